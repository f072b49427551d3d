"""The door to torch: tensors as numpy arrays of their bits, and torch's own objects in the document of a state.

Every copy moves words of the element's size, never numbers: the payload of a NaN, -0.0 and the odd byte of a bool
survive on every device and in every memory format. :data:`TORCH` is the one instance; it keeps nothing and all threads
may use it.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from deltastore.deferred import Deferred
from deltastore.dtypes import LOGICAL, NATIVE, from_numpy, storage_dtype
from deltastore.errors import Corruption, Internal, InvalidInput, UnsupportedFormat
from deltastore.plain import Fault, encode_int, member, parse_scalar
from deltastore.tree import Encoded, Parts, PlainNode, TensorLeaf
from deltastore.types import Json, Key

_DTYPES: Final[dict[str, torch.dtype]] = {name: getattr(torch, name) for name in LOGICAL if hasattr(torch, name)}
_NAMES: Final[dict[torch.dtype, str]] = {dtype: name for name, dtype in _DTYPES.items()}
_WORDS: Final[dict[int, tuple[torch.dtype, str]]] = {
    1: (torch.uint8, "|u1"),
    2: (torch.int16, "<i2"),
    4: (torch.int32, "<i4"),
    8: (torch.int64, "<i8"),
    16: (torch.int64, "<i8"),  # two words for each element of complex128
}
_QUANTIZED: Final[dict[str, torch.dtype]] = {"qint8": torch.int8, "quint8": torch.uint8, "qint32": torch.int32}
_PER_TENSOR = "per_tensor"
_PER_CHANNEL = "per_channel"


class Described(NamedTuple):
    """What a layout says of a tensor."""

    dtype: str
    """Logical dtype."""
    shape: tuple[int, ...]


class TorchBridge:
    """torch's side of :class:`deltastore.tree.Bridge`, and the way from tensors to bytes and back.

    Methods that take a value accept whatever :func:`deltastore.tree.flatten` lists as a tensor: strided torch tensors
    on any device, numpy arrays and deferred tensors.
    """

    # -- in and out of the document

    def encode(self, value: Any) -> Encoded | None:
        """Return what to store for an object of torch or a deferred tensor, None for anything else."""
        if isinstance(value, Deferred):
            return TensorLeaf(value)
        if isinstance(value, torch.Tensor):
            return _encode_tensor(value)
        if type(value) is torch.Size:
            return PlainNode({"$": "torch.Size", "v": [encode_int(size) for size in value]})
        if isinstance(value, torch.dtype | torch.device):
            return PlainNode({"$": f"torch.{type(value).__name__}", "v": str(value).removeprefix("torch.")})
        if isinstance(value, torch.nn.Module | torch.optim.Optimizer):
            raise InvalidInput(f"a {type(value).__qualname__} is not its state: store its state_dict()")
        if isinstance(value, torch.Generator):
            raise InvalidInput("a torch.Generator is not its state: store its get_state()")
        return None

    def owns(self, tag: str) -> bool:
        """Return whether a node with this tag comes from torch."""
        return tag in ("torch.dtype", "torch.device", "torch.Size", "quantized")

    def decode(self, tag: str, node: Mapping[str, Json]) -> Any:
        """Return the object of a plain node of torch."""
        try:
            if tag == "torch.Size":
                sizes = [parse_scalar(size) for size in member(node, "v", list)]
                if not all(type(size) is int for size in sizes):
                    raise Fault("a torch.Size holds what is not an integer")
                return torch.Size(sizes)  # type: ignore[arg-type]
            name = member(node, "v", str)
            if tag == "torch.device":
                return torch.device(name)
            # vars, not getattr: an unknown name must not make torch import a module.
            dtype = vars(torch).get(name)
            if not isinstance(dtype, torch.dtype):
                raise Fault(f"{name[:40]!r} is not a dtype of torch {torch.__version__}")
        except (Fault, RuntimeError, TypeError, OverflowError) as error:
            raise Corruption(f"not a {tag}: {error}") from None
        return dtype

    def join(self, tag: str, meta: Mapping[str, Json], parts: Mapping[Key, Any]) -> torch.Tensor:
        """Return the quantized tensor of its parts; those that are not read yet are."""
        parts = {
            name: part[...] if hasattr(part, "nbytes") and not isinstance(part, torch.Tensor) else part
            for name, part in parts.items()
        }
        values, name = parts.get("int_repr"), meta.get("dtype")
        integers = _QUANTIZED.get(name) if isinstance(name, str) else None
        if not isinstance(values, torch.Tensor) or integers is None or values.dtype != integers:
            raise Corruption(f"a quantized tensor of dtype {str(name)[:40]} does not fit its integers")
        if values.is_meta:
            raise InvalidInput("a quantized tensor cannot be made on the meta device")
        try:
            if meta.get("scheme") == _PER_TENSOR:
                return torch._make_per_tensor_quantized_tensor(values, parts["scale"], parts["zero_point"])
            axis, scales, zero_points = meta["axis"], parts["scales"], parts["zero_points"]
            length = (values.shape[axis],)
            if meta.get("scheme") != _PER_CHANNEL or axis < 0 or not scales.shape == zero_points.shape == length:
                raise ValueError(f"{meta.get('scheme')!r}, axis {axis}, {len(scales)} scales")
            return torch._make_per_channel_quantized_tensor(values, scales, zero_points, axis)
        except (AttributeError, KeyError, IndexError, TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise Corruption(f"a quantized tensor whose scales do not fit it: {error}") from error

    # -- what a tensor is

    def torch_dtype(self, name: str) -> torch.dtype:
        """Return the torch dtype of a logical one.

        Raises
        ------
        UnsupportedFormat
            The name is unknown, or this torch is older than the dtype.
        """
        storage_dtype(name)
        if name not in _DTYPES:
            raise UnsupportedFormat(f"torch {torch.__version__} has no dtype {name}; use a newer torch", dtype=name)
        return _DTYPES[name]

    def device(self, device: Any) -> torch.device:
        """Return a device that the caller named, the CPU for None."""
        try:
            return torch.device("cpu" if device is None else device)
        except (RuntimeError, TypeError) as error:
            raise InvalidInput(f"{device!r} is not a device: {error}") from None

    def describe(self, value: Any) -> Described:
        """Return logical dtype and shape of a tensor or array."""
        if isinstance(value, Deferred):
            return Described(value.logical, value.shape)
        name = from_numpy(value.dtype) if isinstance(value, np.ndarray) else _logical(value.dtype)
        return Described(name, tuple(value.shape))

    def identity(self, value: Any) -> Hashable | None:
        """Return a key that is equal for two tensors which are one in memory, None for one that is never shared.

        Same first byte, shape, strides, dtype and device: other views of the same memory are tensors of their own. The
        key holds as long as the tensors live.
        """
        if isinstance(value, Deferred):
            return value.identity
        if isinstance(value, np.ndarray):
            if not value.size:
                return None
            return "numpy", value.ctypes.data, value.shape, _strides(value.shape, value.strides), value.dtype.str
        address = value.data_ptr() if value.numel() else 0
        if not address:
            return None
        lazy = value.is_conj(), value.is_neg()
        strides = _strides(value.shape, value.stride())
        return "torch", str(value.device), address, tuple(value.shape), strides, value.dtype, lazy

    # -- bytes

    def copy_into(self, value: Any, dest: np.ndarray, start: int, count: int) -> None:
        """Copy the elements [start, start + count) of a tensor or array, in row-major order, bit for bit.

        Parameters
        ----------
        value : tensor or ndarray
            Any strides, any device; it is read without autograd. Contiguous CPU memory is copied once, in one piece.
        dest : ndarray
            1-D, contiguous, of the storage dtype and `count` elements.
        """
        about = self.describe(value)
        if not 0 <= start <= start + count <= math.prod(about.shape):
            raise Internal(f"elements {start}..{start + count} of a tensor of shape {about.shape}")
        if dest.shape != (count,) or dest.dtype != storage_dtype(about.dtype) or not dest.flags.c_contiguous:
            raise Internal(f"{dest.shape} {dest.dtype} does not take {count} elements of {about.dtype}")
        if isinstance(value, Deferred):
            value.copy_into(dest, start, count)
        elif isinstance(value, np.ndarray):
            _copy_array(value, dest, start, count)
        else:
            _copy_tensor(value, dest, start, count)

    def copy_to(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy a tensor into another of the same dtype and shape, in place and bit for bit.

        The target may be a leaf that requires grad, an inference tensor, of any memory format and on any device.
        """
        if target.dtype != source.dtype or target.shape != source.shape:
            there, here = f"{target.dtype} {tuple(target.shape)}", f"{source.dtype} {tuple(source.shape)}"
            raise InvalidInput(f"the tensor to fill is {there}, the stored one {here}")
        if any(size > 1 and stride == 0 for size, stride in zip(target.shape, target.stride(), strict=True)):
            raise InvalidInput("an expanded tensor cannot be filled: several of its elements are one in memory")
        as_numbers = target.is_quantized or any(t.is_conj() or t.is_neg() for t in (target, source))
        # An inference tensor can only be written in inference mode, where a write to any other would not be counted.
        with torch.inference_mode() if target.is_inference() else torch.no_grad():
            if as_numbers:
                target.copy_(source)
            else:
                _words(target).copy_(_words(source))

    def empty(self, dtype: str, shape: tuple[int, ...], device: Any = "cpu") -> torch.Tensor:
        """Return a contiguous tensor with a storage of its own and any content."""
        wanted = self.torch_dtype(dtype)
        if dtype == "complex32":  # torch warns of it when it allocates one, not when it views one
            return torch.empty(shape, dtype=torch.int32, device=device).view(wanted)
        return torch.empty(shape, dtype=wanted, device=device)

    def as_array(self, tensor: torch.Tensor) -> np.ndarray:
        """Return the memory of a contiguous CPU tensor as a 1-D array of its storage dtype, without a copy."""
        if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            raise Internal(f"no array for a tensor on {tensor.device} with strides {tensor.stride()}")
        array: np.ndarray = _words(tensor).reshape(-1).numpy()
        return array.view(storage_dtype(_logical(tensor.dtype)))

    def is_plain(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is one run of CPU memory with its elements in order, as :meth:`writable_array` needs.

        A storage that was freed or made smaller is none.
        """
        return bool(
            type(tensor) in (torch.Tensor, torch.nn.Parameter)
            and tensor.device.type == "cpu"
            and tensor.layout == torch.strided
            and tensor.is_contiguous()
            and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
            and (tensor.storage_offset() + tensor.numel()) * tensor.itemsize <= tensor.untyped_storage().nbytes()
        )

    def writable_array(self, tensor: torch.Tensor) -> np.ndarray:
        """Return the memory of a plain tensor to be written to; autograd is told that it changes."""
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)
        return self.as_array(tensor)

    def wrap(self, array: np.ndarray, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the elements of a 1-D array of the storage dtype as a tensor on the same memory.

        An array that is read-only or not contiguous is copied: torch cannot have it.
        """
        wanted = self.torch_dtype(dtype)
        if array.dtype != storage_dtype(dtype) or array.size != math.prod(shape):
            raise Internal(f"{array.size} elements of {array.dtype} are no {dtype} tensor of shape {shape}")
        if not (array.flags.writeable and array.flags.c_contiguous and array.flags.aligned):
            array = array.copy()
        words = torch.from_numpy(array.reshape(-1).view(_WORDS[array.itemsize][1]))
        return words.view(wanted).view(shape)

    def to_numpy(self, tensor: torch.Tensor, dtype: str) -> np.ndarray:
        """Return a contiguous CPU tensor as the numpy array that was stored, on the same memory."""
        if dtype not in NATIVE:
            raise Corruption(f"an array of dtype {dtype!r}, which numpy does not have", dtype=dtype)
        return self.as_array(tensor).view(NATIVE[dtype]).reshape(tuple(tensor.shape))


TORCH: Final = TorchBridge()
"""The bridge."""


def _logical(dtype: torch.dtype) -> str:
    if dtype not in _NAMES:
        raise InvalidInput(f"tensors of dtype {dtype} cannot be stored: the format does not know it", dtype=str(dtype))
    return _NAMES[dtype]


def _encode_tensor(value: torch.Tensor) -> Encoded:
    kind = type(value)
    if isinstance(value, torch.nn.UninitializedParameter | torch.nn.UninitializedBuffer):
        raise InvalidInput(f"a {kind.__name__} has no values yet: run the module's first forward pass before")
    if kind is not torch.Tensor and kind is not torch.nn.Parameter:
        name = f"{kind.__module__}.{kind.__qualname__}"
        raise InvalidInput(
            f"a tensor of the subclass {name} cannot be stored: store the plain tensors that it consists of "
            "(for a DTensor its full_tensor() or to_local())"
        )
    if value.is_nested or value.layout != torch.strided:
        layout = "nested" if value.is_nested else str(value.layout)
        raise InvalidInput(f"a {layout} tensor cannot be stored: store its parts, or to_dense()")
    if value.is_meta:
        raise InvalidInput("a tensor on the meta device has no values")
    if value.is_quantized:
        return _encode_quantized(value)
    _logical(value.dtype)
    return TensorLeaf(value)


def _encode_quantized(value: torch.Tensor) -> Parts:
    dtype, scheme = str(value.dtype).removeprefix("torch."), value.qscheme()
    value = value.detach()
    if dtype in _QUANTIZED and scheme == torch.per_tensor_affine:
        parts = {"int_repr": value.int_repr(), "scale": value.q_scale(), "zero_point": value.q_zero_point()}
        return Parts("quantized", {"dtype": dtype, "scheme": _PER_TENSOR}, parts)
    if dtype in _QUANTIZED and scheme == torch.per_channel_affine:
        parts = {
            "int_repr": value.int_repr(),
            "scales": value.q_per_channel_scales(),
            "zero_points": value.q_per_channel_zero_points(),
        }
        axis = value.q_per_channel_axis()
        return Parts("quantized", {"axis": axis, "dtype": dtype, "scheme": _PER_CHANNEL}, parts)
    raise InvalidInput(f"a quantized tensor of dtype {dtype} and scheme {scheme} cannot be stored")


def _strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides that matter: along a dimension of one element torch leaves whatever was there."""
    return tuple(stride if size > 1 else 0 for size, stride in zip(shape, strides, strict=True))


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as integers of their size, on the same memory; complex128 gets a last dimension of two."""
    tensor = tensor.detach()
    if tensor.dtype == torch.complex128:
        tensor = torch.view_as_real(tensor)
    return tensor.view(_WORDS[tensor.dtype.itemsize][0])


def _copy_tensor(value: torch.Tensor, dest: np.ndarray, start: int, count: int) -> None:
    value = value.detach()
    # A lazily conjugated or negated tensor: copy what is in memory, then flip the signs as its bits say.
    is_conjugated = value.is_conj()
    if is_conjugated:
        value = value.conj()
    is_negated = value.is_neg()
    if is_negated:
        value = torch._neg_view(value)
    source = _words(value)
    target = torch.from_numpy(dest.view(_WORDS[dest.itemsize][1]))
    words = max(1, dest.itemsize // 8)
    if source.is_contiguous():
        target.copy_(source.view(-1)[start * words : (start + count) * words])
    else:
        for box, first, size in _boxes(value.shape, start, count):
            part = source[box]
            target[(first - start) * words : (first - start + size) * words].view(part.shape).copy_(part)
    if is_conjugated or is_negated:
        _flip_signs(value.dtype, dest, real=is_negated, imaginary=is_negated != is_conjugated)


def _flip_signs(dtype: torch.dtype, dest: np.ndarray, *, real: bool, imaginary: bool) -> None:
    size = dest.itemsize // 2 if dtype.is_complex else dest.itemsize
    signs = dest.view(f"<u{size}")
    sign = signs.dtype.type(1 << (8 * size - 1))
    if not dtype.is_complex:
        signs ^= sign
        return
    if real:
        signs[0::2] ^= sign
    if imaginary:
        signs[1::2] ^= sign


def _copy_array(value: np.ndarray, dest: np.ndarray, start: int, count: int) -> None:
    source = value.view(np.uint8) if value.dtype.kind == "b" else value
    if source.flags.c_contiguous:
        np.copyto(dest, source.reshape(-1)[start : start + count], casting="equiv")
        return
    for box, first, size in _boxes(source.shape, start, count):
        part = source[box]
        np.copyto(dest[first - start : first - start + size].reshape(part.shape), part, casting="equiv")


def _boxes(shape: tuple[int, ...], start: int, count: int) -> Iterator[tuple[tuple[Any, ...], int, int]]:
    """Yield index, first element and size of the few rectangles that make up a run of row-major elements."""
    if count == math.prod(shape):
        yield (...,), start, count
        return
    row = math.prod(shape[1:])
    end = start + count
    while start < end:
        index, skip = divmod(start, row)
        if skip or end - start < row:
            size = min(row - skip, end - start)
            for box, first, part in _boxes(shape[1:], skip, size):
                yield (index, *box), index * row + first, part
        else:
            rows = (end - start) // row
            size = rows * row
            yield (slice(index, index + rows), ...), start, size
        start += size
