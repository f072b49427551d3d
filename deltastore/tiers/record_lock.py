"""One writer per place where files cannot be locked: a file LOCK that only one writer can make, with its record inside.

A writer that dies leaves its LOCK. If it ran on this machine the next one sees that and takes over; one on another
machine cannot be asked, and somebody who knows must remove the file. Two writers that take over in the same moment can
both pass: epochs fence them (spec, chapter on epochs and lock).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from types import TracebackType
from typing import Protocol, Self

from deltastore.errors import DeltaStoreError, NotFound
from deltastore.tiers.base import LOCK, Owner
from deltastore.tiers.lock import conflict, identify, is_alive, parse_owner
from deltastore.tiers.posix import PosixOps

_OPS = PosixOps()
_TRIES = 5


class LockPlace(Protocol):
    """What a tier gives, so that its LOCK can be made."""

    @property
    def url(self) -> str:
        """Where the store is."""

    def read(self, name: str) -> bytes:
        """Return the whole of a file, or raise NotFound."""

    def make_lock(self, data: bytes) -> bool:
        """Make the file LOCK; False if it is there."""

    def remove_lock(self) -> None:
        """Remove the file LOCK; one that is missing is fine."""


class RecordLock:
    """A lock that this process holds; made by :func:`acquire_record`."""

    def __init__(self, place: LockPlace, owner: Owner, data: bytes) -> None:
        self._place = place
        self._owner = owner
        self._data = data
        self._released = False

    @property
    def owner(self) -> Owner:
        """The record inside LOCK."""
        return self._owner

    def held(self) -> bool:
        """Tell whether LOCK is still the one that this process made."""
        if self._released or self._owner["pid"] != os.getpid():
            return False
        try:
            return self._place.read(LOCK) == self._data
        except NotFound:
            return False

    def release(self) -> None:
        """Remove LOCK, if it is ours; where that fails, a later writer on this machine takes over."""
        with contextlib.suppress(DeltaStoreError):
            if self.held():
                self._place.remove_lock()
        self._released = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def acquire_record(place: LockPlace, facts: Owner) -> RecordLock:
    """Make LOCK, or raise Conflict with the host and pid of the writer that made it."""
    owner = {**identify(_OPS, facts), "write": secrets.token_hex(8)}
    data = json.dumps(owner, sort_keys=True).encode("ascii") + b"\n"
    found: Owner | None = None
    for _ in range(_TRIES):
        if place.make_lock(data):
            return RecordLock(place, owner, data)
        try:
            found = parse_owner(place.read(LOCK))
        except NotFound:
            continue  # given back meanwhile
        if found is None or is_alive(_OPS, found) is not False:
            break
        place.remove_lock()
    advice = f"; if its machine is gone for good, remove {LOCK}"
    raise conflict(_OPS, f"{place.url}/{LOCK}", found, advice)
