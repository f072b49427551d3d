"""Which commits may go, and in which order (spec 11.6)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from deltastore.config import Retention
from deltastore.errors import Corruption
from deltastore.history.catalog import Catalog, CatalogEntry
from deltastore.history.lineage import chain_entries, line, newest
from deltastore.history.packs import Packs
from deltastore.ondisk.names import PACKS, parse_pack_name


@dataclass(frozen=True, slots=True)
class PruneReport:
    """What a prune removes, or would remove."""

    commits: tuple[str, ...]
    """Ids, in the order of removal."""
    bytes: int
    dry_run: bool


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
    # A pack that cannot be opened now may be readable elsewhere or later, and may name any older commit as its parent.
    unread = [(about.epoch, about.last_step) for about in map(parse_pack_name, catalog.damaged) if about is not None]
    doomed = [entry for entry in doomed if (entry.ref.epoch, entry.step) > max(unread, default=(-1, -1))]
    return sorted(doomed, key=lambda entry: entry.order, reverse=True)


def delete_commits(packs: Packs, catalog: Catalog, doomed: list[CatalogEntry]) -> None:
    """Delete the packs of commits in the given order; each is gone for good before the next, its parent maybe, goes."""
    for name in dict.fromkeys(entry.pack for entry in doomed):
        packs.tier.delete(name)
        packs.tier.sync(PACKS)
        packs.forget(name)
        catalog.drop_pack(name)
