"""Pack indexes: round trip, and the reasons to refuse one (others: tests/test_hostile.py)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltastore.errors import Corruption, UnsupportedFormat
from deltastore.ondisk.canonical import decompress, parse_json
from deltastore.ondisk.codecs import CODECS
from deltastore.ondisk.index import (
    ArrayIndex,
    Extent,
    PackIndex,
    encode_index,
    layout_entry,
    parse_index,
    record_entry,
    storage_dtype_of,
)
from deltastore.ondisk.zarr_profile import ArraySpec
from tests.forge import canonical, compress

SIZE = 1 << 40
crcs = st.integers(0, 2**32 - 1)


@st.composite
def indexes(draw: st.DrawFn) -> PackIndex:
    at = 0

    def extent(length: int) -> Extent:
        nonlocal at
        begin = at + draw(st.integers(0, 5))
        at = begin + length
        return Extent(begin, length, draw(crcs))

    arrays = {}
    for name in draw(st.sets(st.text("ab/.", max_size=4), max_size=3)):
        dtype = draw(st.sampled_from(["uint8", "float32", "complex128"]))
        spec = ArraySpec(dtype, draw(st.integers(1, 300)), draw(st.integers(1, 100)), draw(st.sampled_from(CODECS)))
        least = spec.chunk * spec.itemsize + 4 if spec.codec == "raw" else 5
        arrays[name] = ArrayIndex(spec, tuple(extent(least) for _ in range(spec.chunk_count)))
    ids = draw(st.sets(st.binary(min_size=16, max_size=16).map(bytes.hex), max_size=3))
    blobs = {record_entry(commit): extent(draw(st.integers(0, 50))) for commit in ids}
    commits = tuple((commit, draw(st.binary(min_size=32, max_size=32)).hex()) for commit in ids)
    return PackIndex("5" * 32, "7" * 16, commits, arrays, blobs, draw(st.just({}) | st.just({"x": [1]})))


@given(indexes())
def test_an_index_comes_back(index: PackIndex) -> None:
    assert parse_index(encode_index(index), SIZE, SIZE, "here") == index


def good() -> dict[str, Any]:
    raw = ArrayIndex(ArraySpec("float32", 100, 64, "raw"), (Extent(0, 260, 1), Extent(320, 260, 2)))
    packed = ArrayIndex(ArraySpec("float32", 64, 64, "blosc"), (Extent(640, 50, 3),))
    blobs = {layout_entry("f" * 64): Extent(700, 10, 4)}
    index = PackIndex("5" * 32, "7" * 16, (("a" * 32, "b" * 64),), {"raw": raw, "packed": packed}, blobs)
    value: dict[str, Any] = parse_json(decompress(encode_index(index), 10_000, "here"), "here")
    return value


def parse(value: Any, tail: int = 700, size: int = 1000) -> PackIndex:
    return parse_index(compress(canonical(value)), tail, size, "here")


def test_the_names_of_the_entries() -> None:
    assert record_entry("a" * 32) == f"deltastore/records/{'a' * 32}.json.zst"
    assert layout_entry("b" * 64) == f"deltastore/layouts/{'b' * 64}.json.zst"


def test_the_good_one_is_taken() -> None:
    assert parse(good()).arrays["raw"].chunks[1] == Extent(320, 260, 2)
    assert storage_dtype_of(ArraySpec("float32", 1, 1, "raw")) == np.dtype("<f4")


@pytest.mark.parametrize(
    ("path", "new", "problem"),
    [
        ("store", "x", "store id"),
        ("write", None, "write id"),
        ("format", [1], "format"),
        ("format", "1.0", "format"),
        ("commits", {}, "commits"),
        ("commits", ["a"], "object"),
        ("commits/0/digest", "b", "record digest"),
        ("arrays/raw", [], "arrays"),
        ("arrays/raw", {"chunks": [[0, 260, 1]]}, "dtype"),
        ("arrays/raw/chunks", 5, "arrays"),
        ("arrays/raw/dtype", "bfloat16", "dtype"),
        ("arrays/raw/dtype", "<f4", "dtype"),
        ("arrays/raw/codec", "zstd", "codec"),
        ("arrays/raw/length", 2**41, "length"),
        ("arrays/raw/length", 129, "chunks"),
        ("arrays/raw/length", 64, "chunks"),
        ("arrays/raw/chunks/0/1", 259, "length"),
        ("arrays/raw/chunks/0/1", 261, "length"),
        ("arrays/packed/chunks/0/1", 4, "length"),
        ("arrays/raw/chunks/0", [0, 260], "extent"),
        ("arrays/raw/chunks/0", [0, 260, 1, 1], "extent"),
        ("arrays/raw/chunks/0/0", True, "extent"),
        ("arrays/raw/chunks/0/0", 1.5, "extent"),
        ("arrays/raw/chunks/0/2", 2**32, "outside"),
        ("arrays/packed/chunks/0/0", 800, "outside"),  # chunks lie before the tail
        ("arrays/raw/chunks/0/0", 100, "overlap"),
        ("arrays/packed/chunks/0/0", 330, "overlap"),
        ("blobs", [], "blobs"),
        ("blobs/x", [995, 6, 0], "outside"),
        ("blobs/x", [705, 6, 0], "overlap"),
        ("blobs/x", None, "extent"),
        ("substitutes", [], "substitutes"),
    ],
)
def test_an_index_that_does_not_follow_the_spec_is_refused(path: str, new: Any, problem: str) -> None:
    value = target = good()
    *way, last = (int(key) if key.isdigit() else key for key in path.split("/"))
    for key in way:
        target = target[key]  # type: ignore[index]
    target[last] = new  # type: ignore[index]
    with pytest.raises(Corruption, match=problem):
        dict(parse(value).arrays)  # an array is parsed when it is asked for


@pytest.mark.parametrize("name", sorted(good()))
def test_no_member_may_be_missing(name: str) -> None:
    value = good()
    del value[name]
    with pytest.raises(Corruption, match="here: member"):
        parse(value)


@pytest.mark.parametrize("format_", [[0, 0], [2, 0], [99, 1]])
def test_another_major_version_is_refused_and_a_minor_one_taken(format_: list[int]) -> None:
    with pytest.raises(UnsupportedFormat, match=f"format {format_[0]}"):
        parse({**good(), "format": format_})
    assert parse({**good(), "format": [1, 999], "new": 1}) == parse(good())
