"""The calls to the operating system that a local tier makes, in one class: tests put a simulated disk in its place.

Every method does one system call (or asks one fact of the machine) and raises OSError as that call does. Interrupted
calls are repeated by Python itself (PEP 475); short reads and writes are the caller's affair.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import stat
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from deltastore.tiers.base import Buffer, as_bytes

Kind: TypeAlias = Literal["file", "folder", "link", "other"]

_NO_FOLLOW = os.O_NOFOLLOW | os.O_CLOEXEC
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_BATCH_BYTES = 8 << 20
_SYNC_FILE_RANGE_WRITE = 2
# struct flock of 64-bit file systems: type, whence, start, length, pid; "0q" pads to the alignment of C.
_FLOCK = struct.Struct("@hhqqi0q")
# Some file systems (CIFS, FUSE, vboxsf) have no fsync for folders and say so; there is nothing that could be done.
_NO_FOLDER_SYNC = (errno.EINVAL, errno.EBADF, errno.ENOTSUP)


def _find_sync_file_range() -> Any:
    function = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is not None:
        function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return function


_sync_file_range = _find_sync_file_range()


class Status(NamedTuple):
    """What is known of a file without opening it."""

    kind: Kind
    size: int
    identity: tuple[int, int]
    """Device and inode: the same for two names of one file."""
    modified: float
    """Seconds since 1970."""


class Entry(NamedTuple):
    """One name in a folder."""

    name: str
    kind: Kind
    size: int


class PosixOps:
    """The real operating system."""

    IOV_MAX = 1024
    """Most buffers that one ``writev`` or ``preadv`` takes (Linux, macOS and the BSDs)."""

    def open_write_new(self, path: str) -> int:
        """Create a file, refuse an existing one, and return its descriptor. The mode follows the umask."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_FOLLOW, 0o666)

    def open_read(self, path: str) -> int:
        """Open a file for reading; ELOOP for a symbolic link."""
        # Without O_NONBLOCK a named pipe in a store's folder would stop the reader for ever.
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK | _NO_FOLLOW)

    def open_lock(self, path: str) -> int:
        """Open a file for reading and writing, made if it is not there."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | _NO_FOLLOW, 0o666)

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)

    def writev(self, fd: int, buffers: Sequence[memoryview]) -> int:
        """Append buffers; return how many bytes were taken."""
        return os.writev(fd, buffers)

    def pwrite(self, fd: int, data: bytes, offset: int) -> int:
        """Write at an offset; return how many bytes were taken."""
        return os.pwrite(fd, data, offset)

    def ftruncate(self, fd: int, size: int) -> None:
        """Set the length of a file."""
        os.ftruncate(fd, size)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill buffers from an offset on; return how many bytes there were."""
        return os.preadv(fd, buffers, offset)

    def start_writeback(self, fd: int, offset: int, length: int) -> None:
        """Ask the system to begin to write a range to the disk; a hint that promises nothing and never fails."""
        if _sync_file_range is not None:
            _sync_file_range(fd, offset, length, _SYNC_FILE_RANGE_WRITE)

    def fsync(self, fd: int) -> None:
        """Make the content of a file durable."""
        full = getattr(fcntl, "F_FULLFSYNC", None)
        if full is not None:  # On macOS, fsync leaves the bytes in the drive's cache.
            with contextlib.suppress(OSError):
                fcntl.fcntl(fd, full)
                return
        os.fsync(fd)

    def fsync_folder(self, path: str) -> None:
        """Make the names in a folder durable."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno not in _NO_FOLDER_SYNC:
                raise
        finally:
            os.close(fd)

    def link(self, source: str, target: str) -> None:
        """Give a file a second name, unless that is taken (EEXIST)."""
        os.link(source, target, follow_symlinks=False)

    def rename_new(self, source: str, target: str) -> None:
        """Rename a file, unless the new name is taken (EEXIST); ENOSYS where the system cannot do that."""
        renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
        if renameat2 is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), target)
        if renameat2(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), target)

    def unlink(self, path: str) -> None:
        """Remove a name of a file; a symbolic link itself, not what it points to."""
        os.unlink(path)

    def mkdir(self, path: str) -> None:
        """Make a folder. The mode follows the umask."""
        os.mkdir(path, 0o777)

    def rmdir(self, path: str) -> None:
        """Remove an empty folder."""
        os.rmdir(path)

    def scandir(self, path: str) -> list[Entry]:
        """Return the names in a folder, in any order; links are not followed."""
        found = []
        with os.scandir(path) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # It went away while we looked.
                    status = entry.stat(follow_symlinks=False)
                    found.append(Entry(entry.name, _kind(status.st_mode), status.st_size))
        return found

    def stat(self, path: str, *, follow: bool = False) -> Status:
        """Return what is known of a path; of the link itself unless ``follow``."""
        return _status(os.stat(path, follow_symlinks=follow))

    def fstat(self, fd: int) -> Status:
        """Return what is known of an open file."""
        return _status(os.fstat(fd))

    def require_writable(self, path: str) -> None:
        """Raise EACCES or EROFS unless files can be made in a folder; nothing is written."""
        if os.access(path, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
            return
        read_only = os.statvfs(path).f_flag & os.ST_RDONLY
        number = errno.EROFS if read_only else errno.EACCES
        raise OSError(number, os.strerror(number), path)

    def free_bytes(self, path: str) -> int:
        """Return what an ordinary user may still write to the file system of a path."""
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize

    def lock_description(self, fd: int) -> None:
        """Take an open-file-description lock; EAGAIN or EACCES if another description has it, never waits.

        Unlike a classic ``fcntl`` lock it conflicts within one process too and no other close() releases it.
        """
        command = getattr(fcntl, "F_OFD_SETLK", None)
        if command is None:
            raise OSError(errno.ENOTSUP, "this system has no open-file-description locks")
        fcntl.fcntl(fd, command, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))

    def flock(self, fd: int) -> None:
        """Take a BSD lock; EWOULDBLOCK if another description has it, never waits."""
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def host(self) -> str:
        """Return the name of this machine."""
        return os.uname().nodename

    def boot(self) -> str:
        """Return an id that is new after each start of the machine, "" if there is none."""
        try:
            return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        except OSError:
            return ""

    def process_start(self, pid: int) -> str | None:
        """Return when a process started (in the kernel's own unit), "" if that is not known, None if it has ended.

        With the pid it tells a process from a later one that got the same number.
        """
        try:
            # The second field is the command in parentheses and may hold any character.
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        except OSError:  # No /proc, one that hides other users' processes, or no such process.
            try:
                os.kill(pid, 0)
            except (ProcessLookupError, OverflowError):
                return None
            except PermissionError:
                return ""
            return ""
        # A zombie holds nothing any more, and without an init process it stays for ever.
        return None if fields[0] in (b"Z", b"X") else fields[19].decode("ascii")


def _kind(mode: int) -> Kind:
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "folder"
    return "link" if stat.S_ISLNK(mode) else "other"


def _status(result: os.stat_result) -> Status:
    return Status(_kind(result.st_mode), result.st_size, (result.st_dev, result.st_ino), result.st_mtime)


def write_all(ops: PosixOps, fd: int, parts: Iterable[Buffer]) -> int:
    """Append all parts to a file, in few calls and however the system splits them; return the bytes written."""
    size = 0
    for batch in _batches(parts, ops.IOV_MAX):
        pending = batch
        while pending:
            count = ops.writev(fd, pending)
            if count <= 0:
                raise OSError(errno.EIO, "the system wrote nothing and gave no reason")
            # The disk works while the next parts are made, and the sync at the end finds little left to do.
            ops.start_writeback(fd, size, count)
            size += count
            pending = _after(pending, count)
    return size


def fill(ops: PosixOps, fd: int, views: Sequence[memoryview], offset: int) -> int:
    """Fill views from an offset on; return the bytes found, fewer than asked for only if the file ends before."""
    found = 0
    pending = list(views)
    while pending:
        count = ops.preadv(fd, pending[: ops.IOV_MAX], offset + found)
        if count == 0:
            break
        found += count
        pending = _after(pending, count)
    return found


def _batches(parts: Iterable[Buffer], most: int) -> Iterator[list[memoryview]]:
    """Gather parts for one call each: few calls for many small parts, and a lazy source is not held in memory."""
    batch: list[memoryview] = []
    size = 0
    for part in parts:
        view = as_bytes(part)
        if view.nbytes:
            batch.append(view)
            size += view.nbytes
        if len(batch) == most or size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _after(views: list[memoryview], count: int) -> list[memoryview]:
    """Return what is left of ``views`` after their first ``count`` bytes."""
    for index, view in enumerate(views):
        if count < view.nbytes:
            return [view[count:], *views[index + 1 :]]
        count -= view.nbytes
    return []
