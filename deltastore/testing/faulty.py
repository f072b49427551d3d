"""Faults at named points: what a disk that fills up, breaks or loses an answer does to the code above it."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeAlias

from deltastore.errors import DeltaStoreError
from deltastore.tiers.base import Buffer, FileInfos, Lock, Names, Owner, RandomFile, Staged, Tier, backend_error
from deltastore.tiers.posix import PosixOps

Plan: TypeAlias = Callable[[str, str, int], Exception | None]
"""``plan(point, name, count)`` gives the error to raise there or None; ``count`` is how often the point was reached."""


@dataclass(frozen=True, slots=True)
class FailAt:
    """A plan: fail with the system's error ``errno`` from the ``first``-th time on that ``point`` is reached.

    ``times`` limits how often; None is for ever. ``name`` must be part of the file's name.
    """

    point: str
    errno: int
    first: int = 1
    times: int | None = None
    name: str = ""

    def __call__(self, point: str, name: str, count: int) -> Exception | None:
        """Return the error, if this is the place."""
        last = count if self.times is None else self.first + self.times - 1
        if point == self.point and self.name in name and self.first <= count <= last:
            return OSError(self.errno, os.strerror(self.errno), name)
        return None


@dataclass(frozen=True, slots=True)
class KillPoint:
    """A plan: this process dies by SIGKILL when ``point`` is reached for the ``count``-th time."""

    point: str
    count: int = 1
    name: str = ""

    def __call__(self, point: str, name: str, count: int) -> Exception | None:
        """Kill, if this is the place."""
        if point == self.point and self.name in name and count == self.count:
            os.kill(os.getpid(), signal.SIGKILL)
        return None


class _Gate:
    """Counts points and raises what the plan says."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.counts: Counter[str] = Counter()
        self._guard = threading.Lock()

    def __call__(self, point: str, name: str) -> None:
        with self._guard:
            self.counts[point] += 1
            count = self.counts[point]
        error = self.plan(point, name, count)
        if error is not None:
            raise error


class FaultyTier:
    """A tier that fails where the plan says so, and counts.

    Points: ``create``, ``stage``, ``stage:part:<n>`` (from 0, when the part is asked for), ``stage:after``,
    ``publish:before``, ``publish:after`` (it has landed: the place for OutcomeUnknown and for a kill), ``discard``,
    ``list``, ``open``, ``read`` (of a whole file and of a range), ``delete``, ``sync``, ``lock``, ``clean``. An OSError
    of the plan arrives as Backend with its errno, as from any tier. ``calls[point]`` counts how often one was reached.
    """

    def __init__(self, inner: Tier, plan: Plan) -> None:
        self.inner = inner
        self._gate = _Gate(plan)

    @property
    def calls(self) -> Counter[str]:
        """How often each point was reached."""
        return self._gate.counts

    @property
    def plan(self) -> Plan:
        """The plan, which may be replaced at any time."""
        return self._gate.plan

    @plan.setter
    def plan(self, plan: Plan) -> None:
        self._gate.plan = plan

    @property
    def name(self) -> str:
        """The kind of the inner tier."""
        return self.inner.name

    @property
    def url(self) -> str:
        """What opens the inner tier again."""
        return self.inner.url

    def exists(self) -> bool:
        """Tell whether a store is here."""
        return self.inner.exists()

    def create(self) -> None:
        """Make the root and its folders."""
        self._reach("create", "")
        self.inner.create()

    def check_writable(self) -> None:
        """Raise Backend if writing here must fail."""
        self.inner.check_writable()

    def stage(self, name: str, parts: Iterable[Buffer], session: str) -> Staged:
        """Write a file below tmp."""
        self._reach("stage", name)
        staged = self.inner.stage(name, self._counted(name, parts), session)
        self._reach("stage:after", name)
        return staged

    def publish(self, staged: Staged) -> None:
        """Give a staged file its name."""
        self._reach("publish:before", staged.name)
        self.inner.publish(staged)
        self._reach("publish:after", staged.name)

    def discard(self, staged: Staged) -> None:
        """Remove a staged file."""
        self._reach("discard", staged.name)
        self.inner.discard(staged)

    def publish_new(self, name: str, parts: Iterable[Buffer], session: str) -> int:
        """Stage and publish; return the size."""
        staged = self.stage(name, parts, session)
        try:
            self.publish(staged)
        except BaseException:
            self.inner.discard(staged)
            raise
        return staged.size

    def list(self, folder: str) -> FileInfos:
        """Return every file below a folder."""
        self._reach("list", folder)
        return self.inner.list(folder)

    def open(self, name: str) -> RandomFile:
        """Open a published file."""
        self._reach("open", name)
        return _FaultyFile(self.inner.open(name), lambda: self._reach("read", name))

    def read(self, name: str) -> bytes:
        """Return the whole of a published file."""
        self._reach("read", name)
        return self.inner.read(name)

    def delete(self, name: str) -> None:
        """Remove a file."""
        self._reach("delete", name)
        self.inner.delete(name)

    def sync(self, folder: str) -> None:
        """Make the names in a folder durable."""
        self._reach("sync", folder)
        self.inner.sync(folder)

    def free_bytes(self) -> int | None:
        """Return how much may still be written."""
        return self.inner.free_bytes()

    def lock(self, owner: Owner) -> Lock:
        """Take the right to write."""
        self._reach("lock", "LOCK")
        return self.inner.lock(owner)

    def clean(self, keep_session: str) -> Names:
        """Remove what dead writers left."""
        self._reach("clean", "tmp")
        return self.inner.clean(keep_session)

    def end_session(self, session: str) -> None:
        """Remove what this session left."""
        self.inner.end_session(session)

    def _counted(self, name: str, parts: Iterable[Buffer]) -> Iterator[Buffer]:
        for number, part in enumerate(parts):
            self._reach(f"stage:part:{number}", name)
            yield part

    def _reach(self, point: str, name: str) -> None:
        try:
            self._gate(point, name)
        except DeltaStoreError:
            raise
        except OSError as error:
            raise backend_error(f"{self.url}: {point} {name}", name, error) from error


