"""Canonical JSON, seals and compressed blobs: one form, and every reason to refuse another."""

from __future__ import annotations

import json
import math
import struct

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from deltastore.errors import Corruption, InvalidInput
from deltastore.ondisk.canonical import (
    compress,
    convert,
    decompress,
    digest_of,
    encode_canonical,
    parse_json,
    parse_sealed,
    seal,
)

floats = st.floats(allow_nan=False, allow_infinity=False)
scalars = st.none() | st.booleans() | st.integers() | floats | st.text(max_size=5) | st.just("\udc80")
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)
objects = st.dictionaries(st.text(max_size=4), values, max_size=4)


@given(values)
def test_canonical_json_comes_back_and_is_the_only_form(value: object) -> None:
    data = encode_canonical(value)
    assert data.isascii()
    assert encode_canonical(parse_json(data, "here")) == data
    assert json.dumps(parse_json(data, "here"), sort_keys=True) == json.dumps(value, sort_keys=True)


def test_the_form_is_that_of_the_spec() -> None:
    value = {"b": [1, 2.5, -0.0, 1e300], "a": "é\n", "": None}
    assert encode_canonical(value) == b'{"":null,"a":"\\u00e9\\n","b":[1,2.5,-0.0,1e+300]}'


@pytest.mark.parametrize("value", [math.nan, math.inf, {1: 2, "a": 3}, b"x", {"x": object()}])
def test_what_is_no_json_is_refused(value: object) -> None:
    with pytest.raises(InvalidInput, match="not a JSON value"):
        encode_canonical(value)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"1 2",
        b"'a'",
        b'{"a":1,"a":1}',
        b"NaN",
        b"-Infinity",
        b"1e999",
        b"\xff",
        '"é"'.encode(),
        b"[" * 10**5,
        b'{"a":{"b":1,"b":[]}}',
        b'{"a":1e-05,"b":1,"b":2}',  # read by the other of the two parsers: the float
        b'{"b":"\\u00e9","a":1,"a":2}',
        b"1" * 5000,
    ],
)
def test_bytes_that_are_no_json_are_refused(data: bytes) -> None:
    with pytest.raises(Corruption, match="here: not valid JSON"):
        parse_json(data, "here")


def test_a_value_of_another_type_is_refused() -> None:
    assert convert([[1, 10**30]], list[tuple[int, int]], "here") == [(1, 10**30)]
    wrong: list[object] = [[[1, True]], [[1, 1.0]], [[1, "1"]], [[1]], [[1, 2, 3]], [None], {}]
    for bad in wrong:
        with pytest.raises(Corruption, match="here: Expected") as caught:
            convert(bad, list[tuple[int, int]], "here")
        assert caught.value.where == "here"


@given(objects)
def test_a_sealed_file_comes_back(value: dict[str, object]) -> None:
    value.pop("sha256", None)
    data = seal(value)
    assert parse_sealed(data, "here", len(data)) == value
    with pytest.raises(Corruption, match=f"at most {len(data) - 1}"):
        parse_sealed(data, "here", len(data) - 1)


def test_every_changed_byte_of_a_sealed_file_is_found() -> None:
    data = seal({"format": "x", "n": 12})
    for position in range(len(data)):
        for bit in (1, 0x20):
            changed = bytearray(data)
            changed[position] ^= bit
            with pytest.raises(Corruption, match="here"):
                parse_sealed(bytes(changed), "here", 1000)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"[]", "not a sealed file"),
        (b"{}", "not a sealed file"),
        (b'{"sha256":7}', "not a sealed file"),
        (b'{"sha256":"00"}', "SHA-256"),
        (b"{", "JSON"),
        (b'{"x":' + b"[" * 5000 + b"]" * 5000 + b',"sha256":"00"}', "JSON|deep|SHA-256"),
    ],
)
def test_a_file_that_is_not_sealed_is_refused(data: bytes, problem: str) -> None:
    with pytest.raises(Corruption, match=problem):
        parse_sealed(data, "here", 1 << 20)


def test_a_seal_may_be_laid_out_otherwise() -> None:
    """Only the content is sealed: spaces and order are no damage."""
    value = json.loads(seal({"b": 1, "a": 2}))
    assert parse_sealed(json.dumps(value, indent=1).encode(), "here", 1000) == {"a": 2, "b": 1}


@given(st.binary(max_size=2000))
def test_a_blob_comes_back(data: bytes) -> None:
    blob = compress(data)
    assert decompress(blob, len(data), "here") == data
    assert digest_of(data) == digest_of(decompress(blob, 2000, "here"))


@pytest.mark.parametrize(
    ("blob", "problem"),
    [
        (b"", "zstd"),
        (b"abcdefghijkl", "zstd"),
        (compress(b"x" * 100)[:-1], "zstd"),
        (compress(b"x" * 100) + b"y", "zstd"),
        (compress(b"x" * 100) * 2, "zstd"),
        (compress(b"x" * 101), "at most 100"),
        (zstandard.ZstdCompressor(write_content_size=False).compress(b"x" * 50), "at most|zstd"),
        (b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 50) + b"\1\0\0", "zstd"),
    ],
)
def test_a_blob_that_is_not_one_frame_is_refused(blob: bytes, problem: str) -> None:
    with pytest.raises(Corruption, match=problem):
        decompress(blob, 100, "here")
