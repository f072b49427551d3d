"""The ZIP framing of a pack: STORED entries with known sizes, laid down front to back (spec 3)."""

from __future__ import annotations

import struct
from dataclasses import dataclass

_LOCAL = struct.Struct("<IHHHHHIIIHH")
_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
_END64 = struct.Struct("<IQHHIIQQQQ")
_LOCATOR = struct.Struct("<IIQI")
_END = struct.Struct("<IHHHHIIH")

DOS_DATE = (1 << 5) | 1
"""1 January 1980: packs hold no clock of the writer outside their records."""
PADDING_ID = 0x5344
ALIGNMENT = 64
END_SIGNATURE = b"PK\x05\x06"
"""Some readers look for the last of these: a comment must not hold one."""
DIRECTORY_ENTRY_BYTES = _CENTRAL.size
"""Of a record of the central directory, without the name."""
END_BYTES = _END64.size + _LOCATOR.size + _END.size
"""Of all end records."""
_MAX32 = 0xFFFFFFFF
_MAX16 = 0xFFFF


@dataclass(frozen=True, slots=True)
class ZipEntry:
    """One entry as the central directory lists it."""

    name: str
    header_offset: int
    data_offset: int
    length: int
    crc32: int


def local_header(
    name: str, offset: int, length: int, crc32: int, *, align: bool, spare: int = 0
) -> tuple[bytes, ZipEntry]:
    """Return the local header of an entry that starts at `offset`, and the entry.

    Parameters
    ----------
    align : bool
        Pad with an extra field, so that the data starts at a multiple of 64 bytes.
    spare : int
        Bytes of padding beyond what is needed, a multiple of 64.
    """
    encoded = name.encode("ascii")
    data_offset = offset + _LOCAL.size + len(encoded)
    extra = b""
    if align and (data_offset % ALIGNMENT or spare):
        # Never an empty field: some readers take four bytes of extra data for a damaged header.
        gap = (-(data_offset + 4) % ALIGNMENT or ALIGNMENT) + spare
        extra = struct.pack("<HH", PADDING_ID, gap) + bytes(gap)
    header = _LOCAL.pack(0x04034B50, 20, 0, 0, 0, DOS_DATE, crc32, length, length, len(encoded), len(extra))
    entry = ZipEntry(name, offset, data_offset + len(extra), length, crc32)
    return header + encoded + extra, entry


def central_record(entry: ZipEntry) -> bytes:
    """Return an entry's record of the central directory, with a ZIP64 field where its offset needs one."""
    encoded = entry.name.encode("ascii")
    far = entry.header_offset >= _MAX32
    extra = struct.pack("<HHQ", 1, 8, entry.header_offset) if far else b""
    needed = 45 if far else 20
    head = _CENTRAL.pack(
        0x02014B50, 45, needed, 0, 0, 0, DOS_DATE, entry.crc32, entry.length, entry.length,
        len(encoded), len(extra), 0, 0, 0, 0, _MAX32 if far else entry.header_offset,
    )  # fmt: skip
    return head + encoded + extra


def end_records(count: int, offset: int, size: int, comment_bytes: int) -> bytes:
    """Return the ZIP64 end record, its locator and the end record that announces a comment."""
    end64 = _END64.pack(0x06064B50, _END64.size - 12, 45, 45, 0, 0, count, count, size, offset)
    locator = _LOCATOR.pack(0x07064B50, 0, offset + size, 1)
    few = min(count, _MAX16)
    end = _END.pack(0x06054B50, 0, 0, few, few, min(size, _MAX32), min(offset, _MAX32), comment_bytes)
    return end64 + locator + end
