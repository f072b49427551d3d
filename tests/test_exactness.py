"""Every commit of a random history reads back bit for bit, as a whole, leaf by leaf and slice by slice."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DataObject, DrawFn

import deltastore
from deltastore.reader import LazyTensor, State
from deltastore.store import Store
from deltastore.testing.compare import assert_same
from deltastore.testing.strategies import edit, states
from deltastore.types import Path
from tests.cases.kit import bits, same, walk

COSTS = (1.0, 1.5, 8.0, 1e9)
"""Restore costs: a base nearly every time, now and then, seldom, never."""
MAX_COMMITS = 8


@contextmanager
def memory_url() -> Iterator[str]:
    yield f"memory://exactness-{secrets.token_hex(8)}"


@contextmanager
def folder_url() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="exactness-") as folder:
        yield f"{folder}/store"


def check_whole(state: State, truth: dict[Any, Any]) -> None:
    read = state.to_state_dict()
    assert_same(truth, read)
    same(truth, read)


def check_leaves(state: State, truth: dict[Any, Any], data: DataObject) -> None:
    expected = dict(walk(truth))
    assert list(state) == list(expected)
    for path, value in expected.items():
        found = state[path]
        if isinstance(value, torch.Tensor | np.ndarray):
            check_tensor(found, value, path, data)
        else:
            assert_same(value, found, path)


def check_tensor(lazy: Any, value: torch.Tensor | np.ndarray, path: Path, data: DataObject) -> None:
    assert isinstance(lazy, LazyTensor)
    assert (lazy.path, lazy.shape) == (path, tuple(value.shape))
    tensor = value if isinstance(value, torch.Tensor) else torch.from_numpy(np.array(value, order="C"))
    assert lazy.dtype == tensor.dtype
    assert lazy.nbytes == tensor.numel() * tensor.element_size()
    assert bits(lazy[...]) == bits(tensor)
    index = data.draw(indices(tensor.shape), label=f"index of {path}")
    part, expected = lazy[index], tensor.detach()[index]
    assert part.shape == expected.shape
    assert bits(part) == bits(expected)


def words(tensor: torch.Tensor) -> torch.Tensor:
    """Return integers that torch can index for every dtype."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.dtype == torch.complex128:
        plain = torch.view_as_real(plain)
    return plain.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[plain.element_size()])


@st.composite
def indices(draw: DrawFn, shape: torch.Size) -> Any:
    """Return an index of a tensor: a row, a slice of rows with or without a step, more dimensions, an ellipsis."""
    if not shape:
        return draw(st.sampled_from([..., ()]))
    edges = st.none() | st.integers(-shape[0] - 2, shape[0] + 2)
    rows: st.SearchStrategy[Any] = st.builds(slice, edges, edges, st.none() | st.integers(1, 3))
    if shape[0]:
        rows |= st.integers(-shape[0], shape[0] - 1)
    first = draw(rows)
    if len(shape) == 1 or draw(st.booleans()):
        return first
    second = st.integers(-shape[1], shape[1] - 1) if shape[1] else st.just(slice(None))
    more = [slice(None, None, 2), ..., draw(second)]
    return draw(st.sampled_from([*((first, other) for other in more), (..., slice(1, None))]))


def run_history(data: DataObject, url: str) -> None:
    """Commit a few states, with reopening and going back in between; then read all of them in every way."""
    codec = data.draw(st.sampled_from(["auto", "raw", "blosc"]), label="codec")
    restore_cost = data.draw(st.sampled_from(COSTS), label="restore_cost")
    truth: dict[str, dict[Any, Any]] = {}
    steps: dict[str, int] = {}

    def open_store() -> Store:
        store = deltastore.open(url, codec=codec)
        store.set_restore_cost(restore_cost)
        return store

    store = open_store()
    state: dict[Any, Any] = data.draw(states(), label="state")
    step = 0
    for number in range(data.draw(st.integers(1, MAX_COMMITS), label="commits")):
        if number:
            what = data.draw(st.sampled_from(["go on", "go on", "go on", "reopen", "restore"]), label="then")
            if what == "reopen":
                store.close()
                store = open_store()
                newest = store.commits()[-1]
                state, step = truth[newest.id], newest.step
            elif what == "restore":
                commit = data.draw(st.sampled_from(sorted(truth, key=list(truth).index)), label="commit")
                state, step = truth[commit], steps[commit]
                restored = store.restore(commit)
                assert (restored.commit.id, restored.commit.step) == (commit, step)
                check_whole(restored, state)
            state = data.draw(edit(state), label="state")
            step += data.draw(st.integers(0, 2), label="steps")
        commit = store.commit(step, state).wait().id
        truth[commit], steps[commit] = state, step
    for commit, expected in truth.items():
        check_whole(store.at(commit), expected)
    store.close()

    with deltastore.open(url, "r") as reader:
        assert reader.verify(deep=True).ok
        for commit, expected in truth.items():
            check_whole(reader.at(commit), expected)
            check_leaves(reader.at(commit), expected, data)


@pytest.mark.parametrize("place", [memory_url, folder_url], ids=["memory", "folder"])
@given(data=st.data())
def test_every_commit_of_a_random_history_reads_back(place: Callable[[], Any], data: DataObject) -> None:
    with place() as url:
        run_history(data, url)


@given(data=st.data())
def test_states_that_are_changed_in_place_read_back_as_they_were(data: DataObject) -> None:
    store = deltastore.open(f"memory://exactness-{secrets.token_hex(8)}", max_pending=3)
    store.set_restore_cost(data.draw(st.sampled_from(COSTS), label="restore_cost"))
    state: dict[Any, Any] = data.draw(states(), label="state")
    tensors = [value for _, value in walk(state) if isinstance(value, torch.Tensor)]
    truth = []
    for step in range(4):
        store.commit(step, state)
        truth.append({path: bits(value) for path, value in walk(state) if isinstance(value, torch.Tensor)})
        for tensor in tensors:
            flip(tensor, data)
    store.flush()
    for step, expected in enumerate(truth):
        read = {path: value for path, value in walk(store.at(step).to_state_dict()) if isinstance(value, torch.Tensor)}
        assert {path: bits(value) for path, value in read.items()} == expected
    store.close()


def flip(tensor: torch.Tensor, data: DataObject) -> None:
    """Change a few elements of a tensor in place, whatever its dtype."""
    if not tensor.numel() or (tensor.stride() and 0 in tensor.stride()):
        return
    low = data.draw(st.integers(0, 255), label="pattern")
    target = words(tensor)
    if target.ndim:
        target = target[: 1 + data.draw(st.integers(0, target.shape[0] - 1), label="rows")]
    if tensor.dtype == torch.bool:
        target.copy_(target ^ (low & 1))
    else:
        target.copy_(target ^ torch.tensor(low).to(target.dtype))
