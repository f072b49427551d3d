"""Two writers of one store: the lock keeps the second out, and where it cannot, epochs keep what was acknowledged."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from deltastore.config import WriterOptions
from deltastore.errors import AlreadyExists, Conflict, DeltaStoreError
from deltastore.history.session import Session, claimed_epochs, read_claim
from deltastore.store import Store
from deltastore.testing.compare import assert_same
from deltastore.testing.faulty import FaultyTier, Plan, no_faults
from deltastore.tiers.base import Lock, Owner
from deltastore.tiers.local import LocalTier
from deltastore.tiers.lock import FileLock
from deltastore.tiers.posix import PosixOps
from tests.cases.warm import Child, child
from tests.crash._states import make_state

OPTIONS = WriterOptions(give_up_seconds=0.0)


class FreeLock:
    """What a network file system gives to everybody who asks."""

    def __init__(self, owner: Owner) -> None:
        self.owner = owner

    def held(self) -> bool:
        return True

    def release(self) -> None:
        pass

    def __enter__(self) -> FreeLock:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class NetworkTier(LocalTier):
    """A folder on a network file system whose locks keep nobody out."""

    def lock(self, owner: Owner) -> Lock:  # type: ignore[override]
        return FreeLock(owner)


class Contender:
    """One of several writers of a folder, and what it was promised."""

    def __init__(self, root: Path, seed: int, plan: Plan = no_faults, *, network: bool = True) -> None:
        self.tier = FaultyTier(NetworkTier(root) if network else LocalTier(root), plan)
        self.store = Store(self.tier, options=OPTIONS)
        self.seed = seed
        self.acked: dict[str, int] = {}
        self._step = 0

    def restore(self) -> str | None:
        """Go on from the newest commit."""
        if not self.store.commits():
            return None
        commit = self.store.restore("latest").commit
        self._step = commit.step
        return commit.id

    def next_step(self) -> int:
        self._step += 1
        return self._step

    def commit(self) -> str:
        """Commit, and note that it was acknowledged."""
        step = self.next_step()
        commit = self.store.commit(step, make_state(self.seed, step), metrics={"seed": self.seed}).wait()
        self.acked[commit.id] = step
        return commit.id

    def close(self) -> None:
        with suppress(Conflict):
            self.store.close()


def check(root: Path, *writers: Contender) -> list[str]:
    """Assert that all that was acknowledged is exact, and before what `restore` finds; return that line."""
    with Store(LocalTier(root), writable=False) as store:
        report = store.verify(deep=True)
        assert report.ok, report.findings
        commits = {commit.id: commit for commit in store.commits()}
        assert all(commit.parent is None or commit.parent in commits for commit in commits.values())
        line = []
        at: str | None = store.at("latest").commit.id
        while at is not None:
            line.append(at)
            at = commits[at].parent
        for writer in writers:
            for commit, step in writer.acked.items():
                assert_same(make_state(writer.seed, step), store.at(commit).to_state_dict())
                assert commit in line
    with Store(LocalTier(root), options=OPTIONS) as last:
        assert last.restore("latest").commit.id == line[0]
    return line


def tree(root: Path) -> dict[str, tuple[int, int, bytes]]:
    """Return all that is in a folder, with times and content."""
    found = {}
    for path in sorted([root, *root.rglob("*")]):
        status = path.stat()
        content = b"" if path.is_dir() else path.read_bytes()
        found[str(path)] = (status.st_mode, status.st_mtime_ns, content)
    return found


# ---------------------------------------------------------------- the lock

TRAINER = """
import signal, subprocess
from deltastore.store import Store
from deltastore.tiers.local import LocalTier
from tests.crash._states import make_state

def say(text):
    print(text, flush=True)

store = Store(LocalTier(ROOT))
store.commit(0, make_state(1, 0)).wait()
"""
WITH_A_WORKER = """
if os.fork() == 0:
    signal.signal(signal.SIGUSR1, lambda *_: None)
    say(os.getpid())
    signal.pause()
    try:
        store.commit(5, make_state(1, 5))
    except Exception as error:
        say(type(error).__name__)
    finally:
        store.close()
        os._exit(0)
