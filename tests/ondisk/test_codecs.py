"""Chunks: values to stored bytes and back, checksums, content digests."""

from __future__ import annotations

import contextlib
import hashlib
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numcodecs import blosc

from deltastore.checksums import crc32c
from deltastore.dtypes import LOGICAL
from deltastore.errors import Corruption
from deltastore.ondisk.codecs import (
    BLOSC,
    CHECKSUM_BYTES,
    CODECS,
    RAW,
    bytes_of,
    check_stored,
    content_digest,
    crc32,
    decode_blosc,
    decode_blosc_part,
    digest_values,
    encode_chunk,
)
from deltastore.ondisk.limits import MAX_BLOSC_OVERHEAD_BYTES

DTYPES = sorted({dtype.str for dtype in LOGICAL.values()})


@st.composite
def chunks(draw: st.DrawFn) -> np.ndarray:
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    octets = draw(st.binary(min_size=dtype.itemsize, max_size=6 * dtype.itemsize))
    count = draw(st.sampled_from([1, 2, 63, 64, 1000]))
    return np.resize(np.frombuffer(octets, np.uint8), count * dtype.itemsize).view(dtype)


@given(chunks(), st.sampled_from(CODECS))
def test_a_chunk_comes_back_bit_for_bit(values: np.ndarray, codec: str) -> None:
    chunk = encode_chunk(values, codec)
    body, appended = chunk.parts
    assert len(appended) == CHECKSUM_BYTES
    assert chunk.stored_bytes == len(body) + len(appended)
    assert chunk.crc32 == zlib.crc32(bytes(body) + bytes(appended))
    assert chunk.content_crc == crc32c(values.tobytes())
    check_stored(body, appended, chunk.crc32c, "here")
    if codec == RAW:
        assert np.shares_memory(np.frombuffer(body, np.uint8), values)
        decoded = np.frombuffer(body, values.dtype)
    else:
        decoded = np.empty_like(values)
        decode_blosc(body, decoded, "here")
        assert len(body) <= values.nbytes + values.nbytes // 255 + MAX_BLOSC_OVERHEAD_BYTES
    assert decoded.tobytes() == values.tobytes()


@given(st.binary(max_size=200), st.integers(0, 200))
def test_checksums_may_be_continued(data: bytes, cut: int) -> None:
    assert crc32c(data[cut:], crc32c(data[:cut])) == crc32c(data)
    assert crc32(data[cut:], crc32(data[:cut])) == crc32(data) == zlib.crc32(data)


def test_known_checksums() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32(b"123456789") == 0xCBF43926
    assert crc32c(b"") == crc32(b"") == 0


def test_bytes_of_an_array_are_a_view() -> None:
    values = np.arange(6, dtype="<c16")
    assert len(bytes_of(values)) == 96
    assert bytes_of(values.reshape(2, 3)) == values.tobytes()
    assert np.shares_memory(np.frombuffer(bytes_of(values), np.uint8), values)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("where", ["body", "appended", "listed"])
def test_a_chunk_that_fits_not_all_of_its_checksums_is_refused(codec: str, where: str) -> None:
    chunk = encode_chunk(np.arange(100, dtype="<f4"), codec)
    body, appended, listed = bytearray(chunk.parts[0]), bytearray(chunk.parts[1]), chunk.crc32c
    if where == "body":
        body[-1] ^= 1
    elif where == "appended":
        appended[0] ^= 1
    else:
        listed ^= 1
    with pytest.raises(Corruption, match="CRC-32C of the bytes is") as caught:
        check_stored(bytes(body), bytes(appended), listed, "here")
    assert caught.value.where == "here"


def test_a_blosc_buffer_must_fill_the_array_exactly() -> None:
    body = bytes(encode_chunk(np.arange(100, dtype="<f4"), BLOSC).parts[0])
    for out in (np.empty(99, "<f4"), np.empty(101, "<f4"), np.empty(100, "<f8")):
        with pytest.raises(Corruption, match="announces 400 bytes"):
            decode_blosc(body, out, "here")


@pytest.mark.parametrize("length", [0, 1, 15])
def test_a_blosc_buffer_shorter_than_its_header_is_refused(length: int) -> None:
    with pytest.raises(Corruption, match="too short"):
        decode_blosc(bytes(length), np.empty(4, "u1"), "here")


