"""Copies of states, and above all the short cut: a state whose tensors came again is not laid out anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deltastore import staging
from deltastore.buffers import Hints, StagedState
from deltastore.dtypes import storage_dtype
from deltastore.errors import InvalidInput
from deltastore.layout import LayoutInput, plan, revise
from deltastore.staging import MAX_CHANGED, Stager
from deltastore.testing.strategies import edit, states
from deltastore.torch_bridge import TORCH


class Watched(Stager):
    """A stager, and how often it compared the whole layout."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(pickle_trusted=False)
        self.compared = 0

        def counted(*arguments: Any) -> Any:
            self.compared += 1
            return revise(*arguments)

        monkeypatch.setattr(staging, "revise", counted)


@pytest.fixture
def stager(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


def take(stager: Stager, state: dict[Any, Any], *, replan: bool = False) -> StagedState:
    staged = stager.take(stager.flatten(state), Hints(), replan=replan)
    check(stager, state, staged)
    return staged


def check(stager: Stager, state: dict[Any, Any], staged: StagedState) -> None:
    """The staged state is what was given: every tensor in its place, aliases as in memory, zeros elsewhere."""
    flat = stager.flatten(state)
    assert [entry.path for entry in staged.layout.tensors] == [path for path, _ in flat.tensors]
    left = {number: values.copy() for number, values in staged.buffers.items()}
    first: dict[Any, int] = {}
    for number, ((path, value), entry) in enumerate(zip(flat.tensors, staged.layout.tensors, strict=True)):
        about = TORCH.describe(value)
        assert (entry.dtype, entry.shape) == (about.dtype, about.shape)
        identity = TORCH.identity(value)
        expected = number if identity is None else first.setdefault(identity, number)
        assert (number if entry.alias is None else entry.alias) == expected, path
        whole = np.empty(entry.elements, storage_dtype(entry.dtype))
        TORCH.copy_into(value, whole, 0, entry.elements)
        start = 0
        for piece in staged.layout.by_path[path].pieces:
            found = staged.buffers[piece.partition][piece.offset : piece.offset + piece.count]
            assert found.tobytes() == whole[start : start + piece.count].tobytes(), path
            left[piece.partition][piece.offset : piece.offset + piece.count] = 0
            start += piece.count
    assert not any(values.view(np.uint8).any() for values in left.values()), "a hole is not zero"


def model(size: int = 500) -> dict[str, Any]:
    return {"a": torch.randn(size), "b": torch.randn(size, 3), "rng": torch.arange(16, dtype=torch.uint8)}


# ---------------------------------------------------------------- the short cut is taken


def test_the_same_tensors_come_again(stager: Watched) -> None:
    state = model()
    first = take(stager, state)
    assert first.fresh
    state["a"].add_(1)
    second = take(stager, state)
    assert (second.layout, second.fresh, stager.compared) == (first.layout, False, 0)
    assert second.layout is first.layout
    assert second.buffers is not first.buffers


@pytest.mark.parametrize(
    "make",
    [
        torch.get_rng_state,
        lambda: np.arange(7.0),
        lambda: np.arange(14.0)[::2],
        lambda: torch.zeros(0),
        lambda: torch.randn(6, 4).t(),
        lambda: torch.randn(4, dtype=torch.complex64).conj(),
    ],
)
def test_a_tensor_made_anew_for_each_state_fits(stager: Watched, make: Callable[[], Any]) -> None:
    state = model()
    first = take(stager, {**state, "new": make()})
    second = take(stager, {**state, "new": make()})
    assert second.layout is first.layout
    assert stager.compared == 0


def test_another_tensor_at_the_address_of_one_that_was_freed(stager: Watched) -> None:
    memory = torch.zeros(1000)
    first = take(stager, {"a": memory[:500], "b": torch.ones(3)})
    memory.fill_(7)
    # Other tensor objects on the same memory: for the stager the same as a new allocation at the old address.
    second = take(stager, {"a": memory[:500], "b": torch.ones(3)})
    assert second.layout is first.layout


def test_sixty_four_changes_fit_and_one_more_is_compared(stager: Watched) -> None:
    def state(changed: int) -> dict[str, Any]:
        return {f"{n}": torch.full((3,), float(n)) if n < changed else stays[n] for n in range(100)}

    stays = [torch.full((3,), -float(n)) for n in range(100)]
    first = take(stager, state(0))
    assert take(stager, state(MAX_CHANGED)).layout is first.layout
    assert stager.compared == 0
    take(stager, state(0))
    compared = stager.compared
    assert take(stager, state(MAX_CHANGED + 1)).layout is first.layout
    assert stager.compared == compared + 1


# ---------------------------------------------------------------- and it is not taken where it must not be


def test_an_alias_appears(stager: Watched) -> None:
    state = {**model(), "tied": torch.randn(20), "head": torch.randn(20)}
    take(stager, state)
    state["head"] = state["tied"]
    tied = take(stager, state)
    assert tied.layout.tensors[-1].alias == 3
    assert take(stager, state).layout is tied.layout


@pytest.mark.parametrize("other", ["tied", "head"])
def test_an_alias_disappears_on_either_side(stager: Watched, other: str) -> None:
    shared = torch.randn(20)
    state = {**model(), "tied": shared, "head": shared}
    take(stager, state)
    state[other] = shared.clone()
    assert all(entry.alias is None for entry in take(stager, state).layout.tensors)


def test_two_new_tensors_are_one(stager: Watched) -> None:
    state = {**model(), "x": torch.zeros(4), "y": torch.zeros(4)}
    take(stager, state)
    shared = torch.ones(4)
    assert take(stager, {**state, "x": shared, "y": shared}).layout.tensors[-1].alias == 3


def test_an_alias_moves_with_both_of_its_tensors(stager: Watched) -> None:
    for _ in range(3):
        shared = torch.randn(9)
        take(stager, {**kept(), "x": shared, "y": shared})


_kept = model()


def kept() -> dict[str, Any]:
    return _kept


def test_aliases_change_partners_at_unchanged_addresses(stager: Watched) -> None:
    p, q = torch.randn(8), torch.randn(8)
    for names in ("ppqq", "pqpq", "pqqp", "pppp", "qqpp"):
        take(stager, {**kept(), **{f"{n}": p if name == "p" else q for n, name in enumerate(names)}})


def test_arrays_that_are_one_in_memory(stager: Watched) -> None:
    shared = np.arange(5.0)
    take(stager, {**kept(), "x": shared, "y": shared})
    take(stager, {**kept(), "x": shared, "y": shared})
    take(stager, {**kept(), "x": shared, "y": shared.copy()})
    take(stager, {**kept(), "x": shared, "y": torch.from_numpy(shared)})
    take(stager, {**kept(), "x": shared[::-1], "y": shared[::-1]})


@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: tensor.resize_(60),
        lambda tensor: tensor.resize_(10, 2),
        lambda tensor: tensor.set_(torch.ones(80)),
        lambda tensor: tensor.t_(),
        lambda tensor: tensor.unsqueeze_(0),
        lambda tensor: setattr(tensor, "data", torch.ones(4, 25)),
        lambda tensor: setattr(tensor, "data", torch.ones(20, 5, dtype=torch.float64)),
    ],
)
def test_a_tensor_that_changes_in_place(stager: Watched, change: Callable[[torch.Tensor], object]) -> None:
    state = {**model(), "x": torch.randn(20, 5)}
    take(stager, state)
    change(state["x"])
    take(stager, state)
    take(stager, state)


