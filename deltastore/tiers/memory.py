"""A tier in this process's memory: for ``memory://`` stores and as the model that other tiers are tested against."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Self

from deltastore.errors import AlreadyExists, Backend, DeltaStoreError, InvalidInput, NotFound
from deltastore.tiers.base import (
    Buffer,
    FileInfo,
    FileInfos,
    Names,
    Owner,
    Staged,
    as_bytes,
    backend_error,
    check_name,
    check_range,
    check_session,
    check_target,
    stage_and_publish,
)
from deltastore.tiers.lock import conflict, identify
from deltastore.tiers.posix import PosixOps

_OPS = PosixOps()

# One lock for all: what it guards takes microseconds. Taken around a fork so that no child finds it held by a thread
# that it does not have; reentrant, since a signal handler may fork while we hold it.
_guard = threading.RLock()
os.register_at_fork(before=_guard.acquire, after_in_parent=_guard.release, after_in_child=_guard.release)


class _Place:
    """What all tiers of one name share."""

    def __init__(self) -> None:
        self.created = False
        self.files: dict[str, bytes] = {}
        self.staged: dict[str, bytes] = {}
        self.lock: MemoryLock | None = None


_places: dict[str, _Place] = {}
_tokens = itertools.count()


class MemoryFile:
    """A file of a memory tier."""

    def __init__(self, where: str, data: bytes) -> None:
        self._where = where
        self._data: memoryview | None = memoryview(data)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._open().nbytes

    def readinto(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill all ``buffers`` with the bytes from ``offset`` on; Corruption when the file ends before."""
        views = [buffer.cast("B") for buffer in buffers if buffer.nbytes]
        data = self._open()
        check_range(self._where, data.nbytes, offset, sum(view.nbytes for view in views))
        at = offset
        for view in views:
            view[:] = data[at : at + view.nbytes]
            at += view.nbytes

    def read(self, offset: int, length: int) -> bytes:
        """Return exactly ``length`` bytes from ``offset`` on."""
        data = self._open()
        check_range(self._where, data.nbytes, offset, length)
        return bytes(data[offset : offset + length])

    def close(self) -> None:
        """Give the bytes back; twice is fine."""
        self._data = None

    def _open(self) -> memoryview:
        if self._data is None:
            raise InvalidInput(f"{self._where}: this file was closed", file=self._where)
        return self._data

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class MemoryLock:
    """The right to write to a memory tier."""

    def __init__(self, place: _Place, owner: Owner) -> None:
        self._place = place
        self._owner = owner

    @property
    def owner(self) -> Owner:
        """The record that a refused writer is told."""
        return self._owner

    def held(self) -> bool:
        """Tell whether this process still holds the lock: a forked child has only a copy of it."""
        return self._place.lock is self and self._owner["pid"] == os.getpid()

    def release(self) -> None:
        """Let the next writer in; twice is fine."""
        with _guard:
            if self.held():
                self._place.lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class MemoryTier:
    """The files of ``memory://<name>``: the same for every tier of this name in the process, gone when it ends.

    Bytes are copied when they are staged and when they are read, so nobody's array is ever part of a store.
    """

    name = "memory"

    def __init__(self, name: str) -> None:
        self.url = f"memory://{name}"
        with _guard:
            self._place = _places.setdefault(name, _Place())

    def exists(self) -> bool:
        """Tell whether a store is here."""
        return self._place.created or "FORMAT.json" in self._place.files

    def create(self) -> None:
        """Allow staging."""
        self._place.created = True

    def check_writable(self) -> None:
        """Return: memory can always be written."""

    def stage(self, name: str, parts: Iterable[Buffer], session: str) -> Staged:
        """Copy the parts of a file; it stays invisible."""
        check_target(name)
        check_session(session)
        if not self._place.created:
            raise Backend(f"{self.url}: there is no store here to write {name} to", errno=errno.ENOENT)
        try:
            data = b"".join(map(as_bytes, parts))
        except DeltaStoreError:
            raise
        except OSError as error:
            raise backend_error(f"{self.url}: writing {name}", name, error) from error
        token = f"{session}/{next(_tokens)}"
        self._place.staged[token] = data
        return Staged(name, len(data), token)

    def publish(self, staged: Staged) -> None:
        """Give a staged file its name, or raise AlreadyExists."""
        check_target(staged.name)
        with _guard:
            if staged.name in self._place.files:
                raise AlreadyExists(f"{self.url}: {staged.name} exists", file=staged.name)
            if staged.token not in self._place.staged:
                raise Backend(f"{self.url}: {staged.name} is not staged any more", errno=errno.ENOENT)
            self._place.files[staged.name] = self._place.staged.pop(staged.token)

    def discard(self, staged: Staged) -> None:
        """Forget a staged file."""
        self._place.staged.pop(staged.token, None)

    def publish_new(self, name: str, parts: Iterable[Buffer], session: str) -> int:
        """Stage and publish; return the size."""
        return stage_and_publish(self, name, parts, session)

    def list(self, folder: str) -> FileInfos:
        """Return every file below a folder ("" = all), sorted by name."""
        if folder:
            check_name(folder)
        start = folder and folder + "/"
        with _guard:
            found = [FileInfo(name, len(data)) for name, data in self._place.files.items() if name.startswith(start)]
        return sorted(found, key=lambda info: info.name)

    def open(self, name: str) -> MemoryFile:
        """Open a published file, or raise NotFound."""
        return MemoryFile(f"{self.url}/{name}", self.read(name))

    def read(self, name: str) -> bytes:
        """Return the whole of a published file, or raise NotFound."""
        check_name(name)
        data = self._place.files.get(name)
        if data is None:
            raise NotFound(f"{self.url}: there is no file {name}", file=name)
        return data

    def delete(self, name: str) -> None:
        """Remove a file; one that is missing is fine."""
        check_target(name)
        with _guard:
            self._place.files.pop(name, None)

    def sync(self, folder: str) -> None:
        """Check the name: there is nothing more durable than memory here."""
        if folder:
            check_name(folder)

    def free_bytes(self) -> int | None:
        """Return None: how much memory the rest of the process will need is not known."""
        return None

    def lock(self, owner: Owner) -> MemoryLock:
        """Take the right to write, or raise Conflict."""
        with _guard:
            if self._place.lock is not None:
                raise conflict(_OPS, self.url, self._place.lock.owner)
            self._place.lock = MemoryLock(self._place, identify(_OPS, owner))
            return self._place.lock

    def clean(self, keep_session: str) -> Names:
        """Return nothing: what a dead writer left died with its process."""
        check_session(keep_session)
        return []

    def end_session(self, session: str) -> None:
        """Forget what this session left staged."""
        check_session(session)
        with _guard:
            for token in [token for token in self._place.staged if token.startswith(session + "/")]:
                del self._place.staged[token]
