"""Partitions that predictions tie together, decoded side by side: all commits of some blocks, then of the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from deltastore.dtypes import storage_dtype
from deltastore.errors import Corruption
from deltastore.history.chain import Chain, Link
from deltastore.history.corrections import fetch_layer
from deltastore.history.packs import Packs
from deltastore.history.predicted import Prediction, fetch_prediction
from deltastore.layers.blocks import Blocks, blocks_of
from deltastore.layers.encoded import array_path
from deltastore.layout import Partition
from deltastore.ondisk.records import FULL
from deltastore.parallel import run_reads

RUN_ELEMENTS = 65_536
"""Elements of a run: those of three partitions, and their codes, stay in a core's cache."""
HELD_BYTES = 64 << 20
"""Codes of so many bytes are in memory at once, beside the partitions."""

_NAMES = ("gradient", "codes", "gaps", "values", "xor", "signs")
"""The arrays that take memory."""

Arrays = dict[int, np.ndarray]
"""Partition number -> its elements."""
Step = Callable[[int, int, Arrays], None]
"""What one commit does to the elements first..last; counted from the first one that was read."""


def read_tied(packs: Packs, chain: Chain, partition: Partition, first: int, last: int) -> Arrays:
    """Return the elements first..last of a partition, and of all that it is predicted with."""
    members = _members(chain, chain.ties[partition.id])
    tables = _tables(chain, members)
    low, high = _aligned(tables, first, last)
    arrays = {member.id: np.empty(high - low, storage_dtype(member.dtype)) for member in members}
    runs = list(_runs(tables, low, high))

    def load(link: Link) -> list[Step]:
        return list(_steps(packs, chain, link, members, arrays, low, high))

    for links in _batches(chain, members):
        steps = [step for found in run_reads(load, links) for step in found]
        for begin, end in runs:
            for step in steps:
                step(begin - low, end - low, arrays)
    return {number: array[first - low : last - low] for number, array in arrays.items()}


def advance_tied(packs: Packs, chain: Chain, numbers: Sequence[int]) -> Iterator[tuple[Link, Arrays]]:
    """Yield each commit of a chain with whole partitions that are predicted together, as it left them.

    The next one changes them in place. What no commit has given them yet is not initialised, and is left out.
    """
    members = _members(chain, numbers)
    arrays = {member.id: np.empty(member.length, storage_dtype(member.dtype)) for member in members}
    given: set[int] = set()
    for link in chain.links:
        for step in _steps(packs, chain, link, members, arrays, 0, members[0].length):
            step(0, members[0].length, arrays)
        given.update(layer.partition for layer in link.record.layers if layer.kind == FULL)
        yield link, {number: array for number, array in arrays.items() if number in given}


def _members(chain: Chain, numbers: Sequence[int]) -> list[Partition]:
    """Return partitions that are predicted together; a buffer may be one that the newest commit has no more."""
    members: list[Partition] = []
    for number in numbers:
        layouts = chain.layout, *(chain.layout_at(link) for link in chain.links)
        known = next((layout.by_id[number] for layout in layouts if number in layout.by_id), None)
        if known is None or known.length != (members or [known])[0].length or known.dtype != "float32":
            raise Corruption(
                f"step {chain.record.step}: the partitions {', '.join(map(str, numbers))} are predicted together, and "
                "they do not have as many elements of float32",
                step=chain.record.step,
                partition=number,
            )
        members.append(known)
    return members


def _tables(chain: Chain, members: Sequence[Partition]) -> list[Blocks]:
    """Return the different tables of blocks that the predictions of these partitions have."""
    numbers = {member.id for member in members}
    found: dict[int, Blocks] = {}
    for link in chain.links:
        for prediction in link.record.predictions:
            if prediction.partitions[0] in numbers:
                table = blocks_of(chain.layout_at(link), prediction.partitions[0])
                found[id(table)] = table
    return list(found.values())


def _aligned(tables: Sequence[Blocks], first: int, last: int) -> tuple[int, int]:
    """Return a range that begins and ends between blocks."""
    before = (-1, -1)
    while before != (first, last):
        before = first, last
        for table in tables:
            low, high = table.covering(first, last)
            if low < high:
                first, last = min(first, int(table.starts[low])), max(last, int(table.ends[high - 1]))
    return first, last


def _runs(tables: Sequence[Blocks], first: int, last: int) -> Iterator[tuple[int, int]]:
    """Yield parts of a range that begin and end between blocks."""
    edges = np.zeros(0, np.int64)
    if len(tables) == 1:
        edges = tables[0].starts
    begin = first
    for edge in edges[np.searchsorted(edges, first, side="right") : np.searchsorted(edges, last)].tolist():
        if edge - begin >= RUN_ELEMENTS:
            yield begin, edge
            begin = edge
    if begin < last:
        yield begin, last


def _batches(chain: Chain, members: Sequence[Partition]) -> Iterator[list[Link]]:
    """Yield the commits of a chain in groups whose codes are held in memory together."""
    numbers = {member.id for member in members}
    batch: list[Link] = []
    held = 0
    for link in chain.links:
        stored = sum(
            array.spec.length * array.spec.itemsize
            for number in numbers
            for name in _NAMES
            if (array := link.tail.index.arrays.get(array_path(link.record.id, number, name))) is not None
        )
        if batch and held + stored > HELD_BYTES:
            yield batch
            batch, held = [], 0
        batch.append(link)
        held += stored
    yield batch


def _steps(
    packs: Packs, chain: Chain, link: Link, members: Sequence[Partition], arrays: Arrays, first: int, last: int
) -> Iterator[Step]:
    """Yield what one commit does: it predicts, then it corrects."""
    numbers = {member.id: member for member in members}
    for prediction in link.record.predictions:
        if prediction.partitions[0] in numbers:
            blocks = blocks_of(chain.layout_at(link), prediction.partitions[0])
            length = numbers[prediction.partitions[0]].length
            yield _predicting(
                fetch_prediction(packs, link, prediction, blocks, length, first, last), prediction.partitions
            )
    for layer in link.record.layers:
        member = numbers.get(layer.partition)
        if member is not None:
            # Only what nothing was done to before may be read into its place: this is run long before its turn.
            is_later = layer.kind == FULL and link is not chain.links[0]
            out = np.empty_like(arrays[member.id]) if is_later else arrays[member.id]
            correct = fetch_layer(packs, member, (link, layer), first, out)
            yield _assigning(member.id, out) if is_later else _correcting(member.id, correct)


def _predicting(predicted: Prediction, partitions: Sequence[int]) -> Step:
    def step(begin: int, end: int, arrays: Arrays) -> None:
        predicted.apply(begin, end, [arrays[number][begin:end] for number in partitions])

    return step


def _correcting(number: int, correct: Callable[[int, np.ndarray], None]) -> Step:
    def step(begin: int, end: int, arrays: Arrays) -> None:
        correct(begin, arrays[number][begin:end])

    return step


def _assigning(number: int, values: np.ndarray) -> Step:
    def step(begin: int, end: int, arrays: Arrays) -> None:
        arrays[number][begin:end] = values[begin:end]

    return step
