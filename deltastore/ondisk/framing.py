"""The ZIP and Zarr side of a pack against its index: what only stock readers look at (spec 3, 4.2, 13.2)."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator

from deltastore.errors import Corruption
from deltastore.ondisk.canonical import parse_json
from deltastore.ondisk.codecs import crc32
from deltastore.ondisk.index import INDEX_ENTRY, ArrayIndex
from deltastore.ondisk.pack import PackTail
from deltastore.ondisk.trailer import TRAILER_BYTES
from deltastore.ondisk.zarr_profile import array_metadata
from deltastore.ondisk.zipfile64 import (
    ALIGNMENT,
    DIRECTORY_ENTRY_BYTES,
    END_BYTES,
    ZipEntry,
    central_record,
    end_records,
    local_header,
)

Read = Callable[[int, int], bytes]
"""Gives the bytes of a pack: offset, length."""

_ADVICE = "this library can still read the values, other ZIP and Zarr readers may not"


def directory_entries(tail: PackTail) -> list[ZipEntry]:
    """Return the entries of a pack's central directory, which must agree with index and Zarr metadata.

    Raises
    ------
    Corruption
        The directory, its end records or a `zarr.json` is not what a writer of this index would have made.
    """
    data, base = tail.tail, tail.trailer.tail_offset
    end = len(data) - TRAILER_BYTES - END_BYTES
    count, size, offset = struct.unpack_from("<QQQ", data, max(end, 0) + 32)
    start = offset - base
    if end < 0 or start < 0 or start + size != end:
        raise _fault(tail, "central directory", "it does not lie in front of its end records")
    entries = list(_parse(tail, data[start:end]))
    made = b"".join(map(central_record, entries)) + end_records(len(entries), offset, size, TRAILER_BYTES)
    if len(entries) != count or made != data[start:-TRAILER_BYTES]:
        raise _fault(tail, "central directory", "it is not as a writer makes it")
    _check_entries(tail, {entry.name: entry for entry in entries}, len(entries))
    return entries


def check_headers(tail: PackTail, entries: list[ZipEntry], read: Read) -> None:
    """Compare the data of every entry with its CRC-32, and all bytes between with what a writer must have written."""
    at = 0
    for entry in entries:
        gap = entry.data_offset - at
        header, _ = local_header(entry.name, at, entry.length, entry.crc32, align="/c/" in entry.name)
        longer, _ = local_header(entry.name, at, entry.length, entry.crc32, align=True, spare=ALIGNMENT)
        found = read(at, gap) if gap > 0 else b""
        if entry.header_offset != at or found not in (header, longer):
            raise _fault(tail, entry.name, f"the local header at byte {at} is damaged")
        at = entry.data_offset + entry.length
        if crc32(read(entry.data_offset, entry.length)) != entry.crc32:
            raise _fault(tail, entry.name, "its data does not fit its CRC-32")


def _parse(tail: PackTail, directory: bytes) -> Iterator[ZipEntry]:
    """Yield the entries; where the data of a chunk lies is known from the index only."""
    extents = {
        f"{path}/c/{number}": extent
        for path, array in tail.index.arrays.items()
        for number, extent in enumerate(array.chunks)
    }
    at = 0
    while at + DIRECTORY_ENTRY_BYTES <= len(directory):
        crc, length, _size, name_length, extra_length = struct.unpack_from("<IIIHH", directory, at + 16)
        (offset,) = struct.unpack_from("<I", directory, at + 42)
        begin = at + DIRECTORY_ENTRY_BYTES
        encoded = directory[begin : begin + name_length]
        if not encoded.isascii():
            raise _fault(tail, "central directory", f"the name {encoded[:40]!r} is not ASCII")
        name = encoded.decode("ascii")
        at = begin + name_length + extra_length
        if extra_length == 12:
            (offset,) = struct.unpack_from("<Q", directory, at - 8)
        data_offset = extents[name].offset if name in extents else offset + 30 + name_length
        yield ZipEntry(name, offset, data_offset, length, crc)


def _check_entries(tail: PackTail, entries: dict[str, ZipEntry], count: int) -> None:
    listed = {INDEX_ENTRY: (tail.trailer.index_offset, tail.trailer.index_length)}
    listed |= {name: (extent.offset, extent.length) for name, extent in tail.index.blobs.items()}
    for path, array in tail.index.arrays.items():
        listed |= {f"{path}/c/{number}": (chunk.offset, chunk.length) for number, chunk in enumerate(array.chunks)}
    if len(entries) != count:
        raise _fault(tail, "central directory", "it lists a name twice")
    for name, (offset, length) in listed.items():
        entry = entries.get(name)
        if entry is None or (entry.data_offset, entry.length) != (offset, length):
            raise _fault(tail, name, "the central directory does not list it where the index does")
    for path, array in tail.index.arrays.items():
        _check_metadata(tail, f"{path}/zarr.json", array, entries.get(f"{path}/zarr.json"))


def _check_metadata(tail: PackTail, name: str, array: ArrayIndex, entry: ZipEntry | None) -> None:
    if entry is None:
        raise _fault(tail, name, "it is missing")
    start = entry.data_offset - tail.trailer.tail_offset
    found = parse_json(tail.tail[max(start, 0) : max(start + entry.length, 0)], f"{tail.where}, {name}")
    expected = json.loads(array_metadata(array.spec, None))
    del expected["attributes"]
    if isinstance(found, dict) and isinstance(found.get("chunk_key_encoding"), dict):
        found["chunk_key_encoding"].pop("configuration", None)  # may say that the separator is the default one
    if not isinstance(found, dict) or {name: found.get(name) for name in expected} != expected:
        raise _fault(tail, name, "it describes another array than the index")


def _fault(tail: PackTail, entry: str, problem: str) -> Corruption:
    return Corruption(f"{tail.where}, {entry}: {problem}; {_ADVICE}", where=tail.where, entry=entry)
