"""The newest commit whose whole chain verifies on some tier, and how far back each tier reaches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deltastore.errors import Backend, Corruption, DeltaStoreError, NotFound
from deltastore.handle import Commit
from deltastore.history.catalog import CatalogEntry
from deltastore.view import View


@dataclass(frozen=True, slots=True)
class Reach:
    """What one tier holds."""

    url: str
    commits: int
    bytes: int
    oldest: int | None
    """Its oldest step."""
    newest: int | None
    error: str | None
    """Why nothing is known of it; None where it answers."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """A newer commit that a tier cannot give."""

    step: int
    id: str
    url: str
    reason: str


@dataclass(frozen=True, slots=True)
class Recovery:
    """What a restore of the latest commit would take."""

    commit: Commit | None
    """The newest commit that was read and checked as a whole; None if there is none."""
    url: str | None
    """The nearest tier that has it."""
    rejected: tuple[Rejected, ...]
    tiers: tuple[Reach, ...]


def survey(views: Sequence[View]) -> Recovery:
    """Read commits from the newest on, from the nearest tier first, until one is whole; nothing is changed."""
    tiers = reaches(views)
    reached = [view for view, reach in zip(views, tiers, strict=True) if reach.error is None]
    candidates: dict[str, list[tuple[View, CatalogEntry]]] = {}
    for view in reached:
        for entry in view.catalog.ordered():
            candidates.setdefault(entry.id, []).append((view, entry))
    rejected: list[Rejected] = []
    for places in sorted(candidates.values(), key=lambda found: found[0][1].order, reverse=True):
        for view, entry in places:
            reason = _fault(view, entry)
            if reason is None:
                return Recovery(view.commit(entry), view.packs.tier.url, tuple(rejected), tiers)
            rejected.append(Rejected(entry.step, entry.id, view.packs.tier.url, reason))
    return Recovery(None, None, tuple(rejected), tiers)


def reaches(views: Sequence[View]) -> tuple[Reach, ...]:
    """Return what each tier holds, as it is now."""
    found: list[Reach] = []
    for view in views:
        try:
            view.refresh()
            found.append(_reach(view))
        except Backend as error:
            found.append(Reach(view.packs.tier.url, 0, 0, None, None, str(error)))
    return tuple(found)


def _reach(view: View) -> Reach:
    entries = view.catalog.ordered()
    steps = [entry.step for entry in entries]
    size = sum(view.catalog.packs.values())
    return Reach(view.packs.tier.url, len(entries), size, min(steps, default=None), max(steps, default=None), None)


def _fault(view: View, entry: CatalogEntry) -> str | None:
    """Return why a commit cannot be read, None if every byte of its chain is right."""
    try:
        view.read_whole(entry)
    except (Backend, Corruption, NotFound) as error:
        return _short(error)
    return None


def _short(error: DeltaStoreError) -> str:
    return str(error).partition(";")[0]
