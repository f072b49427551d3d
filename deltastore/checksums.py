"""CRC-32C: the checksum of chunks, and the one that HDFS keeps of its blocks. The door to crc32c."""

from __future__ import annotations

from crc32c import crc32c as _crc32c


def crc32c(data: bytes | bytearray | memoryview, crc: int = 0) -> int:
    """Return the CRC-32C of `data`, continuing `crc`."""
    return int(_crc32c(data, crc))


def crc32c_of_each(data: bytes | bytearray | memoryview, size: int) -> list[int]:
    """Return the CRC-32C of every `size` bytes of `data`, and of what is left at its end."""
    view = memoryview(data)
    return [_crc32c(view[at : at + size]) for at in range(0, view.nbytes, size)]
