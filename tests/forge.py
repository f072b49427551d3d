"""Packs taken apart and put together again with true checksums: for damage, hostile stores and golden data. No torch.

What comes out is well framed whatever was changed: a reader must find the change itself, not a checksum.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

import zstandard

from deltastore.checksums import crc32c
from deltastore.ondisk.codecs import crc32
from deltastore.ondisk.index import INDEX_ENTRY, layout_entry, record_entry
from deltastore.ondisk.trailer import TRAILER_BYTES, Trailer, encode_trailer, parse_trailer
from deltastore.ondisk.zipfile64 import ZipEntry, central_record, end_records, local_header

LOCAL_HEADER_BYTES = 30


@dataclass(frozen=True)
class Region:
    """A run of bytes of a pack that has one purpose."""

    kind: str
    entry: str
    start: int
    stop: int


def canonical(value: Any) -> bytes:
    """Return canonical JSON without any of the product's checks."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii")


def compress(data: bytes) -> bytes:
    """Return one zstd frame that names its size."""
    return zstandard.ZstdCompressor(level=3, write_content_size=True).compress(data)


def decompress(data: bytes) -> bytes:
    """Return what one zstd frame holds."""
    return zstandard.ZstdDecompressor().decompress(data)


def sealed(value: dict[str, Any]) -> bytes:
    """Return a sealed file of an object, its old seal replaced."""
    body = {name: member for name, member in value.items() if name != "sha256"}
    return canonical({**body, "sha256": hashlib.sha256(canonical(body)).hexdigest()})


def regions(data: bytes) -> Iterator[Region]:
    """Yield every byte of a pack exactly once, by what it is for."""
    with zipfile.ZipFile(BytesIO(data)) as archive:
        entries = archive.infolist()
        directory = archive.start_dir
    for info in entries:
        name_length, extra_length = struct.unpack_from("<HH", data, info.header_offset + 26)
        at = info.header_offset
        name_at = at + LOCAL_HEADER_BYTES
        body = name_at + name_length + extra_length
        stop = body + info.file_size
        chunk = "/c/" in info.filename
        yield Region("local header", info.filename, at, name_at)
        yield Region("name", info.filename, name_at, name_at + name_length)
        if extra_length:
            yield Region("padding", info.filename, name_at + name_length, body)
        kind = next((kind for part, kind in _KINDS if part in info.filename), "zarr.json")
        yield Region(kind, info.filename, body, stop - 4 if chunk else stop)
        if chunk:
            yield Region("chunk checksum", info.filename, stop - 4, stop)
    end = len(data) - TRAILER_BYTES - 22
    yield Region("central directory", "", directory, end - 76)
    yield Region("zip64 records", "", end - 76, end)
    yield Region("end record", "", end, end + 22)
    yield Region("trailer", "", end + 22, len(data))


_KINDS = (("/c/", "chunk body"), ("/layouts/", "layout"), ("/records/", "record"), (INDEX_ENTRY, "index"))


