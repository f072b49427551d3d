"""One pack from the commits of several, their entries copied as they are (spec 3.8)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

from deltastore.errors import Corruption
from deltastore.history.catalog import CatalogEntry, record_of
from deltastore.history.packs import Packs
from deltastore.ondisk.canonical import parse_json
from deltastore.ondisk.codecs import CHECKSUM_BYTES, Buffer, EncodedChunk, check_stored, crc32
from deltastore.ondisk.framing import directory_entries
from deltastore.ondisk.index import ArrayIndex, layout_entry, record_entry
from deltastore.ondisk.pack import PackArray, PackCommit, PackTail, PackWriter
from deltastore.tiers.base import RandomFile


class MergedPack:
    """The buffers of a pack that holds some commits of other packs; they may be gone through more than once.

    Every chunk is checked on its way: damage ends the pack with Corruption, which names the commit, and is not copied.
    One chunk is in memory at a time.

    Parameters
    ----------
    packs : Packs
        Where the commits are.
    entries : sequence of CatalogEntry
        The commits, parents before children.
    write : str
        The new pack's write id.
    """

    def __init__(self, packs: Packs, entries: Sequence[CatalogEntry], write: str) -> None:
        self._packs = packs
        self._entries = entries
        self._write = write

    def __iter__(self) -> Iterator[Buffer]:
        """Yield the buffers of the file."""
        writer = PackWriter(self._packs.tail(self._entries[0].pack).index.store, self._write)
        attributes_of = cache(self._attributes)
        for entry in self._entries:
            try:
                for array in self._arrays(entry, attributes_of):
                    for buffers in writer.array(array):
                        yield from buffers
            except Corruption as error:
                raise Corruption(error.message, **{**error.fields, "commit": entry.id}) from error
        for buffers in writer.finish([self._commit(entry) for entry in self._entries]):
            yield from buffers

    def _arrays(self, entry: CatalogEntry, attributes_of: Callable[[str], dict[str, Any]]) -> Iterator[PackArray]:
        tail, file = self._packs.tail(entry.pack), self._packs.file(entry.pack)
        for path, array in sorted(tail.index.arrays.items(), key=_place):
            if path.startswith(f"{entry.id}/"):
                chunks = read_chunks(file, array, f"{tail.where}, {path}")
                yield PackArray(path, array.spec, attributes_of(entry.pack)[path], chunks)

    def _commit(self, entry: CatalogEntry) -> PackCommit:
        tail = self._packs.tail(entry.pack)
        layout = record_of(tail, entry.id, entry.ref.digest).layout
        name = layout_entry(layout)
        layouts = {layout: tail.blob(name)} if name in tail.index.blobs else {}
        blob = tail.blob(record_entry(entry.id))
        return PackCommit(entry.id, entry.step, entry.kind, blob, entry.ref.digest, layouts)

    def _attributes(self, name: str) -> dict[str, Any]:
        """Return what the arrays of a pack say of themselves to stock readers, by path."""
        tail = self._packs.tail(name)
        entries = {entry.name: entry for entry in directory_entries(tail)}
        found: dict[str, Any] = {}
        for path in tail.index.arrays:
            entry = entries[f"{path}/zarr.json"]
            found[path] = _attributes_of(tail, entry.name, entry.data_offset, entry.length)
        return found


def _place(item: tuple[str, ArrayIndex]) -> int:
    """Return where an array lies: merged in this order, it is still read from front to back."""
    return item[1].chunks[0].offset if item[1].chunks else 0


def _attributes_of(tail: PackTail, name: str, offset: int, length: int) -> Any:
    start = offset - tail.trailer.tail_offset
    metadata = parse_json(tail.tail[start : start + length], f"{tail.where}, {name}")
    try:
        return metadata["attributes"]["deltastore"]
    except (KeyError, TypeError) as error:
        raise Corruption(f"{tail.where}, {name}: it has no attributes of deltastore", where=tail.where) from error


def read_chunks(file: RandomFile, array: ArrayIndex, where: str) -> Iterator[EncodedChunk]:
    """Yield the chunks of an array as they are stored, each checked against its checksums."""
    for number, extent in enumerate(array.chunks):
        data = memoryview(file.read(extent.offset, extent.length))
        check_stored(data[:-CHECKSUM_BYTES], data[-CHECKSUM_BYTES:], extent.crc, f"{where}/c/{number}")
        yield EncodedChunk([data], extent.crc, crc32(data), 0)
