"""One writer per folder, whatever processes, children and file systems do."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from deltastore.errors import Backend, Conflict
from deltastore.testing.faulty import FailAt, FaultyOps
from deltastore.tiers.local import LocalTier
from deltastore.tiers.lock import parse_owner
from deltastore.tiers.posix import PosixOps

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tier(tmp_path: Path) -> LocalTier:
    made = LocalTier(tmp_path / "store")
    made.create()
    return made


@contextmanager
def script(text: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run a script that says when it is ready and goes on when its input ends."""
    head = "import os, sys\nfrom deltastore.tiers.local import LocalTier\ntier = LocalTier(sys.argv[1])\n"
    process = subprocess.Popen(
        [sys.executable, "-c", head + text, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process
    finally:
        process.kill()
        process.stdin.close()
        process.stdout.close()
        process.wait(60)


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


HOLDS = 'lock = tier.lock({"session": "theirs"})\nprint("held", flush=True)\nsys.stdin.read()\n'


def test_another_process_and_its_death(tier: LocalTier) -> None:
    with script(HOLDS, tier.root) as process:
        assert said(process) == "held"
        with pytest.raises(Conflict) as caught:
            tier.lock({"session": "mine"})
        assert (caught.value.pid, caught.value.host) == (process.pid, os.uname().nodename)
        assert str(process.pid) in str(caught.value)
        assert "theirs" in str(caught.value)
        assert "since 20" in str(caught.value)
        process.kill()
        process.wait(60)
        with tier.lock({"session": "mine"}) as lock:
            assert lock.held()
            written = json.loads(Path(tier.root, "LOCK").read_bytes())
            assert written == lock.owner
            assert (written["pid"], written["session"]) == (os.getpid(), "mine")
            assert written["start"] == PosixOps().process_start(os.getpid())


CHILD_OUTLIVES = """
lock = tier.lock({"session": "theirs"})
if os.fork() == 0:
    print(os.getpid(), lock.held(), flush=True)
    sys.stdin.read()
    os._exit(0)
sys.stdin.read()
"""


def test_a_child_that_outlives_its_parent_holds_nothing(tier: LocalTier) -> None:
    with script(CHILD_OUTLIVES, tier.root) as process:
        child, held = said(process).split()
        assert held == "False"
        with pytest.raises(Conflict) as caught:
            tier.lock({})
        assert caught.value.pid == process.pid
        process.kill()
        process.wait(60)
        os.kill(int(child), 0)  # it still runs
        with tier.lock({}) as lock:
            assert lock.held()
            os.kill(int(child), signal.SIGKILL)


CHILD_ENDS = """
lock = tier.lock({"session": "theirs"})
pid = os.fork()
if pid == 0:
    lock.release()
    sys.exit(0)
os.waitpid(pid, 0)
print(lock.held(), flush=True)
sys.stdin.read()
"""


STARTS_A_PROGRAM = """
import subprocess
lock = tier.lock({"session": "theirs"})
print(subprocess.Popen(["sleep", "60"], close_fds=False).pid, flush=True)
sys.stdin.read()
"""


def test_a_program_that_the_owner_started_holds_nothing(tier: LocalTier) -> None:
    with script(STARTS_A_PROGRAM, tier.root) as process:
        program = int(said(process))
        process.kill()
        process.wait(60)
        os.kill(program, 0)
        with tier.lock({}) as lock:
            assert lock.held()
        os.kill(program, signal.SIGKILL)


def test_a_childs_exit_frees_nothing(tier: LocalTier) -> None:
    with script(CHILD_ENDS, tier.root) as process:
        assert said(process) == "True"
        with pytest.raises(Conflict) as caught:
            tier.lock({})
        assert caught.value.pid == process.pid
        assert parse_owner(Path(tier.root, "LOCK").read_bytes()) is not None


CHILD_LOCKS = """
lock = tier.lock({"session": "theirs"})
pid = os.fork()
if pid == 0:
    try:
        tier.lock({})
    except Exception as error:
        print(type(error).__name__, error.pid == os.getppid(), flush=True)
    os._exit(0)
os.waitpid(pid, 0)
sys.stdin.read()
"""


def test_a_child_is_a_second_writer(tier: LocalTier) -> None:
    with script(CHILD_LOCKS, tier.root) as process:
        assert said(process) == "Conflict True"


def test_a_fork_from_a_busy_process(tier: LocalTier) -> None:
    """Forks while threads take and give back the lock: no child hangs and none keeps it."""
    text = """
import threading
end = threading.Event()
def work():
    while not end.is_set():
        try:
            tier.lock({}).release()
        except Exception as error:
            assert type(error).__name__ == "Conflict", error
threads = [threading.Thread(target=work) for _ in range(2)]
for thread in threads: thread.start()
children = []
for _ in range(50):
    pid = os.fork()
    if pid == 0:
        tier.list("packs")
        sys.stdin.read()
        os._exit(0)
    children.append(pid)
end.set()
for thread in threads: thread.join()
with tier.lock({}) as lock:
    print(lock.held(), flush=True)
sys.stdin.read()
for pid in children: os.waitpid(pid, 0)
"""
    with script(text, tier.root) as process:
        assert said(process) == "True"
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0


def test_a_record_of_a_pid_that_is_in_use_again(tier: LocalTier) -> None:
    """The kernel's lock decides, not what a dead writer wrote: a container's pid 1 is not the old pid 1."""
    stale = {"host": os.uname().nodename, "pid": os.getpid(), "start": "1", "session": "old"}
    Path(tier.root, "LOCK").write_text(json.dumps(stale) * 50)
    with tier.lock({"session": "new"}) as lock:
        assert json.loads(Path(tier.root, "LOCK").read_bytes()) == lock.owner


def test_release_leaves_the_file_and_no_record(tier: LocalTier) -> None:
    tier.lock({}).release()
    assert Path(tier.root, "LOCK").read_bytes() == b""


def test_one_of_many_threads(tier: LocalTier) -> None:
    barrier = threading.Barrier(8)
    told: list[int] = []

    def race(_: int) -> bool:
        barrier.wait(30)
        try:
            tier.lock({})
        except Conflict as conflict:
            told.append(conflict.pid)
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(race, range(8))) == 1
    assert told == [os.getpid()] * 7


def test_a_lock_file_that_was_replaced(tier: LocalTier) -> None:
    lock = tier.lock({})
    Path(tier.root, "LOCK").unlink()
    assert not lock.held()
    with tier.lock({}) as other:
        assert other.held()
        assert not lock.held()
        lock.release()
        assert other.held()


def test_replaced_between_open_and_lock(tier: LocalTier) -> None:
    class Replacing(PosixOps):
        replaced = False

        def lock_description(self, fd: int) -> None:
            super().lock_description(fd)
            if not self.replaced:
                self.replaced = True
                Path(tier.root, "LOCK").unlink()

    with LocalTier(tier.root, Replacing()).lock({}) as lock:
        assert lock.held()
        with pytest.raises(Conflict):
            tier.lock({})


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(Backend) as caught:
        LocalTier(tmp_path / "none").lock({})
    assert caught.value.errno == errno.ENOENT


def test_a_lock_that_cannot_be_written_is_not_held(tier: LocalTier) -> None:
    with pytest.raises(Backend) as caught:
        LocalTier(tier.root, FaultyOps(FailAt("pwrite", errno.EIO))).lock({})
    assert caught.value.errno == errno.EIO
    tier.lock({}).release()


def test_a_full_disk_does_not_lock_out_who_frees_it(tier: LocalTier) -> None:
    with LocalTier(tier.root, FaultyOps(FailAt("pwrite", errno.ENOSPC))).lock({}) as lock:
        assert lock.held()
        with pytest.raises(Conflict):
            tier.lock({})


def test_conflicts_leave_no_descriptor_open(tier: LocalTier) -> None:
    with tier.lock({}):
        before = os.listdir("/proc/self/fd")
        for _ in range(5):
            with pytest.raises(Conflict):
                tier.lock({})
        assert len(os.listdir("/proc/self/fd")) == len(before)


def test_without_a_record_the_conflict_says_so(tier: LocalTier) -> None:
    with tier.lock({}):
        Path(tier.root, "LOCK").write_bytes(b"\xff{")
        with pytest.raises(Conflict, match="left no record") as caught:
            tier.lock({})
        assert caught.value.pid is None


def test_a_dead_owner_whose_lock_is_still_held(tier: LocalTier) -> None:
    """Something else than os.fork made a child: we cannot take over, but can say why."""
    with tier.lock({}):
        record = {"host": os.uname().nodename, "pid": os.getpid(), "start": "1"}
        Path(tier.root, "LOCK").write_text(json.dumps(record))
        with pytest.raises(Conflict, match="not seen here"):
            tier.lock({})


class NoDescriptionLocks(PosixOps):
    """A system without open-file-description locks."""

    def lock_description(self, fd: int) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


class NoLocks(NoDescriptionLocks):
    """A file system without any locks."""

    def flock(self, fd: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


@pytest.mark.parametrize(("ops", "how"), [(NoDescriptionLocks(), "flock"), (NoLocks(), "record")])
def test_lesser_locks(tier: LocalTier, ops: PosixOps, how: str) -> None:
    lesser = LocalTier(tier.root, ops)
    with lesser.lock({}) as lock:
        assert lock.how == how
        with pytest.raises(Conflict) as caught:
            LocalTier(tier.root, ops).lock({})
        assert caught.value.pid == os.getpid()
    lesser.lock({}).release()


def test_other_errors_of_the_lock_are_errors(tier: LocalTier) -> None:
    class Broken(PosixOps):
        def lock_description(self, fd: int) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.raises(Backend) as caught:
        LocalTier(tier.root, Broken()).lock({})
    assert caught.value.errno == errno.EIO


@pytest.mark.parametrize(
    "changes", [{"start": "1"}, {"boot": "other"}, {"host": "elsewhere"}, {"pid": 0}, {"pid": "x"}]
)
def test_without_locks_a_dead_record_is_taken_over(tier: LocalTier, changes: dict[str, object]) -> None:
    lesser = LocalTier(tier.root, NoLocks())
    owner = dict(lesser.lock({}).owner)
    with pytest.raises(Conflict):
        lesser.lock({})
    Path(tier.root, "LOCK").write_text(json.dumps(owner | changes))
    with lesser.lock({}) as lock:
        assert lock.held()


def test_the_lock_that_a_forked_child_inherits_by_flock(tier: LocalTier) -> None:
    text = "import errno\nclass Ops(type(tier.ops)):\n"
    text += "    def lock_description(self, fd): raise OSError(errno.ENOLCK, '')\n"
    text += "tier = LocalTier(sys.argv[1], Ops())\n" + CHILD_OUTLIVES
    other = LocalTier(tier.root, NoDescriptionLocks())
    with script(text, tier.root) as process:
        child = int(said(process).split()[0])
        with pytest.raises(Conflict):
            other.lock({})
        process.kill()
        process.wait(60)
        with other.lock({}):
            os.kill(child, signal.SIGKILL)
