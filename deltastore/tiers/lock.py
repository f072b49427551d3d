"""One writer per folder: an open-file-description lock on the file LOCK, with a record of its owner inside.

The same record stands in the folder of each session below tmp, where there is no lock and it decides.

The kernel frees the lock when the last descriptor of its open file is closed, so a process that dies, however it dies,
leaves nothing to clean, and the record inside LOCK only tells the refused whom to ask. A forked child inherits such a
descriptor; it closes its own (which frees nothing) and must not unlock, which would free the parent's lock. LOCK is
never deleted: a file that is replaced while somebody waits for it would give two owners.

Where the file system has no such locks we try ``flock``; where it has none at all only the record is left: a writer
on this machine that still runs is a Conflict. Two writers that start in the same moment can both pass that last check;
epochs fence them (spec, chapter on epochs and lock).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from types import TracebackType
from typing import Literal, Self, TypeAlias

from deltastore.errors import Conflict, DeltaStoreError
from deltastore.tiers.base import Owner
from deltastore.tiers.posix import PosixOps, write_all

How: TypeAlias = Literal["description", "flock", "record"]

_TRIES = 20
_PAUSE_SECONDS = 0.005
_DAY_SECONDS = 86400.0
_MINUTE_SECONDS = 60.0
_MOST_RECORD_BYTES = 65536
_HELD_BY_ANOTHER = (errno.EAGAIN, errno.EACCES, errno.EWOULDBLOCK)
_NO_SUCH_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)

# Held while a descriptor of a LOCK is opened or closed and during each fork: a child then finds every inherited
# descriptor in _held. Reentrant, since a signal handler may fork while we hold it.
_guard = threading.RLock()
_held: set[FileLock] = set()


def identify(ops: PosixOps, facts: Owner) -> dict[str, object]:
    """Return the record of this process: ``facts``, host, pid, boot id, start time of the process, and now."""
    pid = os.getpid()
    return {
        **facts,
        "host": ops.host(),
        "pid": pid,
        "boot": ops.boot(),
        "start": ops.process_start(pid) or "",
        "since": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def parse_owner(data: bytes) -> Owner | None:
    """Return an owner's record, or None if the bytes are none (half written, or damaged in a power loss)."""
    try:
        record = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("host"), str):
        return None
    pid = record.get("pid")
    return record if type(pid) is int and 0 < pid < 2**31 else None


def is_alive(ops: PosixOps, record: Owner) -> bool | None:
    """Tell whether the process of a record still runs; None if it is on another host and cannot be asked."""
    if record["host"] != ops.host():
        return None
    if record.get("boot") and ops.boot() and record["boot"] != ops.boot():
        return False
    start = ops.process_start(record["pid"])
    if start is None:
        return False
    return not (record.get("start") and start) or record["start"] == start


def read_small(ops: PosixOps, path: str) -> bytes:
    """Return the first 64 KiB of a file, which a record never fills."""
    fd = ops.open_read(path)
    try:
        data = bytearray(_MOST_RECORD_BYTES)
        return bytes(data[: ops.preadv(fd, [memoryview(data)], 0)])
    finally:
        ops.close(fd)


def write_owner(ops: PosixOps, path: str, session: str) -> None:
    """Put this process's record into a new file; nothing is left if that fails."""
    fd = ops.open_write_new(path)
    try:
        try:
            write_all(ops, fd, [_encode(identify(ops, {"session": session}))])
        finally:
            ops.close(fd)
    except BaseException:  # Else an empty record would stay, and the next file of this session would not mend it.
        with contextlib.suppress(OSError):
            ops.unlink(path)
        raise


def is_abandoned(ops: PosixOps, folder: str, record_name: str) -> bool:
    """Tell whether the writer that works in a folder is gone.

    One on another host, or with a record that cannot be read, cannot be asked: it counts as gone a day after the last
    change in its folder. Without a record it takes a minute: a writer may just be making it (spec 11.1).
    """
    age_seconds = time.time() - ops.stat(folder).modified
    try:
        record = parse_owner(read_small(ops, f"{folder}/{record_name}"))
    except FileNotFoundError:
        return age_seconds > _MINUTE_SECONDS
    except OSError:
        record = None
    alive = None if record is None else is_alive(ops, record)
    return age_seconds > _DAY_SECONDS if alive is None else not alive


