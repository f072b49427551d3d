"""The disk fails while commits wait: each commit is told, what was published stays whole, and the run can go on."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from deltastore import writer
from deltastore.config import Retention, WriterOptions
from deltastore.errors import Backend, DeltaStoreError, OutcomeUnknown
from deltastore.handle import Handle
from deltastore.history.catalog import read_catalog
from deltastore.history.packs import Packs
from deltastore.store import Store
from deltastore.testing.faulty import FaultyOps, FaultyTier, Plan, no_faults
from deltastore.tiers.local import LocalTier
from tests.crash._journal import Journal, check
from tests.crash._states import make_state

AT_ONCE = WriterOptions(give_up_seconds=0.0, max_pending=4)
PATIENT = WriterOptions(give_up_seconds=60.0, max_pending=4)
QUEUED = 3
UNKNOWN = -1
"""Stands for the error OutcomeUnknown instead of one of the system."""

TIER_POINTS = ("stage", "stage:part:0", "stage:part:3", "publish:before", "open", "list")
OPS_POINTS = (
    "open_write_new",
    "writev",
    "writev:after",
    "fsync",
    "fsync:after",
    "link",
    "fsync_folder",
    "fsync_folder:after",
    "open_read",
    "preadv",
)
HARMLESS = ("link:after", "unlink", "unlink:after")
"""What fails here is made good, or left to the next writer."""
AFTER_IT_LANDED = ("publish:after", "open", "list", "fsync_folder", "fsync_folder:after", "open_read", "preadv")


class QuickOps(FaultyOps):
    """Syncs nothing, for what the disk answers is made up here anyway: the tests take half the time."""

    def fsync(self, fd: int) -> None:
        self.gate("fsync", self._paths.get(fd, ""))
        self.gate("fsync:after", self._paths.get(fd, ""))

    def fsync_folder(self, path: str) -> None:
        self.gate("fsync_folder", path)
        self.gate("fsync_folder:after", path)


@dataclass
class Fault:
    """A plan: fail at a point so many times; None is for ever. `name` must be part of the file's name."""

    point: str
    number: int
    times: int | None = None
    name: str = ""
    hits: int = 0

    def __call__(self, point: str, name: str, count: int) -> Exception | None:
        if point != self.point or self.name not in name or self.hits == self.times:
            return None
        self.hits += 1
        if self.number == UNKNOWN:
            return OutcomeUnknown(f"{point} {name}: no answer", errno=errno.EIO)
        return OSError(self.number, os.strerror(self.number), name)


@dataclass
class Bench:
    """A store on a tier that fails, with what it promised."""

    store: Store
    set_plan: Callable[[Plan], None]
    root: Path
    journal: Journal = field(default_factory=lambda: Journal(1))
    retention: Retention | None = None

    def submit(self, *, tag: str | None = None) -> tuple[int, Handle]:
        serial = self.journal.next_serial
        self.journal.submit(serial, serial)
        return serial, self.store.commit(serial, make_state(1, serial), tag=tag, metrics={"serial": serial})

    def commit(self) -> str:
        serial, handle = self.submit()
        commit = handle.wait()
        self.journal.ack(serial, commit.id)
        return commit.kind

    def queue(self, plan: Plan, count: int = QUEUED) -> list[tuple[int, Handle]]:
        """Let the background begin with the first of some commits only when all are handed over, then fail."""
        go = threading.Event()

        def held(point: str, name: str, number: int) -> Exception | None:
            assert go.wait(60)
            return plan(point, name, number)

        self.set_plan(held)
        try:
            return [self.submit() for _ in range(count)]
        finally:
            go.set()

    def settle(self, queued: Sequence[tuple[int, Handle]]) -> list[DeltaStoreError | None]:
        """Wait for each; return the errors, and let the next commit follow the last that stands."""
        errors: list[DeltaStoreError | None] = []
        for serial, handle in queued:
            raised = None
            try:
                self.journal.ack(serial, handle.wait(timeout=60).id)
            except DeltaStoreError as error:
                raised = error
            assert handle.error is raised
            assert handle.done() is (raised is None)
            errors.append(raised)
        self.journal.follow(max(self.journal.acked))
        return errors

    def finish(self) -> None:
        """Close; then all is exact, no number was used twice and nothing is left over."""
        self.set_plan(no_faults)
        self.store.close()
        tier = LocalTier(self.root)
        assert list((self.root / "tmp").iterdir()) == []
        check(tier, self.journal, self.retention)
        packs = Packs(tier)
        catalog = read_catalog(packs)
        packs.close()
        numbers = [(entry.ref.epoch, entry.ref.sequence) for entry in catalog.by_id.values()]
        assert len(set(numbers)) == len(numbers)

    def temporary_files(self) -> list[str]:
        return [path.name for path in (self.root / "tmp").glob("*/*") if path.name != "OWNER"]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "FIRST_PAUSE_SECONDS", 0.001)


