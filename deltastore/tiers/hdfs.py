"""A tier on a Hadoop file system.

How a file becomes visible (each step names what a crash after it leaves):

1. written whole to tmp/<session>/<random>-<name>, each block synced to the DataNodes' disks: a leftover, perhaps a
   short one (HDFS closes the file of a client that died), cleaned a day later;
2. length and checksum compared with what was sent: the same;
3. RENAME without options, which refuses a name that is taken and is in the NameNode's edit log before it answers:
   visible and durable.

Names are durable when the NameNode has answered, so ``sync`` has nothing to do. ``delete`` moves a file to tmp/deleted,
where those who have it open still read it, by its inode, until the grace period is over.
"""

from __future__ import annotations

import errno
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence

from deltastore.errors import AlreadyExists, Backend, DeltaStoreError, InvalidInput, NotFound
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
    check_session,
    check_target,
    folder_of,
    is_segment,
    stage_and_publish,
)
from deltastore.tiers.hdfs_client import WebHdfs
from deltastore.tiers.hdfs_connection import HdfsConnection, HdfsOptions
from deltastore.tiers.hdfs_file import HdfsFile
from deltastore.tiers.record_lock import RecordLock, acquire_record
from deltastore.tiers.self_test import require_first_wins

GRACE_SECONDS = 3600.0
"""How long what was deleted can still be read by those who have it open."""
STALE_SECONDS = 86400.0
"""After so long without a change a session that was not ended counts as dead."""

_DELETED = "deleted"


