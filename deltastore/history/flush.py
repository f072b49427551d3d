"""What a flush moves: which commits another tier lacks, and which of them go into one pack. No I/O."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from deltastore.history.catalog import Catalog, CatalogEntry

PACK_BYTES = 128 << 20
"""Packs are merged up to this size: a block of HDFS, whose NameNode keeps every file in memory."""


@dataclass(frozen=True, slots=True)
class FlushPlan:
    """What is to be moved."""

    batches: tuple[tuple[CatalogEntry, ...], ...]
    """The commits of each pack, in the order in which the packs must be published: parents before children."""
    held_back: tuple[CatalogEntry, ...]
    """Commits that are damaged here, or whose chain is: they would be of no use there."""

    @property
    def commits(self) -> int:
        """How many commits are moved."""
        return sum(map(len, self.batches))


def plan_flush(
    catalog: Catalog,
    present: AbstractSet[str],
    damaged: AbstractSet[str] = frozenset(),
    pack_bytes: int = PACK_BYTES,
) -> FlushPlan:
    """Return how the commits that are not ``present`` on the other tier go there, without the ``damaged`` ones.

    A pack holds commits of one epoch, in order, and more than ``pack_bytes`` only where one commit alone does.
    """
    whole = set(present)
    held_back: list[CatalogEntry] = []
    batches: list[list[CatalogEntry]] = []
    size = 0
    for entry in catalog.ordered():
        if entry.id in present:
            continue
        is_cut_off = entry.kind == "delta" and (entry.parent is None or entry.parent.id not in whole)
        if is_cut_off or entry.id in damaged:
            held_back.append(entry)
            continue
        whole.add(entry.id)
        last = batches[-1] if batches else []
        if not last or last[-1].ref.epoch != entry.ref.epoch or size + entry.bytes > pack_bytes:
            last, size = [], 0
            batches.append(last)
        last.append(entry)
        size += entry.bytes
    return FlushPlan(tuple(map(tuple, batches)), tuple(held_back))
