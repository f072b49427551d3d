"""Members of untrusted objects: what fits comes out, all else is Corruption that names the member."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from deltastore.errors import Corruption
from deltastore.ondisk.fields import Fields
from deltastore.ondisk.limits import MAX_NUMBER


def fields(value: Any) -> Fields:
    return Fields({"m": value}, "here")


@pytest.mark.parametrize("value", [None, [], "x", 5, True])
def test_only_objects_have_members(value: Any) -> None:
    with pytest.raises(Corruption, match=r"here: expected an object") as caught:
        Fields(value, "here")
    assert caught.value.where == "here"


GOOD: list[tuple[Callable[[Fields], Any], Any, Any]] = [
    (lambda f: f.integer("m"), 0, 0),
    (lambda f: f.integer("m"), MAX_NUMBER, MAX_NUMBER),
    (lambda f: f.integer("m", 5), 5, 5),
    (lambda f: f.text("m"), "", ""),
    (lambda f: f.choice("m", ("a", "b")), "b", "b"),
    (lambda f: f.items("m"), [1, None], [1, None]),
    (lambda f: f.mapping("m"), {"x": 1}, {"x": 1}),
    (lambda f: f.numbers("m"), [], []),
    (lambda f: f.numbers("m", 2), [0, MAX_NUMBER], [0, MAX_NUMBER]),
    (lambda f: f.raw("m"), {"x": []}, {"x": []}),
    (lambda f: f.raw("other"), 1, None),
    (lambda f: f.has("m"), 0, True),
    (lambda f: f.has("m"), None, False),
    (lambda f: f.has("other"), 1, False),
]


@pytest.mark.parametrize("number", range(len(GOOD)))
def test_what_fits_comes_out(number: int) -> None:
    take, value, expected = GOOD[number]
    assert take(fields(value)) == expected


DEEP: list[Any] = []
for _ in range(5000):
    DEEP = [DEEP]

BAD: list[tuple[Callable[[Fields], Any], list[Any]]] = [
    (lambda f: f.integer("m"), [None, -1, MAX_NUMBER + 1, 1.0, True, "1", [], {}, DEEP]),
    (lambda f: f.integer("m", 5), [6]),
    (lambda f: f.text("m"), [None, 5, b"", [], DEEP]),
    (lambda f: f.choice("m", ("a", "b")), [None, "c", "", 0, ["a"], {"a": 1}, DEEP]),
    (lambda f: f.items("m"), [None, "ab", {}, ()]),
    (lambda f: f.mapping("m"), [None, [], "ab"]),
    (lambda f: f.numbers("m"), [None, [-1], [True], [1.0], ["1"], [MAX_NUMBER + 1], "12"]),
    (lambda f: f.numbers("m", 2), [[], [1], [1, 2, 3]]),
]


@pytest.mark.parametrize("number", range(len(BAD)))
def test_what_does_not_fit_is_named(number: int) -> None:
    take, values = BAD[number]
    for value in values:
        with pytest.raises(Corruption, match=r"here: member 'm' is .*, expected ") as caught:
            take(fields(value))
        assert len(caught.value.message) < 300
        assert {"where", "expected", "found"} <= set(caught.value.fields)


def test_a_member_that_is_missing_is_named_too() -> None:
    with pytest.raises(Corruption, match="'other' is None"):
        fields(1).integer("other")


def test_a_long_value_is_cut_in_the_text() -> None:
    with pytest.raises(Corruption) as caught:
        fields("x" * 10**6).integer("m")
    assert len(str(caught.value)) < 200
