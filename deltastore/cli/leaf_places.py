"""Where in the packs the elements of a tensor lie, for people with nothing but zarr."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from deltastore.dtypes import words_per_element
from deltastore.history.chain import Chain, Link
from deltastore.layers.encoded import BLOCK_ELEMENTS, array_path
from deltastore.layout import Layout, Partition, Piece
from deltastore.ondisk.records import FULL, XOR, LayerRecord
from deltastore.types import Path


@dataclass(frozen=True, slots=True)
class ArrayPlace:
    """A Zarr array of a pack, and which of its values belong to a tensor."""

    name: str
    path: str
    start: int | None
    """None: the values of the layer's indptr tell, as they stand in the pack."""
    stop: int | None

    def json(self) -> dict[str, Any]:
        """Return it as programs get it."""
        return {"name": self.name, "path": self.path, "start": self.start, "stop": self.stop}


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """What one commit has of a piece of a tensor."""

    kind: str
    step: int
    commit: str
    pack: str
    arrays: tuple[ArrayPlace, ...]

    def json(self) -> dict[str, Any]:
        """Return it as programs get it."""
        arrays = [array.json() for array in self.arrays]
        return {"kind": self.kind, "step": self.step, "commit": self.commit, "pack": self.pack, "arrays": arrays}


@dataclass(frozen=True, slots=True)
class PiecePlace:
    """A run of a tensor's elements, row-major, and the layers that make it, the full one first."""

    first: int
    count: int
    partition: int
    offset: int
    """Of its first element in the partition; positions of overlays count from there."""
    layers: tuple[LayerPlace, ...]

    def json(self) -> dict[str, Any]:
        """Return it as programs get it."""
        return {
            "first_element": self.first,
            "elements": self.count,
            "partition": self.partition,
            "partition_offset": self.offset,
            "layers": [layer.json() for layer in self.layers],
        }


def places(chain: Chain, layout: Layout, path: Path) -> Iterator[PiecePlace]:
    """Yield where the pieces of a tensor lie; none for a tensor without elements."""
    first = 0
    for piece in layout.by_path[path].pieces:
        partition = layout.by_id[piece.partition]
        layers = tuple(_layer(link, layer, partition, piece) for link, layer in chain.layers(partition.id))
        yield PiecePlace(first, piece.count, partition.id, piece.offset, layers)
        first += piece.count


def _layer(link: Link, layer: LayerRecord, partition: Partition, piece: Piece) -> LayerPlace:
    arrays = tuple(
        ArrayPlace(name, array_path(link.record.id, partition.id, name), *_range(layer.kind, name, partition, piece))
        for name in sorted(layer.arrays, key=_reading_order)
    )
    return LayerPlace(layer.kind, link.record.step, link.record.id, link.pack, arrays)


def _reading_order(name: str) -> tuple[bool, str]:
    return name != "indptr", name  # which tells where to look in the others


def _range(kind: str, name: str, partition: Partition, piece: Piece) -> tuple[int | None, int | None]:
    end = piece.offset + piece.count
    if kind == FULL:
        return piece.offset, end
    if kind == XOR:
        per_element = words_per_element(partition.dtype)
        return piece.offset * per_element, end * per_element
    if name == "indptr":
        return piece.offset // BLOCK_ELEMENTS, -(-end // BLOCK_ELEMENTS) + 1
    return None, None
