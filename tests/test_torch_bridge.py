"""Tensors as bytes, in whatever form torch holds them, and torch's objects in a document."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deltastore import torch_bridge
from deltastore.dtypes import LOGICAL, NATIVE, storage_dtype
from deltastore.errors import Corruption, Internal, InvalidInput, UnsupportedFormat
from deltastore.testing.compare import assert_same
from deltastore.testing.strategies import TORCH_DTYPES, arrays, tensors
from deltastore.torch_bridge import TORCH, Described
from deltastore.tree import build, flatten

EVERY_BYTE = np.arange(256, dtype=np.uint8)


def every_pattern(name: str) -> torch.Tensor:
    """Return 768 bytes as a tensor: NaNs with payloads, infinities, subnormals, -0.0, bools that are neither."""
    data = np.concatenate([EVERY_BYTE, EVERY_BYTE[::-1], EVERY_BYTE])
    return TORCH.wrap(data.view(storage_dtype(name)), name, (len(data) // storage_dtype(name).itemsize,))


def content(value: Any, start: int = 0, count: int | None = None) -> bytes:
    about = TORCH.describe(value)
    size = int(np.prod(about.shape, dtype=np.int64)) - start if count is None else count
    dest = np.empty(size, storage_dtype(about.dtype))
    TORCH.copy_into(value, dest, start, size)
    return dest.tobytes()


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a contiguous tensor, by torch's own means."""
    # A tensor of one element or none counts as contiguous whatever its strides, and torch refuses to view it as bytes.
    flat = tensor.detach().contiguous().as_strided((tensor.numel(),), (1,))
    return bytes(flat.view(torch.uint8).tolist())


# ---------------------------------------------------------------- copies


def test_this_torch_has_every_dtype_of_version_1() -> None:
    assert set(TORCH_DTYPES) == set(LOGICAL)


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_every_dtype_keeps_every_bit(name: str) -> None:
    tensor = every_pattern(name)
    expected = np.concatenate([EVERY_BYTE, EVERY_BYTE[::-1], EVERY_BYTE]).tobytes()
    assert TORCH.describe(tensor) == Described(name, tuple(tensor.shape))
    assert content(tensor) == expected
    grid = tensor.view(2, 3, -1)
    assert content(grid.permute(2, 0, 1).permute(1, 2, 0)) == expected
    back = TORCH.empty(name, tuple(grid.shape))
    assert back.dtype == getattr(torch, name)
    array = TORCH.as_array(back)
    assert array.dtype == storage_dtype(name)
    array[:] = np.frombuffer(expected, storage_dtype(name))
    assert content(back) == expected
    other = TORCH.empty(name, tuple(grid.shape))
    TORCH.copy_to(other, back)
    assert content(other) == expected


STRIDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.transpose(0, 2),
    "strided": lambda t: t[:, ::2, 1::2],
    "narrow": lambda t: t.narrow(1, 1, 3),
    "diagonal": lambda t: torch.diagonal(t, dim1=0, dim2=1),
    "expanded": lambda t: t[:, :1, :1].expand(4, 5, 6),
    "unfolded": lambda t: t.unfold(2, 4, 2),
    "one element": lambda t: t[3, 4, 5],
    "empty": lambda t: t[:, :0],
    "parameter": lambda t: torch.nn.Parameter(t, requires_grad=t.is_floating_point() or t.is_complex()),
    "channels last": lambda t: t.reshape(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("look", STRIDED)
@pytest.mark.parametrize("name", ["bool", "bfloat16", "float32", "complex64", "complex128"])
def test_every_memory_layout_reads_row_major(name: str, look: str) -> None:
    generator = np.random.default_rng(1)
    dtype = storage_dtype(name)
    data = generator.integers(0, 2 if name == "bool" else 256, 120 * dtype.itemsize, dtype=np.uint8).view(dtype)
    tensor = STRIDED[look](TORCH.wrap(data, name, (4, 5, 6)))
    expected = bytes_of(tensor)
    assert content(tensor) == expected
    size = tensor.numel()
    width = dtype.itemsize
    for start in range(0, size, 7):
        for count in {0, 1, 5, 29, 60, size - start}:
            if start + count <= size:
                assert content(tensor, start, count) == expected[start * width : (start + count) * width]


@given(st.data())
def test_any_run_of_any_tensor(data: st.DataObject) -> None:
    value = data.draw(tensors() | arrays())
    whole = content(value)
    width = value.itemsize
    size = len(whole) // width
    start = data.draw(st.integers(0, size))
    count = data.draw(st.integers(0, size - start))
    assert content(value, start, count) == whole[start * width : (start + count) * width]
    if isinstance(value, np.ndarray):
        assert whole == np.ascontiguousarray(value).tobytes()
    else:
        assert whole == bytes_of(value.contiguous())


@pytest.mark.parametrize("name", ["complex32", "complex64", "complex128"])
def test_lazy_conjugates_and_negatives(name: str) -> None:
    half = storage_dtype(name).itemsize // 2
    tensor = every_pattern(name).view(2, -1)
    raw = np.frombuffer(content(tensor), f"<u{half}").reshape(-1, 2)
    sign = np.array(1 << (8 * half - 1), raw.dtype)
    conjugate = tensor.conj()
    assert conjugate.is_conj()
    assert content(conjugate) == (raw ^ np.array([0, sign], raw.dtype)).tobytes()
    negative = torch._neg_view(tensor)
    assert content(negative) == (raw ^ sign).tobytes()
    assert content(torch._neg_view(conjugate)) == (raw ^ np.array([sign, 0], raw.dtype)).tobytes()
    if name != "complex32":
        imaginary = conjugate.imag
        assert imaginary.is_neg()
        assert content(imaginary) == (raw[:, 1] ^ sign).tobytes()
        assert content(imaginary.t(), 3, 20) == content(imaginary.t().clone(), 3, 20)


def test_inference_tensors_are_read_and_written() -> None:
    with torch.inference_mode():
        tensor = torch.arange(6.0).view(2, 3)
    assert content(tensor.t()) == bytes_of(torch.arange(6.0).view(2, 3).t())
    TORCH.copy_to(tensor, torch.full((2, 3), 7.0))
    assert tensor.tolist() == [[7.0] * 3] * 2
    normal = torch.zeros(2, 3)
    TORCH.copy_to(normal, tensor)
    assert normal.tolist() == [[7.0] * 3] * 2
    with torch.inference_mode():
        assert content(normal) == content(tensor)


def test_a_copy_leaves_no_trace_in_autograd() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    product = (weight * weight).sum()
    version = weight._version
    content(weight)
    content(product)
    assert weight._version == version
    torch.autograd.backward(product)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("name", sorted(NATIVE))
def test_numpy_arrays_in_both_byte_orders(name: str, order: str) -> None:
    native = TORCH.to_numpy(every_pattern(name), name)
    assert native.dtype == NATIVE[name]
    swapped = native.byteswap().view(native.dtype.newbyteorder(">")) if order == ">" else native
    grid = swapped.reshape(2, 3, -1)
    assert content(grid) == native.tobytes()
    expected = np.ascontiguousarray(native.reshape(2, 3, -1)[::-1, :, ::2].transpose(2, 1, 0))
    odd = grid[::-1, :, ::2].transpose(2, 1, 0)
    assert content(odd) == expected.tobytes()
    assert content(odd, 5, 13) == expected.tobytes()[5 * native.itemsize : 18 * native.itemsize]


def test_a_scalar_array_and_a_read_only_one() -> None:
    assert content(np.array(1.5)) == np.float64(1.5).tobytes()
    frozen = np.arange(4)
    frozen.flags.writeable = False
    assert content(frozen[::2]) == np.array([0, 2]).tobytes()


@pytest.mark.parametrize(
    ("dest", "start", "count"),
    [
        (np.empty(3, "<f4"), 0, 2),
        (np.empty(2, "<f8"), 0, 2),
        (np.empty(4, "<f4")[::2], 0, 2),
        (np.empty((2, 1), "<f4"), 0, 2),
        (np.empty(2, "<f4"), 3, 2),
        (np.empty(2, "<f4"), -1, 2),
    ],
)
def test_a_destination_that_does_not_fit_is_a_bug(dest: np.ndarray, start: int, count: int) -> None:
    with pytest.raises(Internal):
        TORCH.copy_into(torch.zeros(4), dest, start, count)


# ---------------------------------------------------------------- tensors on given memory


def test_empty_has_a_storage_of_its_own_size() -> None:
    for name in TORCH_DTYPES:
        tensor = TORCH.empty(name, (3, 5))
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert tensor.is_contiguous()
        assert TORCH.as_array(TORCH.empty(name, (2, 0))).shape == (0,)
        assert TORCH.as_array(TORCH.empty(name, ())).shape == (1,)
    assert TORCH.empty("bfloat16", (2,), device="meta").is_meta


def test_as_array_and_wrap_share_memory() -> None:
    tensor = TORCH.empty("bfloat16", (2, 3))
    TORCH.as_array(tensor)[:] = 0x3F80
    assert tensor.tolist() == [[1.0] * 3] * 2
    array = np.zeros(6, "<u2")
    wrapped = TORCH.wrap(array, "bfloat16", (2, 3))
    array[:] = 0x4000
    assert wrapped.tolist() == [[2.0] * 3] * 2


def test_wrap_copies_what_torch_cannot_have() -> None:
    read_only = np.frombuffer(b"\0\0\x80\x3f" * 2, "<f4")
    assert TORCH.wrap(read_only, "float32", (2,)).tolist() == [1.0, 1.0]
    assert TORCH.wrap(np.arange(4.0)[::-2], "float64", (2,)).tolist() == [3.0, 1.0]
    unaligned = np.frombuffer(bytearray(b"x\0\0\x80\x3f"), "<f4", offset=1)
    assert TORCH.wrap(unaligned, "float32", ()).item() == 1.0


@pytest.mark.parametrize("shape", [(), (0,), (0, 128), (128, 0), (2, 0, 3), (1,), (1, 1, 1)])
def test_scalars_and_empty_tensors(shape: tuple[int, ...]) -> None:
    tensor = torch.full(shape, 2.5, dtype=torch.bfloat16)
    back = TORCH.empty("bfloat16", shape)
    TORCH.copy_into(tensor, TORCH.as_array(back), 0, tensor.numel())
    assert_same(tensor, back)
    TORCH.copy_to(back, tensor)
    array = tensor.float().numpy()
    assert_same(array, TORCH.to_numpy(TORCH.wrap(array.reshape(-1), "float32", shape), "float32"))


@pytest.mark.parametrize(
    "tensor", [torch.zeros(2, 3).t(), torch.zeros(2, device="meta"), torch.zeros(2, dtype=torch.cfloat).conj()]
)
def test_no_array_of_what_is_no_plain_memory(tensor: torch.Tensor) -> None:
    with pytest.raises(Internal):
        TORCH.as_array(tensor)


def test_wrap_and_to_numpy_check_what_they_get() -> None:
    with pytest.raises(Internal):
        TORCH.wrap(np.zeros(3, "<f4"), "float32", (2,))
    with pytest.raises(Internal):
        TORCH.wrap(np.zeros(2, "<f4"), "int32", (2,))
    with pytest.raises(Corruption, match="numpy does not have"):
        TORCH.to_numpy(TORCH.empty("bfloat16", (2,)), "bfloat16")


# ---------------------------------------------------------------- in place


def test_copy_to_a_leaf_counts_as_one_write() -> None:
    weight = torch.nn.Parameter(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last))
    source = torch.arange(120.0).view(2, 3, 4, 5)
    version, address = weight._version, weight.data_ptr()
    TORCH.copy_to(weight, source)
    assert torch.equal(weight, source)
    assert weight._version == version + 1
    assert (weight.data_ptr(), weight.requires_grad, weight.is_leaf) == (address, True, True)
    assert weight.is_contiguous(memory_format=torch.channels_last)


