"""What a store holds, as last seen: commits, tags, and the states of the past."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Mapping
from typing import Protocol

from deltastore.buffers import Buffers
from deltastore.document import plain_value
from deltastore.errors import Corruption, DeltaStoreError, NotFound
from deltastore.fidelity import Fidelity
from deltastore.handle import Commit
from deltastore.history.catalog import Catalog, CatalogEntry, read_catalog
from deltastore.history.chain import Chain, open_chain
from deltastore.history.lineage import chain_entries, line, needs_tags, newest, resolve
from deltastore.history.packs import Packs
from deltastore.history.tags import read_tags
from deltastore.ondisk.fidelity import check_tensors
from deltastore.reader import State
from deltastore.sources import GuardedSource, MovingSource, PackSource, PartitionSource, read_all
from deltastore.tiers.base import Tier
from deltastore.types import Json

log = logging.getLogger("deltastore")


class Others(Protocol):
    """Further tiers that may hold the same commits."""

    def guard(self, source: PartitionSource, entry: CatalogEntry) -> PartitionSource:
        """Return a source that goes on elsewhere where the given one fails."""


class View:
    """The reading side of a store; thread safe, and shared with its writing side."""

    def __init__(self, tier: Tier, *, pickle_trusted: bool) -> None:
        self.packs = Packs(tier)
        self.lock = threading.RLock()
        self._tier = tier
        self._pickle_trusted = pickle_trusted
        self._catalog: Catalog | None = None
        self._tags: dict[str, str] | None = None
        _views.add(self)

    def refresh(self) -> None:
        """Look again at what the store holds: another process may have committed, tagged or pruned."""
        with self.lock:
            self._catalog = read_catalog(self.packs, self._catalog)
            self._tags = None

    def look(self) -> None:
        """Read the catalog if it was not read yet."""
        with self.lock:
            _ = self.catalog

    @property
    def catalog(self) -> Catalog:
        """The commits that were seen last; read at first use."""
        if self._catalog is None:
            self._catalog = read_catalog(self.packs)
        return self._catalog

    def tags(self) -> dict[str, str]:
        """Return the commit id of each tag."""
        if self._tags is None:
            self._tags = read_tags(self._tier)
        return self._tags

    def reread(self) -> None:
        """Look at every pack again, whatever a cache or an earlier look says."""
        with self.lock:
            fresh = Packs(self._tier, self.packs.store)
            try:
                self._catalog = read_catalog(fresh, Catalog())
            finally:
                fresh.close()
            self._tags = None

    def commits(self) -> list[Commit]:
        """Return all commits, oldest first."""
        with self.lock:
            tags = self._tags_by_commit()
            return [_commit_of(entry, tags) for entry in self.catalog.ordered()]

    def ordered_commits(self) -> list[tuple[tuple[int, int, str], Commit]]:
        """Return all commits with what orders them among those of other tiers."""
        with self.lock:
            return list(zip((entry.order for entry in self.catalog.ordered()), self.commits(), strict=True))

    def _tags_by_commit(self) -> dict[str, list[str]]:
        by_commit: dict[str, list[str]] = {}
        try:
            for tag, commit in sorted(self.tags().items()):
                by_commit.setdefault(commit, []).append(tag)
        except DeltaStoreError as error:
            log.warning("tags cannot be listed: %s", error)
        return by_commit

    def at(self, ref: int | str, others: Others | None = None) -> State:
        """Return the state of a commit; nothing of it is loaded yet.

        Parameters
        ----------
        ref : int or str
            A step (the newest commit of it on the line of history of the latest, else of the highest epoch),
            "latest", "latest~3", a tag, or a commit id (8 or more characters).
        others : Others, optional
            The tiers to go on with where this one is damaged.

        Raises
        ------
        NotFound
            Nothing has this name; the nearest is named.
        Corruption
            What it needs is damaged.
        """
        with self.lock:
            entry = self.resolve(ref)
            chain = self._chain(entry)
            source = self._moving(entry, chain)
            return self.state(chain, source if others is None else others.guard(source, entry), entry)

    def read_whole(self, entry: CatalogEntry) -> tuple[Chain, Buffers]:
        """Return a commit with all its partitions, every byte checked."""
        chain = self._open_chain(entry)
        return chain, read_all(PackSource(self.packs, chain), chain.layout)

    def copy_of(self, entry: CatalogEntry) -> CatalogEntry | None:
        """Return the same commit, as this tier has it; None if it does not."""
        found = self.catalog.by_id.get(entry.id)
        return found if found is not None and found.ref == entry.ref else None

    def source(self, entry: CatalogEntry) -> PartitionSource:
        """Return where the elements of a commit are."""
        with self.lock:
            return self._moving(entry, self._chain(entry))

    def _moving(self, entry: CatalogEntry, chain: Chain) -> PartitionSource:
        def relocate() -> PartitionSource | None:
            with self.lock:
                self.refresh()
                moved = self.copy_of(entry)
                return None if moved is None else PackSource(self.packs, open_chain(self.packs, self.catalog, moved))

        return MovingSource(PackSource(self.packs, chain), relocate)

    def resolve(self, ref: int | str) -> CatalogEntry:
        """Return the commit that a reference means, looking again at the store before it is not found."""
        named = needs_tags(ref)
        try:
            return resolve(self.catalog, self.tags() if named else {}, ref)
        except NotFound:
            self.refresh()
            return resolve(self.catalog, self.tags() if named else {}, ref)

    def _chain(self, entry: CatalogEntry) -> Chain:
        try:
            return self._open_chain(entry)
        except Corruption as error:
            raise self.with_advice(error, entry) from error

    def _open_chain(self, entry: CatalogEntry) -> Chain:
        """Return the chain of a commit, looking again at the store where a pack is gone: it may have been merged."""
        try:
            return open_chain(self.packs, self.catalog, entry)
        except NotFound:
            self.refresh()
            moved = self.copy_of(entry)
            if moved is None:
                raise
            return open_chain(self.packs, self.catalog, moved)

    def with_advice(self, error: Corruption, entry: CatalogEntry) -> Corruption:
        """Return the error with the newest commit that does not need what is damaged."""
        bad = str(error.fields.get("where", entry.pack))
        usable = None
        for other in reversed(self.catalog.ordered()):
            try:
                if other.id != entry.id and all(
                    not bad.endswith(member.pack) for member in chain_entries(self.catalog, other)
                ):
                    usable = other
                    break
            except Corruption:
                continue
        advice = "no other commit can be read"
        if usable is not None:
            advice = f"the newest commit that does not need this is step {usable.step} ({usable.id[:12]})"
        fields = {**error.fields, "newest_intact": None if usable is None else usable.step}
        return Corruption(f"{error.message}; {advice}", **fields)

    def state(self, chain: Chain, source: PartitionSource, entry: CatalogEntry) -> State:
        """Return the state of a commit from wherever its elements are."""
        commit = self.commit(entry)
        guarded = GuardedSource(source, lambda error: self.with_advice(error, entry))
        recorded = chain.record.fidelity
        check_tensors(recorded, len(chain.layout.tensors), chain.links[-1].tail.where)
        fidelity = Fidelity(recorded, chain.layout)
        return State(guarded, chain.document, chain.layout, commit, fidelity, pickle_trusted=self._pickle_trusted)

    def lineage(self) -> list[Commit]:
        """Return the commits on the line of history of the newest one, oldest first."""
        with self.lock:
            top = newest(self.catalog)
            tags = self._tags_by_commit()
            return [] if top is None else [_commit_of(entry, tags) for entry in line(self.catalog, top)]

    def commit(self, entry: CatalogEntry) -> Commit:
        """Return a catalog entry as users see it."""
        return _commit_of(entry, self._tags_by_commit())

    def forget_tags(self) -> None:
        """Read the tags again when they are needed next."""
        self._tags = None


_views: weakref.WeakSet[View] = weakref.WeakSet()


def _unlock_in_child() -> None:
    # The writer's thread may have held a lock while the process forked, and does not live in the child.
    for view in _views:
        view.lock = threading.RLock()
        view.packs.unlock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock_in_child)


def _commit_of(entry: CatalogEntry, tags: Mapping[str, list[str]]) -> Commit:
    return Commit(
        id=entry.id,
        step=entry.step,
        parent=None if entry.parent is None else entry.parent.id,
        epoch=entry.ref.epoch,
        kind=entry.kind,
        bytes=entry.bytes,
        exact=entry.exact,
        created=entry.created,
        tags=tuple(tags.get(entry.id, ())),
        metrics={name: _metric(node) for name, node in entry.metrics.items()},
    )


def _metric(node: Json) -> Json:
    """Return a metric; one that this version cannot decode is shown as it stands, for a list must not fail for it."""
    try:
        return plain_value(node, None)
    except DeltaStoreError:
        return str(node)