def test_another_dtype_at_the_same_address(stager: Watched) -> None:
    memory = torch.randn(64)
    for view in (memory, memory.view(torch.int32), memory.view(torch.int32)[:32], memory.view(torch.bfloat16), memory):
        take(stager, {**kept(), "x": view})


def test_a_view_at_the_address_of_another_tensor(stager: Watched) -> None:
    memory = torch.randn(64)
    take(stager, {**kept(), "x": memory, "y": torch.zeros(8)})
    take(stager, {**kept(), "x": memory, "y": memory[:8]})
    take(stager, {**kept(), "x": memory, "y": memory[:8]})
    take(stager, {**kept(), "x": memory[:8], "y": memory[:8]})


def test_a_column_of_a_matrix_begins_where_the_matrix_does(stager: Watched) -> None:
    matrix = torch.randn(8, 8)
    take(stager, {**kept(), "x": matrix, "y": torch.randn(8, 8)})
    take(stager, {**kept(), "x": matrix, "y": matrix.t()})
    take(stager, {**kept(), "x": matrix.t(), "y": matrix.t()})


def test_paths_that_change_while_the_tensors_stay(stager: Watched) -> None:
    a, b = torch.randn(9), torch.randn(9)
    take(stager, {**kept(), "x": a, "y": b})
    take(stager, {**kept(), "y": b, "x": a})
    take(stager, {**kept(), "x": b, "y": a})
    take(stager, {**kept(), "x": {"y": a}, "y": b})


