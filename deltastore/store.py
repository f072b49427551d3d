"""The facade: commit, read, tag, verify, prune."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import secrets
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from deltastore.buffers import Fill, Hints
from deltastore.config import Retention, TierLimits, WriterOptions, as_integer, check_timeout
from deltastore.errors import (
    AlreadyExists,
    Corruption,
    DeltaStoreError,
    InvalidInput,
    NotFound,
    ReadOnly,
    UnsupportedFormat,
)
from deltastore.further import Further
from deltastore.handle import HELD_BY, HELD_SECONDS, Commit, Handle
from deltastore.history.catalog import Catalog, CatalogEntry, read_catalog, write_cache
from deltastore.history.chain import Chain, open_chain
from deltastore.history.compact import CompactReport, compact
from deltastore.history.flush import PACK_BYTES
from deltastore.history.lineage import line, needs_tags, newest, newest_complete, resolve
from deltastore.history.packs import Packs
from deltastore.history.retention import PruneReport, delete_commits, held_back, plan_prune
from deltastore.history.session import Session, read_format
from deltastore.history.tags import read_tags, write_tag
from deltastore.history.verify import Progress, VerifyReport, verify
from deltastore.layout import Layout
from deltastore.ondisk.limits import MAX_NUMBER
from deltastore.ondisk.names import check_tag
from deltastore.policy import EXACT_RESTORE_COST, Policy, check_policy
from deltastore.reader import State
from deltastore.recording import Recording, check_step
from deltastore.recovery import Reach, Recovery
from deltastore.remotes import RemotePlace
from deltastore.sources import BufferSource, PackSource
from deltastore.tiers.base import Tier
from deltastore.view import View
from deltastore.writer import Written

log = logging.getLogger("deltastore")

CACHE_EVERY_COMMITS = 500
"""How often a writer renews the catalog cache, beside at its end."""


_open_stores: weakref.WeakSet[Store] = weakref.WeakSet()

EXIT_SECONDS = 600.0
"""How long the end of the interpreter waits for commits that are still written."""


class Store:
    """A run's history: commits in packs on one tier. Made by :func:`deltastore.open`.

    Threads may share a store; a forked child may read from it, but not commit.
    """

    def __init__(
        self,
        tier: Tier,
        *,
        writable: bool = True,
        retention: Retention | None = None,
        pickle_trusted: bool = False,
        session: str | None = None,
        options: WriterOptions | None = None,
        places: Sequence[RemotePlace] = (),
        limits: TierLimits | None = None,
    ) -> None:
        self._tier = tier
        self._writable = writable
        self._retention = retention
        self._pickle_trusted = pickle_trusted
        self._session_id = session or secrets.token_hex(8)
        self._options = options or WriterOptions()
        self._policy: Policy | None = None
        self._restore_cost = EXACT_RESTORE_COST
        self._view = View(tier, pickle_trusted=pickle_trusted)
        self._further = Further(self._view, places, limits or TierLimits(), pickle_trusted=pickle_trusted)
        self._remotes = self._further.remotes
        self._recording: Recording | None = None
        self._closed = False
        self._has_staged = False
        self._pid = os.getpid()
        _open_stores.add(self)
        if writable:
            tier.check_writable()
        elif not tier.exists() and not any(place.tier.exists() for place in places):
            raise NotFound(f"{tier.url}: there is no store here; mode 'a' makes one", url=tier.url)
        self._read_format()

    def _read_format(self) -> None:
        try:
            self._view.packs.store = read_format(self._tier).store
        except NotFound:
            return
        except Corruption as error:
            log.warning("%s; reading goes on, for the packs hold all that is needed", error)

    def set_policy(self, policy: Policy | None) -> None:
        """Store the commits that follow as a policy says; None: every bit, as a new store does.

        Raises
        ------
        InvalidInput
            It is no policy.
        """
        self._policy = check_policy(policy)
        if self._recording is not None:
            self._recording.policy = policy
        self.set_restore_cost(EXACT_RESTORE_COST if policy is None else policy.chain_cost)

    def set_restore_cost(self, restore_cost: float) -> None:
        """Let reading a commit cost up to this many full loads before a base is written (spec 9, "Bases")."""
        if not isinstance(restore_cost, int | float) or not restore_cost >= 1:
            raise InvalidInput(f"restore_cost is {restore_cost!r}, expected 1 or more")
        self._restore_cost = restore_cost
        if self._recording is not None:
            self._recording.set_restore_cost(restore_cost)

    # ---------------------------------------------------------------- reading

    @property
    def is_writable(self) -> bool:
        """Whether the store was opened with mode "a"."""
        return self._writable

    @property
    def tier_names(self) -> tuple[str, ...]:
        """The tiers that `wait` and `durable` know."""
        return (self._tier.name, *self._remotes.names)

    @property
    def layout(self) -> Layout | None:
        """How the state that was committed last is laid out; None before the first commit."""
        return None if self._recording is None else self._recording.layout

    @property
    def url(self) -> str:
        """What opens the same store again."""
        return self._tier.url

    def refresh(self) -> None:
        """Look again at what the store holds: another process may have committed, tagged or pruned."""
        self._further.reading.refresh()

    def commits(self) -> list[Commit]:
        """Return all commits, oldest first."""
        return self._further.reading.commits()

    def lineage(self) -> list[Commit]:
        """Return the commits on the line of history of the latest one, oldest first; the others were left behind."""
        return self._further.reading.lineage()

    def at(self, ref: int | str) -> State:
        """Return the state of a commit; nothing of it is loaded yet.

        Parameters
        ----------
        ref : int or str
            A step (the newest commit of it on the line of history of the latest, else of the highest epoch),
            "latest", "latest~3", a tag, or a commit id (8 or more characters).

        Raises
        ------
        NotFound
            Nothing has this name; the nearest is named.
        Corruption
            What it needs is damaged.
        """
        return self._further.reading.at(ref)

    def verify(self, deep: bool = False, *, progress: Progress | None = None) -> VerifyReport:
        """Return what is damaged or missing; nothing is changed.

        Parameters
        ----------
        deep : bool
            Read and decode every byte, instead of metadata and chains only.
        progress : callable, optional
            Called with (commits done, commits in all).
        """
        with self._view.lock:
            fresh = Packs(self._tier, self._view.packs.store)
            try:
                return verify(fresh, read_catalog(fresh, Catalog()), deep=deep, progress=progress)
            finally:
                fresh.close()

    def durable(self, tier: str | None = None) -> int | None:
        """Return the newest acknowledged step of a tier, None if there is none.

        A store that is only read cannot know what its writer was told: it returns the newest step that it sees.
        """
        self._check_tier(tier)
        if tier is not None and tier != self._tier.name:
            return self._further.durable(tier)
        with self._view.lock:
            if self._recording is not None:
                return self._recording.durable_step
            top = newest(self._view.catalog)
            return None if top is None else top.step

    def _check_tier(self, tier: str | None) -> None:
        if tier not in (None, *self.tier_names):
            raise InvalidInput(f"the store has no tier {tier!r}; it has {', '.join(self.tier_names)}", tier=tier)

    # ---------------------------------------------------------------- writing

    def commit(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        exact: bool | None = None,
        tag: str | None = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> Handle:
        """Commit one version of a nested state.

        The state is copied before this returns and may be changed at once; it is written in the background, after
        all commits that were made before. While `max_pending` commits are being written, this waits.

        Parameters
        ----------
        step : int
            Never smaller than that of the commit before. The same step again is a new version of it, and costs nothing
            if nothing changed.
        state : mapping
            Nested dicts, lists and tuples of tensors and plain values.
        exact : bool, optional
            True: store every bit of this commit, whatever the policy says.
        tag : str, optional
            Name the commit, for ever; it is then stored as a base.
        metrics : mapping, optional
            Numbers and strings to remember with the commit, such as the loss.

        Returns
        -------
        Handle

        Raises
        ------
        InvalidInput
            Something in the state cannot be stored, or the step decreases; nothing was committed.
        Conflict
            Another writer has the store.
        DeltaStoreError
            An earlier commit failed in the background and nobody was told yet.
        """
        return self.commit_with_hints(step, state, None, exact=exact, tag=tag, metrics=metrics)

    def commit_with_hints(
        self,
        step: int,
        state: Mapping[str, Any],
        hints: Hints | None,
        *,
        exact: bool | None = None,
        tag: str | None = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> Handle:
        """Commit as :meth:`commit` does, for adapters that know the roles of tensors ."""
        step = self._check_commit(step, state, tag)
        if exact not in (None, True, False):
            raise InvalidInput(f"exact is {exact!r}, expected None, True or False")
        recording, metrics = self._admit(metrics)
        return recording.commit(step, state, hints or Hints(), exact=exact, tag=tag, metrics=metrics)

    def commit_streamed(
        self, step: int, state: Mapping[str, Any], *, tag: str | None = None, metrics: Mapping[str, Any] | None = None
    ) -> Commit:
        """Commit a state that is not copied: each part is read when it is written. Returns when the commit is safe.

        For states that are larger than the memory, with tensors of files (``deltastore.formats.load(lazy=True)``). They
        must not change meanwhile. Exact whatever the policy says; a delta reads its parent from the store, part by
        part, and nothing is kept in memory for the next commit: one by :meth:`commit` is a base.

        Parameters
        ----------
        step, state, tag, metrics
            As for :meth:`commit`.

        Raises
        ------
        InvalidInput, Conflict
            As for :meth:`commit`.
        DeltaStoreError
            The commit failed, or a tensor could not be read; nothing of it is seen.
        """
        step = self._check_commit(step, state, tag)
        recording, metrics = self._admit(metrics)
        return recording.commit_streamed(step, state, tag=tag, metrics=metrics, open_parent=self._open_parent)

    def _open_parent(self, commit: str) -> Fill:
        with self._view.lock:
            chain = open_chain(self._view.packs, self._view.catalog, self._view.catalog.by_id[commit])
        return PackSource(self._view.packs, chain).partition

    def _check_commit(self, step: int, state: Mapping[str, Any], tag: str | None) -> int:
        """Raise unless a commit may be made; what is refused leaves no trace."""
        step = as_integer(step, "step")
        if not 0 <= step <= MAX_NUMBER:
            raise InvalidInput(f"step is {step!r}, expected an integer of 0 to {MAX_NUMBER}")
        if not isinstance(state, Mapping):
            raise InvalidInput(f"the state is a {type(state).__name__}, expected a dict of objects by name")
        if tag is not None:
            check_tag(tag)
            if tag in read_tags(self._tier):
                raise AlreadyExists(
                    f"tag {tag!r} exists; commit without it, then move it with tag(name, ref, move=True)", tag=tag
                )
        if self._recording is None:
            top = newest(self._view.catalog)
            check_step(step, -1 if top is None else top.step)
        return step

    def _admit(self, metrics: Mapping[str, Any] | None) -> tuple[Recording, Mapping[str, Any] | None]:
        """Return the recording, once the limits of the further tiers let a commit in; the metrics say what it took."""
        recording = self._record()
        held = self._further.admit(recording.follows) if self._remotes.all else None
        if held is not None and (metrics is None or isinstance(metrics, Mapping)):
            metrics = {**(metrics or {}), HELD_SECONDS: held.seconds, HELD_BY: held.limit}
        return recording, metrics

    def _record(self) -> Recording:
        """Return the recording; the first call claims the store."""
        self._require_writable()
        with self._view.lock:
            if self._recording is not None and self._recording.is_stopped:  # an interrupt struck in restore()
                self._go_on_from(self._recording.session, self._recording.follows)
            if self._recording is None:
                self._further.meet(self._session_id)
                session = Session(self._tier, self._session_id)
                session.claim()
                try:
                    self._look_at(session)
                    # Not one whose chain is broken: the line of history would be lost with it.
                    self._recording = self._make_recording(session, newest_complete(self._view.catalog), None)
                except BaseException:
                    session.close()
                    raise
            return self._recording

    def _require_writable(self) -> None:
        if not self._writable:
            raise ReadOnly(f"{self.url} was opened with mode 'r'; open it with mode 'a' to write", url=self.url)
        if self._closed:
            raise InvalidInput(f"{self.url} is closed")

    def _look_at(self, session: Session) -> None:
        self._view.packs.store = session.store
        if self._retention is None:
            self.refresh()
        else:
            self._view.reread()  # what is going to decide over deletions comes from the packs, not from a cache

    def _make_recording(
        self, session: Session, parent: CatalogEntry | None, resumed: tuple[Chain, dict[int, Any]] | None
    ) -> Recording:
        return Recording(
            self._view.packs,
            session,
            self._view.catalog,
            parent,
            resumed,
            options=self._options,
            policy=self._policy,
            restore_cost=self._restore_cost,
            retention=self._retention,
            pickle_trusted=self._pickle_trusted,
            acknowledge=self._acknowledge,
            find=self._commit_by_id,
            further=self._remotes,
            tiers=self.tier_names,
        )

    def restore(self, ref: int | str = "latest") -> State:
        """Go back to a commit and go on from it: the next commit follows it, in a new epoch.

        What was submitted before is written first. The commit is read as a whole, so that the next one can be a delta;
        if the latest is damaged, the newest intact one before it is taken and a warning is logged.

        Returns
        -------
        State
            In memory; its ``commit`` tells which one it is.

        Raises
        ------
        NotFound
            The store holds no such commit.
        Conflict
            Another writer has the store.
        """
        self._require_writable()
        with self._view.lock:
            recording = self._recording
        if recording is not None:
            recording.flush()
            self.refresh()
            self._fetch(ref)
            self._view.resolve(ref)  # a reference that means nothing leaves everything as it is
            recording.stop()
        else:
            self._fetch(ref)
            if ref != "latest":
                self._view.resolve(ref)
        with self._view.lock:
            session = self._claim_anew(recording)
            try:
                self._look_at(session)
                entry, chain, buffers, is_whole = self._read_newest_intact(ref)
                self._recording = self._make_recording(session, entry, (chain, buffers) if is_whole else None)
            except BaseException:
                self._go_on_from(session, None if recording is None else recording.follows)
                raise
            return self._view.state(chain, BufferSource(buffers), entry)

    def _fetch(self, ref: int | str) -> None:
        if self._remotes.all:
            silent = self._further.meet(self._session_id)
            self._read_format()
            self._further.fetch(ref, silent, self._session_id)

    def fetch(self, ref: int | str = "latest") -> None:
        """Bring a commit with its chain here, if only a further tier has it; nothing else is changed.

        Raises
        ------
        NotFound
            No tier that answers has such a commit.
        """
        self._require_writable()
        self._fetch(ref)
        self._view.resolve(ref)

    def placement(self) -> dict[str, tuple[str, ...]]:
        """Return for each commit, by its id, the tiers that list it with its whole chain, nearest first.

        As far as the store has looked: :meth:`refresh` looks again.
        """
        return self._further.placement()

    def reaches(self) -> tuple[Reach, ...]:
        """Return what each tier holds, nearest first, and how far back it reaches."""
        return self._further.reaches()

    def recoverable(self) -> Recovery:
        """Return the newest commit whose whole chain is right on some tier, every byte read, and what is newer."""
        return self._further.survey()

    def _claim_anew(self, recording: Recording | None) -> Session:
        """Return a claimed session in a new epoch: that of the recording, or a new one."""
        if recording is None:
            session = Session(self._tier, self._session_id)
            session.claim()
            return session
        self._recording = None
        try:
            recording.session.next_epoch()
        except BaseException:
            recording.session.close()  # the next call claims the store anew
            raise
        return recording.session

    def _go_on_from(self, session: Session, commit: str | None) -> None:
        """After a failed restore: let the next commit follow the one that it would have followed."""
        try:
            known = self._view.catalog.by_id.get(commit) if commit is not None else None
            self._recording = self._make_recording(session, known or newest_complete(self._view.catalog), None)
        except BaseException:
            session.close()
            raise

    def _read_newest_intact(self, ref: int | str) -> tuple[CatalogEntry, Chain, dict[int, Any], bool]:
        """Return a commit with its state, and whether its chain here is whole: a delta may follow it."""
        entry = resolve(self._view.catalog, self._view.tags() if needs_tags(ref) else {}, ref)
        for error in self._view.catalog.damaged.values():
            if ref == "latest" and isinstance(error, UnsupportedFormat):
                raise error  # a newer deltastore went on from here: what is the latest only that one can tell
        while True:
            try:
                return entry, *self._view.read_whole(entry), True
            except Corruption as error:
                found = self._further.read_elsewhere(entry)
                if found is not None:
                    log.warning("step %s is damaged here and was read from a further tier: %s", entry.step, error)
                    return entry, *found, False
                older = [other for other in self._view.catalog.ordered() if other.order < entry.order]
                if ref != "latest" or not older:
                    raise self._view.with_advice(error, entry) from error
                log.warning("the commit of step %s is damaged and left out: %s", entry.step, error)
                entry = older[-1]

    def _acknowledge(self, written: Written, tag: str | None) -> Commit:
        with self._view.lock:
            catalog = self._view.catalog
            catalog.add(written.entry, written.pack_bytes)
            self._remotes.added(written.entry.id)
            if tag is not None:
                write_tag(self._tier, tag, written.entry.id, self._session_id, move=False)
                self._view.forget_tags()
            if self._retention is not None:
                self._apply_retention(self._retention, written)
            if len(catalog.packs) % CACHE_EVERY_COMMITS == 0:
                write_cache(self._view.packs, catalog, self._session_id)
            return self._view.commit(written.entry)

    def _apply_retention(self, retention: Retention, written: Written) -> None:
        try:
            if written.has_copies:
                self.refresh()  # what landed without our knowledge goes by the same rules
            if plan_prune(self._view.catalog, self._view.tags().values(), retention):
                # Another process may have tagged one of them since: look again before anything goes.
                self._view.forget_tags()
                doomed = plan_prune(self._view.catalog, self._view.tags().values(), retention)
                delete_commits(self._view.packs, self._view.catalog, doomed)
        except DeltaStoreError as error:
            log.warning("retention did not delete anything this time: %s", error)

    def _commit_by_id(self, commit: str) -> Commit:
        with self._view.lock:
            return self._view.commit(self._view.catalog.by_id[commit])

    def busy(self) -> bool:
        """Return whether `commit` would have to wait for earlier commits."""
        return self._recording is not None and self._recording.busy()

    def flush(self, timeout: float | None = None) -> None:
        """Wait until every commit is acknowledged.

        Raises
        ------
        Timeout
            The time is over.
        DeltaStoreError
            A commit failed and nobody was told yet.
        """
        check_timeout(timeout)
        if self._recording is not None:
            self._recording.flush(timeout)

    def drain(self, timeout: float) -> bool:
        """Flush at the end of the program, if this process writes; return whether there is something to close."""
        if self._closed or os.getpid() != self._pid:
            return False
        if self._recording is not None:
            self._recording.drain(timeout)
        return True

    def wait(self, step: int, *, tier: str | None = None, timeout: float | None = None) -> Commit:
        """Wait until a step is acknowledged by a tier, and return its commit.

        Raises
        ------
        NotFound
            The step was never committed.
        Timeout
            The time is over.
        """
        self._check_tier(tier)
        handle = None if self._recording is None else self._recording.handle_of(step)
        if handle is not None:
            return handle.wait(tier, timeout)
        commit = self.at(step).commit
        if tier is not None and tier != self._tier.name:
            self._remotes.wait(tier, commit.id, timeout)
        return commit

    def tag(self, name: str, ref: int | str | None = "latest", move: bool = False) -> None:
        """Name a commit. Tagged commits are never pruned.

        Parameters
        ----------
        name : str
            Letters, digits, ``.``, ``_``, ``-``; not a number, not "latest".
        ref : int or str or None
            The commit; None removes the tag.
        move : bool
            Let an existing tag name another commit.

        Raises
        ------
        AlreadyExists
            The tag names another commit and `move` is false.
        """
        self._require_writable()
        check_tag(name)
        with self._view.lock:
            commit = None if ref is None else self._view.resolve(ref).id
            self._has_staged = True
            write_tag(self._tier, name, commit, self._session_id, move=move)
            self._view.forget_tags()
            self._check_tagged(name, commit)

    def _check_tagged(self, name: str, commit: str | None) -> None:
        """Raise NotFound if the run that writes the store deleted a commit while it was tagged."""
        if commit is not None and self._recording is None:
            self.refresh()
            if commit not in self._view.catalog.by_id:
                write_tag(self._tier, name, None, self._session_id, move=True)
                raise NotFound(f"tag {name!r}: retention has just deleted commit {commit[:12]}", tag=name)

    def prune(self, keep_last: int = 1, keep_every: int | None = None, dry_run: bool = True) -> PruneReport:
        """Delete the commits that nothing kept needs; tagged ones are always kept.

        Parameters
        ----------
        keep_last, keep_every : int
            Keep the last commits, and those whose step is a multiple.
        dry_run : bool
            Only report what would go.

        Raises
        ------
        Conflict
            Another process is writing the store.
        """
        retention = Retention(keep_last, keep_every)
        with self._changing(dry_run):
            return self._prune(retention, dry_run=dry_run)

    def compact(
        self, pack_bytes: int = PACK_BYTES, dry_run: bool = True, *, progress: Progress | None = None
    ) -> CompactReport:
        """Merge small packs into few large ones; every commit stays what it is.

        Many small files burden a file system, HDFS above all. Readers go on: they look again where a pack is gone. Of
        a store that this process writes, commits wait meanwhile.

        Parameters
        ----------
        pack_bytes : int
            How large a merged pack may become.
        dry_run : bool
            Only report what would be done.
        progress : callable, optional
            Called with (packs done, packs in all).

        Raises
        ------
        Conflict
            Another process is writing the store.
        Backend
            Something could not be written or deleted; nothing is lost, and the next call goes on.
        """
        if type(pack_bytes) is not int or pack_bytes < 1:
            raise InvalidInput(f"pack_bytes is {pack_bytes!r}, expected an integer of 1 or more")
        with self._changing(dry_run):
            self._has_staged = self._has_staged or not dry_run
            try:
                return compact(
                    self._view.packs, self._session_id, pack_bytes=pack_bytes, dry_run=dry_run, progress=progress
                )
            finally:
                self._view.reread()

    @contextlib.contextmanager
    def _changing(self, dry_run: bool) -> Iterator[None]:
        """Hold what is needed to delete packs; nothing for a dry run."""
        if not dry_run:
            self._require_writable()
            self.flush()
        with self._view.lock:
            if not dry_run and self._recording is None:
                with self._tier.lock({"session": self._session_id}):
                    yield
            else:
                yield

    def _prune(self, retention: Retention, *, dry_run: bool) -> PruneReport:
        self._view.reread()  # what is to be kept must be there: the packs decide, not a cache
        kept = [*self._view.tags().values()]
        if self._recording is not None and self._recording.follows is not None:
            kept.append(self._recording.follows)
        doomed = plan_prune(self._view.catalog, kept, retention)
        top = newest(self._view.catalog)
        held = [] if top is None else held_back(self._view.catalog, line(self._view.catalog, top), retention)
        ids = tuple(entry.id for entry in doomed)
        report = PruneReport(ids, sum(entry.bytes for entry in doomed), dry_run, tuple(held))
        if not dry_run:
            delete_commits(self._view.packs, self._view.catalog, doomed)
        return report

    def close(self) -> None:
        """Write what is pending, give the lock back and close all files.

        Raises
        ------
        DeltaStoreError
            A commit failed and nobody was told yet.
        """
        if self._closed:
            return
        self._closed = True
        try:
            # What a forked child inherited belongs to its parent: the pending commits, the lock, the temporary files.
            if os.getpid() == self._pid:
                self._end_writing()
                self._remotes.end()
        finally:
            self._view.packs.close()
            self._further.close()

    def _end_writing(self) -> None:
        recording = self._recording
        try:
            if recording is not None:
                recording.stop()
        finally:
            # Before the lock goes back: the next writer must not meet us.
            try:
                if recording is not None:
                    with self._view.lock:
                        write_cache(self._view.packs, self._view.catalog, self._session_id)
                if recording is not None or self._has_staged:
                    self._tier.end_session(self._session_id)
            except DeltaStoreError as error:
                log.warning("leftovers stay below tmp/ until the next writer comes: %s", error)
            finally:
                if recording is not None:
                    recording.session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except DeltaStoreError:
            if error is None:
                raise
            log.exception("while another error is on its way, the store reports")

    def __repr__(self) -> str:
        return f"Store({self.url!r}, {'writable' if self._writable else 'read only'})"


def _close_at_exit() -> None:
    """Write what is pending when the interpreter ends; if that fails say so and end with an error."""
    lost: list[str] = []
    for store in list(_open_stores):
        try:
            if store.drain(EXIT_SECONDS):
                store.close()
        except DeltaStoreError as error:
            lost.append(f"deltastore: a commit was lost at the end of the program: {error}")
    if lost:
        print("\n".join(lost), file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


atexit.register(_close_at_exit)
