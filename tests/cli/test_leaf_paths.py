"""Paths on a command line mean the leaf that they were printed for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltastore.cli.leaf_paths import parse_path, path_text
from deltastore.errors import InvalidInput
from deltastore.reader import State
from deltastore.tree import flatten, leaves
from deltastore.types import Path

KEYS = st.text(st.sampled_from("ab01[]-."), max_size=4) | st.integers(-3, 12)
STATES = st.dictionaries(
    KEYS,
    st.recursive(st.none(), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3)),
    min_size=1,
    max_size=4,
)


def state_of(value: Any) -> State:
    return cast(State, SimpleNamespace(document=flatten(value, None).document))


@given(value=STATES)
def test_what_is_printed_is_read_back(value: dict[str | int, Any]) -> None:
    state = state_of(value)
    for path, _ in leaves(state.document):
        assert parse_path(state, path_text(path)) == path


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("a/b", ("a/b",)),
        ('["a", "b"]', ("a", "b")),
        ("a/b/", ("a", "b")),
        ("a/c", ("a", "c")),
        ("l/0", ("l", 0)),
        ("l/[0]", ("l", 0)),
        ("d/0", ("d", "0")),
        ("d/[0]", ("d", 0)),
        ("d/[1]", ("d", "[1]")),
        ("d/-7", ("d", -7)),
        ("d/5", ("d", 5)),
        ("[0]", (0,)),
        ("absent", ("absent",)),
        ("[bracket", ("[bracket",)),
    ],
)
def test_what_a_text_means(text: str, path: Path) -> None:
    value = {
        "a/b": 1,
        "a": {"b": 2, "c": 3},
        "l": [4],
        "d": {"0": 5, 0: 6, "[1]": 7, -7: 8},
        0: 9,
        "[bracket": 10,
    }
    assert parse_path(state_of(value), text) == path


@pytest.mark.parametrize("text", ["[]", "[true]", "[1.5]", "[null]", '[["a"]]'])
def test_what_is_no_path(text: str) -> None:
    with pytest.raises(InvalidInput, match="a list of strings and integers"):
        parse_path(state_of({"a": 1}), text)
