"""The pack index: physical, made anew whenever a pack is written (spec 6.3)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from deltastore.errors import Corruption, UnsupportedFormat
from deltastore.ondisk.canonical import compress, decompress, encode_canonical, parse_json
from deltastore.ondisk.codecs import CHECKSUM_BYTES, CODECS, RAW
from deltastore.ondisk.fields import Fields
from deltastore.ondisk.limits import (
    MAX_ARRAY_ELEMENTS,
    MAX_BLOSC_OVERHEAD_BYTES,
    MAX_CHUNK_BYTES,
    MAX_INDEX_BYTES,
)
from deltastore.ondisk.names import is_commit_id, is_digest, is_write_id
from deltastore.ondisk.zarr_profile import ArraySpec
from deltastore.types import Json

FORMAT_MAJOR = 1
FORMAT_MINOR = 0
INDEX_ENTRY = "deltastore/index.json.zst"

_STORAGE_DTYPES = tuple(
    "uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 float32 float64 complex64 complex128".split()
)


class Extent(NamedTuple):
    """Where stored bytes lie in a pack, with their CRC-32C."""

    offset: int
    length: int
    crc: int


@dataclass(frozen=True, slots=True)
class ArrayIndex:
    """An array of a pack and where each of its chunks lies."""

    spec: ArraySpec
    chunks: tuple[Extent, ...]


@dataclass(frozen=True, slots=True)
class PackIndex:
    """What a pack holds and where."""

    store: str
    write: str
    commits: tuple[tuple[str, str], ...]
    """(id, record digest), in chain order."""
    arrays: Mapping[str, ArrayIndex]
    blobs: dict[str, Extent]
    substitutes: dict[str, Json] = field(default_factory=dict)


class StoredArrays(Mapping[str, ArrayIndex]):
    """The arrays of a stored index, each parsed and checked when it is first asked for.

    One tensor needs a few arrays of a pack that may hold thousands.
    """

    def __init__(self, entries: dict[str, Any], limit: int, where: str) -> None:
        self._entries = entries
        self._limit = limit
        self._where = where
        self._parsed: dict[str, ArrayIndex] = {}

    def __getitem__(self, name: str) -> ArrayIndex:
        """Return an array; KeyError if there is none, Corruption if its entry does not follow the spec."""
        found = self._parsed.get(name)
        if found is None:
            found = self._parsed[name] = _parse_array(Fields(self._entries[name], self._where), self._limit)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def record_entry(commit: str) -> str:
    """Return the name of the entry that holds a commit's record."""
    return f"deltastore/records/{commit}.json.zst"


def layout_entry(digest: str) -> str:
    """Return the name of the entry that holds a layout."""
    return f"deltastore/layouts/{digest}.json.zst"


def encode_index(index: PackIndex) -> bytes:
    """Return the stored blob of an index."""
    arrays = {
        name: {
            "dtype": array.spec.dtype,
            "length": array.spec.length,
            "chunk": array.spec.chunk,
            "codec": array.spec.codec,
            "chunks": [list(extent) for extent in array.chunks],
        }
        for name, array in index.arrays.items()
    }
    return compress(
        encode_canonical(
            {
                "format": [FORMAT_MAJOR, FORMAT_MINOR],
                "store": index.store,
                "write": index.write,
                "commits": [{"id": commit, "digest": digest} for commit, digest in index.commits],
                "arrays": arrays,
                "blobs": {name: list(extent) for name, extent in index.blobs.items()},
                "substitutes": index.substitutes,
            }
        )
    )