def test_copy_to_views_and_lazy_tensors() -> None:
    grid = torch.zeros(3, 4)
    TORCH.copy_to(grid[:, 1], torch.tensor([1.0, 2.0, 3.0]))
    assert grid[:, 1].tolist() == [1.0, 2.0, 3.0]
    values = torch.zeros(2, dtype=torch.complex64)
    TORCH.copy_to(values.conj(), torch.tensor([1 + 1j, 2 - 2j]))
    assert values.tolist() == [1 - 1j, 2 + 2j]


@pytest.mark.parametrize(
    ("target", "source", "reason"),
    [
        (torch.zeros(2), torch.zeros(3), r"to fill is torch\.float32 \(2,\), the stored one torch\.float32 \(3,\)"),
        (torch.zeros(1), torch.zeros(()), "to fill is"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), "float64"),
        (torch.zeros(1).expand(2), torch.zeros(2), "expanded"),
    ],
)
def test_copy_to_refuses_what_does_not_fit(target: torch.Tensor, source: torch.Tensor, reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        TORCH.copy_to(target, source)


# ---------------------------------------------------------------- identity


def test_identity_is_that_of_the_memory() -> None:
    base = torch.arange(12.0)
    parameter = torch.nn.Parameter(base)
    key = TORCH.identity(base)
    assert key is not None
    assert {key} == {
        TORCH.identity(x) for x in (base, base.detach(), parameter, base.view(12), base[:], base.view(1, 12)[0])
    }
    others = [
        base[:6], base[1:], base[6:], base.view(3, 4), base.view(3, 4).t(), base[::2], base.view(torch.int32),
        base.clone(), base.unsqueeze(0), base[:1].expand(12), torch._neg_view(base),
    ]  # fmt: skip
    keys = [TORCH.identity(other) for other in others]
    assert len({key, *keys}) == 1 + len(others)
    assert None not in keys


def test_identity_ignores_strides_along_one_element() -> None:
    row = torch.arange(4.0).view(1, 4)
    assert TORCH.identity(row) == TORCH.identity(row.as_strided((1, 4), (77, 1)))


def test_nothing_is_shared_by_empty_tensors() -> None:
    for value in (torch.empty(0, 3), np.empty((0, 3)), torch.zeros(3)[:0]):
        assert TORCH.identity(value) is None


def test_identity_of_arrays() -> None:
    array = np.arange(6)
    assert TORCH.identity(array) == TORCH.identity(array.view()) == TORCH.identity(array[:])
    others = [array[1:], array[:3], array.reshape(2, 3), array.copy(), array.view(np.uint64), array[::-1]]
    assert len({TORCH.identity(array), *map(TORCH.identity, others)}) == 1 + len(others)


# ---------------------------------------------------------------- in and out of the document


def take_apart(value: Any) -> tuple[Any, dict[Any, Any]]:
    flat = flatten({"w": value}, TORCH)
    return json.loads(json.dumps(flat.document, sort_keys=True)), dict(flat.tensors)


def put_together(document: Any, tensors_by_path: dict[Any, Any]) -> Any:
    return build(document, lambda path, kind: tensors_by_path[path], TORCH)["w"]


@pytest.mark.parametrize("value", [torch.zeros(2), torch.nn.Parameter(torch.zeros(2)), torch.nn.Buffer(torch.zeros(2))])
def test_plain_tensors_are_leaves(value: torch.Tensor) -> None:
    flat = flatten({"w": value}, TORCH)
    assert flat.tensors == [(("w",), value)]
    assert flat.tensors[0][1] is value


class Subclass(torch.Tensor):
    pass


class Packed(torch.Tensor):
    @staticmethod
    def __new__(cls, data: torch.Tensor) -> Packed:
        return torch.Tensor._make_wrapper_subclass(cls, (8, 16), dtype=torch.bfloat16)

    def __init__(self, data: torch.Tensor) -> None:
        self.data8 = data

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return NotImplemented


def sparse_csr() -> torch.Tensor:
    return torch.eye(2).to_sparse_csr()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.zeros(1).as_subclass(Subclass), "subclass .*Subclass"),
        (lambda: Packed(torch.zeros(1)), "subclass .*Packed"),
        (torch.nn.UninitializedParameter, "UninitializedParameter has no values yet"),
        (torch.nn.UninitializedBuffer, "UninitializedBuffer has no values yet"),
        (lambda: torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1), (2,)), r"torch\.sparse_coo tensor"),
        (sparse_csr, r"torch\.sparse_csr tensor"),
        (lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), "NestedTensor"),
        (lambda: torch.nested.nested_tensor([torch.ones(2)]), "a nested tensor"),
        (lambda: torch.zeros(1, device="meta"), "meta device"),
        (lambda: torch.zeros(1, dtype=torch.uint8).view(vars(torch)["uint4"]), r"dtype torch\.uint4"),
        (lambda: torch.zeros(1, dtype=torch.uint8).view(torch.bits8), r"dtype torch\.bits8"),
        (torch.nn.ReLU, "state_dict"),
        (torch.Generator, "get_state"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*(Sparse|sparse|nested)")
def test_other_tensors_are_refused_by_name(make: Callable[[], Any], reason: str) -> None:
    with pytest.raises(InvalidInput, match=f"^blk/w: .*{reason}") as caught:
        flatten({"blk": {"w": make()}}, TORCH)
    assert caught.value.path == ("blk", "w")


def test_trust_takes_what_is_refused() -> None:
    document, _ = take_apart([torch.float32])
    sparse = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1), (2,))
    flat = flatten({"w": sparse}, TORCH, pickle_trusted=True)
    back = build(flat.document, lambda path, kind: None, TORCH, pickle_trusted=True)["w"]
    assert back.is_sparse
    assert put_together(document, {}) == [torch.float32]