def on_tier(root: Path, options: WriterOptions, retention: Retention | None = None) -> Bench:
    tier = FaultyTier(LocalTier(root, QuickOps(no_faults)), no_faults)

    def set_plan(plan: Plan) -> None:
        tier.plan = plan

    return prepared(Bench(Store(tier, options=options, retention=retention), set_plan, root, retention=retention))


def on_ops(root: Path, options: WriterOptions, ops: FaultyOps | None = None) -> Bench:
    faulty = ops or QuickOps(no_faults)

    def set_plan(plan: Plan) -> None:
        faulty.gate.plan = plan

    return prepared(Bench(Store(LocalTier(root, faulty), options=options), set_plan, root))


def prepared(bench: Bench) -> Bench:
    for _ in range(2):
        bench.commit()
    return bench


MAKERS = [(on_tier, point) for point in TIER_POINTS] + [(on_ops, point) for point in OPS_POINTS]
PLACES = pytest.mark.parametrize(("make", "point"), MAKERS, ids=[f"{m.__name__}-{p}" for m, p in MAKERS])
NUMBERS = [errno.ENOSPC, errno.EIO, errno.EFBIG]


def place(point: str) -> str:
    return "epochs" if point == "list" else "packs"


# ---------------------------------------------------------------- giving up


@PLACES
@pytest.mark.parametrize("number", NUMBERS, ids=errno.errorcode.get)
@pytest.mark.parametrize("times", [1, None])
def test_giving_up(
    tmp_path: Path, make: Callable[[Path, WriterOptions], Bench], point: str, number: int, times: int | None
) -> None:
    """The first of three that wait cannot be written: all three fail, the next one is a base and stands."""
    bench = make(tmp_path / "s", AT_ONCE)
    errors = bench.settle(bench.queue(Fault(point, number, times, place(point))))
    assert all(isinstance(error, Backend) and error.errno == number for error in errors), errors
    assert {isinstance(error, OutcomeUnknown) for error in errors} == {point in AFTER_IT_LANDED}
    assert bench.temporary_files() == []
    bench.set_plan(no_faults)
    assert [bench.commit() for _ in range(2)] == ["base", "delta"]
    bench.finish()


@pytest.mark.parametrize("point", ["publish:before", "publish:after"])
def test_an_outcome_that_stays_unknown(tmp_path: Path, point: str) -> None:
    """Whether it landed or not, it is reported as unknown; if it did, it is an ordinary commit."""
    bench = on_tier(tmp_path / "s", AT_ONCE)
    errors = bench.settle(bench.queue(Fault(point, UNKNOWN, None, "packs")))
    assert all(isinstance(error, OutcomeUnknown) for error in errors)
    bench.set_plan(no_faults)
    assert [bench.commit() for _ in range(2)] == ["base", "delta"]
    bench.finish()
    with Store(LocalTier(bench.root), writable=False) as reader:
        assert (2 in [commit.step for commit in reader.commits()]) is (point == "publish:after")


