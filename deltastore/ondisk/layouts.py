"""Layouts as stored blobs (spec 7.1)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from deltastore.dtypes import LOGICAL
from deltastore.errors import Corruption, InvalidInput, UnsupportedFormat
from deltastore.layout import ALIGN_ELEMENTS, BACKWARD, FORWARD, Layout, Partition, Piece, TensorEntry
from deltastore.ondisk.canonical import compress, convert, decompress, digest_of, encode_canonical, parse_json
from deltastore.ondisk.fields import Fields
from deltastore.ondisk.limits import (
    MAX_DIMENSIONS,
    MAX_LAYOUT_BYTES,
    MAX_NUMBER,
    MAX_PARTITION_ELEMENTS,
    MAX_PARTITION_ID,
    MAX_PARTITIONS,
    MAX_TENSORS,
)
from deltastore.types import Json, Path


def encode_layout(layout: Layout) -> tuple[bytes, str]:
    """Return the stored blob of a layout and the layout's digest."""
    tensors: list[Json] = []
    for entry in layout.tensors:
        about: dict[str, Json] = {"path": list(entry.path), "dtype": entry.dtype, "shape": list(entry.shape)}
        if entry.alias is None:
            about["pieces"] = [[piece.partition, piece.offset, piece.count] for piece in entry.pieces]
        else:
            about["alias"] = entry.alias
        tensors.append(about)
    partitions = [
        {"id": p.id, "dtype": p.dtype, "length": p.length, "role": p.role, "window": p.window, "group": p.group}
        for p in layout.partitions
    ]
    data = encode_canonical({"tensors": tensors, "partitions": partitions})
    if len(data) > MAX_LAYOUT_BYTES or len(layout.tensors) > MAX_TENSORS:
        raise InvalidInput(
            f"{len(layout.tensors):,} tensors: their layout takes {len(data):,} bytes, at most {MAX_LAYOUT_BYTES:,}"
        )
    return compress(data), digest_of(data)


def parse_layout(blob: bytes, digest: str, where: str) -> Layout:
    """Return the layout of a stored blob whose digest must be `digest`.

    Raises
    ------
    Corruption
        The bytes are damaged, or a tensor does not lie inside of its partitions.
    """
    data = decompress(blob, MAX_LAYOUT_BYTES, where)
    found = digest_of(data)
    if found != digest:
        raise Corruption(
            f"{where}: layout has digest {found[:12]}..., expected {digest[:12]}...",
            where=where,
            expected=digest,
            found=found,
        )
    fields = Fields(parse_json(data, where), where)
    entries = fields.items("partitions")
    if len(entries) > MAX_PARTITIONS or len(fields.items("tensors")) > MAX_TENSORS:
        raise fields.fault("partitions", f"at most {MAX_PARTITIONS} partitions and {MAX_TENSORS} tensors")
    partitions = {p.id: p for p in (_parse_partition(Fields(entry, where)) for entry in entries)}
    if len(partitions) != len(entries):
        raise fields.fault("partitions", "partitions with different numbers")
    values = fields.items("tensors")
    tensors: list[TensorEntry] = []
    for value, stored in zip(values, convert(values, list[_StoredTensor], f"{where}, tensors"), strict=True):
        tensors.append(_parse_tensor(stored, Fields(value, where), tensors, partitions))
    if len({tensor.path for tensor in tensors}) != len(tensors):
        raise fields.fault("tensors", "tensors with different paths")
    covered = dict.fromkeys(partitions, 0)
    for tensor in tensors:
        for piece in tensor.pieces:
            covered[piece.partition] += piece.count
    if any(count > partitions[number].length for number, count in covered.items()):
        raise Corruption(f"{where}: tensors that share elements of a partition", where=where)
    return Layout(tuple(tensors), tuple(partitions.values()))


def check_pieces(layout: Layout, where: str) -> None:
    """Raise Corruption if two pieces overlap (spec 7.2 rule 3); verification does that, readers need not."""
    pieces = sorted((p.partition, p.offset, p.count) for tensor in layout.tensors for p in tensor.pieces)
    for before, after in pairwise(pieces):
        if before[0] == after[0] and before[1] + before[2] > after[1]:
            raise Corruption(f"{where}: pieces {list(before)} and {list(after)} of tensors overlap", where=where)


def _parse_partition(fields: Fields) -> Partition:
    length = fields.integer("length", MAX_PARTITION_ELEMENTS)
    dtype = fields.text("dtype")
    _check_dtype(dtype, fields.where)
    if not length:
        raise fields.fault("length", "at least one element")
    return Partition(
        id=fields.integer("id", MAX_PARTITION_ID),
        dtype=dtype,
        length=length,
        role=fields.text("role"),
        window=fields.choice("window", (FORWARD, BACKWARD)),
        group=fields.integer("group") if fields.has("group") else None,
    )


def _check_dtype(dtype: str, where: str) -> None:
    if dtype not in LOGICAL:
        raise UnsupportedFormat(
            f"{where}: dtype {dtype[:40]!r}, which this version does not know; read it with a newer deltastore",
            where=where,
            dtype=dtype,
        )


@dataclass(slots=True)
class _StoredTensor:
    """An entry of `tensors`, of which only the types of its members are known to be right."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    pieces: list[tuple[int, int, int]] | None = None
    alias: int | None = None


def _parse_tensor(
    stored: _StoredTensor, fields: Fields, earlier: list[TensorEntry], partitions: dict[int, Partition]
) -> TensorEntry:
    path, dtype, shape = stored.path, stored.dtype, stored.shape
    # Zeros left out: frameworks compute strides, which must not overflow, of tensors without elements too.
    if len(shape) > MAX_DIMENSIONS or min(shape, default=0) < 0 or math.prod(filter(None, shape)) > MAX_NUMBER:
        raise fields.fault("shape", f"at most {MAX_DIMENSIONS} dimensions, their product at most {MAX_NUMBER}")
    _check_dtype(dtype, fields.where)
    if stored.alias is not None:
        target = earlier[stored.alias] if 0 <= stored.alias < len(earlier) else None
        if target is None or target.alias is not None or (target.dtype, target.shape) != (dtype, shape):
            raise fields.fault("alias", "the index of an earlier tensor of the same dtype and shape")
        return TensorEntry(path, dtype, shape, (), stored.alias)
    if stored.pieces is None:
        raise fields.fault("pieces", "a list of [partition, offset, count]")
    missing = math.prod(shape)
    for number, offset, count in stored.pieces:
        partition = partitions.get(number)
        if (
            partition is None
            or partition.dtype != dtype
            or count < 1
            or offset < 0
            or offset % ALIGN_ELEMENTS
            or offset + count > partition.length
        ):
            raise Corruption(
                f"{fields.where}: tensor {list(path)} does not lie inside of partition {number}", where=fields.where
            )
        missing -= count
    if missing:
        raise fields.fault("pieces", f"{math.prod(shape)} elements in all")
    return TensorEntry(path, dtype, shape, tuple([Piece(*piece) for piece in stored.pieces]))
