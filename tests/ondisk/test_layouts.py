"""Stored layouts: round trip, and the reasons to refuse one (others: tests/test_hostile.py)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltastore.dtypes import LOGICAL
from deltastore.errors import Corruption, UnsupportedFormat
from deltastore.layout import FORWARD, Layout, LayoutInput, Partition, Piece, TensorEntry, plan
from deltastore.ondisk.canonical import decompress, digest_of, parse_json
from deltastore.ondisk.layouts import check_pieces, encode_layout, parse_layout
from tests.forge import canonical, compress

keys = st.text(max_size=4) | st.just("\udc80") | st.integers(-(2**70), 2**70)
tensors = st.tuples(
    st.lists(keys, max_size=3).map(tuple),
    st.sampled_from(sorted(LOGICAL)),
    st.lists(st.integers(0, 70), max_size=3).map(tuple),
    st.none() | st.integers(0, 2),
)


@given(st.lists(tensors, max_size=8, unique_by=lambda tensor: tensor[0]))
def test_a_layout_comes_back(found: list[Any]) -> None:
    inputs = [
        LayoutInput(path, dtype, shape, None if memory is None else (memory, dtype, shape), "param", path)
        for path, dtype, shape, memory in found
    ]
    layout = plan(inputs)
    blob, digest = encode_layout(layout)
    parsed = parse_layout(blob, digest, "here")
    assert parsed == layout
    check_pieces(parsed, "here")
    assert encode_layout(parsed)[1] == digest
    assert [[type(key) for key in entry.path] for entry in parsed.tensors] == [
        [type(key) for key in entry.path] for entry in layout.tensors
    ]


LAYOUT = Layout(
    (
        TensorEntry(("a",), "float32", (100,), (Piece(3, 0, 64), Piece(4, 64, 36))),
        TensorEntry(("b", 0), "float32", (100,), (), 0),
        TensorEntry(("c",), "bool", (), (Piece(9, 0, 1),)),
        TensorEntry(("d",), "int8", (0, 5), ()),
    ),
    (
        Partition(3, "float32", 64, "param", FORWARD, 0),
        Partition(4, "float32", 100, "param", "backward", None),
        Partition(9, "bool", 1, "other", FORWARD, None),
    ),
)


def good() -> dict[str, Any]:
    value: dict[str, Any] = parse_json(decompress(encode_layout(LAYOUT)[0], 10_000, "here"), "here")
    return value


def parse(value: Any) -> Layout:
    data = canonical(value)
    return parse_layout(compress(data), digest_of(data), "here")


def changed(path: str, new: Any) -> dict[str, Any]:
    value = target = good()
    *way, last = (int(key) if key.isdigit() else key for key in path.split("/"))
    for key in way:
        target = target[key]  # type: ignore[index]
    target[last] = new  # type: ignore[index]
    return value


def test_the_good_one_is_taken() -> None:
    assert parse(good()) == LAYOUT


@pytest.mark.parametrize("path", [["a", -1, 10**30, ""], []])
def test_a_path_has_any_strings_and_integers(path: list[str | int]) -> None:
    assert parse(changed("tensors/2/path", path)).tensors[2].path == tuple(path)


@pytest.mark.parametrize(
    ("path", "new", "problem"),
    [
        ("partitions", {}, "partitions"),
        ("partitions/0", 5, "object"),
        ("partitions/0/id", -1, "id"),
        ("partitions/0/id", 2**31, "id"),
        ("partitions/0/length", 1.0, "length"),
        ("partitions/0/role", None, "role"),
        ("partitions/0/window", "middle", "window"),
        ("partitions/0/group", -1, "group"),
        ("tensors/0", "a", "object"),
        ("tensors/0/path", "a", "path"),
        ("tensors/0/path", [True], "path"),
        ("tensors/0/path", [None], "path"),
        ("tensors/0/path", [1.5], "path"),
        ("tensors/0/path", [["a"]], "path"),
        ("tensors/0/path", None, "path"),
        ("tensors/0/shape", [True], "shape"),
        ("tensors/0/shape", None, "shape"),
        ("tensors/0/shape", [-10, -10], "shape"),
        ("tensors/0/shape", [100.0], "shape"),
        ("tensors/0/shape", [1] * 65, "shape"),
        ("tensors/3/shape", [0, 2**62], "shape"),
        ("tensors/0/dtype", 5, "dtype"),
        ("tensors/0/dtype", "int32", "inside"),
        ("tensors/0/pieces", None, "pieces"),
        ("tensors/0/pieces/0", [3, 0], "pieces"),
        ("tensors/0/pieces/0", [3, 0, 64, 0], "pieces"),
        ("tensors/0/pieces/0/1", -64, "inside"),
        ("tensors/0/pieces/0/2", -64, "inside"),
        ("tensors/3/pieces", None, "pieces"),
        ("tensors/0/pieces/0/2", True, "pieces"),
        ("tensors/0/pieces/1/1", 32, "inside"),  # not a multiple of 64
        ("tensors/0/pieces/0/2", 65, "inside"),
        ("tensors/0/pieces/1/2", 35, "elements in all"),
        ("tensors/0/pieces", [], "elements in all"),
        ("tensors/3/pieces", [[9, 0, 1]], "inside|elements"),
        ("tensors/1/alias", 1, "alias"),
        ("tensors/1/alias", 2, "alias"),
        ("tensors/1/alias", -1, "alias"),
        ("tensors/1/alias", True, "alias"),
        ("tensors/1/shape", [10, 10], "alias"),
        ("tensors/1/dtype", "int32", "alias"),
        ("tensors/2/path", ["a"], "different paths"),
    ],
)
def test_a_layout_that_does_not_follow_the_spec_is_refused(path: str, new: Any, problem: str) -> None:
    with pytest.raises(Corruption, match=problem):
        parse(changed(path, new))


def test_an_alias_of_an_alias_is_refused() -> None:
    value = good()
    value["tensors"].append({"path": ["e"], "dtype": "float32", "shape": [100], "alias": 1})
    with pytest.raises(Corruption, match="alias"):
        parse(value)


@pytest.mark.parametrize("path", ["partitions/0/dtype", "tensors/0/dtype"])
def test_an_unknown_dtype_is_refused_by_name(path: str) -> None:
    with pytest.raises(UnsupportedFormat, match="float3"):
        parse(changed(path, "float3"))


def test_another_digest_is_refused() -> None:
    with pytest.raises(Corruption, match="layout has digest"):
        parse_layout(encode_layout(LAYOUT)[0], "0" * 64, "here")


def test_pieces_that_share_elements_are_found() -> None:
    partition = Partition(0, "int8", 300, "param", FORWARD, None)
    entries = [TensorEntry((name,), "int8", (n,), (Piece(0, at, n),)) for name, at, n in (("a", 0, 65), ("b", 64, 3))]
    layout = Layout(tuple(entries), (partition,))
    blob, digest = encode_layout(layout)
    with pytest.raises(Corruption, match="overlap"):
        check_pieces(parse_layout(blob, digest, "here"), "here")
