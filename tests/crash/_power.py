"""Processes on a simulated disk: each dies by SIGKILL or with the power, at a chosen call to the system."""

from __future__ import annotations

import errno
import linecache
import os
import random
import sys
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

from deltastore.config import Retention, WriterOptions
from deltastore.errors import DeltaStoreError
from deltastore.store import Store
from deltastore.testing.powerloss import SimulatedDisk
from deltastore.tiers.local import LocalTier
from deltastore.tiers.posix import PosixOps
from tests.crash._journal import Journal, check
from tests.crash._workload import run

OPTIONS = WriterOptions(give_up_seconds=0.0)
_PASSED = (
    "open_write_new open_read open_lock close writev pwrite ftruncate preadv fsync fsync_folder link rename_new unlink "
    "mkdir rmdir scandir stat fstat require_writable free_bytes lock_description flock"
)


class SiteDisk(SimulatedDisk):
    """A simulated disk that can leave out the syncs of one place in the code, named by its line and its caller."""

    def __init__(self, skipped: Container[str] = ()) -> None:
        super().__init__()
        self.skipped = skipped
        self.sites: set[str] = set()

    def again(self, rng: random.Random) -> SiteDisk:
        """Return the disk after a power loss at this moment."""
        after = SiteDisk(self.skipped)
        after.sites = self.sites
        crashed = self.crash(rng)
        after._root, after._count = crashed._root, crashed._count  # the numbers are the identity of files
        return after

    def _skips(self, path: str) -> bool:
        site = f"{self.label(path)}: {_site()}"
        self.sites.add(site)
        return site in self.skipped


def _site() -> str:
    """Return the line of the tier that syncs, in which of its calls, and who made that."""
    frame = sys._getframe(1)
    line = call = ""
    while frame.f_back is not None:
        code = frame.f_code
        if frame.f_globals["__name__"] == "deltastore.tiers.local":
            line = line or linecache.getline(code.co_filename, frame.f_lineno).strip().removeprefix("self.ops.")
            call = code.co_name
        elif line:
            return f"{line} in {call} from {code.co_name}"
        frame = frame.f_back
    raise AssertionError("nobody syncs")


