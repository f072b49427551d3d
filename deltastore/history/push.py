"""Moves commits from one tier to another, several files at a time (spec 3.8, 10.1).

It needs no lock: it copies what was published, in chain order, and never deletes. It may run beside the writer; it may
die at any moment and begin again, and of two that run at once each does a part, or both the same, which is harmless.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from deltastore.errors import (
    AlreadyExists,
    Backend,
    Conflict,
    Corruption,
    DeltaStoreError,
    NotFound,
    OutcomeUnknown,
)
from deltastore.history.catalog import CatalogEntry, read_catalog, write_cache
from deltastore.history.flush import PACK_BYTES, FlushPlan, plan_flush
from deltastore.history.lineage import newest, whole_ids
from deltastore.history.merge import MergedPack
from deltastore.history.packs import Packs
from deltastore.history.session import read_format
from deltastore.ondisk.names import EPOCHS, FORMAT_FILE, TAGS, new_write_id, pack_name, parse_epoch_name, parse_tag_name
from deltastore.tiers.base import Staged, Tier

log = logging.getLogger("deltastore")

STREAMS = 3
"""Files on their way at the same time: the servers are slower than we are, each by itself."""

Progress = Callable[[int, int], None]
"""Called with (commits done, commits in all)."""


@dataclass(frozen=True, slots=True)
class PushReport:
    """What was moved."""

    commits: int
    packs: int
    bytes: int
    held_back: tuple[int, ...]
    """Steps of commits that were left, since their chain is broken here."""
    newest: int | None
    """The newest step that the other tier has now."""
    present: frozenset[str] = frozenset()
    """Ids of the commits that it has now with their whole chains."""
    broken: Mapping[str, str] = field(default_factory=dict)
    """Those of `held_back` by their ids: what is wrong with each."""


def push(
    source: Tier,
    target: Tier,
    session: str,
    *,
    pack_bytes: int = PACK_BYTES,
    progress: Progress | None = None,
    only: AbstractSet[str] | None = None,
) -> PushReport:
    """Give a tier the commits, claims and tags of another that it lacks.

    Parameters
    ----------
    only : set of str, optional
        Ids of the commits that are wanted; the others are not moved.

    Raises
    ------
    NotFound
        There is no store to copy.
    Conflict
        The other tier holds another store.
    Backend
        It did not take everything; what arrived is whole, and the next push goes on from there.
    """
    store = read_format(source).store
    _copy_format(source, target, store, session)
    # Claims first: where a commit of an epoch is, there is its claim.
    _copy_new(source, target, EPOCHS, session)
    with contextlib.closing(Packs(source, store)) as here, contextlib.closing(Packs(target, store)) as there:
        catalog, known = read_catalog(here), read_catalog(there)
        before = set(known.by_id)
        packs, moved = 0, 0
        damaged: dict[str, str] = {}
        while True:
            unwanted: set[str] = set() if only is None else catalog.by_id.keys() - only
            plan = plan_flush(catalog, known.by_id.keys(), damaged.keys() | unwanted, pack_bytes)
            sizes: list[int] = []
            try:
                _move(here, there, plan, session, sizes, progress)
                break
            except Corruption as error:
                if "commit" not in error.fields:
                    raise
                log.warning("a commit is damaged, it and what needs it are not moved: %s", error)
                damaged[error.commit] = str(error)
            finally:
                packs, moved = packs + len(sizes), moved + sum(sizes)
                known = read_catalog(there, known)
        _copy_new(source, target, TAGS, session)
        if packs:
            write_cache(there, known, session)
        target.end_session(session)
    top = newest(known)
    held_back = [entry for entry in plan.held_back if entry.id not in unwanted]
    return PushReport(
        len(known.by_id.keys() - before),
        packs,
        moved,
        tuple(entry.step for entry in held_back),
        None if top is None else top.step,
        whole_ids(known),
        {entry.id: damaged.get(entry.id, _cut_off(entry, source)) for entry in held_back},
    )


def _cut_off(entry: CatalogEntry, source: Tier) -> str:
    return f"step {entry.step} (commit {entry.id[:12]}) needs a commit that {source.url} holds damaged, or not at all"


def _copy_format(source: Tier, target: Tier, store: str, session: str) -> None:
    try:
        found = read_format(target).store
    except NotFound:
        target.create()
        with contextlib.suppress(AlreadyExists):
            target.publish_new(FORMAT_FILE, [source.read(FORMAT_FILE)], session)
        found = read_format(target).store
    if found != store:
        raise Conflict(
            f"{target.url} holds store {found[:8]}, {source.url} is store {store[:8]}: push to an empty folder",
            expected=store,
            found=found,
        )


def _copy_new(source: Tier, target: Tier, folder: str, session: str) -> None:
    """Copy the small files of a folder that the other tier does not have."""
    there = {info.name for info in target.list(folder)}
    for info in source.list(folder):
        if info.name not in there and (parse_epoch_name(info.name) or parse_tag_name(info.name)):
            with contextlib.suppress(AlreadyExists):
                target.publish_new(info.name, [source.read(info.name)], session)


@dataclass(frozen=True, slots=True)
class _Sending:
    """A pack on its way."""

    entries: Sequence[CatalogEntry]
    write: str
    staged: Future[Staged]


def _move(
    here: Packs, there: Packs, plan: FlushPlan, session: str, sizes: list[int], progress: Progress | None
) -> None:
    """Upload all packs, several at a time, and publish them one after the other; `sizes` gets that of each."""
    done = 0
    underway: deque[_Sending] = deque()
    with ThreadPoolExecutor(STREAMS, thread_name_prefix="deltastore-push") as pool:
        try:
            for entries in (*plan.batches, *[None] * STREAMS):
                if entries is not None:
                    write = new_write_id()
                    name = pack_name(entries[0].ref.epoch, entries[0].step, entries[-1].step, write)
                    parts = MergedPack(here, entries, write)
                    underway.append(_Sending(entries, write, pool.submit(there.tier.stage, name, parts, session)))
                if underway and (entries is None or len(underway) == STREAMS):
                    sending = underway.popleft()
                    staged = sending.staged.result()
                    publish_merged(there, staged, sending.write, sending.entries)
                    sizes.append(staged.size)
                    done += len(sending.entries)
                    if progress is not None:
                        progress(done, plan.commits)
        finally:
            _discard(there.tier, underway)


def publish_merged(there: Packs, staged: Staged, write: str, entries: Sequence[CatalogEntry]) -> None:
    """Publish a pack of some commits and read it back: only what can be read has arrived."""
    unknown: OutcomeUnknown | None = None
    try:
        there.tier.publish(staged)
    except OutcomeUnknown as error:
        unknown = error
    except BaseException:
        with contextlib.suppress(Backend):
            there.tier.discard(staged)
        raise
    try:
        index = there.tail(staged.name).index
    except NotFound as error:
        raise unknown or error from error
    expected = (write, tuple((entry.id, entry.ref.digest) for entry in entries))
    if (index.write, index.commits) != expected:
        raise Corruption(f"{there.tier.url}/{staged.name}: it is not the pack that was sent", where=staged.name)


def _discard(tier: Tier, underway: Iterable[_Sending]) -> None:
    """After an error: take away what was sent for nothing."""
    for sending in underway:
        if not sending.staged.cancel():
            try:
                tier.discard(sending.staged.result())
            except DeltaStoreError as error:
                log.debug("a pack that was underway: %s", error)