@dataclass
class Pack:
    """A pack taken apart.

    Attributes
    ----------
    chunks : bytearray
        The bytes before the tail. May be changed in place; the ZIP entries in it stay those of the original.
    index : dict
        The index; `blobs` is made anew by :meth:`build`.
    blobs : dict
        Entry name -> JSON value of each record and layout, or bytes that are stored as they are.
    """

    chunks: bytearray
    entries: list[ZipEntry]
    zarr: dict[str, bytes]
    blobs: dict[str, Any]
    index: dict[str, Any]
    change_index: Callable[[dict[str, Any]], Any] = field(default=lambda index: index)
    """Called with the finished index; what it returns is stored: an object, or the bytes of the blob."""
    change_trailer: Callable[[Trailer], Trailer] = field(default=lambda trailer: trailer)

    @classmethod
    def parse(cls, data: bytes) -> Pack:
        """Return a good pack taken apart."""
        trailer = parse_trailer(data, len(data), "pack")
        blob = data[trailer.index_offset : trailer.index_offset + trailer.index_length]
        index = json.loads(decompress(blob))
        entries: list[ZipEntry] = []
        zarr: dict[str, bytes] = {}
        with zipfile.ZipFile(BytesIO(data)) as archive:
            for info in archive.infolist():
                if info.header_offset < trailer.tail_offset:
                    name_length, extra_length = struct.unpack_from("<HH", data, info.header_offset + 26)
                    begin = info.header_offset + LOCAL_HEADER_BYTES + name_length + extra_length
                    entries.append(ZipEntry(info.filename, info.header_offset, begin, info.file_size, info.CRC))
                elif info.filename.endswith("zarr.json"):
                    zarr[info.filename] = archive.read(info)
        blobs = {}
        for name, (offset, length, _crc) in index["blobs"].items():
            blobs[name] = json.loads(decompress(data[offset : offset + length]))
        return cls(bytearray(data[: trailer.tail_offset]), entries, zarr, blobs, index)

    @property
    def commit(self) -> str:
        """Id of the pack's only, or first, commit."""
        return str(self.index["commits"][0]["id"])

    @property
    def record(self) -> Any:
        """The record of the first commit; :meth:`build` renews its digest in the index."""
        return self.blobs[record_entry(self.commit)]

    @property
    def layout(self) -> Any:
        """The layout of the first commit; give it back by :meth:`set_layout`."""
        return self.blobs[layout_entry(self.record["layout"])]

    def set_layout(self, value: Any) -> None:
        """Replace the layout of the first commit, its name and the record's digest of it."""
        data = value if isinstance(value, bytes) else canonical(value)
        self.blobs.pop(layout_entry(self.record["layout"]), None)
        digest = hashlib.sha256(data).hexdigest()
        self.record["layout"] = digest
        self.blobs[layout_entry(digest)] = Raw(compress(data))

    def fix_chunk(self, path: str, number: int) -> None:
        """Give a chunk whose bytes were changed its true checksums, as a clever writer would."""
        extent = self.index["arrays"][path]["chunks"][number]
        offset, length, _crc = extent
        body = self.chunks[offset : offset + length - 4]
        extent[2] = crc32c(bytes(body))
        self.chunks[offset + length - 4 : offset + length] = struct.pack("<I", extent[2])

    def build(self) -> bytes:
        """Return the bytes of the pack, every checksum and digest renewed."""
        out = bytearray(self.chunks)
        tail_offset = len(out)
        entries = list(self.entries)

        def add(name: str, data: bytes) -> ZipEntry:
            header, entry = local_header(name, len(out), len(data), crc32(data), align=False)
            out.extend(header + data)
            entries.append(entry)
            return entry

        for name, data in self.zarr.items():
            add(name, data)
        digests: dict[str, str] = {}
        blobs: dict[str, Any] = {}
        for name, value in self.blobs.items():
            data = value.data if isinstance(value, Raw) else compress(canonical(value))
            if isinstance(value, Raw) and value.digest:
                digests[name] = value.digest
            elif not isinstance(value, Raw):
                digests[name] = hashlib.sha256(canonical(value)).hexdigest()
            entry = add(name, data)
            blobs[name] = [entry.data_offset, entry.length, crc32c(data)]
        for about in self.index["commits"]:
            about["digest"] = digests.get(record_entry(about["id"]), about["digest"])
        made = self.change_index({**self.index, "blobs": blobs})
        index = add(INDEX_ENTRY, made if isinstance(made, bytes) else compress(canonical(made)))
        directory = b"".join(central_record(entry) for entry in entries)
        ends = end_records(len(entries), len(out), len(directory), TRAILER_BYTES)
        out += directory + ends
        size = len(out) + TRAILER_BYTES
        tail_crc = crc32c(memoryview(out)[tail_offset:])
        trailer = Trailer(tail_offset, index.data_offset, index.length, tail_crc, size)
        return bytes(out) + encode_trailer(self.change_trailer(trailer))


@dataclass(frozen=True)
class Raw:
    """Bytes of a blob that are stored as they are."""

    data: bytes
    digest: str = ""
    """Digest that the index gets for it, where it is a record."""
