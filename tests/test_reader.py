"""States of the past: indexing, sub-states, devices."""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np
import pytest
import torch

import deltastore
from deltastore.errors import NotFound
from deltastore.reader import LazyTensor, State
from deltastore.testing.compare import assert_same


def state_of(state: dict[Any, Any]) -> State:
    store = deltastore.open(f"memory://reader-{secrets.token_hex(8)}")
    store.commit(1, state).wait()
    return store.at(1)


INDICES: list[Any] = [
    0,
    -1,
    slice(1, 3),
    slice(3, 1),
    slice(None),
    slice(-2, None),
    slice(0, 4, 2),
    slice(100, 200),
    (slice(1, 3), 2),
    (1, 2),
    (-1, slice(None, None, 2)),
    ...,
    (),
    (..., 1),
    (0, ...),
    None,
    (None, 0),
    (slice(1, 2), None),
    [0, 2],
    True,
    False,
    np.int64(2),
    torch.tensor(1),
    torch.tensor([1, 3]),
    torch.tensor([True, False, True, False]),
    (torch.tensor([0, 1]), torch.tensor([2, 3])),
]


@pytest.mark.parametrize("index", INDICES, ids=[str(number) for number in range(len(INDICES))])
def test_an_index_gives_what_it_gives_on_the_tensor(index: Any) -> None:
    tensor = torch.arange(24.0).view(4, 6)
    found = state_of({"x": tensor})["x"][index]
    assert found.shape == tensor[index].shape
    assert torch.equal(found, tensor[index])


@pytest.mark.parametrize("index", [4, -5, (0, 6), (0, 0, 0), "a", slice(None, None, -1), 1.0, (slice(None), 9)])
def test_an_index_that_fails_on_the_tensor_fails_here(index: Any) -> None:
    tensor = torch.arange(24.0).view(4, 6)
    lazy = state_of({"x": tensor})["x"]
    with pytest.raises((IndexError, TypeError, ValueError)) as expected:
        tensor[index]
    with pytest.raises(expected.type):
        lazy[index]


@pytest.mark.parametrize("index", [..., (), None, (...,), True])
def test_an_index_of_a_scalar(index: Any) -> None:
    tensor = torch.tensor(2.5)
    found = state_of({"x": tensor})["x"][index]
    assert found.shape == tensor[index].shape
    assert torch.equal(found, tensor[index])


def test_a_tensor_tells_of_itself_without_reading() -> None:
    lazy = state_of({"model": {"x": torch.zeros(3, 0, 2, dtype=torch.bfloat16)}})["model", "x"]
    assert isinstance(lazy, LazyTensor)
    assert (lazy.path, lazy.shape, lazy.dtype, lazy.nbytes, len(lazy)) == (
        ("model", "x"),
        (3, 0, 2),
        torch.bfloat16,
        0,
        3,
    )
    assert "bfloat16" in repr(lazy)
    with pytest.raises(TypeError):
        len(state_of({"x": torch.tensor(1)})["x"])


def test_a_state_is_a_mapping_of_paths() -> None:
    w = torch.randn(5)
    state = state_of({"a": {"x": w, "l": [w, (1, 2.5)], "none": None}, "e": {}, 0: {"0": "s"}})
    paths = [("a", "x"), ("a", "l", 0), ("a", "l", 1, 0), ("a", "l", 1, 1), ("a", "none"), (0, "0")]
    assert list(state) == paths
    assert len(state) == 6
    assert ("a", "x") in state
    assert ("a",) not in state
    assert (state["a", "l", 1, 1], state["a", "none"], state[0, "0"]) == (2.5, None, "s")
    assert state.get("nothing") is None
    assert state.get(("a", "none"), 7) is None
    assert list(state["a"]["l"]) == [(0,), (1, 0), (1, 1)]
    assert_same({"x": w, "l": [w, (1, 2.5)], "none": None}, state["a"].to_state_dict())
    assert_same([w, (1, 2.5)], state["a", "l"].to_state_dict())
    assert_same({}, state["e"].to_state_dict())
    assert state["a"].commit == state.commit


@pytest.mark.parametrize("path", [("a", "z"), "z", ("a", "x", 0), (), ("a", "x", "y"), ("0",), (True,), (0, 0)])
def test_a_path_to_nothing_is_not_found(path: Any) -> None:
    state = state_of({"a": {"x": torch.ones(2)}, 0: {"0": 1}})
    with pytest.raises(NotFound, match="step 1"):
        state[path]


def test_what_is_near_is_named() -> None:
    with pytest.raises(NotFound, match="model/weight"):
        state_of({"model": {"weight": torch.ones(2)}})["model", "wieght"]


def test_meta_takes_tensors_and_leaves_counters() -> None:
    state = {
        "optim": {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(4)}}},
        "model": {"w": torch.ones(2)},
    }
    back = state_of(state).to_state_dict("meta")
    assert back["model"]["w"].is_meta
    assert back["optim"]["state"][0]["exp_avg"].is_meta
    assert back["optim"]["state"][0]["step"].item() == 3.0
