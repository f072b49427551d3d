"""Which tensor lies where: partitions, groups, aliases (spec 7). Pure planning, no bytes."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from deltastore.dtypes import storage_dtype
from deltastore.types import Path

FORWARD = "forward"
BACKWARD = "backward"
FORWARD_BYTES = 4 << 20
"""Largest partition of the forward window by rule."""
BACKWARD_BYTES = 32 << 20
"""Largest partition of the backward window by rule."""
FORWARD_SHARE = 1 / 3
"""Forward takes about half as long as backward: it gets the first third of each signature."""
ALIGN_ELEMENTS = 64
MAX_CHANGED_SHARE = 0.25
"""When more of the state than this is new or unused, a new plan (and a base) is cheaper."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of a tensor's elements, row-major, in one partition."""

    partition: int
    offset: int
    count: int


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a layout."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    alias: int | None = None
    """Index of the earlier entry whose bytes these are."""

    @property
    def elements(self) -> int:
        """How many elements the tensor has."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Partition:
    """A run of tensors of one dtype and one role, encoded and read as one unit."""

    id: int
    dtype: str
    length: int
    role: str
    window: str
    group: int | None

    @property
    def bytes(self) -> int:
        """Decoded bytes."""
        return self.length * storage_dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Layout:
    """The table of tensors and partitions of a commit."""

    tensors: tuple[TensorEntry, ...]
    partitions: tuple[Partition, ...]

    @cached_property
    def by_path(self) -> dict[Path, TensorEntry]:
        """Each tensor by its path, aliases resolved to the entry that has the pieces."""
        return {t.path: t if t.alias is None else replace(self.tensors[t.alias], path=t.path) for t in self.tensors}

    @cached_property
    def by_id(self) -> dict[int, Partition]:
        """Each partition by its number."""
        return {partition.id: partition for partition in self.partitions}

    @property
    def bytes(self) -> int:
        """Decoded bytes of all partitions."""
        return sum(partition.bytes for partition in self.partitions)


@dataclass(frozen=True, slots=True)
class LayoutInput:
    """What the planner knows of one tensor.

    Tensors of one owner (a parameter and its moments) that have equal shapes form a group.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    identity: Hashable
    """Equal for two tensors that are one in memory; None: never shared."""
    role: str
    owner: Hashable


def plan(inputs: Sequence[LayoutInput]) -> Layout:
    """Return a fresh layout, sizes by rule."""
    aliases = _aliases(inputs)
    own = [item for index, item in enumerate(inputs) if aliases[index] is None]
    pieces, partitions = _place(own, first_id=0, first_group=0)
    return Layout(_entries(inputs, aliases, pieces), partitions)


def revise(layout: Layout, inputs: Sequence[LayoutInput]) -> Layout | None:
    """Return the layout for changed tensors, or None where a new plan is better.

    Unchanged tensors stay where they are; new and changed ones get partitions of their own. The very same
    object comes back when nothing changed.
    """
    aliases = _aliases(inputs)
    if _same(layout, inputs, aliases):
        return layout
    old = {entry.path: entry for entry in layout.tensors if entry.alias is None}
    pieces: dict[Path, tuple[Piece, ...]] = {}
    fresh: list[LayoutInput] = []
    for item, alias in zip(inputs, aliases, strict=True):
        known = old.get(item.path)
        if alias is not None:
            continue
        if known is not None and (known.dtype, known.shape) == (item.dtype, item.shape):
            pieces[item.path] = known.pieces
        else:
            fresh.append(item)
    used = {piece.partition for found in pieces.values() for piece in found}
    kept = tuple(partition for partition in layout.partitions if partition.id in used)
    first_id = max((partition.id for partition in layout.partitions), default=-1) + 1
    first_group = max((p.group for p in layout.partitions if p.group is not None), default=-1) + 1
    placed, partitions = _place(fresh, first_id, first_group)
    result = Layout(_entries(inputs, aliases, pieces | placed), kept + partitions)
    live = sum(_bytes(item) for item, alias in zip(inputs, aliases, strict=True) if alias is None)
    changed = sum(_bytes(item) for item in fresh)
    unused = result.bytes - live
    if changed > MAX_CHANGED_SHARE * live or unused > MAX_CHANGED_SHARE * live + (1 << 16):
        return None
    return result


def _aliases(inputs: Sequence[LayoutInput]) -> list[int | None]:
    first: dict[Hashable, int] = {}
    result: list[int | None] = []
    for index, item in enumerate(inputs):
        seen = None if item.identity is None else first.setdefault(item.identity, index)
        result.append(None if seen in (None, index) else seen)
    return result


