"""Files of an fsspec file system, open for reading."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from deltastore.errors import Backend, Corruption, DeltaStoreError, InvalidInput
from deltastore.tiers.base import backend_error, check_range

_PART_BYTES = 4 << 20
"""A long range of an object store is read in parts of this size, at the same time."""


class FsspecFile:
    """One file; how its bytes come is the affair of the subclasses."""

    def __init__(self, where: str, size: int) -> None:
        self._where = where
        self._size = size
        self._closed = False

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._size

    def readinto(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill all ``buffers`` with the bytes from ``offset`` on; Corruption when the file ends before."""
        views = [buffer.cast("B") for buffer in buffers if buffer.nbytes]
        data = memoryview(self.read(offset, sum(view.nbytes for view in views)))
        at = 0
        for view in views:
            view[:] = data[at : at + view.nbytes]
            at += view.nbytes

    def read(self, offset: int, length: int) -> bytes:
        """Return exactly ``length`` bytes from ``offset`` on."""
        check_range(self._where, self._size, offset, length)
        if self._closed:
            raise InvalidInput(f"{self._where}: this file was closed", file=self._where)
        try:
            data = self._fetch(offset, length) if length else b""
        except DeltaStoreError:
            raise
        except OSError as error:
            raise backend_error(f"reading {self._where}", self._where, error) from error
        except Exception as error:
            text = f"reading {self._where}: {type(error).__name__}: {error}"
            raise Backend(text, transient=True, file=self._where) from error
        if len(data) != length:
            raise Corruption(
                f"{self._where}: expected {length} bytes at offset {offset}, found {len(data)}: the file was cut after"
                " it was opened; run `deltastore verify`",
                file=self._where,
                offset=offset,
                expected=length,
                found=len(data),
            )
        return data

    def _fetch(self, offset: int, length: int) -> bytes:
        raise NotImplementedError

    def close(self) -> None:
        """Give the file back; twice is fine."""
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class HeldFile(FsspecFile):
    """A file of a system that keeps what is open, also when it is deleted: a handle, used by one thread at a time."""

    def __init__(self, where: str, handle: Any, size: int) -> None:
        super().__init__(where, size)
        self._handle = handle
        self._guard = threading.Lock()

    def _fetch(self, offset: int, length: int) -> bytes:
        with self._guard:
            self._handle.seek(offset)
            return bytes(self._handle.read(length))

    def close(self) -> None:
        """Close the handle; twice is fine."""
        super().close()
        self._handle.close()


class KeptFile(FsspecFile):
    """A file that was read whole when it was opened."""

    def __init__(self, where: str, data: bytes) -> None:
        super().__init__(where, len(data))
        self._data = data

    def _fetch(self, offset: int, length: int) -> bytes:
        return self._data[offset : offset + length]


class RangedFile(FsspecFile):
    """An object of a store that is asked for each range; when the object is deleted, reading it fails."""

    def __init__(self, where: str, system: Any, path: str, size: int) -> None:
        super().__init__(where, size)
        self._system = system
        self._path = path

    def _fetch(self, offset: int, length: int) -> bytes:
        starts = range(offset, offset + length, _PART_BYTES)
        ends = [min(start + _PART_BYTES, offset + length) for start in starts]
        return b"".join(self._system.cat_ranges([self._path] * len(ends), list(starts), ends, on_error="raise"))
