"""Small packs become few large ones; their commits stay what they are (spec 10.9)."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from deltastore.errors import Backend, Corruption
from deltastore.history.catalog import Catalog, CatalogEntry, entries_of, read_catalog, record_of
from deltastore.history.merge import MergedPack, read_chunks
from deltastore.history.packs import Packs
from deltastore.history.push import Progress, publish_merged
from deltastore.ondisk.names import PACKS, new_write_id, pack_name
from deltastore.ondisk.pack import PackTail

log = logging.getLogger("deltastore")


@dataclass(frozen=True, slots=True)
class CompactPlan:
    """What is not needed, and what becomes one pack."""

    duplicates: tuple[str, ...]
    """Packs whose every commit stands in one that stays, too."""
    batches: tuple[tuple[str, ...], ...]
    """Packs of one epoch, two or more each, in the order of their commits."""


@dataclass(frozen=True, slots=True)
class CompactReport:
    """What a compaction did, or would do."""

    packs_before: int
    packs_after: int
    merged: int
    """How many packs went into others."""
    duplicates: int
    """How many were deleted since all that they held stands elsewhere."""
    damaged: tuple[str, ...]
    """Packs that stay as they are, for something in them cannot be read."""
    dry_run: bool


def plan_compact(catalog: Catalog, pack_bytes: int, spared: AbstractSet[str] = frozenset()) -> CompactPlan:
    """Return which packs are not needed, and which of the others go together; pure.

    Packs follow each other as their commits do, and a merged one takes up to `pack_bytes`. A pack that shares some
    commits with another one is left alone: it is merged once that one is gone.

    Parameters
    ----------
    spared : set of str
        Packs that stay as they are; nothing relies on them.
    """
    held: dict[str, list[CatalogEntry]] = {}
    for entry in (*catalog.by_id.values(), *(copy for copies in catalog.copies.values() for copy in copies)):
        held.setdefault(entry.pack, []).append(entry)
    holders = Counter(entry.id for name, entries in held.items() if name not in spared for entry in entries)
    duplicates: list[str] = []
    for name in sorted(held, key=lambda name: (len(held[name]), name)):  # as spec 3.8 has it
        if name not in spared and all(holders[entry.id] > 1 for entry in held[name]):
            duplicates.append(name)
            holders.subtract(entry.id for entry in held[name])
    shared = {copy.pack for copies in catalog.copies.values() for copy in copies}
    shared |= {catalog.by_id[commit].pack for commit, copies in catalog.copies.items() if copies}
    batches: list[list[str]] = [[]]
    size, epoch = 0, None
    for name in sorted(held, key=lambda name: min(entry.order for entry in held[name])):
        stored = catalog.packs[name]
        is_kept = name in shared or name in spared or stored >= pack_bytes
        if is_kept or held[name][0].ref.epoch != epoch or size + stored > pack_bytes:
            batches.append([])
            size = 0
        if not is_kept:
            batches[-1].append(name)
            size += stored
        epoch = held[name][0].ref.epoch
    return CompactPlan(tuple(duplicates), tuple(tuple(batch) for batch in batches if len(batch) > 1))


def compact(
    packs: Packs, session: str, *, pack_bytes: int, dry_run: bool, progress: Progress | None = None
) -> CompactReport:
    """Merge the small packs of a tier, and delete what was merged once the new pack was read back.

    The caller has the right to delete: nobody else writes there.

    Parameters
    ----------
    progress : callable, optional
        Called with (packs done, packs in all).

    Raises
    ------
    Backend
        Something could not be written or deleted; every commit is still there, and the next call goes on.
    """
    catalog = read_catalog(packs, Catalog())  # what is deleted is decided by packs, not by a cache
    before = len(catalog.packs)
    first = plan = plan_compact(catalog, pack_bytes)
    damaged: set[str] = set(catalog.damaged)
    done = 0
    while not dry_run and (plan.batches or plan.duplicates):
        in_all = done + len(plan.duplicates) + sum(map(len, plan.batches))
        # Merged is what stands in no other pack: so first the duplicates, then what is left.
        for names in [(name,) for name in plan.duplicates] or plan.batches:
            try:
                if plan.duplicates:
                    _check_elsewhere(packs, catalog, names[0], damaged)
                else:
                    _merge(packs, catalog, names, session)
            except Corruption as error:
                log.warning("what cannot be read stays where it is: %s", error)
                entry = catalog.by_id.get(error.fields.get("commit", ""))
                damaged.update(names if entry is None else (entry.pack,))
            else:
                _delete(packs, catalog, names)
            done += len(names)
            if progress is not None:
                progress(done, in_all)
        plan = plan_compact(catalog, pack_bytes, damaged)
    merged = sum(map(len, first.batches))
    after = before - len(first.duplicates) - merged + len(first.batches) if dry_run else len(catalog.packs)
    return CompactReport(before, after, merged, len(first.duplicates), tuple(sorted(damaged)), dry_run)


def _merge(packs: Packs, catalog: Catalog, names: Sequence[str], session: str) -> None:
    """Write what some packs hold as one, and read back every byte of it."""
    chosen = set(names)
    entries = sorted((entry for entry in catalog.by_id.values() if entry.pack in chosen), key=lambda entry: entry.order)
    write = new_write_id()
    name = pack_name(entries[0].ref.epoch, entries[0].step, entries[-1].step, write)
    staged = packs.tier.stage(name, MergedPack(packs, entries, write), session)
    publish_merged(packs, staged, write, entries)
    try:
        tail = packs.tail(name)
        for path in tail.index.arrays:
            _read(packs, tail, name, path)
        for entry in entries_of(tail, name):
            catalog.add(entry, staged.size)
    except Corruption as error:
        _delete(packs, catalog, [name])
        raise Backend(f"{packs.tier.url}/{name} is not what was written to it: {error}; nothing was lost") from error


def _check_elsewhere(packs: Packs, catalog: Catalog, name: str, damaged: AbstractSet[str]) -> None:
    """Raise Corruption unless all that a pack holds can be read from others."""
    tail = packs.tail(name)
    for commit, _digest in tail.index.commits:
        fault: Corruption | None = None
        for entry in (catalog.by_id[commit], *catalog.copies.get(commit, [])):
            if entry.pack != name and entry.pack not in damaged:
                fault = _fault(packs, entry)
                if fault is None:
                    break
        else:
            raise fault or Corruption(f"{tail.where}: commit {commit[:12]} stands nowhere else", where=tail.where)


def _fault(packs: Packs, entry: CatalogEntry) -> Corruption | None:
    """Return what is wrong with a commit in its pack, None if every byte is right."""
    try:
        tail = packs.tail(entry.pack)
        record_of(tail, entry.id, entry.ref.digest)
        for path in tail.index.arrays:
            if path.startswith(f"{entry.id}/"):
                _read(packs, tail, entry.pack, path)
    except Corruption as error:
        return error
    return None


def _read(packs: Packs, tail: PackTail, name: str, path: str) -> None:
    for _chunk in read_chunks(packs.file(name), tail.index.arrays[path], f"{tail.where}, {path}"):
        pass


def _delete(packs: Packs, catalog: Catalog, names: Sequence[str]) -> None:
    """Delete packs of which nothing is needed any more, in whatever order."""
    for name in names:
        packs.tier.delete(name)
        packs.forget(name)
    packs.tier.sync(PACKS)
    catalog.drop_packs(names)
