"""A disk that may lose power: it keeps what was synced and forgets, shortens or reorders the rest.

The model is the weakest that POSIX allows, weaker than any real file system:

- the content of a file survives only up to its last ``fsync``; later writes survive as prefix, zeros or garbage;
- a name (made, linked, renamed, removed) survives only if its *folder* was synced afterwards; of the changes since, any
  subset survives, in any order;
- a lock, an open descriptor and the boot id never survive.
"""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from deltastore.tiers.posix import Entry, PosixOps, Status

Skip: TypeAlias = int | Callable[[str], bool] | None


class _File:
    """Content as programs see it, and as it lay on the disk at the last sync."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.data = bytearray()
        self.durable = b""
        self.dirty = False
        self.modified = time.time()
        self.locked = False


class _Folder:
    """Names as programs see them, as the disk has them, and the changes between the two."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.names: dict[str, _File | _Folder] = {}
        self.durable: dict[str, _File | _Folder] = {}
        self.pending: list[tuple[str, _File | _Folder | None]] = []
        self.modified = time.time()

    def change(self, name: str, node: _File | _Folder | None) -> None:
        if node is None:
            del self.names[name]
        else:
            self.names[name] = node
        self.pending.append((name, node))
        self.modified = time.time()


class _Handle(NamedTuple):
    file: _File
    path: str
    locks: bool


