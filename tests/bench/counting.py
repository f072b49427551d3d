"""A local tier that counts what it reads."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from deltastore.store import Store
from deltastore.tiers.local import LocalTier
from deltastore.tiers.posix import PosixOps


class CountingOps(PosixOps):
    """The real system, its reads counted."""

    def __init__(self) -> None:
        self.reads = 0
        self.bytes = 0

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill buffers, and count."""
        count = os.preadv(fd, buffers, offset)
        self.reads += 1
        self.bytes += count
        return count

    def reset(self) -> None:
        """Count from zero."""
        self.reads = self.bytes = 0


class UnsyncedOps(PosixOps):
    """A system that syncs nothing: for stores that are built only to be read, and again if the machine fails."""

    def fsync(self, fd: int) -> None:
        """Do nothing."""

    def fsync_folder(self, path: str) -> None:
        """Do nothing."""


def counted_store(root: Path) -> tuple[Store, CountingOps]:
    """Open a store for reading, with its counters."""
    ops = CountingOps()
    return Store(LocalTier(root, ops), writable=False), ops