def parse_index(blob: bytes, tail_offset: int, file_size: int, where: str) -> PackIndex:
    """Return the index of a stored blob; every extent lies inside the file and none overlaps another.

    Raises
    ------
    UnsupportedFormat
        The pack has another major version.
    Corruption
        The bytes are damaged or do not follow the spec.
    """
    fields = Fields(parse_json(decompress(blob, MAX_INDEX_BYTES, where), where), where)
    major, _minor = fields.numbers("format", 2)
    if major != FORMAT_MAJOR:
        raise UnsupportedFormat(
            f"{where}: pack of format {major}, this version reads {FORMAT_MAJOR}; read it with a newer deltastore",
            where=where,
            found=major,
            expected=FORMAT_MAJOR,
        )
    if not is_commit_id(fields.raw("store")) or not is_write_id(fields.raw("write")):
        raise fields.fault("store", "a store id beside a write id")
    arrays = fields.mapping("arrays")
    index = PackIndex(
        store=fields.text("store"),
        write=fields.text("write"),
        commits=tuple(_parse_commit(Fields(entry, where)) for entry in fields.items("commits")),
        arrays=StoredArrays(arrays, tail_offset, where),
        blobs={name: _parse_extent(entry, file_size, where) for name, entry in fields.mapping("blobs").items()},
        substitutes=fields.mapping("substitutes"),
    )
    if len(dict(index.commits)) != len(index.commits):
        raise fields.fault("commits", "commits with different ids")
    try:
        chunks = [extent for entry in arrays.values() for extent in entry["chunks"]]
    except (TypeError, KeyError) as error:
        raise fields.fault("arrays", "arrays with their chunks") from error
    _check_overlaps([*index.blobs.values(), *chunks], file_size, where)
    return index


def _check_overlaps(extents: list[Any], file_size: int, where: str) -> None:
    """Refuse bytes that are used twice: a small file could otherwise claim to hold any amount of data."""
    try:
        if {*map(len, extents)} - {3}:
            raise ValueError("an extent of another length")
        table = np.fromiter(chain.from_iterable(extents), np.int64).reshape(-1, 3)  # half the time of np.array
    except (ValueError, TypeError, OverflowError) as error:
        raise Corruption(f"{where}: an extent is not [offset, length, crc32c]", where=where) from error
    begins, lengths = table[:, 0], table[:, 1]
    if table.min(initial=0) < 0 or table[:, :2].max(initial=0) > file_size:
        raise Corruption(f"{where}: an extent lies outside of the pack", where=where)
    order = np.lexsort((lengths, begins))
    begins, ends = begins[order], (begins + lengths)[order]
    over = np.flatnonzero(ends[:-1] > begins[1:])
    if len(over):
        pair = [[int(begins[at]), int(ends[at] - begins[at])] for at in (over[0], over[0] + 1)]
        raise Corruption(f"{where}: the extents {pair[0]} and {pair[1]} overlap", where=where)


def _parse_commit(fields: Fields) -> tuple[str, str]:
    if not is_commit_id(fields.raw("id")) or not is_digest(fields.raw("digest")):
        raise fields.fault("id", "a commit id and a record digest")
    return fields.text("id"), fields.text("digest")


def _parse_array(fields: Fields, limit: int) -> ArrayIndex:
    spec = ArraySpec(
        dtype=fields.choice("dtype", _STORAGE_DTYPES),
        length=fields.integer("length", MAX_ARRAY_ELEMENTS),
        chunk=fields.integer("chunk"),
        codec=fields.choice("codec", CODECS),
    )
    chunks = tuple([_parse_extent(extent, limit, fields.where) for extent in fields.items("chunks")])
    chunk_bytes = spec.chunk * spec.itemsize
    if not 0 < chunk_bytes <= MAX_CHUNK_BYTES or not spec.length or len(chunks) != spec.chunk_count:
        raise fields.fault(
            "chunks", f"{-(-spec.length // max(spec.chunk, 1))} chunks of at most {MAX_CHUNK_BYTES} bytes"
        )
    least = longest = chunk_bytes + CHECKSUM_BYTES
    if spec.codec != RAW:
        # A file with holes may be longer than any memory: what no encoder makes is not read.
        least, longest = CHECKSUM_BYTES + 1, longest + chunk_bytes // 255 + MAX_BLOSC_OVERHEAD_BYTES
    if not all(least <= extent.length <= longest for extent in chunks):
        raise fields.fault("chunks", "chunks with the length that their codec gives")
    return ArrayIndex(spec, chunks)


def _parse_extent(value: Json, limit: int, where: str) -> Extent:
    if type(value) is not list or len(value) != 3 or {*map(type, value)} != {int} or min(value) < 0:
        raise Corruption(f"{where}: an extent is not [offset, length, crc32c]", where=where)
    extent = Extent(*value)
    if extent.offset + extent.length > limit or extent.crc >= 1 << 32:
        raise Corruption(f"{where}: extent {value} lies outside of the pack", where=where)
    return extent


def storage_dtype_of(spec: ArraySpec) -> np.dtype:
    """Return the little-endian numpy dtype of an array."""
    return np.dtype(spec.dtype).newbyteorder("<")
