"""What a tier promises: whole files that appear at once, are never changed, and last once published.

Calls of a writer, in order::

    check_writable()                  when a store is opened for writing; writes nothing
    create()                          once per session, before anything else is written
    lock({"session": s})              one writer per place; held until release() or the end of the process
    clean(s)                          leftovers of dead writers go; only the lock's holder calls it
    list("packs"), sync("packs")      what was found is made durable before something new builds on it
    stage(name, parts, s)             as many as wanted, also from several threads at once
    publish(staged) or discard(staged)
    end_session(s)                    tidies up; a session that is never ended is cleaned by a later writer

A reader calls only ``exists``, ``list``, ``open`` and ``read``; it needs no lock and writes nothing.

==================  ===============================================================================================
idempotent          ``exists create check_writable discard list open read delete sync free_bytes clean end_session``
not idempotent      ``stage`` (a new temporary file each time), ``publish`` (the second finds its name taken),
                    ``lock`` (Conflict, also within one process)
thread safe         every call. Several threads may stage and publish; of several that publish one name, one wins
after a fork        a child may read; what it inherited of a lock is closed and never released; it must not write
errors              ``Backend`` with ``errno`` where the system refused, and nothing became visible by halves;
                    ``OutcomeUnknown`` where a publish may have landed: ``read`` the name, compare your write id,
                    and if it is yours call ``sync`` of its folder, only then is it durable
==================  ===============================================================================================

See spec, chapters on publishing and on the lock.
"""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self, TypeAlias

from deltastore.errors import Backend, Corruption, DeltaStoreError, InvalidInput

Buffer: TypeAlias = bytes | bytearray | memoryview
"""Bytes to write: anything whose buffer is C-contiguous."""

Owner: TypeAlias = Mapping[str, Any]
"""Who holds a lock or a session: host, pid, boot, start, session, since."""

FileInfos: TypeAlias = "list[FileInfo]"
Names: TypeAlias = list[str]

FOLDERS = ("packs", "epochs", "tags", "tmp")
"""The folders that ``create`` makes."""

LOCK = "LOCK"

# A retry may help: space is made, descriptors come free, a server comes back.
_TRANSIENT = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EAGAIN,
    errno.EINTR,
    errno.EBUSY,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.ETIMEDOUT,
)
_SEGMENT = re.compile(r"[A-Za-z0-9._-]{1,200}")


def is_segment(text: str) -> bool:
    """Tell whether ``text`` may be one segment of a file's name."""
    return _SEGMENT.fullmatch(text) is not None and text not in (".", "..")


def check_name(name: str) -> None:
    """Raise InvalidInput unless ``name`` is a relative path of the store tree.

    Segments of ``[A-Za-z0-9._-]`` joined by ``/``: no empty one, no ``.`` or ``..``, nothing absolute.
    """
    if not all(map(is_segment, name.split("/"))):
        raise InvalidInput(
            f"{name!r} is no name in a store: segments of up to 200 letters, digits, '.', '_', '-', joined by '/'",
            name=name,
        )


def check_target(name: str) -> None:
    """Raise InvalidInput unless ``name`` may be published or deleted: a good name, not the lock, not below tmp."""
    check_name(name)
    if name == LOCK or name.split("/", maxsplit=1)[0] == "tmp":
        raise InvalidInput(f"{name!r} belongs to the tier itself and is neither published nor deleted", name=name)


def check_session(session: str) -> None:
    """Raise InvalidInput unless ``session`` may be the name of a folder below tmp."""
    if not is_segment(session):
        raise InvalidInput(f"{session!r} is no session id: up to 200 letters, digits, '.', '_', '-'", session=session)


def as_bytes(part: Buffer) -> memoryview:
    """Return a flat view of the bytes of ``part``, not a copy."""
    view = memoryview(part)
    if not view.c_contiguous:
        raise InvalidInput("a part of a file must be C-contiguous")
    # A view with a zero in its shape cannot be cast.
    return view.cast("B") if view.nbytes else memoryview(b"")


def check_range(where: str, size: int, offset: int, length: int) -> None:
    """Raise Corruption unless a file of ``size`` bytes holds ``length`` bytes at ``offset``."""
    if offset < 0 or length < 0 or offset + length > size:
        found = min(max(size - offset, 0), size)
        raise Corruption(
            f"{where}: expected {length} bytes at offset {offset}, found {found}: the file has {size} bytes;"
            " run `deltastore verify`",
            file=where,
            offset=offset,
            expected=length,
            found=found,
        )


def backend_error(doing: str, file: str, error: OSError) -> Backend:
    """Return the error for a request that the system refused, with its errno and whether a retry may help."""
    return Backend(f"{doing}: {error}", errno=error.errno, transient=error.errno in _TRANSIENT, file=file)