def test_an_unknown_outcome_is_told_though_the_last_attempt_failed_in_another_way(tmp_path: Path) -> None:
    bench = on_tier(tmp_path / "s", PATIENT)
    unknown, full = Fault("publish:after", UNKNOWN, 1, "packs"), Fault("stage", errno.EFBIG, None, "packs")

    def plan(point: str, name: str, count: int) -> Exception | None:
        return unknown(point, name, count) or (full(point, name, count) if unknown.hits else None)

    errors = bench.settle(bench.queue(plan))
    assert all(isinstance(error, OutcomeUnknown) for error in errors), errors
    bench.set_plan(no_faults)
    assert bench.commit() == "base"
    bench.finish()


def test_only_those_that_wait_behind_it_fail(tmp_path: Path) -> None:
    for first in range(QUEUED):
        bench = on_tier(tmp_path / str(first), AT_ONCE)
        reached = 0

        def plan(point: str, name: str, count: int, first: int = first) -> Exception | None:
            nonlocal reached
            if (point, name[:5]) != ("stage", "packs"):
                return None
            reached += 1
            return OSError(errno.EIO, "I/O error") if reached > first else None

        errors = bench.settle(bench.queue(plan))
        assert [error is None for error in errors] == [number < first for number in range(QUEUED)]
        bench.set_plan(no_faults)
        assert bench.commit() == "base"
        bench.finish()


def test_many_failures_in_a_row(tmp_path: Path) -> None:
    bench = on_tier(tmp_path / "s", AT_ONCE)
    for point in ("stage", "publish:after", "stage:part:1", "publish:after"):
        number = UNKNOWN if point == "publish:after" else errno.ENOSPC
        errors = bench.settle(bench.queue(Fault(point, number, None, "packs")))
        assert None not in errors
        bench.set_plan(no_faults)
        assert bench.commit() == "base"
    bench.finish()


# ---------------------------------------------------------------- trying again


@PLACES
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize("times", [1, 4])
def test_trying_again(
    tmp_path: Path, make: Callable[[Path, WriterOptions], Bench], point: str, number: int, times: int
) -> None:
    """What passes is nobody's business: the pack stays at the head of the queue until it is written."""
    bench = make(tmp_path / "s", PATIENT)
    fault = Fault(point, number, times, place(point))
    assert bench.settle(bench.queue(fault)) == [None] * QUEUED
    assert fault.hits == times
    bench.store.flush()
    assert bench.temporary_files() == []
    bench.finish()


def test_each_attempt_is_a_new_file(tmp_path: Path) -> None:
    """After a failed sync the kernel may report success for bytes that it has dropped."""
    names = []

    def plan(point: str, name: str, count: int) -> Exception | None:
        if point != "fsync" or "packs" not in name:
            return None
        names.append(name.rpartition("packs.")[2])
        return OSError(errno.EIO, "I/O error") if len(names) <= 3 else None

    bench = on_ops(tmp_path / "s", PATIENT)
    assert bench.settle(bench.queue(plan, 1)) == [None]
    assert len(set(names)) == len(names) == 4
    bench.finish()


@pytest.mark.parametrize("point", ["publish:before", "publish:after"])
def test_an_outcome_that_is_settled_by_the_same_commit_again(tmp_path: Path, point: str) -> None:
    bench = on_tier(tmp_path / "s", PATIENT)
    assert bench.settle(bench.queue(Fault(point, UNKNOWN, 2, "packs"))) == [None] * QUEUED
    bench.finish()


@pytest.mark.parametrize("point", HARMLESS)
@pytest.mark.parametrize("times", [1, None])
def test_harmless(tmp_path: Path, point: str, times: int | None) -> None:
    bench = on_ops(tmp_path / "s", AT_ONCE)
    assert bench.settle(bench.queue(Fault(point, errno.EIO, times, "packs"))) == [None] * QUEUED
    bench.finish()