def _same(layout: Layout, inputs: Sequence[LayoutInput], aliases: list[int | None]) -> bool:
    return len(layout.tensors) == len(inputs) and all(
        entry.path == item.path and entry.dtype == item.dtype and entry.shape == item.shape and entry.alias == alias
        for entry, item, alias in zip(layout.tensors, inputs, aliases, strict=True)
    )


def _entries(
    inputs: Sequence[LayoutInput], aliases: list[int | None], pieces: dict[Path, tuple[Piece, ...]]
) -> tuple[TensorEntry, ...]:
    return tuple(
        TensorEntry(item.path, item.dtype, item.shape, () if alias is not None else pieces.get(item.path, ()), alias)
        for item, alias in zip(inputs, aliases, strict=True)
    )


def _bytes(item: LayoutInput) -> int:
    return math.prod(item.shape) * storage_dtype(item.dtype).itemsize


Signature = tuple[tuple[str, str], ...]
"""Roles and dtypes of the tensors that belong together."""


def _place(
    inputs: Iterable[LayoutInput], first_id: int, first_group: int
) -> tuple[dict[Path, tuple[Piece, ...]], tuple[Partition, ...]]:
    """Place tensors into new partitions: runs of equal signature, in each run one partition for each role: a group."""
    runs: dict[Signature, list[tuple[LayoutInput, ...]]] = {}
    for member in _members(inputs):
        runs.setdefault(tuple((item.role, item.dtype) for item in member), []).append(member)
    pieces: dict[Path, list[Piece]] = {}
    partitions: list[Partition] = []
    group = first_group
    for signature, members in runs.items():
        for run in _cut(members):
            for column, (role, dtype) in enumerate(signature):
                number = first_id + len(partitions)
                partitions.append(Partition(number, dtype, run.end, role, run.window, group))
                for slab in run.slabs:
                    pieces.setdefault(slab.member[column].path, []).append(Piece(number, slab.offset, slab.count))
            group += 1
    return {path: tuple(found) for path, found in pieces.items()}, tuple(partitions)


def _members(inputs: Iterable[LayoutInput]) -> list[tuple[LayoutInput, ...]]:
    """Return the tensors that share owner and shape, in order of first appearance; empty tensors have no place."""
    together: dict[Hashable, list[LayoutInput]] = {}
    for item in inputs:
        if math.prod(item.shape):
            together.setdefault((item.owner, item.shape), []).append(item)
    return [tuple(sorted(items, key=lambda item: item.role != "param")) for items in together.values()]


@dataclass(frozen=True, slots=True)
class _Slab:
    """A run of elements of the tensors that share an owner, at one place of a run's partitions."""

    member: tuple[LayoutInput, ...]
    offset: int
    count: int


@dataclass(slots=True)
class _Run:
    """One partition of each role, while it is filled."""

    window: str
    capacity: int
    slabs: list[_Slab]
    end: int = 0

    @property
    def room(self) -> int:
        return self.capacity - -(-self.end // ALIGN_ELEMENTS) * ALIGN_ELEMENTS

    def add(self, member: tuple[LayoutInput, ...], count: int) -> None:
        offset = self.capacity - self.room
        self.slabs.append(_Slab(member, offset, count))
        self.end = offset + count


def _cut(members: list[tuple[LayoutInput, ...]]) -> list[_Run]:
    """Cut tensors into partitions: small ones for the forward window first, then large ones.

    A tensor is cut only where it is larger than a partition, between rows where a row fits.
    """
    widest = max(storage_dtype(item.dtype).itemsize for item in members[0])
    total = sum(math.prod(member[0].shape) for member in members)
    forward_until = total * FORWARD_SHARE if total * widest > FORWARD_BYTES else total
    runs: list[_Run] = []
    placed = 0
    for member in members:
        shape = member[0].shape
        left = math.prod(shape)
        row = max(1, left // shape[0]) if shape else 1
        while left:
            run = runs[-1] if runs else None
            if (
                run is None
                or run.room <= 0
                or (left > run.room and (left <= run.capacity or run.end > run.capacity // 2))
            ):
                window = FORWARD if placed < forward_until else BACKWARD
                capacity = (FORWARD_BYTES if window == FORWARD else BACKWARD_BYTES) // widest
                run = _Run(window, capacity, [])
                runs.append(run)
            count = min(left, run.room)
            if row <= count < left:
                count -= count % row
            run.add(member, count)
            left -= count
            placed += count
    return runs
