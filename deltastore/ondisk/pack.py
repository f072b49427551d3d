"""Packs: written front to back as buffers, opened from their tail (spec 3)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from deltastore.checksums import crc32c
from deltastore.errors import Backend, Corruption, Internal
from deltastore.ondisk.codecs import Buffer, EncodedChunk, crc32, encode_chunk
from deltastore.ondisk.index import (
    FORMAT_MAJOR,
    FORMAT_MINOR,
    INDEX_ENTRY,
    ArrayIndex,
    Extent,
    PackIndex,
    encode_index,
    layout_entry,
    parse_index,
    record_entry,
)
from deltastore.ondisk.trailer import TRAILER_BYTES, Trailer, check_tail, encode_trailer, parse_trailer
from deltastore.ondisk.zarr_profile import ArraySpec, array_metadata, group_metadata
from deltastore.ondisk.zipfile64 import END_SIGNATURE, ZipEntry, central_record, end_records, local_header
from deltastore.types import Json

TAIL_GUESS_BYTES = 128 << 10
"""How much of the end of a pack is read at first; more only where the tail is longer."""


@dataclass(frozen=True)
class PackArray:
    """An array that goes into a pack."""

    path: str
    spec: ArraySpec
    attributes: Json
    chunks: Iterable[EncodedChunk]
    """Encoded chunks in order; may be made while the pack is written."""


@dataclass(frozen=True)
class PackCommit:
    """A commit that goes into a pack; everything but the arrays may be known only after they were written."""

    id: str
    step: int
    kind: str
    record: bytes
    digest: str
    layouts: dict[str, bytes] = field(default_factory=dict)


class PackWriter:
    """Lays down one pack as a stream of buffers.

    Call :meth:`array` for each array, then :meth:`finish` once; send all buffers that they yield to one file, in order.
    Nothing is buffered here but the metadata.
    """

    def __init__(self, store: str, write: str) -> None:
        self.store = store
        self.write = write
        self._offset = 0
        self._entries: list[ZipEntry] = []
        self._arrays: dict[str, ArrayIndex] = {}
        self._metadata: list[tuple[str, bytes]] = []
        self._tail_crc: int | None = None

    def array(self, array: PackArray) -> Iterator[list[Buffer]]:
        """Yield the buffers of one array's chunks."""
        extents: list[Extent] = []
        for number, chunk in enumerate(array.chunks):
            entry, buffers = self._entry(f"{array.path}/c/{number}", chunk.parts, chunk.crc32, align=True)
            extents.append(Extent(entry.data_offset, entry.length, chunk.crc32c))
            yield buffers
        if len(extents) != array.spec.chunk_count:
            raise Internal(f"{array.path}: {len(extents)} chunks were written, {array.spec.chunk_count} planned")
        self._arrays[array.path] = ArrayIndex(array.spec, tuple(extents))
        self._metadata.append((f"{array.path}/zarr.json", array_metadata(array.spec, array.attributes)))

    def finish(self, commits: list[PackCommit]) -> Iterator[list[Buffer]]:
        """Yield the metadata, the central directory and the trailer."""
        tail_offset = self._offset
        self._tail_crc = 0
        about = {"major": FORMAT_MAJOR, "minor": FORMAT_MINOR, "store": self.store, "write": self.write}
        groups = [("zarr.json", group_metadata(about))]
        groups += [(f"{c.id}/zarr.json", group_metadata({"step": c.step, "kind": c.kind})) for c in commits]
        for name, data in groups + self._metadata:
            yield self._entry(name, [data], crc32(data))[1]
        blobs: dict[str, Extent] = {}
        layouts = {digest: blob for c in commits for digest, blob in c.layouts.items()}
        named = [(layout_entry(digest), blob) for digest, blob in layouts.items()]
        named += [(record_entry(c.id), c.record) for c in commits]
        for name, blob in named:
            entry, buffers = self._entry(name, [blob], crc32(blob))
            blobs[name] = Extent(entry.data_offset, entry.length, crc32c(blob))
            yield buffers
        index = PackIndex(self.store, self.write, tuple((c.id, c.digest) for c in commits), self._arrays, blobs)
        index_blob = encode_index(index)
        index_entry, buffers = self._entry(INDEX_ENTRY, [index_blob], crc32(index_blob))
        yield buffers
        directory_offset = self._offset
        directory = b"".join(central_record(entry) for entry in self._entries)
        ends = end_records(len(self._entries), directory_offset, len(directory), TRAILER_BYTES)
        self._account([directory, ends])
        size = self._offset + TRAILER_BYTES
        trailer = encode_trailer(
            Trailer(tail_offset, index_entry.data_offset, index_entry.length, self._tail_crc, size)
        )
        if END_SIGNATURE in trailer:
            raise Backend("the trailer happens to hold a ZIP signature; the next write id will not", transient=True)
        yield [directory, ends, trailer]

    def _entry(
        self, name: str, parts: list[Buffer], crc32: int, *, align: bool = False
    ) -> tuple[ZipEntry, list[Buffer]]:
        length = sum(len(part) for part in parts)
        header, entry = local_header(name, self._offset, length, crc32, align=align)
        self._entries.append(entry)
        buffers: list[Buffer] = [header, *parts]
        self._account(buffers)
        return entry, buffers

    def _account(self, buffers: list[Buffer]) -> None:
        self._offset += sum(len(buffer) for buffer in buffers)
        if self._tail_crc is not None:
            for buffer in buffers:
                self._tail_crc = crc32c(buffer, self._tail_crc)


