"""Meeting the further tiers of a store before it is written: their claims, and what a restore needs of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from deltastore.buffers import Buffers
from deltastore.errors import Backend, Corruption, NotFound
from deltastore.history.catalog import CatalogEntry
from deltastore.history.chain import Chain
from deltastore.history.lineage import chain_entries
from deltastore.history.push import push
from deltastore.nearest import Nearest
from deltastore.tiers.base import Tier
from deltastore.view import View

log = logging.getLogger("deltastore")


def meet(views: Sequence[View], target: Tier, session: str) -> list[str]:
    """Take over identity, claims and tags of every tier that answers; return the URLs of those that do not.

    A claim that is made afterwards is the highest of all reachable tiers (spec 10.4), and a store begun on a new
    machine is the one that the others hold.
    """
    silent: list[str] = []
    for view in views:
        try:
            push(view.packs.tier, target, session, only=frozenset())
        except NotFound:
            continue  # nothing was pushed there yet
        except Backend as error:
            log.warning("%s does not answer; what it holds is not considered: %s", view.packs.tier.url, error)
            silent.append(view.packs.tier.url)
    return silent


def fetch(nearest: Nearest, views: Sequence[View], local: View, ref: int | str, session: str) -> None:
    """Bring a commit with its chain to the local tier, if only a further one has it.

    Parameters
    ----------
    views : sequence of View
        Those of the further tiers, nearest first.
    """
    if ref == "latest":
        top = nearest.newest()
        if top is None or top[0] is local:
            return
        _fetch_chain(*top, local, session)
        return
    try:
        local.resolve(ref)
        return
    except NotFound:
        for view in views:
            try:
                entry = view.resolve(ref)
            except (NotFound, Backend):
                continue
            _fetch_chain(view, entry, local, session)
            return


def _fetch_chain(view: View, entry: CatalogEntry, local: View, session: str) -> None:
    chain = [member.id for member in chain_entries(view.catalog, entry)]
    log.info("step %d is fetched from %s: %d commits", entry.step, view.packs.tier.url, len(chain))
    push(view.packs.tier, local.packs.tier, session, only=frozenset(chain))
    local.refresh()


def read_elsewhere(views: Sequence[View], entry: CatalogEntry) -> tuple[Chain, Buffers] | None:
    """Return a commit that is damaged here as another tier has it, None if none does."""
    for view in views:
        try:
            view.look()
            other = view.copy_of(entry)
            if other is not None:
                return view.read_whole(other)
        except (Backend, Corruption, NotFound) as error:
            log.warning("%s cannot help: %s", view.packs.tier.url, error)
    return None
