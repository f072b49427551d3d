"""What commands tell of a store that its public names do not: the one place that looks behind them."""

from __future__ import annotations

from deltastore.handle import Commit
from deltastore.history.chain import Chain, open_chain
from deltastore.store import Store


def unreadable_packs(store: Store) -> list[str]:
    """Return the names of the packs that could not be opened; nothing is read for it once the commits are listed."""
    view = store._view
    with view.lock:
        return sorted(view.catalog.damaged)


def chain_of(store: Store, commit: Commit) -> Chain:
    """Return the commits that a commit is read from, with what their packs hold."""
    view = store._view
    with view.lock:
        return open_chain(view.packs, view.catalog, view.catalog.by_id[commit.id])
