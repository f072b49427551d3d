"""Layouts as stored blobs (spec 7.4)."""

from __future__ import annotations

import math

from deltastore.dtypes import LOGICAL
from deltastore.errors import Corruption
from deltastore.layout import ALIGN_ELEMENTS, BACKWARD, FORWARD, Layout, Partition, Piece, TensorEntry
from deltastore.ondisk.canonical import compress, decompress, digest_of, encode_canonical, parse_json
from deltastore.ondisk.fields import Fields
from deltastore.ondisk.limits import MAX_LAYOUT_BYTES, MAX_PARTITION_ELEMENTS, MAX_PARTITIONS, MAX_TENSORS
from deltastore.types import Json


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
    tensors: list[TensorEntry] = []
    for entry in fields.items("tensors"):
        tensors.append(_parse_tensor(Fields(entry, where), tensors, partitions))
    if len({tensor.path for tensor in tensors}) != len(tensors):
        raise fields.fault("tensors", "tensors with different paths")
    return Layout(tuple(tensors), tuple(partitions.values()))


def _parse_partition(fields: Fields) -> Partition:
    length = fields.integer("length", MAX_PARTITION_ELEMENTS)
    if not length:
        raise fields.fault("length", "at least one element")
    return Partition(
        id=fields.integer("id", MAX_PARTITIONS * 16),
        dtype=fields.choice("dtype", tuple(LOGICAL)),
        length=length,
        role=fields.text("role"),
        window=fields.choice("window", (FORWARD, BACKWARD)),
        group=fields.integer("group") if fields.has("group") else None,
    )


def _parse_tensor(fields: Fields, earlier: list[TensorEntry], partitions: dict[int, Partition]) -> TensorEntry:
    shape = tuple(fields.numbers("shape"))
    dtype = fields.choice("dtype", tuple(LOGICAL))
    path = fields.path("path")
    if fields.has("alias"):
        alias = fields.integer("alias")
        target = earlier[alias] if alias < len(earlier) else None
        if target is None or target.alias is not None or (target.dtype, target.shape) != (dtype, shape):
            raise fields.fault("alias", "the index of an earlier tensor of the same dtype and shape")
        return TensorEntry(path, dtype, shape, (), alias)
    pieces = []
    for piece in fields.items("pieces"):
        if not isinstance(piece, list) or len(piece) != 3 or not all(type(item) is int and item >= 0 for item in piece):
            raise fields.fault("pieces", "a list of [partition, offset, count]")
        partition = partitions.get(piece[0])
        if (
            partition is None
            or partition.dtype != dtype
            or piece[1] % ALIGN_ELEMENTS
            or piece[1] + piece[2] > partition.length
        ):
            raise Corruption(
                f"{fields.where}: tensor {list(path)} does not lie inside of partition {piece[0]}", where=fields.where
            )
        pieces.append(Piece(*piece))
    if sum(piece.count for piece in pieces) != math.prod(shape):
        raise fields.fault("pieces", f"{math.prod(shape)} elements in all")
    return TensorEntry(path, dtype, shape, tuple(pieces))
