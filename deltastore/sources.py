"""Where a state's elements come from, and how many tensors are read at once (spec 9)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np

from deltastore.buffers import allocate
from deltastore.dtypes import storage_dtype
from deltastore.errors import Corruption, NotFound
from deltastore.history.chain import Chain
from deltastore.history.decode import check_partition, read_partition, read_range
from deltastore.history.packs import Packs
from deltastore.history.tied import read_tied
from deltastore.layers.encoded import array_path
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

    def unit(self, partition: Partition) -> int:
        """Return how many elements are read and checked together; 0: any number, for nothing is left to be checked."""

    def tied(self, partition: int) -> int:
        """Return the first of the partitions that are decoded together: one thread reads them one after the other."""


class PackSource:
    """A commit in its packs."""

    def __init__(self, packs: Packs, chain: Chain) -> None:
        self._packs = packs
        self._chain = chain
        self._decoded = threading.local()

    def partition(self, partition: Partition, out: np.ndarray) -> None:
        """Fill `out` with a whole partition, checked against the record.

        What is decoded with it is kept until this thread reads something else, or has read all of it.
        """
        members = self._chain.ties.get(partition.id)
        if members is None:
            read_partition(self._packs, self._chain, partition, out)
            return
        arrays: dict[int, np.ndarray] = getattr(self._decoded, "arrays", {})
        if partition.id not in arrays:
            self._decoded.arrays = {}
            arrays = read_tied(self._packs, self._chain, partition, 0, partition.length)
            self._decoded.arrays = arrays
        out[:] = arrays.pop(partition.id)
        check_partition(self._chain.record, partition, out)

    def tied(self, partition: int) -> int:
        """Return the first of the partitions that are predicted together."""
        return self._chain.ties.get(partition, (partition,))[0]

    def elements(self, partition: Partition, start: int, out: np.ndarray) -> None:
        """Fill `out` from only the chunks that are needed."""
        read_range(self._packs, self._chain, partition, start, out)

    def unit(self, partition: Partition) -> int:
        """Return the length of a chunk, of the whole partition where the record has a check of it."""
        check = self._chain.record.check
        link, *later = [link for link, _layer in self._chain.layers(partition.id)]
        array = link.tail.index.arrays.get(array_path(link.record.id, partition.id, "data"))
        checked = check is not None and partition.id in check.crcs
        is_tied = partition.id in self._chain.ties
        return partition.length if checked or later or is_tied or array is None else array.spec.chunk


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

    def unit(self, _partition: Partition) -> int:
        """Return 0: everything was checked when it was read."""
        return 0

    def tied(self, partition: int) -> int:
        """Return the partition itself."""
        return partition


def read_all(source: PartitionSource, layout: Layout) -> dict[int, np.ndarray]:
    """Return every partition of a layout, decoded in parallel."""
    buffers = allocate(layout)

    def read(numbers: list[int]) -> None:
        for number in numbers:
            source.partition(layout.by_id[number], buffers[number])

    run_all(read, _together(source, buffers))
    return buffers


def _together(source: PartitionSource, numbers: Iterable[int]) -> list[list[int]]:
    """Return partitions in groups, each for one thread."""
    groups: dict[int, list[int]] = {}
    for number in numbers:
        groups.setdefault(source.tied(number), []).append(number)
    return list(groups.values())


def read_elements(source: PartitionSource, layout: Layout, entry: TensorEntry, start: int, out: np.ndarray) -> None:
    """Fill `out` with the row-major elements of one tensor from `start` on."""
    position = 0
    for piece in entry.pieces:
        low, high = max(start, position), min(start + len(out), position + piece.count)
        if low < high:
            partition = layout.by_id[piece.partition]
            source.elements(partition, piece.offset + low - position, out[low - start : high - start])
        position += piece.count


_Piece = tuple[int, int, np.ndarray]
"""First element in the partition, number of elements, where they go."""


def read_into(
    source: PartitionSource, layout: Layout, wanted: Iterable[tuple[TensorEntry, np.ndarray]], *, living: bool = False
) -> None:
    """Fill the arrays with their tensors, each partition decoded once, in parallel.

    Beside the arrays this needs memory for one partition a thread, whatever the number of tensors.

    Parameters
    ----------
    wanted : iterable of (TensorEntry, ndarray)
        Entries that are no aliases, and where all their elements go: 1-D, contiguous, storage dtype.
    living : bool
        Somebody has the arrays already: nothing is written to them that is not known to be right.
    """
    by_partition: dict[int, list[_Piece]] = {}
    for entry, out in wanted:
        start = 0
        for piece in entry.pieces:
            target = out[start : start + piece.count]
            by_partition.setdefault(piece.partition, []).append((piece.offset, piece.count, target))
            start += piece.count
    spare: list[np.ndarray] = []

    def read(numbers: list[int]) -> None:
        for number in numbers:
            _read_pieces(source, layout.by_id[number], by_partition[number], spare, living)

    run_all(read, _together(source, sorted(by_partition)))  # as they lie in the packs, whatever the tensors' order


def _read_pieces(
    source: PartitionSource, partition: Partition, pieces: list[_Piece], spare: list[np.ndarray], living: bool
) -> None:
    unit = source.unit(partition)
    if not unit:
        for offset, _count, target in pieces:
            source.elements(partition, offset, target)
    elif not living and len(pieces) == 1 and pieces[0][1] == partition.length:
        source.partition(partition, pieces[0][2])
    elif unit < partition.length or sum(count for _, count, _ in pieces) >= WHOLE_SHARE * partition.length:
        for low in range(0, partition.length, unit):
            _read_unit(source, partition, low, min(low + unit, partition.length), pieces, spare)
    else:
        for offset, count, target in pieces:
            with _lent(spare, count, target.dtype) as decoded:
                source.elements(partition, offset, decoded)
                target[:] = decoded


def _read_unit(
    source: PartitionSource, partition: Partition, low: int, high: int, pieces: list[_Piece], spare: list[np.ndarray]
) -> None:
    """Read the elements low..high of a partition, if any piece has some of them, and copy them to where they belong."""
    inside = [piece for piece in pieces if piece[0] < high and piece[0] + piece[1] > low]
    if not inside:
        return
    with _lent(spare, high - low, storage_dtype(partition.dtype)) as decoded:
        if high - low == partition.length:
            source.partition(partition, decoded)
        else:
            source.elements(partition, low, decoded)
        for offset, count, target in inside:
            first, last = max(low, offset), min(high, offset + count)
            target[first - offset : last - offset] = decoded[first - low : last - low]


@contextmanager
def _lent(spare: list[np.ndarray], count: int, dtype: np.dtype) -> Iterator[np.ndarray]:
    """Lend memory that was used before: the first touch of fresh memory takes longer than to read into it."""
    size = count * dtype.itemsize
    try:
        block = spare.pop()
    except IndexError:
        block = np.empty(0, np.uint8)
    if block.nbytes < size:
        block = np.empty(size, np.uint8)
    yield block[:size].view(dtype)
    spare.append(block)


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


class MovingSource:
    """A source whose packs may be merged while it is used: it looks once more before it misses one.

    Parameters
    ----------
    relocate : callable
        Gives the same commit as it stands now, None if it is gone.
    """

    def __init__(self, source: PartitionSource, relocate: Callable[[], PartitionSource | None]) -> None:
        self._source = source
        self._relocate = relocate
        self._lock = threading.Lock()

    def partition(self, partition: Partition, out: np.ndarray) -> None:
        """Fill `out` with a whole partition."""
        source = self._source
        try:
            source.partition(partition, out)
        except NotFound as error:
            self._moved(source, error).partition(partition, out)

    def elements(self, partition: Partition, start: int, out: np.ndarray) -> None:
        """Fill `out` with the elements from `start` on."""
        source = self._source
        try:
            source.elements(partition, start, out)
        except NotFound as error:
            self._moved(source, error).elements(partition, start, out)

    def unit(self, partition: Partition) -> int:
        """Return how many elements are read and checked together: merging leaves chunks as they are."""
        return self._source.unit(partition)

    def tied(self, partition: int) -> int:
        """Return the first of the partitions that are decoded together."""
        return self._source.tied(partition)

    def _moved(self, missing: PartitionSource, error: NotFound) -> PartitionSource:
        with self._lock:
            if missing is self._source:
                found = self._relocate()
                if found is None:
                    raise error
                self._source = found
            return self._source


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

    def unit(self, partition: Partition) -> int:
        """Return how many elements are read and checked together."""
        return self._source.unit(partition)

    def tied(self, partition: int) -> int:
        """Return the first of the partitions that are decoded together."""
        return self._source.tied(partition)
