"""What every layer kind has in common (spec 9)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deltastore.layout import Partition
from deltastore.ondisk.codecs import EncodedChunk, content_digest
from deltastore.ondisk.pack import PackArray, encode_array
from deltastore.ondisk.predictions import PredictionRecord
from deltastore.ondisk.records import LayerRecord
from deltastore.ondisk.zarr_profile import plan_array

BLOCK_ELEMENTS = 65_536
"""Elements of a block: the unit of overlays and of the checks of the reconstruction."""


@dataclass(frozen=True)
class EncodedPrediction:
    """A prediction whose codes are encoded and held in memory until its commit is published."""

    record: PredictionRecord
    arrays: tuple[PackArray, ...]
    stored_bytes: int


@dataclass(frozen=True)
class EncodedLayer:
    """A layer whose arrays are encoded and held in memory until its commit is published."""

    record: LayerRecord
    arrays: tuple[PackArray, ...]
    stored_bytes: int


def encode_layer(
    partition: Partition, kind: str, arrays: dict[str, np.ndarray], codec: str, commit: str
) -> EncodedLayer:
    """Return the encoded layer of one partition.

    Parameters
    ----------
    arrays : dict of str to ndarray
        The arrays of the layer's kind, 1-D and contiguous.
    codec : {"raw", "blosc"}
        How the chunks are stored.
    commit : str
        Id of the commit that the layer belongs to.
    """
    digests, packed, stored = encode_arrays(partition, kind, arrays, codec, commit)
    return EncodedLayer(LayerRecord(partition.id, kind, digests), packed, stored)


def encode_arrays(
    partition: Partition, kind: str, arrays: dict[str, np.ndarray], codec: str, commit: str
) -> tuple[dict[str, str], tuple[PackArray, ...], int]:
    """Return digests, encoded arrays and stored bytes of what a commit has under one partition."""
    packed: list[PackArray] = []
    digests: dict[str, str] = {}
    stored = 0
    for name, values in arrays.items():
        chunks: list[EncodedChunk] = list(encode_array(values, spec := plan_array(values.dtype, len(values), codec)))
        stored += sum(chunk.stored_bytes for chunk in chunks)
        digests[name] = content_digest(spec.dtype, spec.length, spec.chunk, [chunk.content_crc for chunk in chunks])
        packed.append(PackArray(array_path(commit, partition.id, name), spec, attributes(partition, kind), chunks))
    return digests, tuple(packed), stored


def array_path(commit: str, partition: int, array: str) -> str:
    """Return the Zarr path of a layer's array."""
    return f"{commit}/p{partition}.{array}"


def attributes(partition: Partition, kind: str) -> dict[str, str]:
    """Return what a layer's arrays say of themselves to a stock Zarr reader."""
    return {"layer": kind, "dtype": partition.dtype, "role": partition.role}
