"""A tensor whose elements are somewhere else until they are asked for, and that can be committed all the same."""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import Any

import numpy as np

from deltastore.dtypes import storage_dtype


class Deferred(ABC):
    """What a file gives instead of a tensor; :meth:`deltastore.Store.commit` reads it piece by piece.

    Parameters
    ----------
    logical : str
        Logical dtype.
    shape : tuple of int
        The shape.
    identity : hashable
        Equal for two that are one tensor, None for one that is never shared.
    """

    def __init__(self, logical: str, shape: tuple[int, ...], identity: Hashable) -> None:
        self.logical = logical
        self.shape = shape
        self.identity = identity if 0 not in shape else None

    @property
    def is_read_whole(self) -> bool:
        """Whether reading a piece takes about as much as reading all of it."""
        return False

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * storage_dtype(self.logical).itemsize

    @abstractmethod
    def read(self, index: Any) -> np.ndarray:
        """Return the elements of ``...``, or of a slice of rows, in the storage dtype; any thread may call it."""

    def copy_into(self, dest: np.ndarray, start: int, count: int) -> None:
        """Copy the elements [start, start + count), in row-major order; only the rows that hold them are read."""
        if not self.shape or count == math.prod(self.shape):
            dest[:] = self.read(...).reshape(-1)
            return
        row = math.prod(self.shape[1:])
        low, high = start // row, -(-(start + count) // row)
        dest[:] = self.read(slice(low, high)).reshape(-1)[start - low * row :][:count]


class HeldWhole(Deferred):
    """One that can only be read as a whole: it is kept from its first piece to its last."""

    def __init__(self, inner: Deferred) -> None:
        super().__init__(inner.logical, inner.shape, inner.identity)
        self._inner = inner
        self._lock = threading.Lock()
        self._elements: np.ndarray | None = None
        self._left = math.prod(inner.shape)

    def read(self, index: Any) -> np.ndarray:
        """Return the elements of ``...``, or of a slice of rows."""
        return self._inner.read(index)

    def copy_into(self, dest: np.ndarray, start: int, count: int) -> None:
        """Copy the elements [start, start + count), in row-major order."""
        with self._lock:
            if self._elements is None:
                self._elements = self._inner.read(...).reshape(-1)
            elements = self._elements
            self._left -= count
            if not self._left:
                self._elements, self._left = None, len(elements)
        dest[:] = elements[start : start + count]
