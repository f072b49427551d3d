"""Where a state's elements come from, and how many tensors are read at once (spec 9)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import numpy as np

from deltastore.buffers import allocate
from deltastore.dtypes import storage_dtype
from deltastore.errors import Corruption
from deltastore.history.chain import Chain
from deltastore.history.decode import read_partition, read_range
from deltastore.history.packs import Packs
from deltastore.layout import Layout, Partition, TensorEntry
from deltastore.parallel import run_all, threads

WHOLE_SHARE = 0.5
"""Partitions of which less is wanted are read piece by piece."""


class PartitionSource(Protocol):
    """Gives the elements of partitions."""

    def partition(self, partition: Partition, out: np.ndarray) -> None:
        """Fill `out` with a whole partition."""

    def elements(self, partition: Partition, start: int, out: np.ndarray) -> None:
        """Fill `out` with the elements from `start` on."""


class PackSource:
    """A commit in its packs."""

    def __init__(self, packs: Packs, chain: Chain) -> None:
        self._packs = packs
        self._chain = chain

    def partition(self, partition: Partition, out: np.ndarray) -> None:
        """Fill `out` with a whole partition, checked against the record."""
        read_partition(self._packs, self._chain, partition, out)

    def elements(self, partition: Partition, start: int, out: np.ndarray) -> None:
        """Fill `out` from only the chunks that are needed."""
        read_range(self._packs, self._chain, partition, start, out)


class BufferSource:
    """A commit that was read into memory as a whole."""

    def __init__(self, buffers: dict[int, np.ndarray]) -> None:
        self._buffers = buffers

    def partition(self, partition: Partition, out: np.ndarray) -> None:
        """Copy a whole partition."""
        out[:] = self._buffers[partition.id]

    def elements(self, partition: Partition, start: int, out: np.ndarray) -> None:
        """Copy elements."""
        out[:] = self._buffers[partition.id][start : start + len(out)]


def read_all(source: PartitionSource, layout: Layout) -> dict[int, np.ndarray]:
    """Return every partition of a layout, decoded in parallel."""
    buffers = allocate(layout)
    run_all(lambda partition: source.partition(partition, buffers[partition.id]), layout.partitions)
    return buffers


def read_elements(source: PartitionSource, layout: Layout, entry: TensorEntry, start: int, out: np.ndarray) -> None:
    """Fill `out` with the row-major elements of one tensor from `start` on."""
    position = 0
    for piece in entry.pieces:
        low, high = max(start, position), min(start + len(out), position + piece.count)
        if low < high:
            partition = layout.by_id[piece.partition]
            source.elements(partition, piece.offset + low - position, out[low - start : high - start])
        position += piece.count


_Wanted = dict[int, list[tuple[int, int, np.ndarray]]]


def read_into(source: PartitionSource, layout: Layout, wanted: Iterable[tuple[TensorEntry, np.ndarray]]) -> None:
    """Fill the arrays with their tensors, each partition decoded once, in parallel.

    Parameters
    ----------
    wanted : iterable of (TensorEntry, ndarray)
        Entries that are no aliases, and where all their elements go: 1-D, contiguous, storage dtype.
    """
    by_partition: _Wanted = {}
    for entry, out in wanted:
        start = 0
        for piece in entry.pieces:
            target = out[start : start + piece.count]
            by_partition.setdefault(piece.partition, []).append((piece.offset, piece.count, target))
            start += piece.count
    run_all(lambda number: _read_pieces(source, layout.by_id[number], by_partition[number]), by_partition)


def _read_pieces(source: PartitionSource, partition: Partition, pieces: list[tuple[int, int, np.ndarray]]) -> None:
    if len(pieces) == 1 and pieces[0][1] == partition.length:
        source.partition(partition, pieces[0][2])
    elif sum(count for _, count, _ in pieces) >= WHOLE_SHARE * partition.length:
        decoded = np.empty(partition.length, storage_dtype(partition.dtype))
        source.partition(partition, decoded)
        for offset, count, target in pieces:
            target[:] = decoded[offset : offset + count]
    else:
        for offset, _count, target in pieces:
            source.elements(partition, offset, target)


def batches(layout: Layout, entries: Iterable[TensorEntry]) -> Iterator[list[TensorEntry]]:
    """Yield tensors in groups that share few partitions: one group after the other needs little memory."""
    at_once = threads()
    group: list[TensorEntry] = []
    seen: set[int] = set()
    for entry in sorted(entries, key=lambda item: item.pieces[0].partition if item.pieces else -1):
        numbers = {piece.partition for piece in entry.pieces}
        if group and len(seen | numbers) > max(at_once, len(numbers)):
            yield group
            group, seen = [], set()
        group.append(entry)
        seen |= numbers
    if group:
        yield group


class GuardedSource:
    """A source whose damage is reported with advice."""

    def __init__(self, source: PartitionSource, advise: Callable[[Corruption], Corruption]) -> None:
        self._source = source
        self._advise = advise

    def partition(self, partition: Partition, out: np.ndarray) -> None:
        """Fill `out` with a whole partition."""
        try:
            self._source.partition(partition, out)
        except Corruption as error:
            raise self._advise(error) from error

    def elements(self, partition: Partition, start: int, out: np.ndarray) -> None:
        """Fill `out` with the elements from `start` on."""
        try:
            self._source.elements(partition, start, out)
        except Corruption as error:
            raise self._advise(error) from error
