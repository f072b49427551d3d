"""The operations of HDFS that a store needs, and no answer believed that may be wrong.

pyhdfs returns booleans unread, and an answer that was lost looks, at the second try, like a refusal: both are settled
here, by looking at what is there.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from deltastore.checksums import crc32c
from deltastore.errors import Backend, Corruption, NotFound, OutcomeUnknown
from deltastore.tiers.base import Buffer
from deltastore.tiers.hdfs_body import PIECE_BYTES, Body, pieces_of
from deltastore.tiers.hdfs_checksum import BYTES_PER_CRC, HdfsChecksum
from deltastore.tiers.hdfs_connection import HdfsConnection
from deltastore.tiers.hdfs_errors import UNANSWERED, Trouble

_PAUSES_OF_A_GHOST = (0.0, 0.1, 0.3, 0.6)
_CUTS_OF_DAMAGE = 3
"""So many answers that all end at the same byte say that no replica holds the next one."""


class HdfsStatus(NamedTuple):
    """What the NameNode knows of a path."""

    name: str
    """Its last segment, as a listing gives it; "" for the path that was asked for."""
    is_file: bool
    size: int
    id: int
    """The same for ever, whatever the file is renamed to."""
    modified: float
    """Seconds since 1970, by the NameNode's clock."""


class Upload(NamedTuple):
    """A file that arrived: length and checksum are those that were sent."""

    path: str
    size: int
    id: int


