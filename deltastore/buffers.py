"""What a staged state consists of, and the memory that it lies in; no torch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import numpy as np

from deltastore.dtypes import storage_dtype
from deltastore.layers.rules import Rule
from deltastore.layout import Layout, Partition
from deltastore.types import Json, Path
from deltastore.window import Window

Buffers = dict[int, np.ndarray]
"""Partition number -> its elements, 1-D, storage dtype."""

_ALIGNMENT = 4096
"""Each buffer begins at a page."""


@dataclass(frozen=True)
class Hints:
    """What an adapter knows of tensors and a path does not tell."""

    roles: Mapping[Path, str] = field(default_factory=dict)
    owners: Mapping[Path, Hashable] = field(default_factory=dict)
    rules: Mapping[Path, Rule] = field(default_factory=dict)
    """What the optimizer did since the state before, for where it has the buffers of each parameter."""
    gradients: Mapping[Path, np.ndarray] = field(default_factory=dict)
    """What it did it with, row-major float32."""
    lasting: AbstractSet[int] = frozenset()
    """Addresses of tensors that stay as they are until the window is finished."""
    patience_seconds: float = 0.0
    """How long the backward pass, in which the large ones are copied, is waited for."""


@dataclass(frozen=True)
class StagedState:
    """A private copy of one state; complete once its window, if it has one, is finished."""

    document: Json
    layout: Layout
    fresh: bool
    """The layout is a new plan: the commit must be a base."""
    buffers: Buffers
    window: Window | None = None


Fill = Callable[[Partition, np.ndarray], None]
"""Fills memory with all elements of a partition; any thread may call it."""


@dataclass(frozen=True)
class StreamedState:
    """A state that stays where it is: its partitions are read when they are written, in their order."""

    document: Json
    layout: Layout
    fresh: bool
    """The layout is a new plan: the commit must be a base."""
    read: Fill
    """Reads a partition into memory that holds zeros."""
    read_parent: Fill | None = None
    """The same of the commit before; None: the commit is going to be a base."""


def allocate(layout: Layout) -> Buffers:
    """Return zeroed buffers of a layout, all in one block of memory.

    One large block gets huge pages from the system (numpy asks for them); buffers of a few MiB each would not, and
    touching them for the first time would cost more than the copy.
    """
    starts: list[int] = []
    end = 0
    for partition in layout.partitions:
        starts.append(end)
        end += -(-partition.bytes // _ALIGNMENT) * _ALIGNMENT
    block = np.zeros(end + _ALIGNMENT, np.uint8)
    shift = -block.ctypes.data % _ALIGNMENT
    return {
        partition.id: block[shift + start : shift + start + partition.bytes].view(storage_dtype(partition.dtype))
        for partition, start in zip(layout.partitions, starts, strict=True)
    }


class BufferPool:
    """Sets of buffers for one layout, used again and again; elements that no tensor covers stay zero."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._layout: Layout | None = None
        self._free: list[Buffers] = []

    def take(self, layout: Layout) -> Buffers:
        """Return a set of buffers of a layout."""
        with self._lock:
            if layout is not self._layout:
                self._layout, self._free = layout, []
            if self._free:
                return self._free.pop()
        return allocate(layout)

    def give(self, layout: Layout, buffers: Buffers) -> None:
        """Give a set back that nobody reads any more."""
        with self._lock:
            if layout is self._layout and len(buffers) == len(layout.partitions):
                self._free.append(buffers)