quantized_is_deprecated = pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")


def per_channel(axis: int) -> torch.Tensor:
    length = (4, 6)[axis]
    zero_points = torch.arange(length) - 2
    return torch.quantize_per_channel(torch.randn(4, 6), torch.rand(length) + 0.1, zero_points, axis, torch.qint8)


QUANTIZED: dict[str, Callable[[], torch.Tensor]] = {
    "qint8": lambda: torch.quantize_per_tensor(torch.randn(4, 6), 0.05, 3, torch.qint8),
    "quint8": lambda: torch.quantize_per_tensor(torch.randn(4, 6).t(), 0.1, 130, torch.quint8),
    "qint32": lambda: torch.quantize_per_tensor(torch.randn(()), 1e-7, 0, torch.qint32),
    "empty": lambda: torch.quantize_per_tensor(torch.randn(0, 2), 1.0, 0, torch.qint8),
    "channel 0": lambda: per_channel(0),
    "channel 1": lambda: per_channel(1),
}


@quantized_is_deprecated
@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized_tensors_keep_their_parts(kind: str) -> None:
    value = QUANTIZED[kind]()
    document, parts = take_apart(value)
    assert document["v"][0]["$"] == "quantized"
    assert ("w", "int_repr") in parts
    back = put_together(document, parts)
    assert_same(value, back)
    assert torch.equal(value.dequantize(), back.dequantize())


