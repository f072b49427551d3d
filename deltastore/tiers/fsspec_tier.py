"""A tier on any file system of fsspec that can give a name only if it is free. The door to fsspec.

A file is staged on this machine's disk, and uploaded whole when it is published.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import secrets
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from deltastore.errors import (
    AlreadyExists,
    Backend,
    DeltaStoreError,
    InvalidInput,
    MissingDependency,
    NotFound,
    OutcomeUnknown,
)
from deltastore.tiers.base import (
    LOCK,
    Buffer,
    FileInfo,
    FileInfos,
    Names,
    Owner,
    Staged,
    as_bytes,
    backend_error,
    check_name,
    check_session,
    check_target,
    failing,
    is_segment,
    stage_and_publish,
)
from deltastore.tiers.fsspec_file import FsspecFile, HeldFile, KeptFile, RangedFile
from deltastore.tiers.fsspec_publish import PUBLISHERS
from deltastore.tiers.record_lock import RecordLock, acquire_record
from deltastore.tiers.self_test import require_first_wins

_SCRATCH = "tmp"

_REFUSED = {
    "webhdfs": "fsspec's webhdfs returns error pages as content, and its mv reports success when nothing was moved:"
    " write hdfs://namenode:9870/folder instead"
}


class FsspecTier:
    """The files of a store below a URL of fsspec.

    On an object store a file that is deleted is gone at once, also for those who have it open.

    Parameters
    ----------
    url : str
        ``s3://bucket/run``, ``gs://bucket/run``, or any other that fsspec knows, for reading.
    options : mapping, optional
        What fsspec's file system takes: keys, endpoints.
    """

    name = "remote"

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        scheme = url.partition("://")[0]
        if scheme in _REFUSED:
            raise InvalidInput(f"{url}: {_REFUSED[scheme]}", url=url)
        try:
            self._core = importlib.import_module("fsspec.core")
        except ImportError as error:
            raise MissingDependency(
                f"{url} needs the package fsspec: install deltastore-checkpoint[fsspec]", name="fsspec"
            ) from error
        self.url = url.rstrip("/")
        self._options = {"use_listings_cache": False, "skip_instance_cache": True, **(options or {})}
        self._systems: dict[int, Any] = {}
        try:
            self.root = str(self._core.url_to_fs(self.url, **self._options)[1]).rstrip("/")
        except ImportError as error:
            raise MissingDependency(f"{url}: {error}", name=scheme) from error
        except ValueError as error:
            raise _unknown(url) from error
        protocol = self._system.protocol
        kinds = [protocol] if isinstance(protocol, str) else list(protocol)
        if "local" in kinds and scheme not in kinds:  # fsspec takes what it does not know for a local path
            raise _unknown(url)
        self._publisher = next((PUBLISHERS[kind] for kind in kinds if kind in PUBLISHERS), None)
        self._made = False
        self._spool: str | None = None

    @property
    def _system(self) -> Any:
        """The file system of this process: most of fsspec's do not survive a fork."""
        pid = os.getpid()
        if pid not in self._systems:
            self._systems = {pid: self._core.url_to_fs(self.url, **self._options)[0]}
        return self._systems[pid]

    def exists(self) -> bool:
        """Tell whether a store is here: a FORMAT.json or a folder packs."""
        with _calling(f"looking at {self.url}", ""):
            return any(self._system.exists(f"{self.root}/{name}") for name in ("FORMAT.json", "packs"))

    def create(self) -> None:
        """Make sure that of two publishers the first wins; folders come with their files."""
        self.check_writable()
        self._made = True
        require_first_wins(self, self._remove)

    def check_writable(self) -> None:
        """Raise Backend if files there cannot be published safely."""
        if self._publisher is None:
            raise Backend(
                f"{self.url}: of two files of one name this kind of place keeps the second, or nobody can tell; a store"
                f" can be read from it, and written to {', '.join(PUBLISHERS)}, hdfs and folders",
                errno=errno.EROFS,
            )

    def stage(self, name: str, parts: Iterable[Buffer], session: str) -> Staged:
        """Write a whole file to this machine's disk; it is uploaded when it is published."""
        check_target(name)
        check_session(session)
        if not (self._made or self.exists()):
            raise Backend(f"{self.url}: there is no store here to write {name} to", errno=errno.ENOENT, file=name)
        return self._stage(name, parts, session)

    def _stage(self, name: str, parts: Iterable[Buffer], session: str) -> Staged:
        if self._spool is None:
            self._spool = tempfile.mkdtemp(prefix="deltastore-")
            weakref.finalize(self, _remove_spool, self._spool, os.getpid())
        token = f"{session}-{secrets.token_hex(8)}"
        path = f"{self._spool}/{token}"
        size = 0
        try:
            with open(path, "xb") as file:
                for part in parts:
                    size += file.write(as_bytes(part))
        except BaseException as error:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            if isinstance(error, OSError) and not isinstance(error, DeltaStoreError):
                raise backend_error(f"{self.url}: writing {name} to {self._spool}", name, error) from error
            raise
        return Staged(name, size, token)

    def publish(self, staged: Staged) -> None:
        """Upload a staged file under its name, unless that is taken. See :class:`Tier`."""
        check_target(staged.name)
        self._publish(staged)

    def _publish(self, staged: Staged) -> None:
        local, path = self._local(staged), f"{self.root}/{staged.name}"
        if not os.path.exists(local):
            with _calling(f"{self.url}: publishing {staged.name}", staged.name):
                taken = self._system.exists(path)
            kind: type[DeltaStoreError] = AlreadyExists if taken else Backend
            raise kind(f"{self.url}: {staged.name} {'exists' if taken else 'is not staged any more'}", file=staged.name)
        try:
            assert self._publisher is not None  # noqa: S101 - create() refuses such a place
            self._publisher(self._system, local, path, f"{self.root}/{_SCRATCH}")
        except FileExistsError as error:
            if not self._is_ours(path, local, staged.size):
                raise AlreadyExists(f"{self.url}: {staged.name} exists", file=staged.name) from error
        except Exception as error:
            raise OutcomeUnknown(
                f"{self.url}: {staged.name} may have been published: {type(error).__name__}: {error}; read it back",
                errno=getattr(error, "errno", None),
                file=staged.name,
            ) from error
        os.unlink(local)

    def _is_ours(self, path: str, local: str, size: int) -> bool:
        """After a refusal: if what is there is what we sent, it was our own try whose answer was lost."""
        with _calling(f"reading {path}", path):
            if self._system.info(path)["size"] != size:
                return False
            with open(local, "rb") as file:
                return bool(self._system.cat_file(path) == file.read())

    def discard(self, staged: Staged) -> None:
        """Remove a staged file that is not wanted any more; a published file is not touched."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._local(staged))

    def publish_new(self, name: str, parts: Iterable[Buffer], session: str) -> int:
        """Stage and publish; return the size."""
        return stage_and_publish(self, name, parts, session)

    def list(self, folder: str) -> FileInfos:
        """Return every file below a folder ("" = all), sorted by name; a folder that is missing holds none."""
        if folder:
            check_name(folder)
        top = f"{self.root}/{folder}".rstrip("/")
        found: dict[str, Any] = {}
        with _calling(f"listing {self.url}/{folder}", folder), contextlib.suppress(FileNotFoundError):
            found = self._system.find(top, detail=True)
        start = len(self.root) + 1
        infos = [FileInfo(path[start:], info["size"]) for path, info in found.items() if path.startswith(top + "/")]
        named = [info for info in infos if all(map(is_segment, info.name.split("/")))]
        return sorted(named, key=lambda info: info.name)

    def open(self, name: str) -> FsspecFile:
        """Open a published file, or raise NotFound."""
        check_name(name)
        path, where, system = f"{self.root}/{name}", f"{self.url}/{name}", self._system
        with _calling(f"opening {where}", name), self._or_not_found(name):
            if "memory" in system.protocol:
                return KeptFile(where, system.cat_file(path))
            info = system.info(path)
            if info["type"] != "file":
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            if system.async_impl:
                return RangedFile(where, system, path, info["size"])
            return HeldFile(where, system.open(path, "rb"), info["size"])

    def read(self, name: str) -> bytes:
        """Return the whole of a published file, or raise NotFound."""
        check_name(name)
        with _calling(f"reading {self.url}/{name}", name), self._or_not_found(name):
            return bytes(self._system.cat_file(f"{self.root}/{name}"))

    @contextlib.contextmanager
    def _or_not_found(self, name: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            raise NotFound(f"{self.url}: there is no file {name}", file=name) from error

    def delete(self, name: str) -> None:
        """Remove a file; one that is missing is fine."""
        check_target(name)
        self._remove(name)

    def _remove(self, name: str) -> None:
        with _calling(f"deleting {self.url}/{name}", name), contextlib.suppress(FileNotFoundError):
            self._system.rm_file(f"{self.root}/{name}")

    def sync(self, folder: str) -> None:
        """Check the name: what such a place has answered is durable, or it cannot be helped."""
        if folder:
            check_name(folder)

    def free_bytes(self) -> int | None:
        """Return None: such places do not tell."""
        return None

    def lock(self, owner: Owner) -> RecordLock:
        """Take the right to write, or raise Conflict."""
        return acquire_record(self, owner)

    def make_lock(self, data: bytes) -> bool:
        """Make the file LOCK; False if it is there."""
        staged = self._stage(LOCK, [data], "lock")
        try:
            self._publish(staged)
        except AlreadyExists:
            self.discard(staged)
            return False
        return True

    def remove_lock(self) -> None:
        """Remove the file LOCK; one that is missing is fine."""
        self._remove(LOCK)

    def clean(self, keep_session: str) -> Names:
        """Return nothing: what a dead writer left lies on its own machine."""
        check_session(keep_session)
        return []

    def end_session(self, session: str) -> None:
        """Remove what this session left on this machine's disk."""
        check_session(session)
        for path in [] if self._spool is None else os.scandir(self._spool):
            if path.name.startswith(f"{session}-"):
                os.unlink(path.path)

    def _local(self, staged: Staged) -> str:
        return f"{self._spool or ''}/{staged.token}"


@contextlib.contextmanager
def _calling(doing: str, file: str) -> Iterator[None]:
    """Turn whatever a file system raises into Backend; errors of deltastore pass."""
    try:
        with failing(doing, file):
            yield
    except DeltaStoreError:
        raise
    except Exception as error:
        raise Backend(f"{doing}: {type(error).__name__}: {error}", transient=True, file=file) from error


def _unknown(url: str) -> InvalidInput:
    return InvalidInput(f"{url}: neither folder, file://, memory:// or hdfs://, nor a URL that fsspec knows", url=url)


def _remove_spool(path: str, pid: int) -> None:
    if os.getpid() == pid:  # a forked child's copy is not its own
        shutil.rmtree(path, ignore_errors=True)