class Process(PosixOps):
    """The system as one process sees it, until it dies: from then on nothing that it does reaches the disk."""

    def __init__(self, disk: SiteDisk, life: int, before: Callable[[int, int], bool]) -> None:
        self.disk = disk
        self.life = life
        self.calls = 0
        self.syncs = 0
        self.dead = False
        self._dies = before
        self._open: set[int] = set()

    def call(self, name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Pass a call on; once dead, refuse all."""
        with self.disk._guard:
            self.calls += 1
            self.syncs += name == "fsync_folder"
            if not self.dead and self._dies(self.calls, self.syncs if name == "fsync_folder" else 0):
                self.dead = True
                for fd in tuple(self._open):
                    self.disk.close(fd)
            if self.dead:
                if name == "close":
                    return None
                raise OSError(errno.EIO, "this process is dead")
            result = getattr(self.disk, name)(*arguments, **options)
            if name.startswith("open_"):
                self._open.add(result)
            elif name == "close":
                self._open.discard(arguments[0])
            return result

    def host(self) -> str:
        """Return the machine's name."""
        return self.disk.host()

    def boot(self) -> str:
        """Return the id of this life of the machine."""
        return self.disk.boot()

    def process_start(self, pid: int) -> str | None:
        """Return a start time: another one for each process, though all have our pid."""
        return str(self.life) if pid == os.getpid() else None


def _passed(name: str) -> Callable[..., Any]:
    def call(self: Process, *arguments: Any, **options: Any) -> Any:
        return self.call(name, arguments, options)

    return call


for _name in _PASSED.split():
    setattr(Process, _name, _passed(_name))


@dataclass
class Life:
    """What is left of a process: the disk as the next one finds it, and what was promised until then."""

    disk: SiteDisk
    journal: Journal
    killed: bool


def live(
    disk: SiteDisk,
    journal: Journal,
    life: int,
    rng: random.Random,
    *,
    retention: Retention | None = None,
    dies_at: int | None = None,
    dies_at_sync: int | None = None,
    power: bool = True,
    commits: int = 5,
    looks: Container[int] = (),
    restores: bool = True,
) -> list[Life]:
    """Run one process until it ends or dies: with the power, or alone, which leaves the system's cache to the next.

    Returns what a power loss before each of the calls `looks` would have left, and at the end what the process left.
    """
    left: list[Life] = []
    crash_rng = random.Random(rng.random())

    def before(call: int, sync: int) -> bool:
        dies = call == dies_at or sync == dies_at_sync
        if call in looks:
            left.append(Life(disk.again(crash_rng), journal.freeze(), killed=False))
        if dies:
            left.append(Life(disk.again(crash_rng) if power else disk, journal.freeze(), killed=True))
        return dies

    process = Process(disk, life, before)
    store = None
    try:
        store = Store(LocalTier(disk.store, process), options=OPTIONS, retention=retention)
        first = journal.next_serial
        run(store, journal, rng, seed=journal.seed, first_serial=first, commits=commits, restores=restores)
    except DeltaStoreError:
        if not process.dead:
            raise
    finally:
        try:
            if store is not None:
                store.close()
        except DeltaStoreError:
            if not process.dead:
                raise
    if not process.dead:
        left.append(Life(disk.again(crash_rng) if power else disk, journal.freeze(), killed=False))
    return left


def lives(seed: int, skipped: Container[str] = (), sites: set[str] | None = None) -> int:
    """Let three processes work on one store, each after the death of the one before; return how many were struck.

    After each death the store must hold what was promised.
    """
    rng = random.Random(seed)
    retention = rng.choice([None, None, Retention(2), Retention(3, 4)])
    disk, journal = SiteDisk(skipped), Journal(seed)
    struck = 0
    for life in range(3):
        dies_at = rng.randrange(1, rng.choice([25, 80, 250, 600]))
        power, commits = rng.random() < 0.6, rng.randrange(3, 8)
        left = live(disk, journal, life, rng, retention=retention, dies_at=dies_at, power=power, commits=commits)[-1]
        struck += left.killed
        disk, journal = left.disk, left.journal
        if sites is not None:
            sites.update(disk.sites)
        check_disk(disk, journal, retention)
    return struck


def after_a_kill(seed: int, skipped: Container[str] = ()) -> None:
    """Kill a process just before it syncs a folder, and let the power go while the next one works.

    What the first one made and did not sync is there for the second one to see; that must not rely on it.
    """
    rng = random.Random(seed)
    disk, journal = SiteDisk(skipped), Journal(seed)
    first = live(disk, journal, 0, rng, dies_at_sync=1 + seed % 12, power=False, commits=2)[-1]
    looks = {rng.randrange(1, 120) for _ in range(12)}
    for second in live(first.disk, first.journal, 1, rng, commits=2, looks=looks):
        check_disk(second.disk, second.journal, None)


def while_retention_deletes(seed: int, skipped: Container[str] = ()) -> None:
    """Let the power go at many moments of a run that deletes as it goes."""
    rng = random.Random(seed)
    retention = Retention(2, rng.choice([None, 5]))
    disk, journal = SiteDisk(skipped), Journal(seed)
    looks = {rng.randrange(1, 500) for _ in range(12)}
    for left in live(disk, journal, 0, rng, retention=retention, commits=12, looks=looks, restores=False):
        check_disk(left.disk, left.journal, retention)


def check_disk(disk: SiteDisk, journal: Journal, retention: Retention | None) -> None:
    """Assert that the store on a disk holds what was promised, if there is or must be one."""
    tier = LocalTier(disk.store, disk)
    if journal.acked or tier.exists():
        check(tier, journal, retention)