@quantized_is_deprecated
def test_a_quantized_tensor_is_filled_in_place() -> None:
    target, source = (torch.quantize_per_tensor(torch.randn(3), scale, 1, torch.qint8) for scale in (0.1, 0.2))
    TORCH.copy_to(target, source)
    assert_same(source, target)


@quantized_is_deprecated
def test_packed_quantized_dtypes_are_refused_by_name() -> None:
    value = torch.quantize_per_channel(torch.randn(2, 4), torch.ones(2), torch.zeros(2), 0, torch.quint4x2)
    with pytest.raises(InvalidInput, match=r"^w: a quantized tensor of dtype quint4x2"):
        flatten({"w": value}, TORCH)


@quantized_is_deprecated
@pytest.mark.parametrize(
    ("meta", "changed"),
    [
        ({"dtype": "qint32"}, {}),
        ({"dtype": "int8"}, {}),
        ({"dtype": None}, {}),
        ({"scheme": "per_row"}, {}),
        ({"axis": 7}, {}),
        ({"axis": -1}, {}),
        ({"axis": None}, {}),
        ({"axis": 1}, {}),
        ({}, {"int_repr": None}),
        ({}, {"int_repr": torch.zeros(4, 6)}),
        ({}, {"scales": torch.ones(3)}),
        ({}, {"scales": [1.0] * 4}),
        ({}, {"zero_points": None}),
        ({}, {"scales": torch.ones((), dtype=torch.float64)}),
    ],
)
def test_parts_that_do_not_fit_are_corruption(meta: dict[str, Any], changed: dict[str, Any]) -> None:
    document, found = take_apart(per_channel(0))
    document["v"][0] |= meta
    found |= {("w", name): part for name, part in changed.items()}
    with pytest.raises(Corruption, match="plain values at w"):
        put_together(document, found)


