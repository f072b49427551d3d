"""Tensors that stay where they are until they are needed: in a store, in a file, or in memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch

from deltastore.deferred import Deferred
from deltastore.dtypes import storage_dtype
from deltastore.errors import InvalidInput
from deltastore.layout import BACKWARD_BYTES
from deltastore.reader import LazyTensor, stream_tensors
from deltastore.torch_bridge import TORCH, TorchBridge
from deltastore.tree import Encoded, TensorLeaf

K = TypeVar("K")


class FileTensor(Deferred):
    """A tensor of a file that is read when it is indexed; ``lazy[...]`` is all of it, ``lazy[2:4]`` some rows.

    Parameters
    ----------
    dtype : str
        Logical dtype.
    stored : callable
        Gives the stored elements of ``...`` or of a slice of rows, as a numpy array. Their dtype is the storage dtype,
        or one of half the size with a last axis of two.
    identity : hashable
        Equal for two tensors that the file holds once.
    fill : callable, optional
        Fills memory with the stored bytes from a place on, where they lie row after row in the file.
    reads_whole : bool
        `stored` reads the whole tensor whatever it is asked for.
    """

    def __init__(
        self,
        dtype: str,
        shape: tuple[int, ...],
        stored: Callable[[Any], np.ndarray],
        identity: Hashable,
        *,
        fill: Callable[[int, memoryview], None] | None = None,
        reads_whole: bool = False,
    ) -> None:
        super().__init__(dtype, shape, identity)
        self._stored = stored
        self._fill = fill
        self._reads_whole = reads_whole

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype, without reading anything."""
        return TORCH.torch_dtype(self.logical)

    def viewed(self, dtype: str, shape: tuple[int, ...]) -> FileTensor:
        """Return the same bytes as a tensor of another dtype and shape."""
        return FileTensor(dtype, shape, self._stored, self.identity, fill=self._fill, reads_whole=self._reads_whole)

    @property
    def is_read_whole(self) -> bool:
        """Whether reading a piece takes about as much as reading all of it: so it is where a row is large."""
        row = self.nbytes // self.shape[0] if self.shape and self.shape[0] else self.nbytes
        return self._reads_whole or (self._fill is None and row > BACKWARD_BYTES)

    def copy_into(self, dest: np.ndarray, start: int, count: int) -> None:
        """Copy the elements [start, start + count), in row-major order."""
        if self._fill is None:
            super().copy_into(dest, start, count)
        elif count:
            self._fill(start * dest.itemsize, dest.view(np.uint8).data)

    def read(self, index: Any) -> np.ndarray:
        """Return the elements of ``...``, or of a slice of rows, in the storage dtype."""
        array = np.asarray(self._stored(index), order="C")
        shape = array.shape[: len(self.shape)]
        return array.reshape(-1).view(storage_dtype(self.logical)).reshape(shape)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a tensor without dimensions has no length")
        return self.shape[0]

    def __getitem__(self, index: Any) -> torch.Tensor:
        if not (index is Ellipsis or (isinstance(index, slice) and index.step in (None, 1) and self.shape)):
            return self[...][index]
        array = self.read(index)
        return TORCH.wrap(array.reshape(-1), self.logical, array.shape)

    def __repr__(self) -> str:
        return f"FileTensor(shape={self.shape}, dtype={self.logical})"


class CastTensor(Deferred):
    """A floating-point tensor that is rounded to another dtype when it is read."""

    def __init__(self, inner: Leaf, dtype: torch.dtype) -> None:
        known = identity(inner)
        name = str(dtype).removeprefix("torch.")
        super().__init__(name, tuple(inner.shape), None if known is None else (known, dtype))
        self.inner = inner
        self.dtype = dtype

    def read(self, index: Any) -> np.ndarray:
        """Return the elements of ``...``, or of a slice of rows, in the storage dtype."""
        tensor = self[index]
        return TORCH.as_array(tensor).reshape(tuple(tensor.shape))

    def __getitem__(self, index: Any) -> torch.Tensor:
        return whole(self.inner[index]).to(self.dtype)


Leaf: TypeAlias = "torch.Tensor | LazyTensor | FileTensor | CastTensor"
_LAZY = (LazyTensor, FileTensor, CastTensor)


class LeafBridge(TorchBridge):
    """torch's objects, deferred tensors and those of a store, for :func:`deltastore.tree.flatten`."""

    def encode(self, value: Any) -> Encoded | None:
        """Return what to store for an object of torch or a lazy tensor, None for anything else."""
        return TensorLeaf(value) if isinstance(value, LazyTensor) else super().encode(value)


def identity(leaf: Any) -> Hashable | None:
    """Return a key that is equal for two leaves that are one tensor, None for one that is never shared."""
    return leaf.identity if isinstance(leaf, _LAZY) else TORCH.identity(leaf)


def nbytes(leaf: Any) -> int:
    """Return the bytes of all elements of a leaf."""
    about = TORCH.describe(leaf)
    return int(np.prod(about.shape, dtype=np.int64)) * storage_dtype(about.dtype).itemsize


def stream(leaves: Mapping[K, Any]) -> Iterator[tuple[K, torch.Tensor]]:
    """Yield contiguous CPU tensors, one after the other, in the order in which they are read fastest.

    A tensor is only valid until the next one is asked for.
    """
    stored: dict[int, list[K]] = {}
    lazy: dict[int, LazyTensor] = {}
    for key, leaf in leaves.items():
        inner = leaf.inner if isinstance(leaf, CastTensor) else leaf
        if isinstance(inner, LazyTensor):
            lazy[id(inner)] = inner
            stored.setdefault(id(inner), []).append(key)
        else:
            yield key, whole(leaf)
    for found, tensor in stream_tensors(lazy.values()):
        for key in stored[id(found)]:
            leaf = leaves[key]
            yield key, tensor.to(leaf.dtype) if isinstance(leaf, CastTensor) else tensor


def whole(leaf: Any) -> torch.Tensor:
    """Return all of a leaf as a contiguous CPU tensor."""
    if isinstance(leaf, _LAZY):
        return leaf[...]
    if isinstance(leaf, np.ndarray) or leaf.is_conj() or leaf.is_neg() or not (leaf.is_cpu and leaf.is_contiguous()):
        about = TORCH.describe(leaf)
        tensor = TORCH.empty(about.dtype, about.shape)
        TORCH.copy_into(leaf, TORCH.as_array(tensor), 0, tensor.numel())
        return tensor
    detached: torch.Tensor = leaf.detach()
    return detached


def cast(leaf: Any, dtype: torch.dtype) -> Any:
    """Return a floating-point leaf in another floating-point dtype; any other as it is."""
    if not dtype.is_floating_point:
        raise InvalidInput(f"cast to {dtype}: tensors are cast to floating-point dtypes only")
    is_float = not isinstance(leaf, np.ndarray) and leaf.dtype.is_floating_point
    return CastTensor(leaf, dtype) if is_float and leaf.dtype != dtype else leaf
