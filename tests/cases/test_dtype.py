"""O05, O18, O35: every dtype, every bit pattern, quantized weights and subclasses."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from deltastore.errors import InvalidInput
from deltastore.testing.strategies import TORCH_DTYPES
from tests.cases.kit import Store, raises, same

# ---------------------------------------------------------------- O05: every dtype


def test_every_dtype_and_every_byte(tmp_path: Path) -> None:
    raw = torch.arange(256, dtype=torch.uint8).repeat(16)  # so NaNs, infinities, subnormals, -0
    first: dict[str, torch.Tensor] = {}
    second: dict[str, torch.Tensor] = {}
    for name in TORCH_DTYPES:
        octets = raw % 2 if name == "bool" else raw
        first[name] = octets.clone().view(getattr(torch, name))
        second[name] = octets.flip(0).clone().view(getattr(torch, name))
    with Store(tmp_path / "store") as store:
        store.save(1, {"model": first})
        store.save(2, {"model": second})
        store.save(3, {"model": {**second, "float32": first["float32"]}})
        store.wait()
        same({"model": first}, store.read(1))
        same({"model": second}, store.read(2))
        same({"model": {**second, "float32": first["float32"]}}, store.read(3))


def test_no_dtype_of_this_torch_is_left_out(tmp_path: Path) -> None:
    """Each one is kept as itself, or refused by its name at the time of the save."""
    known = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    with Store(tmp_path / "store") as store:
        for step, dtype in enumerate(sorted(known, key=str)):
            name = str(dtype).removeprefix("torch.")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's own, about quantized and half-precision complex tensors
                try:
                    tensor = torch.zeros(16, dtype=torch.uint8).view(dtype)
                except RuntimeError:
                    continue  # torch itself has no such tensors
            if name in TORCH_DTYPES:
                store.save(step, {"model": {"blk.w": tensor}})
                store.wait()
                same({"model": {"blk.w": tensor}}, store.read(step))
            else:
                error = raises(partial(store.save, step, {"model": {"blk.w": tensor}}), InvalidInput)
                assert name in str(error)
                assert "blk.w" in str(error)


def test_a_tensor_changes_its_dtype_and_keeps_its_bits(tmp_path: Path) -> None:
    octets = torch.randint(0, 256, (960,), dtype=torch.uint8)
    names = [name for name in TORCH_DTYPES if name not in ("bool", "float4_e2m1fn_x2")]
    with Store(tmp_path / "store") as store:
        for step, name in enumerate(names):
            moments = {"state": {0: {"m": octets}}}
            store.save(step, {"model": {"w": octets.view(getattr(torch, name))}, "optim": moments})
        store.wait()
        for step, name in enumerate(names):
            same({"w": octets.view(getattr(torch, name))}, store.read(step)["model"])


def test_one_element_of_each_dtype_changes_by_one_bit(tmp_path: Path) -> None:
    with Store(tmp_path / "store") as store:
        octets = {name: torch.zeros(4096, dtype=torch.uint8) for name in TORCH_DTYPES}
        truth = []
        for step, place in enumerate([0, 17, 4095, 2048, 2048]):
            for raw in octets.values():
                raw[place] ^= 1
            state = {"model": {name: raw.clone().view(getattr(torch, name)) for name, raw in octets.items()}}
            truth.append(state)
            store.save(step, state)
        store.wait()
        for step, state in enumerate(truth):
            same(state, store.read(step))


# ---------------------------------------------------------------- O18: -0.0, NaN, infinity


def test_bits_are_compared_not_values(tmp_path: Path) -> None:
    size = 70_000
    zeros = torch.zeros(size)
    payload = torch.full((size,), 0x7FC00001, dtype=torch.int32).view(torch.float32)
    other_payload = torch.full((size,), 0x7FC0BEEF, dtype=torch.int32).view(torch.float32)
    mixed = torch.randn(size)
    mixed[:4] = torch.tensor([float("nan"), float("inf"), float("-inf"), -0.0])
    near = mixed.clone()
    near[100:200] += 0.01  # must still be seen next to the infinity
    infinite = torch.full((size,), float("inf"))
    history = [zeros, -zeros, zeros, payload, payload, other_payload, infinite, mixed, near, -zeros]
    with Store(tmp_path / "store") as store:
        for step, tensor in enumerate(history):
            store.save(step, {"model": {"w": tensor, "h": tensor.half(), "b": tensor.bfloat16()}})
        store.wait()
        for step, tensor in enumerate(history):
            same({"model": {"w": tensor, "h": tensor.half(), "b": tensor.bfloat16()}}, store.read(step))


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64", "complex64", "float8_e5m2"])
def test_one_sign_or_payload_among_many_values(tmp_path: Path, name: str) -> None:
    dtype = getattr(torch, name)
    raw = torch.zeros(70_000 * dtype.itemsize, dtype=torch.uint8)
    with Store(tmp_path / "store") as store:
        truth = []
        for step, (place, octet) in enumerate([(7, 0x80), (65_535, 0x80), (69_999, 0xFF), (69_999, 0x7F), (7, 0)]):
            raw[(place + 1) * dtype.itemsize - 1] = octet  # the byte with the sign
            truth.append({"model": {"w": raw.clone().view(dtype)}})
            store.save(step, truth[-1])
        store.wait()
        for step, state in enumerate(truth):
            same(state, store.read(step))
        assert len({store.product.at(step).commit.id for step in range(5)}) == 5


def test_special_values_in_plain_leaves(tmp_path: Path) -> None:
    values = [0.0, -0.0, float("nan"), -float("nan"), float("inf"), float("-inf"), 5e-324, 0, False, -0.0]
    with Store(tmp_path / "store") as store:
        for step, value in enumerate(values):
            store.save(step, {"user": {"loss": value, "z": complex(value, -0.0), "log": values[: step + 1]}})
        store.wait()
        for step, value in enumerate(values):
            same({"user": {"loss": value, "z": complex(value, -0.0), "log": values[: step + 1]}}, store.read(step))


# ---------------------------------------------------------------- O35: quantized weights and subclasses


@contextmanager
def quantizing() -> Iterator[None]:
    with warnings.catch_warnings():
        # torch announces that it will drop these dtypes; stores with them must still be read.
        warnings.filterwarnings("ignore", message=".*quantized tensor creation functions.*", category=UserWarning)
        yield


class Packed(torch.Tensor):
    """Two 4-bit values in a byte, scales aside, no storage of its own."""

    data8: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls: type[Packed], data: torch.Tensor, scale: torch.Tensor, shape: tuple[int, ...]) -> Packed:
        wrapper: Packed = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bfloat16)
        return wrapper

    def __init__(self, data: torch.Tensor, scale: torch.Tensor, shape: tuple[int, ...]) -> None:
        self.data8, self.scale = data, scale

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return ["data8", "scale"], {"shape": list(self.shape)}

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return NotImplemented


def test_quantized_tensors_keep_integers_scales_and_zero_points(tmp_path: Path) -> None:
    with quantizing(), Store(tmp_path / "store") as store:
        x = torch.randn(4, 6)
        per_channel = torch.quantize_per_channel(x, torch.rand(4) + 0.1, torch.arange(4), 0, torch.quint8)
        truth = [
            torch.quantize_per_tensor(x, 0.05, 3, torch.qint8),
            torch.quantize_per_tensor(x, 0.06, 3, torch.qint8),
            torch.quantize_per_tensor(x, 0.05, 0, torch.qint32),
            per_channel,
        ]
        for step, tensor in enumerate(truth):
            store.save(step, {"model": {"q": tensor}})
        store.wait()
        for step, tensor in enumerate(truth):
            back = store.read(step)["model"]["q"]
            same(tensor, back)
            assert back.qscheme() == tensor.qscheme()
        first = store.read(0)["model"]["q"]
        assert (first.q_scale(), first.q_zero_point()) == (0.05, 3)
        assert store.read(3)["model"]["q"].q_per_channel_axis() == 0


def test_a_subclass_is_refused_by_name(tmp_path: Path) -> None:
    packed = Packed(torch.randint(0, 255, (8, 8), dtype=torch.uint8), torch.rand(8), (8, 16))
    with Store(tmp_path / "store") as store:
        error = raises(lambda: store.save(2, {"model": {"blk.w": packed}}), InvalidInput)
        assert "blk.w" in str(error)
        assert "Packed" in str(error)
        assert store.steps() == []
        parts = {"blk.w.data8": packed.data8, "blk.w.scale": packed.scale}
        store.save(2, {"model": parts})  # what the message says to store instead
        store.wait()
        same({"model": parts}, store.read(2))


def test_packed_4_bit_weights_travel_with_their_side_keys(tmp_path: Path) -> None:
    state = {
        "fc.weight": torch.randint(0, 255, (32, 1), dtype=torch.uint8),
        "fc.weight.absmax": torch.rand(4),
        "fc.weight.quant_map": torch.linspace(-1, 1, 16),
        "fc.weight.quant_state.nf4": torch.frombuffer(bytearray(b'{"blocksize": 64}'), dtype=torch.uint8),
    }
    with Store(tmp_path / "store") as store:
        store.save(3, {"model": state})
        store.wait()
        same({"model": state}, store.read(3))


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        lambda: torch.empty(3, device="meta"),
        torch.nn.parameter.UninitializedParameter,
        lambda: torch.eye(3).to_mkldnn(),
    ],
    ids=["sparse", "csr", "nested", "meta", "uninitialized", "mkldnn"],
)
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning", "ignore:The PyTorch API of nested tensors:UserWarning")
def test_what_has_no_plain_values_is_refused_by_name(tmp_path: Path, make: Callable[[], torch.Tensor]) -> None:
    with Store(tmp_path / "store") as store:
        error = raises(lambda: store.save(1, {"model": {"ok": torch.ones(2), "blk.w": make()}}), InvalidInput)
        assert "blk.w" in str(error)
        store.save(1, {"model": {"ok": torch.ones(2)}})
        store.wait()
        same({"model": {"ok": torch.ones(2)}}, store.read(1))