def encode_array(values: np.ndarray, spec: ArraySpec) -> Iterator[EncodedChunk]:
    """Yield the encoded chunks of an array; a raw chunk is a view of `values`."""
    for start in range(0, spec.length, spec.chunk):
        yield encode_chunk(chunk_values(values, spec, start), spec.codec)


def chunk_values(values: np.ndarray, spec: ArraySpec, start: int) -> np.ndarray:
    """Return the values of the chunk that begins at `start`: a view, or a copy padded with zeros at the end."""
    part = values[start : start + spec.chunk]
    if len(part) == spec.chunk:
        return part
    padded = np.zeros(spec.chunk, values.dtype)
    padded[: len(part)] = part
    return padded


@dataclass(frozen=True)
class PackTail:
    """The verified metadata of a pack."""

    where: str
    trailer: Trailer
    index: PackIndex
    tail: bytes
    """All bytes from the tail offset to the end."""

    def blob(self, name: str) -> bytes:
        """Return a metadata blob.

        Raises
        ------
        Corruption
            The pack does not hold it, or it lies outside of the tail.
        """
        extent = self.index.blobs.get(name)
        if extent is None or extent.offset < self.trailer.tail_offset:
            raise Corruption(f"{self.where}: entry {name} is missing", where=self.where, entry=name)
        start = extent.offset - self.trailer.tail_offset
        data = self.tail[start : start + extent.length]
        if crc32c(data) != extent.crc:
            raise Corruption(f"{self.where}: entry {name} does not fit its checksum", where=self.where, entry=name)
        return data


def tail_start(end: bytes, file_size: int, where: str) -> int:
    """Return where the tail of a pack begins, from the last bytes of the file."""
    return parse_trailer(end, file_size, where).tail_offset


def parse_tail(tail: bytes, file_size: int, where: str) -> PackTail:
    """Return the metadata of a pack from all bytes of its tail, fully checked."""
    trailer = parse_trailer(tail, file_size, where)
    if len(tail) != file_size - trailer.tail_offset:
        raise Corruption(
            f"{where}: {len(tail)} bytes of metadata, expected {file_size - trailer.tail_offset}", where=where
        )
    check_tail(tail, trailer, where)
    start = trailer.index_offset - trailer.tail_offset
    blob = tail[start : start + trailer.index_length]
    index = parse_index(blob, trailer.tail_offset, file_size, f"{where}, {INDEX_ENTRY}")
    return PackTail(where, trailer, index, tail)