def test_a_blosc_buffer_that_is_cut_or_padded_is_refused() -> None:
    body = bytes(encode_chunk(np.arange(100, dtype="<f4"), BLOSC).parts[0])
    for changed in (body[:-1], body + b"\0"):
        with pytest.raises(Corruption, match="announces"):
            decode_blosc(changed, np.empty(100, "<f4"), "here")


@given(st.data())
def test_a_damaged_blosc_buffer_is_refused_or_decodes(data: st.DataObject) -> None:
    """Behind its checksum a buffer may still be a stranger's: no crash, nothing written outside."""
    body = bytearray(encode_chunk(np.arange(3000, dtype="<f4") % 7, BLOSC).parts[0])
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    memory = np.zeros(3000 + 32, "<f4")
    out = memory[16:-16]
    with contextlib.suppress(Corruption):
        decode_blosc(bytes(body), out, "here")
    assert not memory[:16].any()
    assert not memory[-16:].any()


def test_every_chunk_names_its_element_size() -> None:
    body = bytes(encode_chunk(np.arange(100, dtype="<u2"), BLOSC).parts[0])
    assert body[3] == 2
    assert blosc.decompress(body) == np.arange(100, dtype="<u2").tobytes()


@given(st.integers(1, 40), st.integers(1, 12))
def test_content_digests_are_those_of_padded_pieces(length: int, piece: int) -> None:
    values = np.arange(length, dtype="<u2") + 1
    padded = np.zeros(-(-length // piece) * piece, "<u2")
    padded[:length] = values
    crcs = [crc32c(padded[start : start + piece].tobytes()) for start in range(0, length, piece)]
    expected = hashlib.sha256(
        f"uint16:{length}:{piece}:".encode() + b"".join(struct.pack("<I", crc) for crc in crcs)
    ).hexdigest()
    assert digest_values(values, piece) == f"{piece}:{expected}" == content_digest("uint16", length, piece, crcs)


def test_a_content_digest_tells_dtype_length_and_order() -> None:
    found = {
        content_digest("uint16", 4, 2, [1, 2]),
        content_digest("int16", 4, 2, [1, 2]),
        content_digest("uint16", 3, 2, [1, 2]),
        content_digest("uint16", 4, 2, [2, 1]),
        content_digest("uint16", 4, 4, [1, 2]),
    }
    assert len(found) == 5


@given(st.data())
def test_a_part_of_a_chunk_is_that_part_of_its_values(data: st.DataObject) -> None:
    dtype = np.dtype(data.draw(st.sampled_from(["u1", "<u2", "<f4", "<f8", "<c16"])))
    count = data.draw(st.integers(1, 5000))
    generator = np.random.default_rng(data.draw(st.integers(0, 99)))
    values = generator.integers(0, data.draw(st.sampled_from([2, 256])), count * dtype.itemsize, np.uint8).view(dtype)
    blocksize = data.draw(st.sampled_from([0, 128, 1024, 4096, 1 << 20]))
    body = blosc.compress(values, b"zstd", 1, blosc.SHUFFLE, blocksize=blocksize, typesize=dtype.itemsize)
    first = data.draw(st.integers(0, count - 1))
    out = np.empty(data.draw(st.integers(1, count - first)), dtype)
    decode_blosc_part(body, values.nbytes, first * dtype.itemsize, out, "here")
    assert out.tobytes() == values[first : first + len(out)].tobytes()


@pytest.mark.parametrize("first", [0, 1, 524_287, 524_288, 1_048_575, 1_048_576, 1_300_000, 1_599_999])
def test_a_part_of_a_chunk_whose_last_block_is_shorter(first: int) -> None:
    values = np.random.default_rng(0).integers(0, 99, 1_600_000, np.uint16)
    body = encode_chunk(values, BLOSC).parts[0]
    for count in (1, 300_000, 1_600_000):
        out = np.empty(min(count, len(values) - first), "<u2")
        decode_blosc_part(body, values.nbytes, 2 * first, out, "here")
        assert (out == values[first : first + len(out)]).all()


@pytest.mark.parametrize("start", [-1, 0, 19, 2**31 - 1])
def test_a_part_of_a_chunk_whose_blocks_lie_elsewhere_is_damage(start: int) -> None:
    values = np.arange(4096, dtype="<u4")
    body = bytearray(blosc.compress(values, b"zstd", 1, blosc.SHUFFLE, blocksize=1024, typesize=4))
    struct.pack_into("<i", body, 16 + 4 * 3, start)
    with pytest.raises(Corruption, match="here: "):
        decode_blosc_part(bytes(body), values.nbytes, 3 * 1024, np.empty(256, "<u4"), "here")
