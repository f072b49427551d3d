"""Whatever a store can hold comes back from every format of named tensors as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given

import deltastore
from deltastore import formats
from deltastore.errors import InvalidInput
from deltastore.testing.compare import assert_same
from deltastore.testing.strategies import states
from tests.formats.kit import DTYPES, TENSOR_FORMATS, tensor, training_state

every_format = pytest.mark.parametrize("name", TENSOR_FORMATS)


@every_format
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_bit_for_bit(tmp_path: Path, name: str, dtype: str) -> None:
    state = {"a": tensor(dtype, 3, 5), "scalar": tensor(dtype), "empty": tensor(dtype, 0, 4), "b": tensor(dtype, 7)}
    path = tmp_path / f"state.{TENSOR_FORMATS[name]}"
    formats.save(state, path)
    assert_same(formats.load(path), state)


@every_format
@given(state=states())
def test_any_state(tmp_path_factory: pytest.TempPathFactory, name: str, state: dict[Any, Any]) -> None:
    path = tmp_path_factory.mktemp("round") / f"state.{TENSOR_FORMATS[name]}"
    formats.save(state, path)
    assert formats.format_of(str(path)).name == name
    assert_same(formats.load(path), state)


@every_format
def test_a_training_state_with_its_aliases(tmp_path: Path, name: str) -> None:
    state, path = training_state(), tmp_path / f"state.{TENSOR_FORMATS[name]}"
    formats.save(state, path)
    loaded = formats.load(path)
    assert_same(loaded, state)
    assert loaded["model"]["tied.weight"] is loaded["model"]["0.weight"]


@every_format
def test_a_commit_is_written_tensor_by_tensor(tmp_path: Path, name: str) -> None:
    state, path = training_state(), tmp_path / f"state.{TENSOR_FORMATS[name]}"
    with deltastore.open(tmp_path / "store") as store:
        store.commit(0, state).wait()
        state["model"]["0.bias"] = state["model"]["0.bias"] + 1
        store.commit(1, state).wait()
        told: list[tuple[int, int]] = []
        formats.save(store.at(1), path, progress=lambda done, total: told.append((done, total)))
        assert_same(formats.load(path), store.at(1).to_state_dict())
    assert told[-1][0] == told[-1][1] > 0
    assert [done for done, _ in told] == sorted(done for done, _ in told)


@every_format
def test_a_lazy_state_is_read_by_the_row(tmp_path: Path, name: str) -> None:
    weight, path = torch.arange(60.0).reshape(20, 3), tmp_path / f"state.{TENSOR_FORMATS[name]}"
    formats.save({"w": weight, "c": tensor("complex32", 4, 2)}, path)
    lazy = formats.load(path, lazy=True)
    assert (lazy["w"].shape, lazy["w"].dtype, lazy["w"].nbytes, len(lazy["w"])) == ((20, 3), torch.float32, 240, 20)
    assert torch.equal(lazy["w"][3:5], weight[3:5])
    assert torch.equal(lazy["w"][7, 1], weight[7, 1])
    assert lazy["c"][1:2].shape == (1, 2)
    formats.save(lazy, tmp_path / "copy.safetensors")
    assert_same(formats.load(tmp_path / "copy.safetensors"), formats.load(path))


@every_format
def test_strict_refuses_what_the_format_lacks_before_it_writes(tmp_path: Path, name: str) -> None:
    path = tmp_path / f"state.{TENSOR_FORMATS[name]}"
    with pytest.raises(InvalidInput, match="strict"):
        formats.save({"w": torch.ones(2), "lr": 0.1}, path, strict=True)
    assert list(tmp_path.iterdir()) == []
    formats.save({"w": torch.ones(2)}, path, strict=True)
    assert formats.losses({"w": torch.ones(2)}, path) == ()


@every_format
def test_replaced_by_the_same_format_only(tmp_path: Path, name: str) -> None:
    path = tmp_path / f"state.{TENSOR_FORMATS[name]}"
    formats.save({"w": torch.ones(2)}, path)
    formats.save({"v": torch.zeros(2)}, path)
    assert list(formats.load(path)) == ["v"]
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("precious")
    with pytest.raises(InvalidInput):
        formats.save({"w": torch.ones(2)}, tmp_path / "notes", format=name)
    assert (tmp_path / "notes" / "mine.txt").read_text() == "precious"


@every_format
def test_names_that_lead_elsewhere_are_names(tmp_path: Path, name: str) -> None:
    keys = [
        "../../evil",
        "/abs",
        "..",
        ".",
        "",
        "a\0b",
        "~/x",
        "C:\\x",
        "%2e%2e/x",
        "x\n",
        "zarr.json",
        "__x",
        "é" * 300,
    ]
    state = {key: torch.full((3,), float(index)) for index, key in enumerate(keys)}
    path = tmp_path / "in" / f"state.{TENSOR_FORMATS[name]}"
    path.parent.mkdir()
    formats.save({"deep": {"er": state}, **state}, path)
    assert_same(formats.load(path), {"deep": {"er": state}, **state})
    assert [entry.name for entry in tmp_path.iterdir()] == ["in"]
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@every_format
def test_a_lazy_state_is_committed_piece_by_piece(tmp_path: Path, name: str) -> None:
    state, path = training_state(), tmp_path / f"state.{TENSOR_FORMATS[name]}"
    state["model"] |= {dtype: tensor(dtype, 50, 31) for dtype in DTYPES}
    formats.save(state, path)
    with deltastore.open(tmp_path / "store") as store:
        store.commit(0, formats.load(path, lazy=True)).wait()
        store.commit(1, formats.load(path, lazy=True)).wait()
        assert store.commits()[1].kind == "delta"
        loaded = store.at(1).to_state_dict()
    assert_same(loaded, state)
    assert loaded["model"]["tied.weight"] is loaded["model"]["0.weight"]


@every_format
def test_the_order_is_that_of_the_state(tmp_path: Path, name: str) -> None:
    inner = {key: tensor("int8", size) for size, key in enumerate("zxaby", 1)}
    state, path = (
        {"m": {"q": inner, "b": inner["a"]}, "a": tensor("float64", 2)},
        tmp_path / f"x.{TENSOR_FORMATS[name]}",
    )
    formats.save(state, path)
    assert_same(formats.load(path), state)


@every_format
@pytest.mark.filterwarnings("ignore")  # of torch, that quantized tensors are going to leave it
def test_quantized_tensors_of_a_commit(tmp_path: Path, name: str) -> None:
    values = torch.randn(3, 4)
    state = {
        "tensor": torch.quantize_per_tensor(values, 0.1, 3, torch.qint8),
        "channel": torch.quantize_per_channel(
            values, torch.rand(3) + 0.1, torch.zeros(3, dtype=torch.int64), 0, torch.qint8
        ),
    }
    path = tmp_path / f"state.{TENSOR_FORMATS[name]}"
    with deltastore.open(tmp_path / "store") as store:
        store.commit(0, state).wait()
        formats.save(store.at(0), path)
        store.commit(1, formats.load(path, lazy=True)).wait()
        assert_same(store.at(1).to_state_dict(), state)
    assert_same(formats.load(path), state)