class FileLock:
    """A lock that this process holds; made by :func:`acquire`."""

    def __init__(self, ops: PosixOps, path: str, fd: int, owner: Owner, how: How) -> None:
        self._ops = ops
        self._path = path
        self._fd: int | None = fd
        self._owner = owner
        self.how: How = how

    @property
    def owner(self) -> Owner:
        """The record inside LOCK."""
        return self._owner

    def held(self) -> bool:
        """Tell whether LOCK is still the file that we locked, and locked by this process."""
        with _guard:
            return self._fd is not None and _is_at(self._ops, self._fd, self._path)

    def release(self) -> None:
        """Clear the record and close the file; the next writer may come."""
        with _guard:
            if self._fd is None:
                return
            # The record only tells a refused writer whom to ask; a lock that is gone needs none. Where the record is
            # the lock, it may be that of a successor by now.
            with contextlib.suppress(OSError):
                if self.how != "record" or parse_owner(read_small(self._ops, self._path)) == self._owner:
                    self._ops.ftruncate(self._fd, 0)
            self.forget()

    def forget(self) -> None:
        """Close the descriptor without unlocking; a forked child does this to what it inherited."""
        _held.discard(self)
        fd, self._fd = self._fd, None
        if fd is not None:
            self._ops.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def acquire(ops: PosixOps, path: str, facts: Owner) -> FileLock:
    """Take the lock on the file ``path``, or raise Conflict with the owner's host and pid. OSError as it comes.

    Never waits for the owner, but up to a tenth of a second for its record: an owner writes it just after it locked.
    """
    record: Owner | None = None
    for _ in range(_TRIES):
        lock = _try(ops, path, facts)
        if lock is not None:
            return lock
        with contextlib.suppress(FileNotFoundError):  # Taken away by hand: the next try makes it anew.
            record = parse_owner(read_small(ops, path))
        if record is not None and is_alive(ops, record) is not False:
            break
        time.sleep(_PAUSE_SECONDS)
    raise conflict(ops, path, record)


def conflict(ops: PosixOps, where: str, record: Owner | None, advice: str = "") -> DeltaStoreError:
    """Return the error for a writer that came second; ``advice`` says what else may be done."""
    if record is None:
        owner = "a writer that left no record of itself"
    else:
        owner = f"process {record['pid']} on {record['host']}"
        owner += f", session {record.get('session')}, since {record.get('since')}"
        if is_alive(ops, record) is False:
            owner += (
                " (not seen here any more: it runs in another container, or a process that it started has the lock)"
            )
    return Conflict(
        f"{where}: another writer holds this store: {owner}; end it, or open the store with mode='r'{advice}",
        where=where,
        host=record["host"] if record else None,
        pid=record["pid"] if record else None,
        owner=dict(record) if record else None,
    )


def _try(ops: PosixOps, path: str, facts: Owner) -> FileLock | None:
    with _guard:
        fd = ops.open_lock(path)
        lock = None
        try:
            how = _lock_file(ops, fd, path)
            # Between open and lock the file may have been replaced by hand: then this lock guards nothing.
            if how is not None and _is_at(ops, fd, path):
                owner = identify(ops, facts)
                _write_record(ops, fd, owner, how)
                lock = FileLock(ops, path, fd, owner, how)
                _held.add(lock)
            return lock
        finally:
            if lock is None:
                ops.close(fd)


def _write_record(ops: PosixOps, fd: int, owner: Owner, how: How) -> None:
    """Write who holds the lock, over what stands there: on a full disk there is no room for a new block."""
    data = _encode(owner)
    try:
        ops.pwrite(fd, data.ljust(ops.fstat(fd).size), 0)
        ops.ftruncate(fd, len(data))
    except OSError as error:
        # The kernel's lock holds without it, and who frees a full disk must get in.
        if how == "record" or error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise


def _lock_file(ops: PosixOps, fd: int, path: str) -> How | None:
    """Lock by the best means that the file system has; None if another holds it."""
    means: tuple[tuple[How, Callable[[int], None]], ...] = (("description", ops.lock_description), ("flock", ops.flock))
    for how, lock in means:
        try:
            lock(fd)
        except OSError as error:
            if error.errno in _HELD_BY_ANOTHER:
                return None
            if error.errno not in _NO_SUCH_LOCKS:
                raise
        else:
            return how
    record = parse_owner(read_small(ops, path))
    return None if record is not None and is_alive(ops, record) else "record"


def _encode(record: Owner) -> bytes:
    return json.dumps(record, sort_keys=True).encode("ascii") + b"\n"


def _is_at(ops: PosixOps, fd: int, path: str) -> bool:
    try:
        return ops.stat(path).identity == ops.fstat(fd).identity
    except OSError:
        return False


def _forget_in_child() -> None:
    try:
        for lock in tuple(_held):
            lock.forget()
    finally:
        _guard.release()


os.register_at_fork(before=_guard.acquire, after_in_parent=_guard.release, after_in_child=_forget_in_child)
