"""A file of HDFS, open for reading."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

from deltastore.errors import Backend, InvalidInput, NotFound
from deltastore.parallel import run_parts
from deltastore.tiers.base import check_range
from deltastore.tiers.hdfs_ahead import ReadAhead
from deltastore.tiers.hdfs_client import WebHdfs

_PART_BYTES = 4 << 20
_PARTS = 4
"""A long range is read by so many requests at once: a DataNode's connection gives a part of what HDFS can."""


class HdfsFile:
    """A file of HDFS, known by its inode: it may be renamed or deleted meanwhile."""

    def __init__(self, hdfs: WebHdfs, where: str, inode: int, size: int) -> None:
        self._hdfs = hdfs
        self._where = where
        self._path: str | None = f"/.reserved/.inodes/{inode}"
        self._size = size
        self._ahead = ReadAhead(lambda offset, view: self._fill([(offset, [view])]), size)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._size

    def readinto(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill all ``buffers`` with the bytes from ``offset`` on; Corruption when the file ends before."""
        views = [buffer.cast("B") for buffer in buffers if buffer.nbytes]
        check_range(self._where, self._size, offset, sum(view.nbytes for view in views))
        if self._path is None:
            raise InvalidInput(f"{self._where}: this file was closed", file=self._where)
        if self._ahead.read(offset, views):
            return
        parts = list(_parts(offset, views))
        if len(parts) < 2:
            self._fill(parts)
        else:
            run_parts(lambda part: self._fill([part]), parts)

    def read(self, offset: int, length: int) -> bytes:
        """Return exactly ``length`` bytes from ``offset`` on."""
        check_range(self._where, self._size, offset, length)
        data = bytearray(length)
        self.readinto(offset, [memoryview(data)])
        if self._path is None:
            raise InvalidInput(f"{self._where}: this file was closed", file=self._where)
        return bytes(data)

    def _fill(self, parts: Sequence[tuple[int, Sequence[memoryview]]]) -> None:
        for offset, views in parts:
            try:
                self._hdfs.fill(str(self._path), offset, views)
            except Backend as error:
                if error.errno != errno.ENOENT:
                    raise
                raise NotFound(
                    f"{self._where} was deleted since it was opened, and its grace period is over; call refresh()",
                    file=self._where,
                ) from error

    def close(self) -> None:
        """Give the file back; twice is fine."""
        self._path = None
        self._ahead.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _parts(offset: int, views: Sequence[memoryview]) -> Iterator[tuple[int, list[memoryview]]]:
    """Cut a long range into parts, so that they can be read at the same time."""
    total = sum(view.nbytes for view in views)
    size = -(-total // min(_PARTS, max(1, total // _PART_BYTES)))
    part: list[memoryview] = []
    left = size
    for view in views:
        while view.nbytes:
            piece, view = view[:left], view[left:]
            part.append(piece)
            left -= piece.nbytes
            if not left:
                yield offset, part
                offset += size
                part, left = [], size
    if part:
        yield offset, part