class _FaultyFile:
    def __init__(self, inner: RandomFile, reach: Callable[[], None]) -> None:
        self._inner = inner
        self._reach = reach

    @property
    def size(self) -> int:
        return self._inner.size

    def readinto(self, offset: int, buffers: Sequence[memoryview]) -> None:
        self._reach()
        self._inner.readinto(offset, buffers)

    def read(self, offset: int, length: int) -> bytes:
        self._reach()
        return self._inner.read(offset, length)

    def close(self) -> None:
        self._inner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class FaultyOps(PosixOps):
    """The real system, failing below a LocalTier, at points finer than a tier's.

    Points, each reached before the call: ``open_write_new open_read open_lock writev pwrite preadv fsync fsync_folder
    link unlink mkdir``; and after it: ``writev:after fsync:after fsync_folder:after link:after unlink:after``.
    Names are paths.
    """

    def __init__(self, plan: Plan) -> None:
        self.gate = _Gate(plan)
        self._paths: dict[int, str] = {}

    def open_write_new(self, path: str) -> int:
        """Create a file."""
        self.gate("open_write_new", path)
        fd = super().open_write_new(path)
        self._paths[fd] = path
        return fd

    def open_read(self, path: str) -> int:
        """Open a file for reading."""
        self.gate("open_read", path)
        fd = super().open_read(path)
        self._paths[fd] = path
        return fd

    def open_lock(self, path: str) -> int:
        """Open a file for reading and writing."""
        self.gate("open_lock", path)
        fd = super().open_lock(path)
        self._paths[fd] = path
        return fd

    def writev(self, fd: int, buffers: Sequence[memoryview]) -> int:
        """Append buffers."""
        self.gate("writev", self._paths.get(fd, ""))
        count = super().writev(fd, buffers)
        self.gate("writev:after", self._paths.get(fd, ""))
        return count

    def pwrite(self, fd: int, data: bytes, offset: int) -> int:
        """Write at an offset."""
        self.gate("pwrite", self._paths.get(fd, ""))
        return super().pwrite(fd, data, offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill buffers."""
        self.gate("preadv", self._paths.get(fd, ""))
        return super().preadv(fd, buffers, offset)

    def fsync(self, fd: int) -> None:
        """Make the content of a file durable."""
        self.gate("fsync", self._paths.get(fd, ""))
        super().fsync(fd)
        self.gate("fsync:after", self._paths.get(fd, ""))

    def fsync_folder(self, path: str) -> None:
        """Make the names in a folder durable."""
        self.gate("fsync_folder", path)
        super().fsync_folder(path)
        self.gate("fsync_folder:after", path)

    def link(self, source: str, target: str) -> None:
        """Give a file a second name."""
        self.gate("link", target)
        super().link(source, target)
        self.gate("link:after", target)

    def unlink(self, path: str) -> None:
        """Remove a name."""
        self.gate("unlink", path)
        super().unlink(path)
        self.gate("unlink:after", path)

    def mkdir(self, path: str) -> None:
        """Make a folder."""
        self.gate("mkdir", path)
        super().mkdir(path)


def no_faults(point: str, name: str, count: int) -> Exception | None:
    """Return None: a plan under which nothing fails."""
    return None