@contextlib.contextmanager
def failing(doing: str, file: str) -> Iterator[None]:
    """Turn an OSError of the system into Backend; errors of deltastore pass."""
    try:
        yield
    except DeltaStoreError:
        raise
    except OSError as error:
        raise backend_error(doing, file, error) from error


def folder_of(name: str) -> str:
    """Return the folder of a file's name, ``""`` for the root."""
    return name.rpartition("/")[0]


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One file of a tier."""

    name: str
    """Relative to the root: ``packs/e1-0-0-ab.zip``."""
    size: int


@dataclass(frozen=True, slots=True)
class Staged:
    """A file that is written and synced, but not yet visible."""

    name: str
    """The name that it will get."""
    size: int
    token: str
    """What the tier needs to find it; has no meaning outside of the tier."""


class RandomFile(Protocol):
    """A published file, open for reading at any place by any number of threads.

    It keeps working after the file was deleted. Close it when no read runs any more, or use it as a context manager.
    """

    @property
    def size(self) -> int:
        """Bytes of the file."""

    def readinto(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill all ``buffers``, one after the other, with the bytes from ``offset`` on.

        Corruption names file, offset, expected and found when the file ends before they are full.
        """

    def read(self, offset: int, length: int) -> bytes:
        """Return exactly ``length`` bytes; Corruption as for ``readinto``, before anything is allocated."""

    def close(self) -> None:
        """Give the file back; twice is fine."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Lock(Protocol):
    """The right to write to a tier, until it is released or the process ends, however it ends."""

    @property
    def owner(self) -> Owner:
        """The record that a refused writer is told."""

    def held(self) -> bool:
        """Tell whether this process still holds it: not after ``release``, in a forked child, or on a replaced LOCK."""

    def release(self) -> None:
        """Let the next writer in; twice is fine, and in a forked child it does nothing."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Tier(Protocol):
    """A place that holds the files of one store; the module's docstring gives the order of the calls."""

    @property
    def name(self) -> str:
        """The kind of tier, as users write it: "memory", "local", "remote"."""

    @property
    def url(self) -> str:
        """What opens the same place again: an absolute folder, ``memory://name``, ``hdfs://namenode:9870/folder``."""

    def exists(self) -> bool:
        """Tell whether a store is here: a FORMAT.json or a folder packs."""

    def create(self) -> None:
        """Make the root and its folders, durably; what exists is kept and made durable too."""

    def check_writable(self) -> None:
        """Raise Backend, with the errno, if writing here must fail; writes nothing and makes no folder."""

    def stage(self, name: str, parts: Iterable[Buffer], session: str) -> Staged:
        """Write a whole file below tmp/<session>/ and sync it; it stays invisible.

        ``parts`` is taken one by one and may be lazy. Whatever goes wrong, also in ``parts``, the temporary file is
        removed; an OSError becomes Backend. A failed sync is never repeated on the same file.
        """

    def publish(self, staged: Staged) -> None:
        """Give a staged file its name, unless that is taken, and make that durable.

        AlreadyExists if the name is taken: the staged file is still there, discard it. Backend: it did not land and
        may be published again. OutcomeUnknown: it may have landed.
        """

    def discard(self, staged: Staged) -> None:
        """Remove a staged file that is not wanted any more; a published file is not touched."""

    def publish_new(self, name: str, parts: Iterable[Buffer], session: str) -> int:
        """Stage and publish; return the size. On any error nothing is left below tmp."""

    def list(self, folder: str) -> FileInfos:
        """Return every file below a folder ("" = all), sorted by name; a folder that is missing holds none."""

    def open(self, name: str) -> RandomFile:
        """Open a published file, or raise NotFound."""

    def read(self, name: str) -> bytes:
        """Return the whole of a published file, or raise NotFound."""

    def delete(self, name: str) -> None:
        """Remove a file; one that is missing is fine. Durable only after ``sync`` of its folder."""

    def sync(self, folder: str) -> None:
        """Make the names that a folder ("" = the root) now holds durable; a missing folder is fine."""

    def free_bytes(self) -> int | None:
        """Return how much may still be written, None if that is not known."""

    def lock(self, owner: Owner) -> Lock:
        """Take the right to write, or raise Conflict with ``host`` and ``pid`` of the one who has it.

        ``owner`` adds facts for the refused (the session); the tier adds those of the process.
        """

    def clean(self, keep_session: str) -> Names:
        """Remove what dead writers left below tmp and return their sessions; live writers and ``keep_session`` stay."""

    def end_session(self, session: str) -> None:
        """Remove what this session left below tmp."""


def stage_and_publish(tier: Tier, name: str, parts: Iterable[Buffer], session: str) -> int:
    """Do what :meth:`Tier.publish_new` promises by the other methods of a tier."""
    staged = tier.stage(name, parts, session)
    try:
        tier.publish(staged)
    except BaseException:
        with contextlib.suppress(Backend):  # what went wrong before says more
            tier.discard(staged)
        raise
    return staged.size