class HdfsTier:
    """The files of a store below a folder of HDFS.

    Parameters
    ----------
    hosts : sequence of str
        ``host:port`` where the NameNodes answer HTTP; of several, the active one is found.
    root : str
        The folder, absolute.
    scheme : {"http", "https"}
    options : HdfsOptions, optional
    """

    name = "remote"

    def __init__(
        self, hosts: Sequence[str], root: str, scheme: str = "http", options: HdfsOptions | None = None
    ) -> None:
        self.root = "/" + root.strip("/")
        if self.root == "/" or not all(map(is_segment, self.root[1:].split("/"))):
            raise InvalidInput(
                f"{root!r} is no folder for a store on HDFS: names of letters, digits, '.', '_', '-', joined by '/'",
                root=root,
            )
        self.url = f"{'swebhdfs' if scheme == 'https' else 'hdfs'}://{','.join(hosts)}{self.root}"
        self._hdfs = WebHdfs(HdfsConnection(hosts, scheme, options or HdfsOptions()))
        self._tmp = f"{self.root}/tmp"  # noqa: S108 - a folder of the store
        self._purged = time.monotonic()

    def exists(self) -> bool:
        """Tell whether a store is here: a FORMAT.json or a folder packs."""
        return any(self._hdfs.status(f"{self.root}/{name}") is not None for name in ("FORMAT.json", "packs"))

    def create(self) -> None:
        """Make the root and its folders, and make sure that of two publishers the first wins."""
        for name in FOLDERS:
            self._hdfs.make_folder(f"{self.root}/{name}")
        require_first_wins(self, lambda name: self._hdfs.delete(f"{self.root}/{name}"))

    def check_writable(self) -> None:
        """Raise Backend if writing here must fail: a file in the way, no permission."""
        path = self.root
        while (found := self._hdfs.status(path)) is None and path != "/":
            path = folder_of(path) or "/"
        if found is not None and found.is_file:
            raise Backend(f"{self.url}: {path} is a file, not a folder", errno=errno.ENOTDIR, file=path)
        self._hdfs.check_access(path)

    def stage(self, name: str, parts: Iterable[Buffer], session: str) -> Staged:
        """Write a whole file below tmp/<session>/; it stays invisible. See :class:`Tier`.

        ``parts`` that can be gone through twice, such as a list, are sent again when a DataNode dies meanwhile; with a
        generator that is a transient Backend, and the caller begins again.
        """
        check_target(name)
        check_session(session)
        folder = f"{self._tmp}/{session}"
        if self._hdfs.status(folder) is None:
            if self._hdfs.status(self._tmp) is None:
                raise Backend(f"{self.url}: there is no store here to write {name} to", errno=errno.ENOENT, file=name)
            self._hdfs.make_folder(folder)
        try:
            upload = self._hdfs.upload(folder, name.replace("/", ".")[:200], parts)
        except DeltaStoreError:
            raise
        except OSError as error:
            raise backend_error(f"{self.url}: writing {name}", name, error) from error
        return Staged(name, upload.size, f"{upload.path.removeprefix(self.root + '/')}#{upload.id}")

    def publish(self, staged: Staged) -> None:
        """Give a staged file its name, unless that is taken, durably. See :class:`Tier`."""
        check_target(staged.name)
        path, inode = self._find(staged)
        folder = folder_of(staged.name)
        if folder and folder not in FOLDERS:
            self._hdfs.make_folder(f"{self.root}/{folder}")
        if not self._hdfs.rename(path, f"{self.root}/{staged.name}", inode):
            raise AlreadyExists(f"{self.url}: {staged.name} exists", file=staged.name)

    def discard(self, staged: Staged) -> None:
        """Remove a staged file that is not wanted any more; a published file is not touched."""
        self._hdfs.delete(self._find(staged)[0])

    def publish_new(self, name: str, parts: Iterable[Buffer], session: str) -> int:
        """Stage and publish; return the size. On any error nothing is left below tmp."""
        return stage_and_publish(self, name, parts, session)

    def list(self, folder: str) -> FileInfos:
        """Return every file below a folder ("" = all), sorted by name; a folder that is missing holds none."""
        if folder:
            check_name(folder)
        return sorted(self._walk(folder), key=lambda info: info.name)

    def open(self, name: str) -> HdfsFile:
        """Open a published file, or raise NotFound."""
        check_name(name)
        found = self._hdfs.status(f"{self.root}/{name}")
        if found is None or not found.is_file:
            raise NotFound(f"{self.url}: there is no file {name}", file=name)
        return HdfsFile(self._hdfs, f"{self.url}/{name}", found.id, found.size)

    def read(self, name: str) -> bytes:
        """Return the whole of a published file, or raise NotFound."""
        check_name(name)
        return self._hdfs.read(f"{self.root}/{name}")

    def delete(self, name: str) -> None:
        """Take a file away; one that is missing is fine. Who has it open reads it until the grace period is over."""
        check_target(name)
        path = f"{self.root}/{name}"
        if self._hdfs.status(path) is None:
            return
        self._hdfs.make_folder(f"{self._tmp}/{_DELETED}")
        label = f"{int(time.time())}-{secrets.token_hex(4)}-{name.replace('/', '.')[:200]}"
        try:
            self._hdfs.rename(path, f"{self._tmp}/{_DELETED}/{label}")
        except Backend as error:
            if error.errno != errno.ENOENT:  # somebody else was faster
                raise
        if time.monotonic() - self._purged > GRACE_SECONDS:
            self._purge()

    def sync(self, folder: str) -> None:
        """Check the name: what the NameNode has answered is durable."""
        if folder:
            check_name(folder)

    def free_bytes(self) -> int | None:
        """Return how much may still be written, by disks, replication and the root's quota; None if not known."""
        return self._hdfs.free_bytes(self.root)

    def copies(self, name: str) -> int:
        """Return on how many DataNodes each block of a file lies, for the block with the fewest; 0 for an empty file.

        Each copy was synced to disk before the file was published. While it is fewer than the cluster's replication,
        HDFS is still making up for a DataNode that it lost.
        """
        check_name(name)
        return self._hdfs.copies(f"{self.root}/{name}")

    def lock(self, owner: Owner) -> RecordLock:
        """Take the right to write, or raise Conflict. The folder must exist."""
        return acquire_record(self, owner)

    def make_lock(self, data: bytes) -> bool:
        """Make the file LOCK; False if it is there."""
        upload = self._hdfs.upload(self._tmp, LOCK, [data])
        if self._hdfs.rename(upload.path, f"{self.root}/{LOCK}", upload.id):
            return True
        self._hdfs.delete(upload.path)
        return False

    def remove_lock(self) -> None:
        """Remove the file LOCK; one that is missing is fine."""
        self._hdfs.delete(f"{self.root}/{LOCK}")

    def clean(self, keep_session: str) -> Names:
        """Remove what was left below tmp a day ago and return the sessions; also what was deleted long enough ago.

        A session cannot be asked whether it lives: it may run on any machine. Its folder changes with each file.
        """
        check_session(keep_session)
        self._purge()
        removed = []
        for entry in self._hdfs.list(self._tmp):
            spared = entry.name in (keep_session, _DELETED)
            if not spared and time.time() - entry.modified > STALE_SECONDS:
                self._hdfs.delete(f"{self._tmp}/{entry.name}")
                removed.append(entry.name)
        return sorted(removed)

    def end_session(self, session: str) -> None:
        """Remove what this session left below tmp."""
        check_session(session)
        self._hdfs.delete(f"{self._tmp}/{session}")

    def _purge(self) -> None:
        """Remove for good what was deleted before the grace period."""
        self._purged = time.monotonic()
        for entry in self._hdfs.list(f"{self._tmp}/{_DELETED}"):
            deleted_at = entry.name.partition("-")[0]
            if deleted_at.isdigit() and time.time() - int(deleted_at) > GRACE_SECONDS:
                self._hdfs.delete(f"{self._tmp}/{_DELETED}/{entry.name}")

    def _find(self, staged: Staged) -> tuple[str, int]:
        path, _, inode = staged.token.rpartition("#")
        return f"{self.root}/{path}", int(inode)

    def _walk(self, folder: str) -> Iterator[FileInfo]:
        for entry in self._hdfs.list(f"{self.root}/{folder}".rstrip("/")):
            name = f"{folder}/{entry.name}" if folder else entry.name
            if not is_segment(entry.name):
                continue
            if entry.is_file:
                yield FileInfo(name, entry.size)
            else:
                yield from self._walk(name)
