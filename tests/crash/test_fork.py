"""What forked children of a writer do, and must not do: they read, hold no lock, and leave the writer's files alone."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from deltastore.config import Retention, WriterOptions
from deltastore.errors import Conflict
from deltastore.store import Store
from deltastore.testing.faulty import FaultyTier, no_faults
from deltastore.tiers.local import LocalTier
from tests.crash._states import make_state

OPTIONS = WriterOptions(give_up_seconds=0.0)


def in_child(work: Callable[[], object]) -> int:
    """Do something in a forked child; return 0 if it went well, the signal or code otherwise."""
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(LocalTier(tmp_path / "store"), options=OPTIONS)
    made.commit(0, make_state(1, 0)).wait()
    return made


def test_a_child_reads(store: Store) -> None:
    assert in_child(lambda: store.at(0).to_state_dict()) == 0
    store.close()


def test_a_child_does_not_commit(store: Store) -> None:
    def work() -> None:
        with pytest.raises(Conflict, match="forked"):
            store.commit(1, make_state(1, 1))

    assert in_child(work) == 0
    store.commit(1, make_state(1, 1)).wait()
    store.close()


def test_a_child_that_closes_the_store_touches_nothing(store: Store, tmp_path: Path) -> None:
    """A child that leaves a ``with`` block by an exception closes what it inherited."""
    root = tmp_path / "store"
    before = sorted(str(path) for path in root.rglob("*"))
    assert in_child(store.close) == 0
    assert sorted(str(path) for path in root.rglob("*")) == before
    with pytest.raises(Conflict):
        Store(LocalTier(root)).commit(1, make_state(1, 1))
    store.commit(1, make_state(1, 1)).wait()
    store.close()


def test_a_child_that_closes_does_not_take_the_pack_that_is_being_written(tmp_path: Path) -> None:
    staged, go = threading.Event(), threading.Event()

    def plan(point: str, name: str, count: int) -> None:
        if point == "publish:before" and name.startswith("packs/"):
            staged.set()
            assert go.wait(60)

    tier = FaultyTier(LocalTier(tmp_path / "store"), plan)
    with Store(tier, options=OPTIONS) as store:
        handle = store.commit(0, make_state(1, 0))
        assert staged.wait(60)
        assert in_child(store.close) == 0
        go.set()
        assert handle.wait().step == 0


def test_a_child_reads_while_the_writer_holds_its_lock(tmp_path: Path) -> None:
    """A data loader forks at any moment, also while the background deletes; its workers must not hang."""
    deleting, go = threading.Event(), threading.Event()

    def plan(point: str, name: str, count: int) -> None:
        if point == "delete" and name.startswith("packs/"):
            deleting.set()
            assert go.wait(60)

    tier = FaultyTier(LocalTier(tmp_path / "store"), no_faults)
    with Store(tier, options=OPTIONS, retention=Retention(1, 1000)) as store:
        store.set_restore_cost(1.0)
        store.commit(0, make_state(1, 0)).wait()
        tier.plan = plan
        step = 0
        while not deleting.wait(0.2):
            step += 1
            store.commit(step, make_state(1, step))
        status = in_child(lambda: store.at(0).to_state_dict())
        go.set()
    assert status == 0


def test_a_child_that_outlives_the_writer_holds_no_lock(tmp_path: Path) -> None:
    """A forked loader of a trainer that was killed does not keep the next one out."""
    root = tmp_path / "store"
    reading, writing = os.pipe()
    trainer = os.fork()
    if trainer == 0:
        try:
            with Store(LocalTier(root), options=OPTIONS) as store:
                store.commit(0, make_state(1, 0)).wait()
                worker = os.fork()
                if worker == 0:
                    os.write(writing, b"%d\n" % os.getpid())
                    signal.pause()
                signal.pause()
        finally:
            os._exit(1)
    worker = int(os.read(reading, 100))
    try:
        with pytest.raises(Conflict) as caught:
            Store(LocalTier(root)).commit(1, make_state(1, 1))
        assert caught.value.pid == trainer
        os.kill(trainer, signal.SIGKILL)
        os.waitpid(trainer, 0)
        os.kill(worker, 0)  # it lives
        with Store(LocalTier(root)) as after:
            assert after.restore("latest").commit.step == 0
            after.commit(1, make_state(1, 1)).wait()
    finally:
        os.kill(worker, signal.SIGKILL)
        os.close(reading)
        os.close(writing)
