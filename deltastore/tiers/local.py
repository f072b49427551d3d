"""A tier in a folder: an NVMe disk, /dev/shm, or a mounted network file system.

How a file becomes visible (spec, chapter on publishing; each step names what a crash after it leaves):

1. written whole to tmp/<session>/<n>-<name>, a leftover that the next writer cleans;
2. fsync of the file: the same;
3. link() to its final name, which fails if that is taken: visible, complete, not yet acknowledged;
4. fsync of the folder (and, for deeper names, of the folders above): durable;
5. unlink of the temporary name: before it, a second name that the next writer cleans.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import NoReturn, Self

from deltastore.errors import (
    AlreadyExists,
    Backend,
    Corruption,
    InvalidInput,
    NotFound,
    OutcomeUnknown,
)
from deltastore.tiers.base import (
    FOLDERS,
    LOCK,
    Buffer,
    FileInfo,
    FileInfos,
    Names,
    Owner,
    Staged,
    backend_error,
    check_name,
    check_range,
    check_session,
    check_target,
    failing,
    folder_of,
    is_segment,
)
from deltastore.tiers.lock import FileLock, acquire, is_abandoned, write_owner
from deltastore.tiers.posix import PosixOps, fill, write_all

_SYSTEM = PosixOps()
_OWNER = "OWNER"

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_NO_RENAME = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)


class LocalFile:
    """A file of a local tier, open for reading."""

    def __init__(self, ops: PosixOps, path: str) -> None:
        self._ops = ops
        self._path = path
        self._fd: int | None = None
        self._fd = ops.open_read(path)
        status = ops.fstat(self._fd)
        self._size = status.size
        if status.kind != "file":
            self.close()
            raise Corruption(f"{path}: expected a regular file, found a {status.kind}", file=path)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._size

    def readinto(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill all ``buffers`` with the bytes from ``offset`` on; Corruption when the file ends before."""
        fd = self._fd
        if fd is None:
            raise InvalidInput(f"{self._path}: this file was closed", file=self._path)
        views = [buffer.cast("B") for buffer in buffers if buffer.nbytes]
        expected = sum(view.nbytes for view in views)
        check_range(self._path, self._size, offset, expected)
        with failing(f"reading {self._path}", self._path):
            found = fill(self._ops, fd, views, offset)
        if found < expected:  # It was cut after we opened it.
            check_range(self._path, offset + found, offset, expected)

    def read(self, offset: int, length: int) -> bytes:
        """Return exactly ``length`` bytes from ``offset`` on."""
        check_range(self._path, self._size, offset, length)
        data = bytearray(length)
        self.readinto(offset, [memoryview(data)])
        return bytes(data)

    def close(self) -> None:
        """Close the file; twice is fine."""
        fd, self._fd = self._fd, None
        if fd is not None:
            self._ops.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class LocalTier:
    """The files of a store below a folder.

    The root itself may be a symbolic link; nothing below it is ever followed through one. Nothing is made before
    ``create``, and if the root goes away later, writing fails until it is back: it is not made anew behind your back.

    Parameters
    ----------
    root : str or path
        The folder; relative to the current one at this moment.
    ops : PosixOps
        The operating system, or a simulation of it.
    """

    name = "local"

    def __init__(self, root: str | os.PathLike[str], ops: PosixOps = _SYSTEM) -> None:
        text = os.fspath(root)
        if not text or "\0" in text:
            raise InvalidInput(f"{text!r} is no folder", root=text)
        self.root = os.path.abspath(text)
        self.url = self.root
        self.ops = ops
        self._numbers = itertools.count()

    def exists(self) -> bool:
        """Tell whether a store is here: a FORMAT.json or a folder packs."""
        return self._kind(f"{self.root}/FORMAT.json") is not None or self._kind(f"{self.root}/packs") is not None

    def create(self) -> None:
        """Make the root and its folders, durably; what exists is kept and made durable too."""
        missing = []
        path = self.root
        while self._kind(path, follow=True) is None and path != os.path.dirname(path):
            missing.append(path)
            path = os.path.dirname(path)
        with failing(f"making the store {self.root}", self.root):
            # The deepest folder that exists may be as new as ours, made a moment ago by a script or by a killed
            # writer; we may lack the right to open the folder around it, which is then no doing of ours.
            with contextlib.suppress(PermissionError):
                self.ops.fsync_folder(os.path.dirname(path))
            for folder in reversed(missing):
                self._make(folder)
                self.ops.fsync_folder(os.path.dirname(folder))
            for name in FOLDERS:
                self._make(f"{self.root}/{name}")
            self.ops.fsync_folder(self.root)

    def check_writable(self) -> None:
        """Raise Backend if writing here must fail: a file in the way, no permission, a read-only file system."""
        path = self.root
        with failing(f"{self.root} cannot be written", self.root):
            while self._kind(path, follow=True) is None:
                if self._kind(path) is not None:
                    raise FileNotFoundError(errno.ENOENT, "a symbolic link that points to nothing", path)
                path = os.path.dirname(path)
            folders = [f"{self.root}/{name}" for name in FOLDERS] if path == self.root else []
            for folder in [path, *(folder for folder in folders if self._kind(folder) is not None)]:
                self._require_folder(folder)
                self.ops.require_writable(folder)

    def stage(self, name: str, parts: Iterable[Buffer], session: str) -> Staged:
        """Write a whole file below tmp/<session>/ and sync it; it stays invisible. See :class:`Tier`."""
        check_target(name)
        check_session(session)
        with failing(f"{self.root}: writing {name}", name):
            fd, path = self._open_temporary(name, session)
            try:
                try:
                    size = write_all(self.ops, fd, parts)
                    self.ops.fsync(fd)
                finally:
                    self.ops.close(fd)
            except BaseException:
                with contextlib.suppress(OSError):
                    self.ops.unlink(path)
                raise
        return Staged(name, size, path.removeprefix(self.root + "/"))

    def publish(self, staged: Staged) -> None:
        """Give a staged file its name, unless that is taken, and make that durable. See :class:`Tier`."""
        check_target(staged.name)
        temporary, final = self._path(staged.token), self._path(staged.name)
        folders = self._folders_of(staged.name)
        with failing(f"{self.root}: publishing {staged.name}", staged.name):
            made = [self._make(folder) for folder in folders[1:]]
            self._link(temporary, final, staged.name)
        try:
            # create() synced the root with its folders, if they were there; a folder in one of those (that of a tag)
            # may be new, or left unsynced by a writer that was killed.
            for folder in folders if any(made[:1]) else folders[1:] or folders:
                self.ops.fsync_folder(folder)
        except OSError as error:
            raise OutcomeUnknown(
                f"{self.root}: {staged.name} is in its place, but its folder could not be synced: {error};"
                " read it back and sync the folder before you rely on it",
                errno=error.errno,
                file=staged.name,
            ) from error
        # It is durable; a second name that stays is cleaned by the next writer.
        with contextlib.suppress(OSError):
            self.ops.unlink(temporary)

    def discard(self, staged: Staged) -> None:
        """Remove a staged file that is not wanted any more; a published file is not touched."""
        with failing(f"{self.root}: discarding {staged.name}", staged.name), contextlib.suppress(FileNotFoundError):
            self.ops.unlink(self._path(staged.token))

    def publish_new(self, name: str, parts: Iterable[Buffer], session: str) -> int:
        """Stage and publish; return the size. On any error nothing is left below tmp."""
        staged = self.stage(name, parts, session)
        try:
            self.publish(staged)
        except BaseException:
            with contextlib.suppress(Backend):
                self.discard(staged)
            raise
        return staged.size

    def list(self, folder: str) -> FileInfos:
        """Return every file below a folder ("" = all), sorted by name; a folder that is missing holds none.

        A symbolic link is listed, so that it is seen, and refused when it is opened.
        """
        return sorted(self._walk(folder), key=lambda info: info.name)

    def open(self, name: str) -> LocalFile:
        """Open a published file, or raise NotFound; Corruption for a link or anything else that is no file."""
        path = self._path(name)
        try:
            return LocalFile(self.ops, path)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise NotFound(f"{self.root}: there is no file {name}", file=name) from error
        except OSError as error:
            if error.errno == errno.ELOOP:
                _refuse_link(path)
            raise backend_error(f"{self.root}: opening {name}", name, error) from error

    def read(self, name: str) -> bytes:
        """Return the whole of a published file, or raise NotFound."""
        with self.open(name) as file:
            return file.read(0, file.size)

    def delete(self, name: str) -> None:
        """Remove a file; one that is missing is fine. Durable only after ``sync`` of its folder."""
        check_target(name)
        path = self._path(name)
        missing = contextlib.suppress(FileNotFoundError, NotADirectoryError)
        with failing(f"{self.root}: deleting {name}", name), missing:
            self.ops.unlink(path)

    def sync(self, folder: str) -> None:
        """Make the names that a folder ("" = the root) now holds durable; a missing folder is fine."""
        path = self._folder_path(folder)
        with failing(f"{self.root}: syncing {folder or 'the root'}", folder), contextlib.suppress(FileNotFoundError):
            self.ops.fsync_folder(path)

    def free_bytes(self) -> int | None:
        """Return how much may still be written, None if the root is not there."""
        try:
            return self.ops.free_bytes(self.root)
        except OSError:
            return None

    def lock(self, owner: Owner) -> FileLock:
        """Take the right to write, or raise Conflict. The folder must exist."""
        path = f"{self.root}/{LOCK}"
        try:
            return acquire(self.ops, path, owner)
        except OSError as error:
            if error.errno == errno.ELOOP:
                _refuse_link(path)
            raise backend_error(f"{self.root}: locking {LOCK}", LOCK, error) from error

    def clean(self, keep_session: str) -> Names:
        """Remove what dead writers left below tmp and return their sessions.

        Kept: ``keep_session``, sessions whose process lives, those of other hosts or with a damaged owner until a day
        after their last file, those without an owner for a minute, and what we may not remove.
        """
        check_session(keep_session)
        top = self._path("tmp")
        sessions: Names = []
        with failing(f"{self.root}: cleaning tmp", "tmp"), contextlib.suppress(FileNotFoundError):
            sessions += sorted(entry.name for entry in self.ops.scandir(top) if entry.kind == "folder")
        removed = []
        for session in sessions:
            with contextlib.suppress(OSError):  # Removed by its owner, or another user's.
                if session != keep_session and is_abandoned(self.ops, f"{top}/{session}", _OWNER):
                    self._remove_folder(f"{top}/{session}")
                    removed.append(session)
        return removed

    def end_session(self, session: str) -> None:
        """Remove what this session left below tmp."""
        check_session(session)
        with failing(f"{self.root}: ending session {session}", "tmp"), contextlib.suppress(FileNotFoundError):
            self._remove_folder(self._path(f"tmp/{session}"))

    def _path(self, name: str) -> str:
        """Return where a name lies; Corruption if a folder on the way is a symbolic link."""
        check_name(name)
        for folder in self._folders_of(name)[1:]:
            if self._kind(folder) == "link":
                _refuse_link(folder)
        return f"{self.root}/{name}"

    def _folder_path(self, folder: str) -> str:
        return os.path.dirname(self._path(f"{folder}/x")) if folder else self.root

    def _folders_of(self, name: str) -> Sequence[str]:
        """Return the folders from the root down to the one that holds a file."""
        folder = folder_of(name)
        return list(itertools.accumulate(folder.split("/") if folder else [], "{}/{}".format, initial=self.root))

    def _kind(self, path: str, *, follow: bool = False) -> str | None:
        """Return what is at a path; None if nothing is, also when a file is where a folder should be."""
        with failing(f"looking at {path}", path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return self.ops.stat(path, follow=follow).kind
        return None

    def _make(self, folder: str) -> bool:
        """Make a folder unless it is there; tell whether it was made."""
        with contextlib.suppress(FileExistsError):
            self.ops.mkdir(folder)
            return True
        self._require_folder(folder)
        return False

    def _require_folder(self, path: str) -> None:
        if self._kind(path, follow=path == self.root or not path.startswith(self.root + "/")) != "folder":
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)

    def _open_temporary(self, name: str, session: str) -> tuple[int, str]:
        owner = self._path(f"tmp/{session}/{_OWNER}")
        folder = os.path.dirname(owner)
        if self._kind(owner) is None:
            self._make(os.path.dirname(folder))
            self._make(folder)
            with contextlib.suppress(FileExistsError):  # Another thread was faster.
                write_owner(self.ops, owner, session)
        while True:
            path = f"{folder}/{next(self._numbers)}-{name.replace('/', '.')[:200]}"
            with contextlib.suppress(FileExistsError):  # Another tier object of this session took the number.
                return self.ops.open_write_new(path), path

    def _link(self, temporary: str, final: str, name: str) -> None:
        """Publish if absent. Returns only if the final name is ours."""
        try:
            try:
                self.ops.link(temporary, final)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                self._rename(temporary, final)
        except OSError as error:
            if self._is_ours(temporary, final, name):
                return
            # With our file gone too (published before, or discarded) the system reports that first.
            if isinstance(error, FileExistsError | FileNotFoundError) and self._kind(final) is not None:
                raise AlreadyExists(f"{self.root}: {name} exists", file=name) from error
            raise

    def _rename(self, temporary: str, final: str) -> None:
        try:
            self.ops.rename_new(temporary, final)
        except OSError as error:
            if error.errno not in _NO_RENAME:
                raise
            reason = "this file system has neither hard links nor renameat2(RENAME_NOREPLACE)"
            raise OSError(error.errno, reason, final) from error

    def _is_ours(self, temporary: str, final: str, name: str) -> bool:
        """After a link that reported an error: on a network file system it may be the answer that was lost."""
        try:
            return self.ops.stat(final).identity == self.ops.stat(temporary).identity
        except FileNotFoundError:
            return False
        except OSError as error:
            raise OutcomeUnknown(
                f"{self.root}: {name} may have been published: {error}; read it back", errno=error.errno, file=name
            ) from error

    def _walk(self, folder: str) -> Iterator[FileInfo]:
        path = self._folder_path(folder)
        with failing(f"listing {path}", folder), contextlib.suppress(FileNotFoundError):
            for entry in self.ops.scandir(path):
                name = f"{folder}/{entry.name}" if folder else entry.name
                if entry.kind == "folder":
                    yield from self._walk(name) if is_segment(entry.name) else ()
                elif is_segment(entry.name):
                    yield FileInfo(name, entry.size)

    def _remove_folder(self, path: str) -> None:
        for entry in self.ops.scandir(path):
            if entry.kind == "folder":
                self._remove_folder(f"{path}/{entry.name}")
            else:
                self.ops.unlink(f"{path}/{entry.name}")
        self.ops.rmdir(path)


def _refuse_link(path: str) -> NoReturn:
    raise Corruption(f"{path} is a symbolic link; nothing inside a store may be one, it was not followed", file=path)
