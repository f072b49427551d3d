"""A file that stays open as long as a tensor of it may be read."""

from __future__ import annotations

import os
import weakref

from deltastore.errors import Backend, Corruption, InvalidInput, NotFound


class OpenFile:
    """A file that is read at any place by any thread, and closed when nobody has it any more.

    What takes its place at the path later is another file, and does not change what is read.

    Raises
    ------
    NotFound
        There is no such file.
    InvalidInput
        It is a folder.
    Backend
        The system refused.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise NotFound(f"{path}: there is no such file", path=path) from None
        except OSError as error:
            raise Backend(f"{path}: {error.strerror}", errno=error.errno, path=path) from error
        weakref.finalize(self, os.close, descriptor)
        self._descriptor = descriptor
        if os.path.isdir(path):
            raise InvalidInput(f"{path} is a folder; name the file in it", path=path)
        self.size = os.fstat(descriptor).st_size

    def read(self, offset: int, count: int) -> bytes:
        """Return bytes from a place."""
        content = bytearray(count)
        self.read_into(offset, memoryview(content))
        return bytes(content)

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fill memory from a place.

        Raises
        ------
        Corruption
            The file ends before.
        """
        try:
            while out:
                count = os.preadv(self._descriptor, [out], offset)
                if not count:
                    raise Corruption(f"{self.path} became shorter while it was read", path=self.path, where=self.path)
                out, offset = out[count:], offset + count
        except OSError as error:
            raise Backend(f"{self.path}: {error.strerror}", errno=error.errno, path=self.path) from error