class WebHdfs:
    """The files of one HDFS. Thread safe."""

    def __init__(self, connection: HdfsConnection) -> None:
        self._hdfs = connection
        self._bytes_per_crc: int | None = None

    def status(self, path: str) -> HdfsStatus | None:
        """Return what a path is; None if nothing is there."""
        found = self._hdfs.ask_or_none("looking at", path, lambda client, _: client.get_file_status(path))
        return None if found is None else _status_of(found)

    def list(self, path: str) -> list[HdfsStatus]:
        """Return what a folder holds; nothing if it is not there."""
        found = self._hdfs.ask_or_none("listing", path, lambda client, _: client.list_status(path))
        return [_status_of(item) for item in found or ()]

    def make_folder(self, path: str) -> None:
        """Make a folder and those above it, unless they are there."""
        if not self._hdfs.ask("making the folder", path, lambda client, _: client.mkdirs(path)):
            raise self._hdfs.error("making the folder", path, Trouble(errno.EIO, "HDFS answered false"))

    def check_access(self, path: str) -> None:
        """Raise Backend if we may not write into a folder."""
        self._hdfs.ask("may we write to", path, lambda client, _: client._get(path, "CHECKACCESS", fsaction="-wx"))

    def delete(self, path: str) -> None:
        """Remove a file or a folder with all that it holds; what is not there is fine."""
        gone = self._hdfs.ask("deleting", path, lambda client, _: client.delete(path, recursive="true"))
        if not gone and self.status(path) is not None:
            raise self._hdfs.error("deleting", path, Trouble(errno.EIO, "HDFS answered false"))

    def rename(self, source: str, target: str, file_id: int | None = None) -> bool:
        """Give a file a name that is free; False if the name is taken.

        Raises
        ------
        Backend
            Nothing was renamed.
        OutcomeUnknown
            No answer came: it may have been renamed.
        """
        before = self._hdfs.failures
        try:
            moved = self._hdfs.ask("renaming", source, lambda client, _: client.rename(source, target))
            found = self.status(target)
        except Backend as error:
            if self._hdfs.failures == before:
                raise
            raise OutcomeUnknown(
                f"{error.message}; {target} may have been published: read it back", errno=error.errno, file=target
            ) from error
        if found is not None and found.is_file:
            # Refused, and yet ours: the answer to an earlier try of this call was lost.
            lost = self._hdfs.failures != before and file_id is not None and found.id == file_id
            return bool(moved) or lost
        if found is not None:
            raise self._hdfs.error("renaming", source, Trouble(errno.EISDIR, f"{target} is a folder"))
        if moved:
            raise OutcomeUnknown(f"HDFS {self._hdfs.where}: {target} was published, and is not there", file=target)
        missing = self.status(source) is None
        text = f"{source} is not there any more" if missing else f"HDFS refused to move it to {target}"
        raise self._hdfs.error("renaming", source, Trouble(errno.ENOENT if missing else errno.EIO, text))

    def upload(self, folder: str, label: str, parts: Iterable[Buffer]) -> Upload:
        """Write a new file into a folder that is there, and return when it lies on the disks of the DataNodes.

        ``parts`` that can be gone through twice (a list, not a generator) are sent again, under a new name and to
        other DataNodes, when a try fails. The caller's own errors pass; whatever happens, nothing half-made is left
        that could be mistaken: names are never used twice.
        """
        options = self._hdfs.options
        crc_bytes = self._crc_bytes()
        sent: list[tuple[str, Body]] = []

        def create(client: Any, extra: dict[str, str]) -> None:
            path = f"{folder}/{secrets.token_hex(8)}-{label}"
            body = Body(parts, HdfsChecksum(options.block_bytes, crc_bytes))
            sent.append((path, body))
            if options.replication is not None:
                extra = {**extra, "replication": str(options.replication)}
            try:
                client.create(
                    path,
                    body.pieces(),
                    overwrite="false",
                    createparent="false",
                    createflag="CREATE,SYNC_BLOCK",
                    blocksize=str(options.block_bytes),
                    **extra,
                )
            except Exception:
                if body.failure is not None:
                    raise body.failure from None  # requests would report it as a lost connection
                raise

        try:
            self._hdfs.ask("writing", f"{folder}/{label}", create, once=iter(parts) is parts)
            path, body = sent[-1]
            found = self._check_arrived(path, body)
        except BaseException:
            self._remove_quietly(path for path, _ in sent)
            raise
        self._remove_quietly(path for path, _ in sent[:-1])
        return Upload(path, body.size, found.id)

    def read(self, path: str) -> bytes:
        """Return the whole of a file, or raise NotFound."""

        def request(client: Any, extra: dict[str, str]) -> bytes:
            with contextlib.closing(client.open(path, **extra)) as answer:
                return bytes(answer.read())

        found = self._hdfs.ask_or_none("reading", path, request)
        if found is None:
            raise NotFound(f"{self._hdfs.where}: there is no file {path}", file=path)
        return found

    def fill(self, path: str, offset: int, views: Sequence[memoryview]) -> None:
        """Fill flat buffers with the bytes of a file from ``offset`` on, going on where a broken answer ended."""
        total = sum(view.nbytes for view in views)
        done = 0
        cuts: list[int] = []

        def request(client: Any, extra: dict[str, str]) -> None:
            nonlocal done
            with contextlib.closing(client.open(path, offset=offset + done, length=total - done, **extra)) as answer:
                try:
                    for view in pieces_of(views, done):
                        count = answer.readinto(view)
                        done += count
                        if count < view.nbytes:
                            break
                except Exception:
                    cuts.append(done)
                    if cuts.count(done) >= _CUTS_OF_DAMAGE:
                        raise self._damage(path, offset, total, done) from None
                    raise
            if done < total:
                raise self._damage(path, offset, total, done)

        if total:
            self._hdfs.ask("reading", path, request)

    def copies(self, path: str) -> int:
        """Return how many DataNodes hold each block of a file, for the block that has the fewest."""
        answer = self._hdfs.ask("looking at", path, lambda client, _: client._get(path, "GETFILEBLOCKLOCATIONS").json())
        blocks = answer["BlockLocations"]["BlockLocation"]
        return min((0 if block["corrupt"] else len(block["names"]) for block in blocks), default=0)

    def free_bytes(self, path: str) -> int | None:
        """Return how much a folder may still take, by the DataNodes' disks and its own quota; None if not known."""
        try:
            disks = self._hdfs.ask("looking at", "/", lambda client, _: client._get("/", "GETSTATUS").json())
            defaults = self._hdfs.ask("looking at", "/", lambda client, _: client._get("/", "GETSERVERDEFAULTS").json())
            usage = self._hdfs.ask("looking at", path, lambda client, _: client._get(path, "GETQUOTAUSAGE").json())
        except Backend:  # Hadoop before 3.4 tells it only to its own clients
            return None
        quota, used = usage["QuotaUsage"]["spaceQuota"], usage["QuotaUsage"]["spaceConsumed"]
        free = disks["FsStatus"]["remaining"] if quota < 0 else min(disks["FsStatus"]["remaining"], quota - used)
        return max(0, int(free)) // int(self._hdfs.options.replication or defaults["FsServerDefaults"]["replication"])

    def _check_arrived(self, path: str, body: Body) -> HdfsStatus:
        """Return the status of an upload whose length and checksum are right."""
        found = self.status(path)
        if found is None or found.size != body.size:
            text = f"sent {body.size} bytes, HDFS has {None if found is None else found.size}: write it again"
            raise self._hdfs.error("verifying", path, Trouble(UNANSWERED, text))
        told = self._hdfs.ask("verifying", path, lambda client, _: client.get_file_checksum(path))
        if told.bytes[:56] != body.checksum.hexdigest():
            if body.size and not told.algorithm.endswith(f"of-{self._bytes_per_crc}CRC32C"):
                self._compare(path, body)  # the cluster keeps checksums that we do not compute
            else:
                text = f"sent {body.checksum.hexdigest()}, HDFS has {told.bytes[:56]}: write it again"
                raise self._hdfs.error("verifying", path, Trouble(UNANSWERED, text))
        return found

    def _compare(self, path: str, body: Body) -> None:
        """Read an upload back and compare it."""
        found, piece = 0, memoryview(bytearray(PIECE_BYTES))
        for at in range(0, body.size, PIECE_BYTES):
            view = piece[: min(PIECE_BYTES, body.size - at)]
            self.fill(path, at, [view])
            found = crc32c(view, found)
        if found != body.crc:
            text = f"sent CRC-32C {body.crc:08x}, HDFS has {found:08x}: write it again"
            raise self._hdfs.error("verifying", path, Trouble(UNANSWERED, text))

    def _crc_bytes(self) -> int:
        """Return over how many bytes the cluster's checksums go."""
        if self._bytes_per_crc is None:
            self._bytes_per_crc = BYTES_PER_CRC
            with contextlib.suppress(Backend):  # Hadoop before 3.0 does not tell
                told = self._hdfs.ask("looking at", "/", lambda client, _: client._get("/", "GETSERVERDEFAULTS").json())
                self._bytes_per_crc = int(told["FsServerDefaults"]["bytesPerChecksum"])
        return self._bytes_per_crc

    def _remove_quietly(self, paths: Iterable[str]) -> None:
        """Take failed uploads away; a DataNode may make the file a moment after we hung up.

        What stays or comes later yet lies below tmp and is cleaned by age.
        """
        for path in paths:
            for pause in _PAUSES_OF_A_GHOST:
                time.sleep(pause)
                with contextlib.suppress(Backend):
                    if self._hdfs.ask("deleting", path, partial(_delete, path), once=True):
                        break

    def _damage(self, path: str, offset: int, total: int, done: int) -> Corruption:
        return Corruption(
            f"HDFS {self._hdfs.where}: {path}: expected {total} bytes at offset {offset}, every answer ended after"
            f" {done}: no replica has the next one; run `hdfs fsck` on it and `deltastore verify`",
            file=path,
            offset=offset,
            expected=total,
            found=done,
        )


def _status_of(found: Any) -> HdfsStatus:
    is_file = found.type == "FILE"
    return HdfsStatus(found.pathSuffix, is_file, found.length, found.fileId, found.modificationTime / 1000)


def _delete(path: str, client: Any, _extra: dict[str, str]) -> bool:
    return bool(client.delete(path))
