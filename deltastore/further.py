"""The further tiers of a store, as the store sees them: reading over all, and what is brought where (spec 10.8)."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from deltastore.buffers import Buffers
from deltastore.config import Retention, TierLimits
from deltastore.errors import Backend, DeltaStoreError
from deltastore.fetching import fetch, meet, read_elsewhere
from deltastore.history.catalog import CatalogEntry
from deltastore.history.chain import Chain
from deltastore.history.lineage import newest_complete, whole_ids
from deltastore.history.retention import delete_commits, plan_prune
from deltastore.nearest import Nearest
from deltastore.recovery import Reach, Recovery, reaches, survey
from deltastore.remotes import Held, RemotePlace, Remotes
from deltastore.view import View

log = logging.getLogger("deltastore")


class Further:
    """What lies behind the root of a store; without places it is nothing, and does nothing.

    Parameters
    ----------
    here : View
        That of the root.
    """

    def __init__(self, here: View, places: Sequence[RemotePlace], limits: TierLimits, *, pickle_trusted: bool) -> None:
        self._here = here
        self._views = [View(place.tier, pickle_trusted=pickle_trusted) for place in places]
        self._limits = limits
        self.remotes = Remotes(places, here.packs.tier, limits, self._is_known)
        self.reading: Nearest | View = Nearest([here, *self._views]) if places else here
        """What commits are read through."""

    def _is_known(self, commit: str) -> bool:
        with self._here.lock:
            return commit in self._here.catalog.by_id

    def durable(self, tier: str) -> int | None:
        """Return the newest step of the line that a tier has acknowledged; while nobody writes, the newest it has."""
        remote = self.remotes.named(tier)
        if not remote.is_moving:
            view = next(view for view in self._views if view.packs.tier is remote.tier)
            view.refresh()
            entry = newest_complete(view.catalog)
            return None if entry is None else entry.step
        steps = [commit.step for commit in self.reading.lineage() if self.remotes.has(tier, commit.id)]
        return max(steps, default=None)

    def admit(self, follows: str | None) -> Held | None:
        """Let a commit in, once the limits are kept, and return what kept it; what it builds upon is never freed."""
        self.remotes.start()
        return self.remotes.admit(lambda: self._make_room(follows))

    def _make_room(self, follows: str | None) -> int:
        """Return what the local packs take, after deleting what every further tier has if that is too much."""
        if self._plan_freeing(follows, self.remotes.everywhere()):
            held = self.remotes.everywhere() & self._held_everywhere()
            with self._here.lock:
                doomed = self._plan_freeing(follows, held)
                if doomed:
                    log.info("%d commits are freed here, their copies are read from now on", len(doomed))
                    delete_commits(self._here.packs, self._here.catalog, doomed)
        with self._here.lock:
            return sum(self._here.catalog.packs.values())

    def _plan_freeing(self, follows: str | None, held: frozenset[str]) -> list[CatalogEntry]:
        """Return what is to be deleted here, of the commits that all further tiers have; the newest chain stays."""
        with self._here.lock:
            catalog, limit = self._here.catalog, self._limits.max_local_bytes
            if limit is None or sum(catalog.packs.values()) <= limit:
                return []
            return plan_prune(catalog, (catalog.by_id.keys() - held) | ({follows} if follows else set()), Retention(1))

    def _held_everywhere(self) -> frozenset[str]:
        """Return which commits all further tiers list right now: somebody may have pruned one since they arrived."""
        held = []
        for view in self._views:
            try:
                view.refresh()
            except DeltaStoreError as error:
                log.warning("nothing is freed here, since %s does not answer: %s", view.packs.tier.url, error)
                return frozenset()
            held.append(whole_ids(view.catalog))
        return frozenset(set.intersection(*map(set, held)))

    def meet(self, session: str) -> list[str]:
        """Take over what the tiers claim; return the URLs of those that do not answer."""
        return meet(self._views, self._here.packs.tier, session)

    def fetch(self, ref: int | str, silent: Sequence[str], session: str) -> None:
        """Bring here what only a further tier has; fail rather than begin anew because one does not answer."""
        if not isinstance(self.reading, Nearest):
            return
        self.reading.refresh()
        fetch(self.reading, self._views, self._here, ref, session)
        if silent and not self._here.catalog.by_id:
            raise Backend(
                f"{self._here.packs.tier.url} is empty and {', '.join(silent)} does not answer: whether there is a "
                "state to restore cannot be told; try again when it answers, or open the store without that tier",
                url=silent[0],
                transient=True,
            )

    def read_elsewhere(self, entry: CatalogEntry) -> tuple[Chain, Buffers] | None:
        """Return a commit that is damaged here as another tier has it, None if none does."""
        return read_elsewhere(self._views, entry)

    def placement(self) -> dict[str, tuple[str, ...]]:
        """Return for each commit the tiers that answer and list it with its whole chain, nearest first."""
        found: dict[str, list[str]] = {}
        for name, view in zip(
            (self._here.packs.tier.name, *self.remotes.names), [self._here, *self._views], strict=True
        ):
            try:
                view.look()
            except Backend as error:
                log.warning("a tier does not answer, and is left out: %s", error)
                continue
            with view.lock:
                for commit in whole_ids(view.catalog):
                    found.setdefault(commit, []).append(name)
        return {commit: tuple(names) for commit, names in found.items()}

    def reaches(self) -> tuple[Reach, ...]:
        """Return what each tier holds, the root first."""
        return reaches([self._here, *self._views])

    def survey(self) -> Recovery:
        """Return the newest commit that is whole on some tier."""
        return survey([self._here, *self._views])

    def close(self) -> None:
        """Close the files of the tiers."""
        for view in self._views:
            view.packs.close()