class SimulatedDisk(PosixOps):
    """A file system in memory, to be given to ``LocalTier(disk.store, disk)``.

    Attributes
    ----------
    store : str
        The root of the store, from which labels are derived; the folder around it exists and is durable.
    labels : list of str
        What each call of ``fsync`` and ``fsync_folder`` was for, in order: "pack file", "packs folder", ...
    skip_fsync : int, callable or None
        Syncs that do nothing though they succeed: the call of this number (from 0), or those whose label the
        callable accepts. For the check that no sync can be left out.
    """

    def __init__(self, store: str = "/disk/store") -> None:
        self.store = store
        self.labels: list[str] = []
        self.skip_fsync: Skip = None
        self._guard = threading.RLock()
        self._boot = os.urandom(8).hex()
        self._count = 0
        self._handles: dict[int, _Handle] = {}
        self._root = _Folder(self._number())
        folder = self._root
        for name in store.strip("/").split("/")[:-1]:
            inner = _Folder(self._number())
            folder.names[name] = folder.durable[name] = inner
            folder = inner

    def crash(self, rng: random.Random) -> SimulatedDisk:
        """Return a state in which the disk may be found after a power loss at this moment."""
        with self._guard:
            after = SimulatedDisk(self.store)
            copies: dict[int, _File] = {}
            after._root = self._surviving(self._root, rng, copies, after)
            return after

    def label(self, path: str) -> str:
        """Return what a path is in a store: "pack file", "packs folder", "parent of root", ..."""
        if path == self.store:
            return "root folder"
        if self.store.startswith(path.rstrip("/") + "/"):
            return "parent of root"
        names = path.removeprefix(self.store + "/").split("/")
        if names[0] != "tmp":
            return f"{names[0]} folder" if len(names) == 1 else f"{names[0].removesuffix('s')} folder"
        if len(names) < 3:
            return "tmp folder"
        # tmp/<session>/<n>-<name with dots for slashes>
        kind = names[2].partition("-")[2].split(".")[0]
        return f"{kind.removesuffix('s')} file"

    def open_write_new(self, path: str) -> int:
        """Create a file."""
        with self._guard:
            folder, name = self._place(path)
            if name in folder.names:
                raise _error(errno.EEXIST, path)
            file = _File(self._number())
            folder.change(name, file)
            return self._handle(file, path)

    def open_read(self, path: str) -> int:
        """Open a file for reading."""
        with self._guard:
            return self._handle(self._file(path), path)

    def open_lock(self, path: str) -> int:
        """Open a file for reading and writing, made if it is not there."""
        with self._guard:
            folder, name = self._place(path)
            return self._handle(self._file(path), path) if name in folder.names else self.open_write_new(path)

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        with self._guard:
            handle = self._handles.pop(fd)
            if handle.locks:
                handle.file.locked = False

    def writev(self, fd: int, buffers: Sequence[memoryview]) -> int:
        """Append buffers."""
        with self._guard:
            file = self._handles[fd].file
            before = len(file.data)
            for buffer in buffers:
                file.data += buffer
            file.dirty = True
            file.modified = time.time()
            return len(file.data) - before

    def pwrite(self, fd: int, data: bytes, offset: int) -> int:
        """Write at an offset."""
        with self._guard:
            file = self._handles[fd].file
            file.data.extend(bytes(max(0, offset - len(file.data))))
            file.data[offset : offset + len(data)] = data
            file.dirty = True
            return len(data)

    def ftruncate(self, fd: int, size: int) -> None:
        """Set the length of a file."""
        with self._guard:
            file = self._handles[fd].file
            file.data[:] = file.data[:size].ljust(size, b"\0")
            file.dirty = True

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill buffers from an offset on."""
        with self._guard:
            data = self._handles[fd].file.data
            at = min(offset, len(data))
            for buffer in buffers:
                count = min(buffer.nbytes, len(data) - at)
                buffer[:count] = data[at : at + count]
                at += count
            return max(0, at - offset)

    def start_writeback(self, fd: int, offset: int, length: int) -> None:
        """Do nothing: a hint promises nothing."""

    def fsync(self, fd: int) -> None:
        """Make the content of a file durable."""
        with self._guard:
            file, path, _ = self._handles[fd]
            if not self._skips(path):
                file.durable = bytes(file.data)
                file.dirty = False

    def fsync_folder(self, path: str) -> None:
        """Make the names in a folder durable."""
        with self._guard:
            folder = self._folder(path)
            if not self._skips(path):
                folder.durable = dict(folder.names)
                folder.pending.clear()

    def link(self, source: str, target: str) -> None:
        """Give a file a second name."""
        with self._guard:
            file = self._file(source)
            folder, name = self._place(target)
            if name in folder.names:
                raise _error(errno.EEXIST, target)
            folder.change(name, file)

    def rename_new(self, source: str, target: str) -> None:
        """Rename a file; the two folders may remember or forget it independently."""
        with self._guard:
            self.link(source, target)
            self.unlink(source)

    def unlink(self, path: str) -> None:
        """Remove a name of a file."""
        with self._guard:
            self._file(path)
            folder, name = self._place(path)
            folder.change(name, None)

    def mkdir(self, path: str) -> None:
        """Make a folder."""
        with self._guard:
            folder, name = self._place(path)
            if name in folder.names:
                raise _error(errno.EEXIST, path)
            folder.change(name, _Folder(self._number()))

    def rmdir(self, path: str) -> None:
        """Remove an empty folder."""
        with self._guard:
            if self._folder(path).names:
                raise _error(errno.ENOTEMPTY, path)
            folder, name = self._place(path)
            folder.change(name, None)

    def scandir(self, path: str) -> list[Entry]:
        """Return the names in a folder."""
        with self._guard:
            nodes = self._folder(path).names.items()
            return [Entry(name, status.kind, status.size) for name, node in nodes for status in [_status(node)]]

    def stat(self, path: str, *, follow: bool = False) -> Status:
        """Return what is known of a path."""
        with self._guard:
            return _status(self._node(path))

    def fstat(self, fd: int) -> Status:
        """Return what is known of an open file."""
        return _status(self._handles[fd].file)

    def require_writable(self, path: str) -> None:
        """Return if there is such a folder."""
        with self._guard:
            self._folder(path)

    def free_bytes(self, path: str) -> int:
        """Return a large number."""
        self.stat(path)
        return 1 << 40

    def lock_description(self, fd: int) -> None:
        """Lock a file until the descriptor is closed."""
        with self._guard:
            handle = self._handles[fd]
            if handle.file.locked:
                raise _error(errno.EAGAIN, handle.path)
            handle.file.locked = True
            self._handles[fd] = handle._replace(locks=True)

    def flock(self, fd: int) -> None:
        """Lock a file until the descriptor is closed."""
        self.lock_description(fd)

    def host(self) -> str:
        """Return a name that no machine has."""
        return "simulated"

    def boot(self) -> str:
        """Return the id of this life of the machine."""
        return self._boot

    def process_start(self, pid: int) -> str | None:
        """Return a start time for this process; all others have ended."""
        return "1" if pid == os.getpid() else None

    def _skips(self, path: str) -> bool:
        label = self.label(path)
        number = len(self.labels)
        self.labels.append(label)
        return self.skip_fsync(label) if callable(self.skip_fsync) else self.skip_fsync == number

    def _number(self) -> int:
        self._count += 1
        return self._count

    def _handle(self, file: _File, path: str) -> int:
        # Numbers that the real system never gives out, should one ever reach it.
        fd = 1_000_000_000 + self._number()
        self._handles[fd] = _Handle(file, path, locks=False)
        return fd

    def _node(self, path: str) -> _File | _Folder:
        node: _File | _Folder = self._root
        for name in path.strip("/").split("/") if path.strip("/") else []:
            if not isinstance(node, _Folder):
                raise _error(errno.ENOTDIR, path)
            if name not in node.names:
                raise _error(errno.ENOENT, path)
            node = node.names[name]
        return node

    def _file(self, path: str) -> _File:
        node = self._node(path)
        if not isinstance(node, _File):
            raise _error(errno.EISDIR, path)
        return node

    def _folder(self, path: str) -> _Folder:
        node = self._node(path)
        if not isinstance(node, _Folder):
            raise _error(errno.ENOTDIR, path)
        return node

    def _place(self, path: str) -> tuple[_Folder, str]:
        folder, _, name = path.rpartition("/")
        return self._folder(folder), name

    def _surviving(
        self, folder: _Folder, rng: random.Random, copies: dict[int, _File], after: SimulatedDisk
    ) -> _Folder:
        names = dict(folder.durable)
        kept = [change for change in folder.pending if rng.random() < 0.5]
        rng.shuffle(kept)
        for name, node in kept:
            if node is None:
                names.pop(name, None)
            else:
                names[name] = node
        copy = _Folder(after._number())
        for name, node in names.items():
            if isinstance(node, _Folder):
                copy.names[name] = self._surviving(node, rng, copies, after)
            else:
                if node.number not in copies:  # Two names of one file stay one file.
                    copies[node.number] = file = _File(after._number())
                    file.data[:] = file.durable = _remains(node, rng)
                copy.names[name] = copies[node.number]
        copy.durable = dict(copy.names)
        return copy


def _remains(file: _File, rng: random.Random) -> bytes:
    """Return what may be left of a file's content."""
    if not file.dirty:
        return file.durable
    data = bytes(file.data)
    cut = rng.randrange(len(data) + 1)
    tail = len(data) - cut
    return rng.choice(
        [file.durable, data[:cut], data[:cut] + bytes(tail), data[:cut] + rng.randbytes(tail), data, file.durable[:cut]]
    )


def _status(node: _File | _Folder) -> Status:
    if isinstance(node, _File):
        return Status("file", len(node.data), (0, node.number), node.modified)
    return Status("folder", 0, (0, node.number), node.modified)


def _error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)
