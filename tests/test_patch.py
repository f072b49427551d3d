"""Patches of documents: exact, short where little changed, safe against whatever a file holds."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltastore.errors import Corruption
from deltastore.patch import Op, apply, diff
from deltastore.testing.strategies import edit, states
from deltastore.torch_bridge import TORCH
from deltastore.tree import flatten
from deltastore.types import Json

scalars = (
    st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from([0.0, -0.0, 1.0, 2.0, 0.5]) | st.text(max_size=2)
)
documents = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=12) | st.dictionaries(st.sampled_from(["$", "k", "v"]), inner, max_size=3),
    max_leaves=40,
)


def exact(document: Json) -> str:
    return json.dumps(document, sort_keys=True)


@given(documents, documents)
def test_any_document_becomes_any_other(old: Json, new: Json) -> None:
    before = exact(old)
    assert exact(apply(old, diff(old, new))) == exact(new)
    assert exact(old) == before


@given(documents)
def test_the_same_document_has_no_operations(document: Json) -> None:
    assert diff(document, json.loads(exact(document))) == []


@given(st.data())
def test_a_state_and_its_edits_along_a_chain(data: st.DataObject) -> None:
    state = data.draw(states())
    first = flatten(state, TORCH).document
    document, ops = first, []
    for _ in range(3):
        state = data.draw(edit(state))
        new = flatten(state, TORCH).document
        # As the ops are read back from a record, and the document of a reader.
        ops += json.loads(exact(diff(document, new)))
        document = json.loads(exact(new))
    assert exact(apply(first, ops)) == exact(document)


@pytest.mark.parametrize(
    "values", [(1, True), (1, 1.0), (0.0, -0.0), (0, False), (0, None), (0, 0.0), ("", None), ([], {})]
)
@pytest.mark.parametrize("length", [1, 9, 600])
def test_equal_is_not_the_same(values: tuple[Json, Json], length: int) -> None:
    one, other = values
    for old, new in ((one, other), (other, one)):
        before, after = [[7, [old]]] * length, [[7, [old]]] * (length - 1) + [[7, [new]]]
        ops = diff(before, after)
        assert ops
        assert exact(apply(before, ops)) == exact(after)


def test_a_list_that_grows_stores_its_new_end() -> None:
    log = [{"$": "dict", "k": ["step", "loss"], "v": [i, i / 7]} for i in range(5000)]
    old = {"$": "dict", "k": ["log", "n"], "v": [log[:-1], 4999]}
    new = {"$": "dict", "k": ["log", "n"], "v": [log, 5000]}
    assert diff(old, new) == [["extend", ["v", 0], [log[-1]]], ["set", ["v", 1], 5000]]
    # The same objects or equal ones from a file: no difference.
    assert diff(json.loads(exact(old)), new) == diff(old, new)


def test_a_list_that_shrinks_is_cut() -> None:
    assert diff([list(range(100))], [list(range(90))]) == [["cut", [0], 90]]


def test_one_scalar_in_a_large_document() -> None:
    old: Json = [[{"a": [0.5] * 50, "b": str(i)} for i in range(500)] for _ in range(5)]
    new = copy.deepcopy(old)
    new[3][444]["a"][7] = 0.25
    assert diff(old, new) == [["set", [3, 444, "a", 7], 0.25]]


def test_a_document_of_its_own_kind_is_set_as_a_whole() -> None:
    assert diff({"a": 1}, [1]) == [["set", [], [1]]]
    assert diff([{"a": 1, "b": 2}], [{"a": 1}]) == [["set", [0], {"a": 1}]]


def test_where_much_differs_the_container_is_set() -> None:
    old = [float(i) for i in range(1000)]
    shifted = [*old[1:], 7.0]
    assert diff({"window": old, "n": 1}, {"window": shifted, "n": 1}) == [["set", ["window"], shifted]]


def test_many_long_histories_that_all_grow_are_extended_one_by_one() -> None:
    old = [[float(i)] * 100 for i in range(200)]
    new = [[*history, 0.5] for history in old]
    assert diff(old, new) == [["extend", [i], [0.5]] for i in range(200)]


def test_the_patch_is_never_much_longer_than_the_document() -> None:
    seeded = random.Random(5)
    for _ in range(100):
        old = [[seeded.choice([0, 1, 2.5, "x"]) for _ in range(seeded.randrange(30))] for _ in range(10)]
        new = [[seeded.choice([0, 1, 2.5, "x"]) for _ in range(seeded.randrange(30))] for _ in range(10)]
        assert len(json.dumps(diff(old, new))) <= len(json.dumps(new)) + 40


def test_long_integer_lists_change_in_their_last_part() -> None:
    numbers = [random.Random(3).randrange(10**6) for _ in range(20_000)]
    old, new = flatten(numbers, None).document, flatten([*numbers, 5], None).document
    assert len(json.dumps(diff(old, new))) < 3000


def test_a_patch_shares_what_is_unchanged() -> None:
    document: Json = {"kept": [[1], [2]], "changed": [[3], [4]]}
    patched = apply(document, [["set", ["changed", 1], [5]], ["extend", ["changed"], [[6]]]])
    assert patched == {"kept": [[1], [2]], "changed": [[3], [5], [6]]}
    assert document == {"kept": [[1], [2]], "changed": [[3], [4]]}
    assert patched["kept"] is document["kept"]
    assert patched["changed"][0] is document["changed"][0]


def test_operations_stay_as_they_are() -> None:
    inner = [1]
    ops: list[Op] = [["set", [0], inner], ["extend", [0], [2]], ["set", [1], inner], ["set", [1, 0], 9]]
    assert apply([None, None], ops) == [[1, 2], [9]]
    assert inner == [1]


def test_a_document_deeper_than_the_stack_is_set_as_a_whole() -> None:
    old: Json = [1]
    new: Json = [2]
    for _ in range(5000):
        old, new = [old], [new]
    assert diff(old, new)[0][:2] == ["set", []]


DOCUMENT = {"list": [1, [2]], "scalar": 1}


@pytest.mark.parametrize(
    "op",
    [
        None,
        [],
        "set",
        {},
        ["set", ["scalar"]],
        ["set", ["scalar"], 1, 2],
        ["set", "scalar", 1],
        ["set", None, 1],
        ["set", ["missing"], 1],
        ["set", ["scalar", "x"], 1],
        ["set", ["list", 2], 1],
        ["set", ["list", -1], 1],
        ["set", ["list", True], 1],
        ["set", ["list", 0.0], 1],
        ["set", ["list", "0"], 1],
        ["set", ["list", None], 1],
        ["set", [["list"]], 1],
        ["set", [{}], 1],
        ["set", [0], 1],
        ["extend", [], [1]],
        ["extend", ["scalar"], [1]],
        ["extend", ["list"], 1],
        ["extend", ["list"], "ab"],
        ["extend", ["list"], {"a": 1}],
        ["cut", ["list"], 3],
        ["cut", ["list"], -1],
        ["cut", ["list"], True],
        ["cut", ["list"], None],
        ["cut", [], 0],
        ["remove", ["list"], 0],
        [["set"], ["scalar"], 1],
        [None, [], None],
        ["set", ["list"] * 100_000, 1],
    ],
)
def test_an_operation_that_does_not_fit_is_corruption(op: Any) -> None:
    document = copy.deepcopy(DOCUMENT)
    with pytest.raises(Corruption, match="operation 1 of a patch") as caught:
        apply(document, [["cut", ["list"], 2], op])
    assert caught.value.operation == 1
    assert document == DOCUMENT


@pytest.mark.parametrize("ops", [None, 1, "set", {}])
def test_a_patch_that_is_no_list_is_corruption(ops: Any) -> None:
    with pytest.raises(Corruption, match="not a list of operations"):
        apply(DOCUMENT, ops)
