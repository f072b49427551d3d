"""Which commits may go, and in which order (spec 11.6)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from deltastore.config import Retention
from deltastore.errors import Corruption
from deltastore.history.catalog import Catalog, CatalogEntry
from deltastore.history.lineage import chain_entries, line, newest, newest_complete
from deltastore.history.packs import Packs
from deltastore.ondisk.names import PACKS, parse_pack_name


@dataclass(frozen=True, slots=True)
class PruneReport:
    """What a prune removes, or would remove."""

    commits: tuple[str, ...]
    """Ids, in the order of removal."""
    bytes: int
    dry_run: bool
    held_back: tuple[str, ...] = ()
    """Packs that cannot be opened, for whose sake older commits are not deleted."""


def plan_prune(catalog: Catalog, pinned: Iterable[str], retention: Retention) -> list[CatalogEntry]:
    """Return the commits that no kept commit needs, in the order in which they may be deleted.

    Kept are the last commits of the line of history that leads to the newest, those of round steps on it, and those
    that are pinned (tagged, or built upon by a writer), given by id; each with its whole chain. Children come before
    parents, so that a crash leaves no child without its parent.
    """
    top = newest(catalog)
    if top is None:
        return []
    commits = line(catalog, top)
    kept = commits[-retention.keep_last :] + [entry for entry in commits if retention.keeps_step(entry.step)]
    kept += [catalog.by_id[commit] for commit in pinned if commit in catalog.by_id]
    complete = newest_complete(catalog)
    kept += [] if complete is None else [complete]
    needed: set[str] = set()
    for entry in kept:
        if entry.id not in needed:
            try:
                needed.update(member.id for member in chain_entries(catalog, entry))
            except Corruption:
                needed.update(catalog.by_id)  # something is damaged: this is no time to delete
    packs_needed = {catalog.by_id[commit].pack for commit in needed}
    copies = [copy for copies in catalog.copies.values() for copy in copies]
    doomed = [entry for entry in [*catalog.by_id.values(), *copies] if entry.pack not in packs_needed]
    unread = [about for about in map(parse_pack_name, held_back(catalog, commits, retention)) if about is not None]
    newest_unread = max(((about.epoch, about.last_step) for about in unread), default=(-1, -1))
    doomed = [entry for entry in doomed if (entry.ref.epoch, entry.step) > newest_unread]
    return sorted(doomed, key=lambda entry: entry.order, reverse=True)


def held_back(catalog: Catalog, commits: list[CatalogEntry], retention: Retention) -> list[str]:
    """Return the packs that cannot be opened, but would be kept: whatever is older may be what they build upon.

    Such a pack may be readable later, or be replaced by a copy; its parents must still be there then.
    """
    oldest = commits[-retention.keep_last :][0].step if commits else 0
    found = []
    for name in catalog.damaged:
        about = parse_pack_name(name)
        if about is not None:
            steps = range(about.first_step, min(about.last_step, about.first_step + 10_000) + 1)
            if about.last_step >= oldest or any(map(retention.keeps_step, steps)):
                found.append(name)
    return found


def delete_commits(packs: Packs, catalog: Catalog, doomed: list[CatalogEntry]) -> None:
    """Delete the packs of commits in the given order; each is gone for good before the next, its parent maybe, goes."""
    for name in dict.fromkeys(entry.pack for entry in doomed):
        packs.tier.delete(name)
        packs.tier.sync(PACKS)
        packs.forget(name)
        catalog.drop_pack(name)
