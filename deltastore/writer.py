"""The background of a store: encode, write, publish in chain order, acknowledge, or fail loudly (spec 10)."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from deltastore.buffers import BufferPool, StagedState, StreamedState
from deltastore.config import WriterOptions
from deltastore.encoder import ChainState, CommitOrder, EncodedCommit, advance, encode_commit
from deltastore.errors import (
    Backend,
    Conflict,
    Corruption,
    DeltaStoreError,
    Internal,
    NotFound,
    OutcomeUnknown,
    Timeout,
)
from deltastore.handle import Commit, Failure, Handle, Work
from deltastore.history.catalog import CatalogEntry, entry_of
from deltastore.history.packs import Packs
from deltastore.history.session import Session
from deltastore.layout import Layout
from deltastore.ondisk.codecs import Buffer
from deltastore.ondisk.names import new_write_id, pack_name
from deltastore.ondisk.pack import PackWriter
from deltastore.ondisk.predictions import HOLD
from deltastore.ondisk.records import BASE, CommitRecord
from deltastore.parallel import leave_a_core
from deltastore.streaming import StreamedCommit, stream_commit
from deltastore.tiers.base import Tier

log = logging.getLogger("deltastore")

FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 5.0
SPARE_BYTES = 1 << 20
"""Room that must be left for records, tags and the file system itself."""
_PASSING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EAGAIN, errno.ETIMEDOUT, errno.EMFILE, errno.ENFILE})
"""What a retry of the whole pack may cure."""


@dataclass
class Job:
    """A state that waits to be written."""

    staged: StagedState | StreamedState
    order: CommitOrder
    handle: Handle
    submitted: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Written:
    """A commit that was published and acknowledged."""

    entry: CatalogEntry
    pack_bytes: int
    has_copies: bool = False
    """An earlier attempt may have landed too."""


class Writer:
    """Writes the commits of one session, strictly in the order of their submission.

    Parameters
    ----------
    chain : ChainState
        What the first commit builds upon.
    acknowledge : callable
        Called in the background with each acknowledged commit; returns it as users see it.
    find : callable
        Gives a commit of the store by its id.
    """

    def __init__(
        self,
        tier: Tier,
        packs: Packs,
        session: Session,
        chain: ChainState,
        pool: BufferPool,
        options: WriterOptions,
        restore_cost: float,
        acknowledge: Callable[[Written], Commit],
        find: Callable[[str], Commit],
    ) -> None:
        self._tier = tier
        self._packs = packs
        self._session = session
        self._chain = chain
        self._pool = pool
        self._options = options
        self.restore_cost = restore_cost
        self._acknowledge = acknowledge
        self._find = find
        self._pid = os.getpid()
        self._state = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._reserved: set[object] = set()
        self._is_writing = False
        self._stopping = False
        self._failures: deque[Failure] = deque()
        self._fenced: Conflict | None = None
        self._thread: threading.Thread | None = None

    @property
    def base_due(self) -> bool:
        """Whether the next commit is going to be a base, as far as the background has come."""
        return self._chain.base_due(self.restore_cost)

    @property
    def needs_streamed_base(self) -> bool:
        """The same of a commit whose state is streamed: its parent is read from the store."""
        chain = self._chain
        return chain.layout is None or not chain.fidelity.exact or chain.is_costly(self.restore_cost)

    @property
    def is_stopped(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._stopping

    @property
    def parent(self) -> str | None:
        """Id of the commit that the next one builds upon, as far as the background has come."""
        return None if self._chain.parent is None else self._chain.parent.id

    def busy(self) -> bool:
        """Return whether :meth:`reserve` would have to wait."""
        with self._state:
            return self._pending() >= self._options.max_pending

    def _pending(self) -> int:
        return len(self._reserved) + len(self._jobs) + self._is_writing

    def reserve(self, token: object) -> None:
        """Wait until one more state may be taken into memory.

        Parameters
        ----------
        token : object
            Stands for the reservation until :meth:`submit` or :meth:`cancel` ends it.

        Raises
        ------
        DeltaStoreError
            An earlier commit failed and nobody was told yet.
        """
        self._check_process()
        with self._state:
            self._raise_failure()
            self._state.wait_for(lambda: self._stopping or self._pending() < self._options.max_pending)
            self._raise_failure()
            self._refuse_if_stopping()
            self._reserved.add(token)

    def cancel(self, token: object) -> None:
        """Give a reservation back, if it still stands."""
        with self._state:
            self._reserved.discard(token)
            self._state.notify_all()

    def submit(self, job: Job, token: object) -> None:
        """Hand a state over; its buffers belong to the writer from here on."""
        with self._state:
            self._refuse_if_stopping()
            if self._thread is None:
                self._thread = self._start_thread()
            # An interrupt may strike between any two of these: a job that is queued will be written.
            self._jobs.append(job)
            self._reserved.discard(token)
            self._state.notify_all()

    def _start_thread(self) -> threading.Thread:
        thread = threading.Thread(target=self._run, name="deltastore-writer", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise Backend(f"the writer's thread could not be started: {error}") from error
        return thread

    def _refuse_if_stopping(self) -> None:
        if self._stopping:
            raise Conflict("the store is being closed, or restored, in another thread: this state was not committed")

    def flush(self, timeout: float | None = None) -> None:
        """Wait until everything that was submitted is acknowledged.

        Raises
        ------
        Timeout
            The time is over.
        DeltaStoreError
            A commit failed and nobody was told yet.
        """
        self._check_process()
        with self._state:
            if not self._state.wait_for(lambda: self._pending() == 0, timeout):
                raise Timeout(
                    f"{self._pending()} commits are not written after {timeout} s; they go on", timeout=timeout
                )
            self._raise_failure()

    def drain(self, timeout: float | None) -> None:
        """Flush at the end; what somebody was told before is no news there."""
        if self._pending() or not all(failure.seen for failure in self._failures):
            self.flush(timeout)

    def close(self) -> None:
        """Write what was submitted and stop; raises what nobody was told yet."""
        if os.getpid() != self._pid:
            return  # pending commits belong to the process that made them
        try:
            self.drain(None)
        finally:
            with self._state:
                self._stopping = True
                self._state.notify_all()
            if self._thread is not None:
                self._thread.join()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise Conflict(
                f"process {os.getpid()} was forked from the writer {self._pid}: only that one may commit; "
                "open the store for reading here",
                pid=self._pid,
            )

    def _raise_failure(self) -> None:
        if self._fenced is not None:
            for failure in self._failures:
                failure.seen = True
            raise self._fenced
        while self._failures:
            failure = self._failures.popleft()
            if not failure.seen:
                failure.seen = True
                raise failure.error

    # ---------------------------------------------------------------- background

    def _run(self) -> None:
        while True:
            with self._state:
                self._state.wait_for(lambda: self._jobs or self._stopping)
                if not self._jobs:
                    return
                self._is_writing = True
                job = self._jobs.popleft()
                leave_a_core(not self._jobs)  # to the training, unless that is waiting for the writer
            try:
                if isinstance(job.staged, StreamedState):
                    self._write_streamed(job, job.staged)
                else:
                    self._write(job, job.staged)
            except BaseException as error:
                self._fail(job, error)

    def _write(self, job: Job, staged: StagedState) -> None:
        if staged.window is not None and not staged.window.wait():
            self._leave_out(staged)
            return
        begun = time.monotonic()
        encoded = encode_commit(
            self._chain,
            staged,
            job.order,
            epoch=self._session.epoch,
            session=self._session.id,
            restore_cost=self.restore_cost,
            codec=self._options.codec,
        )
        if encoded is None:
            self._settle_unchanged(job, staged)
            return
        ready = time.monotonic()
        record, written = self._publish(encoded)
        work = _work_of(job, begun, ready, record)
        free = advance(self._chain, staged, encoded, record, written.entry.ref.digest, written.pack_bytes)
        if free is not None:
            self._pool.give(staged.layout, free)
        self._settle(job, written, work)

    def _write_streamed(self, job: Job, state: StreamedState) -> None:
        leave_a_core(False)  # the caller waits
        begun = time.monotonic()
        commit = stream_commit(
            self._chain,
            state,
            job.order,
            epoch=self._session.epoch,
            session=self._session.id,
            codec=self._options.codec,
        )
        ready = time.monotonic()
        record, written = self._publish(commit)
        work = _work_of(job, begun, ready, record)
        self._chain.advance(record, written.entry.ref.digest, written.pack_bytes, state.layout, state.document)
        self._chain.rec = None  # nobody has it in memory
        self._settle(job, written, work)

    def _settle(self, job: Job, written: Written, work: Work) -> None:
        log.debug(
            "step %d: %s of %s bytes; waited for %.3f s, encoded in %.3f s, written in %.3f s",
            *(written.entry.step, written.entry.kind, f"{written.pack_bytes:,}"),
            *(work.queue_seconds, work.encode_seconds, work.write_seconds),
        )
        try:
            job.handle._succeed(self._acknowledge(written), work)
        except Exception as error:
            # The commit is safe, and so is the chain: only what was asked beside it (a tag) failed.
            failure = Failure(_as_fault(job, error))
            with self._state:
                self._failures.append(failure)
            job.handle._fail(failure)
        self._release()

    def _leave_out(self, staged: StagedState) -> None:
        """Drop a state that was changed while it was copied; the next commit is a base."""
        self._chain.rec = None
        self._pool.give(staged.layout, staged.buffers)
        self._release()

    def _settle_unchanged(self, job: Job, staged: StagedState) -> None:
        if self._chain.parent is None:
            raise Internal(f"step {job.order.step}: nothing changed, but there is no commit before it")
        self._pool.give(staged.layout, staged.buffers)
        job.handle._succeed(self._find(self._chain.parent.id))
        self._release()

    def _release(self) -> None:
        with self._state:
            self._is_writing = False
            self._state.notify_all()

    def _publish(self, encoded: EncodedCommit | StreamedCommit) -> tuple[CommitRecord, Written]:
        """Write the pack until it is acknowledged, a new file under a new name at each attempt."""
        started = time.monotonic()
        pause = FIRST_PAUSE_SECONDS
        unknown: OutcomeUnknown | None = None
        while True:
            try:
                record, written = self._attempt(encoded)
                return record, replace(written, has_copies=unknown is not None)
            except Backend as error:
                unknown = error if isinstance(error, OutcomeUnknown) else unknown
                late = time.monotonic() - started > self._options.give_up_seconds and not self._options.wait_for_space
                if late or not (error.transient or error.errno in _PASSING or isinstance(error, OutcomeUnknown)):
                    if unknown is None or unknown is error:
                        raise
                    raise unknown from error  # an earlier attempt may have landed: that is what must be told
                log.warning("step %s: not written (%s), trying again", encoded.step, error)
            with self._state:
                self._state.wait_for(lambda: self._stopping, pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _attempt(self, encoded: EncodedCommit | StreamedCommit) -> tuple[CommitRecord, Written]:
        # Steps C3 to C9 of spec 10.2; advance() and the handle are C10.
        self._check_space(encoded)
        write = new_write_id()
        name = pack_name(self._session.epoch, encoded.step, encoded.step, write)
        pack = PackWriter(self._session.store, write)
        made: list[CommitRecord] = []
        digests: list[str] = []

        def parts() -> Iterator[Buffer]:
            for array in encoded.arrays():
                for buffers in pack.array(array):
                    yield from buffers
            record, commit = encoded.finish()
            made.append(record)
            digests.append(commit.digest)
            for buffers in pack.finish([commit]):
                yield from buffers

        staged = self._tier.stage(name, parts(), self._session.id)  # C3-C5
        try:
            self._tier.publish(staged)  # C6, C7, C11
        except BaseException:
            with contextlib.suppress(Backend):  # what went wrong before says more
                self._tier.discard(staged)
            raise
        try:
            self._read_back(name, write)  # C8
            self._session.check_fence()  # C9
        except OutcomeUnknown:
            raise
        except Backend as error:
            raise OutcomeUnknown(
                f"{name}: published, but not acknowledged: {error}", errno=error.errno, where=name
            ) from error
        entry = entry_of(made[0], digests[0], staged.size, name)
        return made[0], Written(entry, staged.size)

    def _read_back(self, name: str, write: str) -> None:
        try:
            found = self._packs.tail(name).index.write
        except (Corruption, NotFound) as error:
            raise OutcomeUnknown(f"{name}: published, but it cannot be read back: {error}", where=name) from error
        if found != write:
            raise OutcomeUnknown(f"{name}: published, but the file has write id {found}", expected=write, found=found)

    def _check_space(self, encoded: EncodedCommit | StreamedCommit) -> None:
        free = self._tier.free_bytes()
        needed = encoded.largest_bytes + SPARE_BYTES
        if free is not None and free < needed:
            raise Backend(
                f"{self._tier.url}: step {encoded.step} needs up to {needed:,} bytes, {free:,} are free; "
                "make room (`deltastore prune`)",
                errno=errno.ENOSPC,
                expected=needed,
                found=free,
            )

    def _fail(self, job: Job, error: BaseException) -> None:
        """Report an error to the commit and to all that follow it; the next commit is a base."""
        fault = _as_fault(job, error)
        log.error("step %s was not committed: %s", job.order.step, fault)
        with self._state:
            self._chain.rec = None
            self._chain.sequence += 1  # what failed may have landed all the same: its number is not used again
            failure = Failure(fault)
            self._failures.append(failure)
            if isinstance(fault, Conflict):
                self._fenced = fault
            failed = [job, *self._jobs]
            self._jobs.clear()
            self._is_writing = False
            for other in failed:
                other.handle._fail(failure)
            self._state.notify_all()


def _work_of(job: Job, begun: float, ready: float, record: CommitRecord) -> Work:
    """Return what a commit took that was durable right now."""
    durable = time.monotonic()
    shares = _predicted_shares(record, job.staged.layout)
    return Work(begun - job.submitted, ready - begun, durable - ready, shares)


def _predicted_shares(record: CommitRecord, layout: Layout) -> dict[str, float]:
    shares: dict[str, float] = {}
    if record.kind != BASE:
        predicted = record.predicted
        for partition in layout.partitions:
            kind = predicted.get(partition.id, HOLD)
            shares[kind] = shares.get(kind, 0.0) + partition.bytes / layout.bytes
    return shares


def _as_fault(job: Job, error: BaseException) -> DeltaStoreError:
    if isinstance(error, DeltaStoreError):
        return error
    fault = Internal(f"step {job.order.step}: {type(error).__name__}: {error}")
    fault.__cause__ = error
    return fault