@quantized_is_deprecated
@pytest.mark.parametrize("part", [{"scale": "a"}, {"zero_point": None}, {"zero_point": 2**70}, {"other": 1}])
def test_scalars_that_do_not_fit_are_corruption(part: dict[str, Any]) -> None:
    document, found = take_apart(QUANTIZED["qint8"]())
    plain = {"scale": 0.1, "zero_point": 1} if "other" not in part else {}
    node = flatten({"int_repr": None, **plain, **part}, None).document
    node["v"][0] = {"$": "tensor"}
    document["v"][0] |= {"k": node["k"], "v": node["v"]}
    with pytest.raises(Corruption, match="plain values at w"):
        put_together(document, found)


@quantized_is_deprecated
def test_quantized_tensors_have_no_meta_form() -> None:
    document, found = take_apart(QUANTIZED["qint8"]())
    found = {path: part.to("meta") for path, part in found.items()}
    with pytest.raises(InvalidInput, match="meta device"):
        put_together(document, found)


# ---------------------------------------------------------------- names


def test_dtypes_and_devices_by_name() -> None:
    assert TORCH.torch_dtype("bfloat16") is torch.bfloat16
    with pytest.raises(UnsupportedFormat, match="'float3'"):
        TORCH.torch_dtype("float3")
    assert TORCH.device(None) == TORCH.device("cpu") == TORCH.device(torch.device("cpu"))
    with pytest.raises(InvalidInput, match="'banana' is not a device"):
        TORCH.device("banana")


def test_an_older_torch_says_which_dtype_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(torch_bridge._DTYPES, "float4_e2m1fn_x2")
    with pytest.raises(UnsupportedFormat, match=r"has no dtype float4_e2m1fn_x2; use a newer torch"):
        TORCH.empty("float4_e2m1fn_x2", (2,))


@pytest.mark.gpu
@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_cuda_tensors_are_copied_bit_for_bit(name: str) -> None:
    tensor = every_pattern(name).view(2, 3, -1)
    on_device = tensor.cuda()
    assert content(on_device) == content(tensor)
    assert content(on_device.transpose(0, 2), 3, 11) == content(tensor.transpose(0, 2), 3, 11)
    target = TORCH.empty(name, (2, 3, tensor.shape[2]), device="cuda")
    TORCH.copy_to(target, tensor)
    assert content(target) == content(tensor)
