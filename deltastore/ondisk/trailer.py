"""The 44 bytes at the end of a pack: with them one suffix read opens it (spec 3.6)."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from deltastore.checksums import crc32c
from deltastore.errors import Corruption
from deltastore.ondisk.limits import MAX_TAIL_BYTES

MAGIC = b"DSPACK01"
_TRAILER = struct.Struct("<8sQQIIQI")
TRAILER_BYTES = _TRAILER.size
SMALLEST_PACK_BYTES = TRAILER_BYTES + 22
"""A trailer behind a ZIP end record."""


@dataclass(frozen=True, slots=True)
class Trailer:
    """Where the metadata of a pack lies."""

    tail_offset: int
    index_offset: int
    index_length: int
    tail_crc: int
    file_size: int


def encode_trailer(trailer: Trailer) -> bytes:
    """Return the bytes of a trailer."""
    head = _TRAILER.pack(
        MAGIC,
        trailer.tail_offset,
        trailer.index_offset,
        trailer.index_length,
        trailer.tail_crc,
        trailer.file_size,
        0,
    )[:-4]
    return head + struct.pack("<I", crc32c(head))


def parse_trailer(data: bytes, file_size: int, where: str) -> Trailer:
    """Return the trailer from the last bytes of a file, after length, magic, checksum and bounds.

    Parameters
    ----------
    data : bytes
        The end of the file, `TRAILER_BYTES` or more.
    file_size : int
        The size that the storage reports.
    """
    if len(data) < TRAILER_BYTES or file_size < SMALLEST_PACK_BYTES:
        raise Corruption(f"{where}: {file_size} bytes are too short for a pack", where=where, found=file_size)
    raw = data[-TRAILER_BYTES:]
    magic, tail, index, length, tail_crc, size, crc = _TRAILER.unpack(raw)
    if magic != MAGIC:
        raise Corruption(
            f"{where}: the file does not end with a pack's trailer: found {magic!r}, expected {MAGIC!r}; "
            "it was cut short, or it is not a pack",
            where=where,
            expected=MAGIC,
            found=magic,
        )
    found = crc32c(raw[:-4])
    if found != crc:
        raise Corruption(
            f"{where}: trailer has CRC-32C {found:08x}, expected {crc:08x}", where=where, expected=crc, found=found
        )
    if size != file_size:
        raise Corruption(
            f"{where}: file has {file_size} bytes, the trailer says {size}", where=where, expected=size, found=file_size
        )
    if not tail <= index <= index + length <= size - TRAILER_BYTES:
        raise Corruption(
            f"{where}: the trailer points to {index} + {length} behind {tail}, outside of the file of {size} bytes",
            where=where,
            expected=size,
            found=index + length,
        )
    if size - tail > MAX_TAIL_BYTES:
        raise Corruption(
            f"{where}: {size - tail} bytes of metadata, at most {MAX_TAIL_BYTES} are allowed",
            where=where,
            expected=MAX_TAIL_BYTES,
            found=size - tail,
        )
    return Trailer(tail, index, length, tail_crc, size)


def check_tail(tail: bytes, trailer: Trailer, where: str) -> None:
    """Raise Corruption unless `tail`, all bytes from the tail offset on, fits its checksum."""
    found = crc32c(memoryview(tail)[:-TRAILER_BYTES])
    if found != trailer.tail_crc:
        raise Corruption(
            f"{where}: the metadata (bytes {trailer.tail_offset} to the end) has CRC-32C {found:08x}, "
            f"expected {trailer.tail_crc:08x}; run `deltastore verify`",
            where=where,
            expected=trailer.tail_crc,
            found=found,
        )