store.commit(1, make_state(1, 1)).wait()
store.close()
"""
WITH_A_COMMAND = """
say(subprocess.Popen(["sleep", "60"], close_fds=False, stdout=subprocess.DEVNULL).pid)
signal.pause()
"""
ALONE = """
say("ready")
signal.pause()
"""


@contextmanager
def trainer(root: Path, how: str = ALONE) -> Iterator[Child]:
    process = child(f"ROOT = {str(root)!r}\n{TRAINER}{how}")
    try:
        yield process
    finally:
        process.kill()


@pytest.mark.parametrize("stopped", [False, True])
def test_the_second_is_told_who_has_it_and_takes_over_when_it_is_gone(tmp_path: Path, stopped: bool) -> None:
    """One that was only stopped lives: its commits are its own."""
    root = tmp_path / "store"
    with trainer(root) as first:
        assert first.line() == "ready"
        if stopped:
            os.kill(first.pid, signal.SIGSTOP)
        second = Store(LocalTier(root), options=OPTIONS)
        for call in (lambda: second.commit(1, make_state(1, 1)), lambda: second.restore("latest")):
            with pytest.raises(Conflict) as caught:
                call()
            assert (caught.value.host, caught.value.pid) == (os.uname().nodename, first.pid)
            assert str(first.pid) in str(caught.value)
        assert second.at("latest").commit.step == 0
        first.kill()
        # The same object, which was refused before.
        parent = second.restore("latest").commit.id
        assert second.commit(1, make_state(1, 1)).wait().parent == parent
        second.close()
    check(root)
    assert list((root / "tmp").iterdir()) == []


def test_a_command_that_the_trainer_started_holds_no_lock(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with trainer(root, WITH_A_COMMAND) as first:
        command = int(first.line())
        first.kill()
        try:
            os.kill(command, 0)
            with Store(LocalTier(root), options=OPTIONS) as second:
                assert second.restore("latest").commit.step == 0
        finally:
            os.kill(command, signal.SIGKILL)


def test_a_worker_that_outlives_its_trainer_can_neither_write_nor_hinder(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with trainer(root, WITH_A_WORKER) as first:
        worker = int(first.line())
        with Store(LocalTier(root), options=OPTIONS) as second:
            while True:  # until the trainer has ended
                with suppress(Conflict):
                    assert second.restore("latest").commit.step == 1
                    break
            second.commit(2, make_state(1, 2)).wait()
            before = tree(root)
            os.kill(worker, signal.SIGUSR1)
            assert [first.line(), first.line()] == ["Conflict", ""]  # it has tried, and ended
            assert tree(root) == before
            second.commit(3, make_state(1, 3)).wait()
        assert first.wait() == 0
    check(root)


def test_a_lock_that_was_deleted_by_hand(tmp_path: Path) -> None:
    """The lock guards nothing any more; the epoch does."""
    root = tmp_path / "store"
    first, second = Contender(root, 1, network=False), Contender(root, 2, network=False)
    first.commit()
    (root / "LOCK").unlink()
    assert second.restore() in first.acked
    second.commit()
    with pytest.raises(Conflict):
        first.commit()
    first.close()
    second.commit()
    second.close()
    check(root, first, second)


# ---------------------------------------------------------------- a machine without locks: the record decides


class OtherLife(PosixOps):
    """A file system without locks, seen by a process of this number in another life of machine or container."""

    def __init__(self, boot: str, start: str, host: str = "node1") -> None:
        self._facts = boot, start, host

    def boot(self) -> str:
        return self._facts[0]

    def process_start(self, pid: int) -> str | None:
        return self._facts[1]

    def host(self) -> str:
        return self._facts[2]

    def lock_description(self, fd: int) -> None:
        raise OSError(errno.ENOLCK, "no locks here")

    flock = lock_description


@pytest.mark.parametrize(("boot", "start"), [("b2", "1"), ("b1", "2"), ("b2", "2")])
def test_process_1_of_a_new_container_is_not_that_of_the_old_one(tmp_path: Path, boot: str, start: str) -> None:
    root = tmp_path / "store"
    old = Store(LocalTier(root, OtherLife("b1", "1")), options=OPTIONS)
    old.commit(0, make_state(1, 0)).wait()
    with pytest.raises(Conflict) as caught:
        Store(LocalTier(root, OtherLife("b1", "1")), options=OPTIONS).commit(1, make_state(1, 1))
    assert (caught.value.host, caught.value.pid) == ("node1", os.getpid())
    with Store(LocalTier(root, OtherLife(boot, start)), options=OPTIONS) as new:  # the old one never closed
        assert new.restore("latest").commit.step == 0
        new.commit(1, make_state(1, 1)).wait()
        assert len(list((root / "tmp").iterdir())) == 1
    with pytest.raises(Conflict):
        old.commit(1, make_state(1, 1)).wait()
    old.close()  # it was told: that it is fenced is no news
    check(root)


@pytest.mark.parametrize("locks", [True, False])
def test_the_number_alone_is_not_believed(tmp_path: Path, locks: bool) -> None:
    """A record with our own number, written before the machine was started anew, hinders nobody."""
    root = tmp_path / "store"
    ops = PosixOps() if locks else OtherLife("b1", "1")
    with Store(LocalTier(root, ops), options=OPTIONS) as store:
        store.commit(0, make_state(1, 0)).wait()
    record = {"boot": "gone", "host": ops.host(), "pid": os.getpid(), "session": "x", "since": "", "start": "0"}
    (root / "LOCK").write_text(json.dumps(record))
    with Store(LocalTier(root, ops), options=OPTIONS) as store:
        assert store.restore("latest").commit.step == 0


def test_a_zombie_without_locks_does_not_clear_the_record_of_its_successor(tmp_path: Path) -> None:
    root = tmp_path / "store"
    old = Store(LocalTier(root, OtherLife("b1", "1", "node1")), options=OPTIONS)
    old.commit(0, make_state(1, 0)).wait()
    new = Store(LocalTier(root, OtherLife("b2", "2", "node2")), options=OPTIONS)
    new.restore("latest")
    old.close()
    with pytest.raises(Conflict) as caught:
        Store(LocalTier(root, OtherLife("b2", "2", "node2")), options=OPTIONS).commit(1, make_state(1, 1))
    assert caught.value.host == "node2"
    new.commit(1, make_state(1, 1)).wait()
    new.close()
    check(root)


# ---------------------------------------------------------------- racing claims of one number


@pytest.mark.parametrize("racers", [2, 6])
def test_racing_claims_of_one_number(tmp_path: Path, racers: int) -> None:
    """Equal epochs cannot arise in one folder: one gets the number, the others the next ones."""
    root = tmp_path / "store"
    barrier = threading.Barrier(racers)

    def together(point: str, name: str, count: int) -> None:
        if point == "publish:before" and name == "epochs/1.json":
            barrier.wait(60)

    NetworkTier(root).create()
    sessions = [Session(FaultyTier(NetworkTier(root), together), f"{number:016x}") for number in range(racers)]
    with ThreadPoolExecutor(racers) as pool:
        list(pool.map(Session.claim, sessions))
    assert barrier.n_waiting == 0
    assert sorted(session.epoch for session in sessions) == list(range(1, racers + 1))
    assert len({session.store for session in sessions}) == 1
    tier = LocalTier(root)
    assert claimed_epochs(tier) == set(range(1, racers + 1))
    for session in sessions:
        assert read_claim(tier, session.epoch) == session.id
        if session.epoch < racers:
            with pytest.raises(Conflict):
                session.check_fence()
        else:
            session.check_fence()
        session.close()


def test_racing_publishes_of_one_name(tmp_path: Path) -> None:
    tiers = [NetworkTier(tmp_path / "store") for _ in range(4)]
    tiers[0].create()
    barrier = threading.Barrier(len(tiers))

    def publish(number: int) -> bool:
        barrier.wait(60)
        try:
            tiers[number].publish_new("epochs/7.json", [b"%d" % number], f"{number:016x}")
        except AlreadyExists:
            return False
        return True

    with ThreadPoolExecutor(len(tiers)) as pool:
        won = list(pool.map(publish, range(len(tiers))))
    assert won.count(True) == 1
    assert tiers[0].read("epochs/7.json") == b"%d" % won.index(True)


def test_racing_first_commits(tmp_path: Path) -> None:
    """Writers begin one store at once; who was acknowledged was so before the next one claimed."""
    root = tmp_path / "store"
    writers = [Contender(root, seed) for seed in (1, 2, 3)]
    barrier = threading.Barrier(len(writers))

    def begin(writer: Contender) -> bool:
        barrier.wait(60)
        try:
            writer.commit()
        except Conflict:
            return False
        return True

    with ThreadPoolExecutor(len(writers)) as pool:
        went = list(pool.map(begin, writers))
    assert any(went)
    for writer in writers:
        writer.close()
    check(root, *writers)


# ---------------------------------------------------------------- a claim while another writer commits

MOMENTS = ("stage", "stage:part:0", "stage:after", "publish:before", "publish:after", "open", "list", "read")


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("goes_on", [False, True], ids=["claims only", "commits"])
def test_a_claim_at_each_moment_of_a_commit(tmp_path: Path, moment: str, goes_on: bool) -> None:
    """The commit is not acknowledged; if it had landed by then, the new writer builds upon it all the same."""
    root = tmp_path / "store"
    loser, winner = Contender(root, 1), Contender(root, 2)
    before = [loser.commit() for _ in range(3)]
    found: list[str | None] = []

    def take_over(point: str, name: str, count: int) -> None:
        if point == moment and not found:
            found.append(winner.restore())
            if goes_on:
                winner.commit()

    loser.tier.plan = take_over
    with pytest.raises(Conflict) as caught:
        loser.commit()
    assert (caught.value.expected, caught.value.found) == (1, 2)
    assert (found[0] not in before) == (moment in ("publish:after", "open", "read", "list"))
    with pytest.raises(Conflict):
        loser.commit()
    loser.close()
    winner.commit()
    winner.close()
    assert set(before) < set(check(root, loser, winner))


def test_the_loser_opens_again_and_goes_on(tmp_path: Path) -> None:
    root = tmp_path / "store"
    loser, winner = Contender(root, 1), Contender(root, 2)
    loser.commit()
    winner.restore()
    last = winner.commit()
    with pytest.raises(Conflict):
        loser.commit()
    loser.close()
    again = Contender(root, 3)
    assert again.restore() == last
    again.commit()
    with pytest.raises(Conflict):
        winner.commit()
    for writer in (winner, again):
        writer.close()
    check(root, loser, winner, again)


@pytest.mark.parametrize("moment", ["stage", "stage:after", "publish:before", "publish:after", "list"])
def test_a_zombie_that_wakes_up(tmp_path: Path, moment: str) -> None:
    """It slept through a takeover, in the middle of a commit with others behind it; then all are told."""
    root = tmp_path / "store"
    asleep, wake = threading.Event(), threading.Event()
    zombie = Contender(root, 1)
    zombie.commit()

    def sleep(point: str, name: str, count: int) -> None:
        if point == moment and not asleep.is_set() and name != "tags":
            asleep.set()
            assert wake.wait(60)

    zombie.tier.plan = sleep
    queued = [zombie.store.commit(zombie.next_step(), make_state(1, step)) for step in (2, 3)]
    assert asleep.wait(60)
    next_one = Contender(root, 2)
    next_one.restore()
    for _ in range(3):
        next_one.commit()
    wake.set()
    for handle in queued:
        with pytest.raises(Conflict):
            handle.wait(timeout=60)
    next_one.commit()
    with pytest.raises(Conflict):
        zombie.commit()
    zombie.close()
    next_one.commit()
    next_one.close()
    check(root, zombie, next_one)


def test_a_zombie_whose_temporary_files_were_cleaned(tmp_path: Path) -> None:
    """From another host, silent for a day, its folder went: nothing of it appears by halves."""
    root = tmp_path / "store"
    zombie = Contender(root, 1)
    zombie.commit()

    def clean(point: str, name: str, count: int) -> None:
        if point == "publish:before" and name.startswith("packs"):
            for folder in (root / "tmp").iterdir():
                shutil.rmtree(folder)

    zombie.tier.plan = clean
    with pytest.raises(DeltaStoreError):
        zombie.commit()
    zombie.tier.plan = no_faults
    zombie.commit()
    zombie.close()
    check(root, zombie)


@pytest.mark.parametrize("rounds", [6, pytest.param(300, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
def test_writers_that_push_each_other_out(tmp_path: Path, seed: int, rounds: int) -> None:
    """At random, from several threads: every acknowledged commit is on the line of whoever came last."""
    for number in range(rounds):
        root = tmp_path / str(number)
        first = Contender(root, 0)
        first.commit()
        first.close()

        def push(mine: int, root: Path = root, number: int = number) -> list[Contender]:
            rng = random.Random((seed * 1000 + number) * 10 + mine)
            made = []
            for life in range(3):
                writer = Contender(root, 10 * mine + life + 1)
                made.append(writer)
                try:
                    writer.restore()
                    for _ in range(rng.randrange(1, 5)):
                        writer.commit()
                except Conflict:
                    pass
                finally:
                    writer.close()
            return made

        with ThreadPoolExecutor(3) as pool:
            writers = [writer for made in pool.map(push, range(3)) for writer in made]
        check(root, first, *writers)


# ---------------------------------------------------------------- copies of a folder


@pytest.mark.parametrize("live", [False, True])
def test_a_copied_folder_is_a_store_of_its_own(tmp_path: Path, live: bool) -> None:
    """Copied while the run lives, with its LOCK and its temporary files: both go on, nothing is lost in either."""
    root, copy = tmp_path / "store", tmp_path / "copy"
    first = Contender(root, 1, network=False)
    before = [first.commit() for _ in range(3)]
    if not live:
        first.close()
    shutil.copytree(root, copy)
    second = Contender(copy, 2, network=False)
    assert second.restore() == before[-1]
    second.commit()
    second.close()
    if live:
        first.commit()
        first.close()
    assert set(before) <= set(check(copy, second))
    assert set(before) <= set(check(root, first))


def test_a_folder_that_is_replaced_by_an_older_copy_under_its_writer(tmp_path: Path) -> None:
    """A node was restored from an image: the writer's claim is gone, so it stops."""
    root, image = tmp_path / "store", tmp_path / "image"
    first = Contender(root, 1, network=False)
    first.commit()
    first.close()
    shutil.copytree(root, image)
    second = Contender(root, 2, network=False)
    second.restore()
    second.commit()
    root.rename(tmp_path / "away")
    image.rename(root)
    with pytest.raises(Conflict, match="removed or replaced"):
        second.commit()
    second.close()
    third = Contender(root, 3, network=False)
    third.restore()
    third.commit()
    third.close()
    with Store(LocalTier(root), writable=False) as store:
        assert store.commits()[-1].metrics == {"seed": 3}
        for commit in first.acked:
            store.at(commit).to_state_dict()