class ShortOps(QuickOps):
    """A system that takes a part of what it is given, and fails when the disk is full."""

    room: int | None = None

    def writev(self, fd: int, buffers: Sequence[memoryview]) -> int:
        self.gate("writev", self._paths.get(fd, ""))
        first = next(buffer for buffer in buffers if buffer.nbytes)[:777]
        if self.room is not None:
            if self.room <= 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            first = first[: self.room]
            self.room -= first.nbytes
        return os.write(fd, first)


@pytest.mark.parametrize("room", [0, 1, 776, 777, 3000])
def test_partial_writes(tmp_path: Path, room: int) -> None:
    ops = ShortOps(no_faults)
    bench = on_ops(tmp_path / "s", AT_ONCE, ops)
    ops.room = room
    errors = bench.settle(bench.queue(no_faults))
    assert isinstance(errors[-1], Backend)
    assert errors[-1].errno == errno.ENOSPC
    assert bench.temporary_files() == []
    ops.room = None
    assert bench.commit() == "base"
    bench.finish()


# ---------------------------------------------------------------- who is told, and how often

ASK: dict[str, Callable[[Bench], object]] = {
    "flush": lambda bench: bench.store.flush(),
    "commit": lambda bench: bench.store.commit(90, make_state(1, 90)),
    "restore": lambda bench: bench.store.restore("latest"),
    "prune": lambda bench: bench.store.prune(dry_run=False),
    "close": lambda bench: bench.store.close(),
}


@pytest.mark.parametrize("call", ASK)
def test_it_is_raised_at_the_next_call_and_only_there(tmp_path: Path, call: str) -> None:
    bench = on_tier(tmp_path / "s", AT_ONCE)
    queued = bench.queue(Fault("stage", errno.EIO, None, "packs"))
    while queued[-1][1].error is None:
        assert not queued[-1][1].done()
    bench.set_plan(no_faults)
    with pytest.raises(Backend) as caught:
        ASK[call](bench)
    assert caught.value.errno == errno.EIO
    for _, handle in queued:  # those who hold a handle are told all the same
        with pytest.raises(Backend) as again:
            handle.wait()
        assert again.value is caught.value
    if call != "close":
        bench.journal.follow(1)
        bench.store.flush()
        assert bench.commit() == "base"
    bench.finish()


def test_who_was_told_by_a_handle_is_not_told_again(tmp_path: Path) -> None:
    bench = on_tier(tmp_path / "s", AT_ONCE)
    bench.settle(bench.queue(Fault("stage", errno.EIO, None, "packs")))
    bench.set_plan(no_faults)
    bench.store.flush()
    assert bench.commit() == "base"
    bench.finish()


def test_each_of_two_failures_is_told(tmp_path: Path) -> None:
    """A tag that could not be written, then a commit: the second must not hide the first."""
    bench = on_tier(tmp_path / "s", AT_ONCE)
    tags, packs = Fault("stage", errno.EFBIG, None, "tags"), Fault("stage", errno.EIO, None, "packs")

    def plan(point: str, name: str, count: int) -> Exception | None:
        assert point == "list" or go.wait(60)
        return tags(point, name, count) or (packs(point, name, count) if tags.hits else None)

    go = threading.Event()
    bench.set_plan(plan)
    (tagged, _), (_, last) = bench.submit(tag="best"), bench.submit()
    go.set()
    while last.error is None:
        assert not last.done()
    bench.set_plan(no_faults)
    told = []
    for _ in range(3):
        try:
            bench.store.flush()
        except Backend as error:
            told.append(error.errno)
    assert told == [errno.EFBIG, errno.EIO]
    bench.journal.follow(tagged)
    bench.commit()
    bench.finish()


