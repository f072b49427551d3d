"""O04, O06, O24, O32, O38: shapes, strides, shared memory and sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.cases.kit import Store, freeze, full, same, used

# ---------------------------------------------------------------- O04: 0-dim and empty tensors


def test_scalars_and_empty_tensors_of_a_training_state(tmp_path: Path) -> None:
    norm = nn.BatchNorm1d(4)
    norm(torch.randn(8, 4))
    odd = {
        "scale": nn.Parameter(torch.tensor(2.659)),
        "e0": torch.empty(0),
        "rows0": torch.empty(0, 128, dtype=torch.bfloat16),
        "cols0": torch.empty(128, 0, dtype=torch.int64),
        "mid0": torch.empty(2, 0, 3, dtype=torch.bool),
        "one": torch.ones(1),
        "one3": torch.ones(1, 1, 1),
    }
    optimizer = torch.optim.AdamW([odd["scale"]])
    odd["scale"].grad = torch.tensor(0.1)
    optimizer.step()
    with Store(tmp_path / "store") as store:
        first = {"model": {**norm.state_dict(), **odd}, "optim": optimizer.state_dict()}
        first_truth = freeze(first)
        store.save(1, first)
        optimizer.step()
        norm(torch.randn(8, 4))
        changed = {"one": torch.tensor(1.0), "e0": torch.ones(3), "rows0": torch.empty(0, 64, dtype=torch.bfloat16)}
        second = {"model": {**norm.state_dict(), **odd, **changed}, "optim": optimizer.state_dict()}
        second_truth = freeze(second)
        store.save(2, second)
        store.wait()
        same(first_truth, store.read(1))
        same(second_truth, store.read(2))


def test_a_state_of_nothing_but_empty_tensors(tmp_path: Path) -> None:
    states: list[dict[str, Any]] = [
        {"model": {"w": torch.empty(0)}},
        {"model": {"w": torch.empty(0, 3)}},
        {"model": {"w": torch.empty(0, 3, dtype=torch.int8)}},
        {"model": {}},
        {},
        {"model": {"w": torch.tensor(1.0)}},
        {"model": {"w": torch.empty(3, 0)}},
    ]
    with Store(tmp_path / "store") as store:
        for step, state in enumerate(states):
            store.save(step, state)
        store.wait()
        for step, state in enumerate(states):
            same(state, store.read(step))
        assert store.product.at(6)["model", "w"][:2].shape == (2, 0)
        assert store.product.at(0)["model", "w"][...].shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex128])
def test_the_rank_of_a_tensor_changes_and_its_value_does_not(tmp_path: Path, dtype: torch.dtype) -> None:
    shapes: list[tuple[int, ...]] = [(), (1,), (1, 1), (1, 1, 1, 1), (), (1, 0), (1,)]
    with Store(tmp_path / "store") as store:
        truth = []
        for step, shape in enumerate(shapes):
            truth.append({"optim": {"state": {0: {"step": torch.ones(shape, dtype=dtype)}}}})
            store.save(step, truth[-1])
        store.wait()
        for step, state in enumerate(truth):
            same(state, store.read(step))


# ---------------------------------------------------------------- O06: tied weights


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(4000, 128)
        self.head = nn.Linear(128, 4000, bias=False)
        self.head.weight = self.emb.weight


def test_tied_weights_are_stored_once_and_come_back_tied(tmp_path: Path) -> None:
    root = tmp_path / "store"
    model = LanguageModel()
    with Store(root) as store:
        tied = freeze(full(model))
        store.save(1, full(model))
        store.wait()
        assert used(root) < 1.5 * model.emb.weight.nbytes, "the shared bytes were written twice"
        back = store.read(1)
        same(tied, back)
        assert back["model"]["head.weight"] is back["model"]["emb.weight"]
        other = LanguageModel()
        other.load_state_dict(back["model"], strict=True)
        assert other.head.weight is other.emb.weight

        model.head.weight = nn.Parameter(model.emb.weight.detach() + 1)
        untied = freeze(full(model))
        store.save(2, full(model))
        model.head.weight = model.emb.weight
        tied_again = freeze(full(model))
        store.save(3, full(model))
        store.wait()
        same(untied, store.read(2))
        same(tied_again, store.read(3))
        second, third = store.read(2)["model"], store.read(3)["model"]
        assert not torch.equal(second["head.weight"], second["emb.weight"])
        assert third["head.weight"] is third["emb.weight"]


def test_the_tensor_that_both_names_meant_goes_away(tmp_path: Path) -> None:
    shared, other = torch.randn(3000), torch.randn(3000)
    states: list[dict[str, Any]] = [
        {"model": {"a": shared, "b": shared, "c": other}},
        {"model": {"b": shared, "c": other}},  # the first name is gone, the bytes were its
        {"model": {"b": shared, "c": shared}},
        {"model": {"c": shared, "b": other, "a": other}},
        {"model": {"a": shared, "b": shared, "c": shared, "d": {"e": [shared, (shared,)]}}},
    ]
    with Store(tmp_path / "store") as store:
        for step, state in enumerate(states):
            store.save(step, state)
        store.wait()
        for step, state in enumerate(states):
            same(state, store.read(step))
        last = store.read(4)["model"]
        assert last["d"]["e"][1][0] is last["a"]


def test_equal_values_in_different_memory_are_not_tied(tmp_path: Path) -> None:
    ones = torch.ones(500)
    state = {"model": {"a": ones, "b": ones.clone(), "half": ones[:250], "square": ones.view(20, 25)}}
    with Store(tmp_path / "store") as store:
        store.save(1, state)
        store.wait()
        back = store.read(1)["model"]
        same(state["model"], back)
        back["a"] += 1  # a view of other shape or extent comes back as values of its own
        assert all((back[name] == 1).all() for name in ("b", "half", "square"))


def test_tied_optimizer_states_and_arrays_follow_too(tmp_path: Path) -> None:
    root = tmp_path / "store"
    moment = torch.randn(200_000)
    array = moment.numpy()
    with Store(root) as store:
        state = {"optim": {"state": {0: {"exp_avg": moment, "copy": moment}}}, "user": {"x": array, "y": array}}
        store.save(1, state)
        store.wait()
        same(state, store.read(1))
        assert used(root) < 2.5 * moment.nbytes


# ---------------------------------------------------------------- O24: a small view drags its whole storage along


def test_views_store_their_own_elements_only(tmp_path: Path) -> None:
    root = tmp_path / "store"
    big = torch.randn(8_000_000)
    views = {
        "head": big[:10],
        "column": big.view(8000, 1000)[:, 3],
        "chunk": torch.chunk(big, 1000)[5],
        "row": nn.Parameter(big.view(8000, 1000)[17]),
    }
    with Store(root) as store:
        store.save(1, {"model": views})
        store.wait()
        assert used(root) < 2 * sum(view.nbytes for view in views.values()) + 100_000, used(root)
        back = store.read(1)["model"]
        same(dict(views), back)
        for name, tensor in back.items():
            assert tensor.untyped_storage().nbytes() <= max(64, 2 * tensor.nbytes), name


def test_an_expanded_tensor_comes_back_with_elements_of_its_own(tmp_path: Path) -> None:
    row, one, zero = torch.arange(7.0).expand(5, 7), torch.tensor(3).expand(4, 2), torch.ones(1).expand(0)
    state = {"model": {"row": row, "one": one, "zero": zero}}
    with Store(tmp_path / "store") as store:
        store.save(1, state)
        store.wait()
        back = store.read(1)["model"]
        same(state["model"], back)
        back["row"][0] = 0  # no element shares memory with another
        assert (back["row"][1:] == state["model"]["row"][1:]).all()


def test_a_slice_of_a_commit_owns_a_storage_of_its_size(tmp_path: Path) -> None:
    with Store(tmp_path / "store") as store:
        store.save(1, {"model": {"w": torch.randn(4000, 100)}})
        store.wait()
        lazy = store.product.at(1)["model", "w"]
        assert lazy[10:12].untyped_storage().nbytes() == 2 * 100 * 4
        assert lazy[7].untyped_storage().nbytes() == 100 * 4
        assert lazy[...].untyped_storage().nbytes() == 4000 * 100 * 4


# ---------------------------------------------------------------- O32: strides


def strided() -> dict[str, torch.Tensor]:
    linear = torch.randn(12, 20)
    return {
        "T": linear.t(),
        "step2": linear[:, ::2],
        "perm": torch.randn(2, 3, 4).permute(2, 0, 1),
        "win": torch.arange(10.0).unfold(0, 4, 2),
        "narrow": linear.narrow(1, 3, 5),
        "diag": torch.diagonal(linear),
        "c3d": torch.randn(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d),
    }


def test_logical_values_are_stored_whatever_the_strides(tmp_path: Path) -> None:
    conv = nn.Conv2d(8, 16, 3)
    tensors = {"conv": conv.weight, **strided()}
    truth = {"model": {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}}
    with Store(tmp_path / "store") as store:
        store.save(1, {"model": tensors})
        store.wait()
        same(truth, store.read(1))
        before = store.product.at(1).commit.bytes
        conv.to(memory_format=torch.channels_last)
        assert not conv.weight.is_contiguous()
        store.save(2, {"model": {**tensors, "conv": conv.weight}})
        store.wait()
        same(truth, store.read(2))
        assert all(tensor.is_contiguous() for tensor in store.read(2)["model"].values())
        assert store.product.at(2).commit.bytes < before / 4, "another memory format is no change"


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "bool", "int8", "complex64", "complex128", "complex32"])
def test_strides_of_every_element_size(tmp_path: Path, name: str) -> None:
    dtype = getattr(torch, name)
    raw = torch.randint(0, 2 if name == "bool" else 256, (24 * dtype.itemsize, 40), dtype=torch.uint8)
    square = raw.t().contiguous().view(dtype)
    permuted = square.view(5, 8, 24).permute(1, 2, 0)
    tensors = {"T": square.t(), "rows": square[1::3], "block": square[2:30, 3:17], "perm": permuted}
    with Store(tmp_path / "store") as store:
        store.save(1, {"model": tensors})
        store.wait()
        same({"model": tensors}, store.read(1))


def test_lazily_conjugated_and_negated_tensors(tmp_path: Path) -> None:
    z = torch.randn(6, 5, dtype=torch.complex64)
    tensors = {"conj": z.conj(), "imag": z.conj().imag, "both": z.conj().t()[::2], "plain": z}
    with Store(tmp_path / "store") as store:
        store.save(1, {"model": tensors})
        store.wait()
        same({"model": tensors}, store.read(1))


# ---------------------------------------------------------------- O38: more than 2 GiB


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_tensor_of_more_than_2_gib(tmp_path: Path) -> None:
    size = 2**31 + 64
    tensor = torch.zeros(size, dtype=torch.uint8)
    marks = {0: 1, 2**31 - 1: 2, 2**31: 3, size - 1: 4}
    for index, value in marks.items():
        tensor[index] = value
    with Store(tmp_path / "store") as store:
        store.save(1, {"model": {"w": tensor, "wide": tensor.view(1, -1)[:, :10]}})
        tensor[2**31 + 5] = 9
        store.save(2, {"model": {"w": tensor, "wide": tensor.view(1, -1)[:, :10]}})
        store.wait()
        first = store.read(1)["model"]["w"]
        assert first.shape == (size,)
        assert {index: int(first[index]) for index in marks} == marks
        assert int(first.sum()) == 10
        lazy = store.product.at(2)["model", "w"]
        assert lazy[2**31 - 2 : 2**31 + 8].tolist() == [0, 2, 3, 0, 0, 0, 0, 9, 0, 0]


@pytest.mark.parametrize("shape", [(3 * 2**20 + 7,), (1, 3 * 2**20 + 7), (3, 2**20 + 5), (2**21 + 3, 2)])
def test_a_tensor_that_spans_chunks_and_partitions(tmp_path: Path, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.int64).view(shape)
    with Store(tmp_path / "store") as store:
        store.save(1, {"model": {"w": tensor, "small": torch.ones(3)}})
        changed = tensor.clone()
        changed.view(-1)[[0, 2**19 - 1, 2**19, -1]] = -1
        store.save(2, {"model": {"w": changed, "small": torch.ones(3)}})
        store.wait()
        same({"w": tensor, "small": torch.ones(3)}, store.read(1)["model"])
        same({"w": changed, "small": torch.ones(3)}, store.read(2)["model"])
        row = store.product.at(2)["model", "w"][-1]
        assert torch.equal(row, changed[-1])
