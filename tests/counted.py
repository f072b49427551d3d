"""A memory tier that tells what was read of it."""

from __future__ import annotations

from collections.abc import Sequence

from deltastore.tiers.memory import MemoryFile, MemoryTier

Read = tuple[str, int, int]
"""Name, offset, bytes."""


class CountedFile(MemoryFile):
    """A file whose reads are written down."""

    def __init__(self, where: str, data: bytes, name: str, reads: list[Read]) -> None:
        super().__init__(where, data)
        self._name = name
        self._reads = reads

    def readinto(self, offset: int, buffers: Sequence[memoryview]) -> None:
        self._reads.append((self._name, offset, sum(buffer.nbytes for buffer in buffers)))
        super().readinto(offset, buffers)

    def read(self, offset: int, length: int) -> bytes:
        self._reads.append((self._name, offset, length))
        return super().read(offset, length)


class CountedTier(MemoryTier):
    """A memory tier with a list of its reads."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.reads: list[Read] = []

    def open(self, name: str) -> MemoryFile:
        return CountedFile(f"{self.url}/{name}", super().read(name), name, self.reads)

    def read(self, name: str) -> bytes:
        data = super().read(name)
        self.reads.append((name, 0, len(data)))
        return data

    def of(self, folder: str) -> list[Read]:
        """Return the reads below a folder, and forget all."""
        found = [read for read in self.reads if read[0].startswith(f"{folder}/")]
        self.reads.clear()
        return found
