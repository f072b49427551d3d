"""Reading over several tiers: each commit from the nearest that has it whole (spec 10.8)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import numpy as np

from deltastore.errors import Backend, Conflict, Corruption, DeltaStoreError, NotFound
from deltastore.handle import Commit
from deltastore.history.catalog import CatalogEntry
from deltastore.history.lineage import newest_complete
from deltastore.layout import Partition
from deltastore.reader import State
from deltastore.sources import PartitionSource
from deltastore.view import View

log = logging.getLogger("deltastore")

FALLS_THROUGH = (NotFound, Corruption, Backend)
"""What the next tier may know better."""


class Nearest:
    """The views of a store's tiers, nearest first."""

    def __init__(self, views: Sequence[View]) -> None:
        self._views = views
        self._unreachable: set[int] = set()

    def reachable(self) -> list[View]:
        """Return the views whose tiers answer; of one that does not the user is told once.

        Raises
        ------
        Conflict
            One of them holds another store.
        """
        found: list[View] = []
        for view in self._views:
            try:
                view.look()
            except Backend as error:
                if id(view) not in self._unreachable:
                    log.warning("a tier does not answer, and is left out: %s", error)
                self._unreachable.add(id(view))
                continue
            self._unreachable.discard(id(view))
            _check_same([*found, view])
            found.append(view)
        return found

    def refresh(self) -> None:
        """Look again at what the tiers hold."""
        for view in self.reachable():
            view.refresh()

    def newest(self) -> tuple[View, CatalogEntry] | None:
        """Return the newest commit of all tiers whose chain is there, and where: the nearest of those that have it."""
        best: tuple[View, CatalogEntry] | None = None
        for view in self.reachable():
            entry = newest_complete(view.catalog)
            if entry is not None and (best is None or entry.order > best[1].order):
                best = view, entry
        return best

    def commits(self) -> list[Commit]:
        """Return the commits of all tiers, oldest first."""
        found: dict[str, tuple[tuple[int, int, str], Commit]] = {}
        for view in self.reachable():
            for order, commit in view.ordered_commits():
                found.setdefault(commit.id, (order, commit))
        return [commit for _order, commit in sorted(found.values(), key=lambda item: item[0])]

    def lineage(self) -> list[Commit]:
        """Return the commits on the line of history of the newest one, from the tier that has most of them."""
        top = self.newest()
        if top is None:
            return []
        lines = [line for view in self.reachable() if (line := view.lineage()) and line[-1].id == top[1].id]
        return max(lines, key=len, default=[])

    def at(self, ref: int | str) -> State:
        """Return the state of a commit from the nearest tier that has it; damage is read around."""
        first: DeltaStoreError | None = None
        views = self.reachable()
        if ref == "latest" and (top := self.newest()) is not None:
            ref = top[1].id
        for number, view in enumerate(views):
            try:
                return view.at(ref, _Others(views[number + 1 :]))
            except FALLS_THROUGH as error:
                first = first or error
        raise first or NotFound(f"{ref}: no tier has any commit")


def _check_same(views: Sequence[View]) -> None:
    known = [(view.packs.store, view.packs.tier.url) for view in views if view.packs.store is not None]
    if len({store for store, _url in known}) > 1:
        (one, here), (other, there) = known[0], known[-1]
        raise Conflict(
            f"{there} holds store {other[:8]}, {here} is store {one[:8]}: tiers of one store hold the same one",
            expected=one,
            found=other,
        )


class _Others:
    """Where a state's elements come from when the nearest tier turns out to be damaged."""

    def __init__(self, views: Sequence[View]) -> None:
        self._views = views

    def guard(self, source: PartitionSource, entry: CatalogEntry) -> PartitionSource:
        """Return a source that goes on in the next tier where one fails."""
        return _FallingSource(source, self._views, entry) if self._views else source


class _FallingSource:
    """The elements of one commit, from the nearest of several tiers that gives them undamaged."""

    def __init__(self, source: PartitionSource, views: Sequence[View], entry: CatalogEntry) -> None:
        self._source = source
        self._views = list(views)
        self._entry = entry
        self._lock = threading.Lock()

    def partition(self, partition: Partition, out: np.ndarray) -> None:
        """Fill `out` with a whole partition."""
        while True:
            source = self._source
            try:
                return source.partition(partition, out)
            except FALLS_THROUGH as error:
                self._fall(source, error)

    def elements(self, partition: Partition, start: int, out: np.ndarray) -> None:
        """Fill `out` with the elements from `start` on."""
        while True:
            source = self._source
            try:
                return source.elements(partition, start, out)
            except FALLS_THROUGH as error:
                self._fall(source, error)

    def unit(self, partition: Partition) -> int:
        """Return how many elements are read and checked together: chunks are the same on every tier."""
        return self._source.unit(partition)

    def tied(self, partition: int) -> int:
        """Return the first of the partitions that are decoded together."""
        return self._source.tied(partition)

    def _fall(self, failed: PartitionSource, error: DeltaStoreError) -> None:
        """Go on to the next tier that has the same commit, unless another thread did; else raise."""
        with self._lock:
            if failed is not self._source:
                return
            while self._views:
                view = self._views.pop(0)
                entry = view.copy_of(self._entry)
                if entry is not None:
                    log.warning("read from %s instead: %s", view.packs.tier.url, error)
                    self._source = view.source(entry)
                    return
        raise error
