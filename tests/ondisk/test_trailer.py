"""The 44 bytes at the end of a pack: round trip, and one test for each reason to refuse them."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltastore.checksums import crc32c
from deltastore.errors import Corruption
from deltastore.ondisk.limits import MAX_TAIL_BYTES
from deltastore.ondisk.trailer import (
    MAGIC,
    SMALLEST_PACK_BYTES,
    TRAILER_BYTES,
    Trailer,
    check_tail,
    encode_trailer,
    parse_trailer,
)

GOOD = Trailer(tail_offset=100, index_offset=120, index_length=30, tail_crc=7, file_size=1000)


@given(st.integers(0, 1 << 50), st.integers(0, 1 << 20), st.integers(0, 1 << 20), st.integers(0, 2**32 - 1))
def test_a_trailer_comes_back(tail: int, before: int, length: int, crc: int) -> None:
    size = tail + before + length + 500
    trailer = Trailer(tail, tail + before, length, crc, size)
    data = encode_trailer(trailer)
    assert len(data) == TRAILER_BYTES == 44
    assert parse_trailer(b"whatever comes before" + data, size, "here") == trailer


def test_the_bytes_are_those_of_the_spec() -> None:
    data = encode_trailer(GOOD)
    assert data[:8] == b"DSPACK01"
    assert struct.unpack("<QQIIQ", data[8:40]) == (100, 120, 30, 7, 1000)
    assert struct.unpack("<I", data[40:]) == (crc32c(data[:40]),)


def test_every_flipped_bit_is_found() -> None:
    for position in range(8 * TRAILER_BYTES):
        data = bytearray(encode_trailer(GOOD))
        data[position // 8] ^= 1 << position % 8
        with pytest.raises(Corruption, match="ends? with a pack's trailer" if position < 64 else "CRC-32C") as caught:
            parse_trailer(bytes(data), 1000, "here")
        assert caught.value.where == "here"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"file_size": 999}, "file has 1000 bytes, the trailer says 999"),
        ({"file_size": 1001}, "file has 1000 bytes"),
        ({"tail_offset": 121}, "outside"),
        ({"index_offset": 99}, "outside"),
        ({"index_offset": 957}, "outside"),
        ({"index_length": 837}, "outside"),
        ({"tail_offset": 2**64 - 1, "index_offset": 2**64 - 1}, "outside"),
    ],
)
def test_a_trailer_that_points_outside_is_refused(change: dict[str, int], problem: str) -> None:
    with pytest.raises(Corruption, match=problem):
        parse_trailer(encode_trailer(replace(GOOD, **change)), 1000, "here")


def test_a_trailer_that_points_to_the_very_end_is_taken() -> None:
    parse_trailer(encode_trailer(replace(GOOD, index_length=1000 - 120 - 44)), 1000, "here")


@pytest.mark.parametrize(("length", "size"), [(0, 0), (43, 43), (44, 44), (44, SMALLEST_PACK_BYTES - 1), (43, 1000)])
def test_a_file_that_is_too_short_is_refused(length: int, size: int) -> None:
    with pytest.raises(Corruption, match="too short"):
        parse_trailer(encode_trailer(GOOD)[:length], size, "here")


def test_metadata_beyond_the_limit_is_refused() -> None:
    size = MAX_TAIL_BYTES + 101
    with pytest.raises(Corruption, match="at most"):
        parse_trailer(encode_trailer(replace(GOOD, file_size=size)), size, "here")


def test_a_zip_file_is_told_from_a_pack() -> None:
    with pytest.raises(Corruption, match="not a pack") as caught:
        parse_trailer(b"PK\x05\x06" + bytes(18 + 44), 1000, "here")
    assert caught.value.expected == MAGIC


def test_the_tail_is_covered_but_not_the_trailer_itself() -> None:
    tail = b"metadata" + bytes(TRAILER_BYTES)
    check_tail(tail, replace(GOOD, tail_crc=crc32c(b"metadata")), "here")
    for position in range(8):
        changed = bytearray(tail)
        changed[position] ^= 1
        with pytest.raises(Corruption, match="run `deltastore verify`"):
            check_tail(bytes(changed), replace(GOOD, tail_crc=crc32c(b"metadata")), "here")
