"""The Zarr v3 metadata of a pack: only what every reader of the core specification knows (spec 4)."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np

from deltastore.ondisk.codecs import BLOSC, BLOSC_BLOCKSIZE
from deltastore.types import Json

CHUNK_BYTES = 4 << 20
"""About how many decoded bytes a chunk holds."""
_ALIGN_ELEMENTS = 64


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """One 1-D array of a pack."""

    dtype: str
    """Storage dtype, numpy's name."""
    length: int
    chunk: int
    """Elements of a chunk; the last one is padded with zeros to this length."""
    codec: str

    @property
    def chunk_count(self) -> int:
        """How many chunks hold the array."""
        return -(-self.length // self.chunk)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return np.dtype(self.dtype).itemsize


def plan_array(dtype: np.dtype, length: int, codec: str) -> ArraySpec:
    """Return how an array is cut: equal chunks of about 4 MiB, so that the padding is small."""
    per_chunk = CHUNK_BYTES // dtype.itemsize
    count = max(1, -(-length // per_chunk))
    chunk = -(-length // count)
    if count > 1:
        chunk = -(-chunk // _ALIGN_ELEMENTS) * _ALIGN_ELEMENTS
    return ArraySpec(dtype.name, length, max(chunk, 1), codec)


def array_metadata(spec: ArraySpec, attributes: Json) -> bytes:
    """Return the `zarr.json` of an array."""
    codecs: list[Json] = [
        {"name": "bytes", "configuration": {"endian": "little"}} if spec.itemsize > 1 else {"name": "bytes"}
    ]
    if spec.codec == BLOSC:
        configuration = {
            "cname": "zstd",
            "clevel": 1,
            "shuffle": "shuffle",
            "typesize": spec.itemsize,
            "blocksize": BLOSC_BLOCKSIZE,
        }
        codecs.append({"name": "blosc", "configuration": configuration})
    codecs.append({"name": "crc32c"})
    fill: Json = [0.0, 0.0] if spec.dtype.startswith("complex") else 0.0 if spec.dtype.startswith("float") else 0
    return _encode(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [spec.length],
            "data_type": spec.dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [spec.chunk]}},
            "chunk_key_encoding": {"name": "default"},
            "fill_value": fill,
            "codecs": codecs,
            "attributes": {"deltastore": attributes},
        }
    )


def group_metadata(attributes: Json) -> bytes:
    """Return the `zarr.json` of a group."""
    return _encode({"zarr_format": 3, "node_type": "group", "attributes": {"deltastore": attributes}})


def _encode(value: Json) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode("ascii")