# ---------------------------------------------------------------- a notebook on a live run


@pytest.mark.parametrize("mode", ["r", "a"])
def test_a_notebook_on_a_live_run_writes_nothing(tmp_path: Path, mode: str) -> None:
    root = tmp_path / "store"
    run = Contender(root, 1, network=False)
    for _ in range(4):
        run.commit()
    run.store.tag("best", 2)
    before = tree(root)
    with Store(LocalTier(root), writable=mode == "a", options=OPTIONS) as notebook:
        assert [commit.step for commit in notebook.commits()] == [1, 2, 3, 4]
        assert_same(make_state(1, 3), notebook.at(3).to_state_dict())
        assert notebook.at("best").commit.step == 2
        assert notebook.verify(deep=True).ok
        assert notebook.durable() == 4
        assert len(notebook.prune(keep_last=1).commits) >= 0
        notebook.flush()
        if mode == "a":
            for refused in (
                lambda: notebook.commit(9, make_state(1, 9)),
                lambda: notebook.restore("latest"),
                lambda: notebook.prune(dry_run=False),
            ):
                with pytest.raises(Conflict):
                    refused()
        assert tree(root) == before
        run.commit()
        during = tree(root)
        assert notebook.durable() == 4
        notebook.refresh()
        assert notebook.durable() == 5
    assert tree(root) == during
    run.commit()
    run.close()
    check(root, run)


def test_a_lock_is_one_file_lock(tmp_path: Path) -> None:
    """The tests above rest on this: a local tier has the lock of the kernel here."""
    tier = LocalTier(tmp_path / "store")
    tier.create()
    with tier.lock({}) as lock:
        assert isinstance(lock, FileLock)
        assert lock.how == "description"
