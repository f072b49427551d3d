"""The bytes of a file on their way to or from HDFS: in pieces, so that memory stays flat."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from deltastore.checksums import crc32c
from deltastore.tiers.base import Buffer, as_bytes
from deltastore.tiers.hdfs_checksum import HdfsChecksum

PIECE_BYTES = 1 << 20
"""What is sent and received at a time."""


class Body:
    """The parts of a file on their way, in pieces of one size, with their checksums."""

    def __init__(self, parts: Iterable[Buffer], checksum: HdfsChecksum) -> None:
        self._parts = parts
        self.checksum = checksum
        self.crc = 0
        self.size = 0
        self.failure: Exception | None = None
        """The error of the caller's parts that ended the sending."""

    def pieces(self) -> Iterator[bytes | memoryview]:
        """Yield what is sent."""
        small = bytearray()
        try:
            for part in self._parts:
                view = as_bytes(part)
                self.checksum.update(view)
                self.crc = crc32c(view, self.crc)
                self.size += view.nbytes
                if small and len(small) + view.nbytes > PIECE_BYTES:
                    yield bytes(small)
                    small.clear()
                if view.nbytes < PIECE_BYTES:
                    small += view
                else:
                    yield from pieces_of([view], 0)
        except Exception as error:
            self.failure = error
            raise
        if small:
            yield bytes(small)


def pieces_of(views: Sequence[memoryview], start: int) -> Iterator[memoryview]:
    """Yield what lies behind the first ``start`` bytes of some buffers, in pieces."""
    for view in views:
        for at in range(min(start, view.nbytes), view.nbytes, PIECE_BYTES):
            yield view[at : at + PIECE_BYTES]
        start = max(0, start - view.nbytes)