# ---------------------------------------------------------------- beside the packs


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, UNKNOWN])
def test_a_commit_whose_tag_cannot_be_written_fails_alone(tmp_path: Path, number: int) -> None:
    bench = on_tier(tmp_path / "s", AT_ONCE)
    go = threading.Event()
    fault = Fault("publish:before", number, None, "tags")

    def plan(point: str, name: str, count: int) -> Exception | None:
        assert point == "list" or go.wait(60)
        return fault(point, name, count)

    bench.set_plan(plan)
    serial, handle = bench.submit(tag="mine")
    behind = [bench.submit(), bench.submit()]
    go.set()
    with pytest.raises(Backend):
        handle.wait()
    assert bench.settle(behind) == [None, None]
    bench.store.flush()
    bench.set_plan(no_faults)
    assert bench.store.at(serial).commit.tags == ()
    bench.store.tag("mine", serial)
    assert bench.commit() == "delta"
    bench.finish()


class SmallDisk(LocalTier):
    """A disk that says how little is free."""

    free: int | None = None

    def free_bytes(self) -> int | None:
        return self.free if self.free is not None else super().free_bytes()


def test_too_little_space_is_seen_before_anything_is_written(tmp_path: Path) -> None:
    disk = SmallDisk(tmp_path / "s", QuickOps(no_faults))
    tier = FaultyTier(disk, no_faults)

    def set_plan(plan: Plan) -> None:
        tier.plan = plan

    bench = prepared(Bench(Store(tier, options=AT_ONCE), set_plan, tmp_path / "s"))
    before = tier.calls["stage"]
    queued = bench.queue(no_faults, 0)
    disk.free = 1000
    queued = [bench.submit()]
    errors = bench.settle(queued)
    assert tier.calls["stage"] == before
    for error in errors:
        assert isinstance(error, Backend)
        assert error.errno == errno.ENOSPC
        assert "1,000 are free" in str(error)
    disk.free = None
    assert bench.commit() == "base"
    bench.finish()


def test_space_that_is_made_in_time(tmp_path: Path) -> None:
    disk = SmallDisk(tmp_path / "s", QuickOps(no_faults))
    bench = prepared(Bench(Store(disk, options=PATIENT), lambda plan: None, tmp_path / "s"))
    disk.free = 0
    queued = [bench.submit() for _ in range(QUEUED)]
    assert not queued[0][1].done()
    disk.free = None
    assert bench.settle(queued) == [None] * QUEUED
    bench.finish()


@pytest.mark.parametrize("which", range(1, 5))
def test_retention_knows_of_copies_whose_outcome_was_unknown(tmp_path: Path, which: int) -> None:
    """A copy of a commit that landed unseen goes with it: it does not stay behind without its parents."""
    bench = on_tier(tmp_path / "s", PATIENT, Retention(2))
    bench.store.set_restore_cost(1.0)
    for number in range(12):
        bench.set_plan(Fault("publish:after", UNKNOWN, 1, "packs") if number == which else no_faults)
        bench.commit()
    bench.finish()
    with Store(LocalTier(bench.root), writable=False) as reader:
        assert len(reader.commits()) <= 4


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_retention_that_cannot_delete_costs_no_commit(tmp_path: Path, number: int) -> None:
    for point in ("delete", "sync"):
        bench = on_tier(tmp_path / point, AT_ONCE, Retention(1))
        bench.store.set_restore_cost(1.0)
        bench.set_plan(Fault(point, number, None, "packs"))
        for _ in range(4):
            bench.commit()
        bench.finish()


@pytest.mark.parametrize("point", ["unlink", "open_write_new", "link", "fsync", "fsync_folder"])
def test_a_close_that_cannot_tidy_up_gives_the_lock_back(tmp_path: Path, point: str) -> None:
    bench = on_ops(tmp_path / "s", AT_ONCE)
    bench.set_plan(Fault(point, errno.EIO))
    with suppress(Backend):
        bench.store.close()
    with Store(LocalTier(tmp_path / "s")) as store:
        assert store.restore("latest").commit.step == 1
        store.commit(2, make_state(1, 2)).wait()