@given(st.data())
def test_whatever_the_next_state_is_it_is_staged_as_it_is(data: st.DataObject) -> None:
    stager = Stager(pickle_trusted=False)
    state = data.draw(states())
    for _ in range(3):
        take(stager, state, replan=data.draw(st.booleans()))
        state = data.draw(edit(state))


# ---------------------------------------------------------------- buffers, holes, interruptions


def test_holes_stay_zero_when_buffers_are_used_again(stager: Watched) -> None:
    state = {"a": torch.ones(3, 1000), "b": torch.ones(70), "c": torch.ones(5)}
    take(stager, state)
    state["b"] = torch.ones(71)
    staged = take(stager, state)
    assert len(staged.layout.partitions) == 2
    stager.pool.give(staged.layout, staged.buffers)
    again = take(stager, state)
    assert again.buffers is staged.buffers


def test_an_interrupted_take_leaves_no_trace(stager: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    state = model()
    first = take(stager, state)
    stager.pool.give(first.layout, first.buffers)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    changed = {**state, "a": torch.ones(700), "z": torch.ones(3)}
    with monkeypatch.context() as patch:
        patch.setattr(staging, "_copy_pieces", interrupt)
        with pytest.raises(KeyboardInterrupt):
            stager.take(stager.flatten(changed), Hints(), replan=False)
        with pytest.raises(KeyboardInterrupt):
            stager.take(stager.flatten(state), Hints(), replan=False)
    assert stager.layout is first.layout
    assert take(stager, state).layout is first.layout
    take(stager, changed)


def test_a_state_that_cannot_be_stored_leaves_no_trace(stager: Watched) -> None:
    state = model()
    first = take(stager, state)
    with pytest.raises(InvalidInput, match="bad"):
        stager.flatten({**state, "bad": object()})
    assert take(stager, state).layout is first.layout
    assert stager.compared == 0


# ---------------------------------------------------------------- plans


def test_a_base_lays_out_anew_only_what_was_patched(stager: Watched) -> None:
    state = model()
    first = take(stager, state)
    assert take(stager, state, replan=True).layout is first.layout
    state["c"] = torch.ones(2)
    patched = take(stager, state)
    assert not patched.fresh
    del state["a"]
    del state["b"]
    replanned = take(stager, state, replan=True)
    assert replanned.fresh
    assert [partition.id for partition in replanned.layout.partitions] == list(range(len(replanned.layout.partitions)))


def test_a_layout_that_was_read_is_gone_on_from(stager: Watched) -> None:
    state = model()
    inputs = [
        LayoutInput(path, *TORCH.describe(value), None, "param", path) for path, value in stager.flatten(state).tensors
    ]
    layout = plan(inputs)
    stager.adopt(layout)
    staged = take(stager, state)
    assert staged.layout is layout
    assert not staged.fresh


def test_roles_and_groups_come_from_paths_and_from_hints(stager: Watched) -> None:
    state = {
        "model": {"w": torch.ones(4, 4), "buffer": torch.ones(2)},
        "optim": {"state": {0: {"step": torch.tensor(1.0), "exp_avg": torch.ones(4, 4)}}},
        "rng": torch.ones(5, dtype=torch.uint8),
    }
    hints = Hints(
        roles={("model", "buffer"): "buffer"},
        owners={("model", "w"): "w", ("optim", "state", 0, "exp_avg"): "w", ("optim", "state", 0, "step"): "w"},
    )
    staged = stager.take(stager.flatten(state), hints, replan=False)
    by_role = {partition.role: partition for partition in staged.layout.partitions}
    assert set(by_role) == {"param", "buffer", "step", "exp_avg", "other"}
    assert by_role["param"].group == by_role["exp_avg"].group != by_role["step"].group
