"""Arrays as stock Zarr readers see them: chunk lengths, metadata."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltastore.dtypes import LOGICAL
from deltastore.ondisk.codecs import CODECS
from deltastore.ondisk.limits import MAX_CHUNK_BYTES
from deltastore.ondisk.zarr_profile import CHUNK_BYTES, ArraySpec, array_metadata, group_metadata, plan_array

STORAGE = sorted({dtype.str for dtype in LOGICAL.values()})


@given(st.sampled_from(STORAGE), st.integers(1, 1 << 30))
def test_chunks_cover_an_array_with_little_padding(code: str, length: int) -> None:
    dtype = np.dtype(code)
    spec = plan_array(dtype, length, "raw")
    assert (spec.length, spec.itemsize, spec.dtype) == (length, dtype.itemsize, dtype.name)
    assert spec.chunk * dtype.itemsize <= CHUNK_BYTES + 64 * dtype.itemsize <= MAX_CHUNK_BYTES
    assert (spec.chunk_count - 1) * spec.chunk < length <= spec.chunk_count * spec.chunk
    if spec.chunk_count > 1:
        assert spec.chunk % 64 == 0
        assert spec.chunk_count * spec.chunk - length < 64 * spec.chunk_count + spec.chunk_count
    else:
        assert spec.chunk == length


@pytest.mark.parametrize(
    ("elements", "count"), [(1, 1), (CHUNK_BYTES // 4, 1), (CHUNK_BYTES // 4 + 1, 2), (CHUNK_BYTES, 4)]
)
def test_a_chunk_is_about_four_mebibytes(elements: int, count: int) -> None:
    assert plan_array(np.dtype("<f4"), elements, "raw").chunk_count == count


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("code", STORAGE)
def test_the_metadata_of_an_array(code: str, codec: str) -> None:
    spec = plan_array(np.dtype(code), 1000, codec)
    value = json.loads(array_metadata(spec, {"layer": "full"}))
    assert (value["zarr_format"], value["node_type"]) == (3, "array")
    assert (value["shape"], value["data_type"]) == ([1000], np.dtype(code).name)
    assert value["chunk_grid"] == {"name": "regular", "configuration": {"chunk_shape": [spec.chunk]}}
    assert value["attributes"] == {"deltastore": {"layer": "full"}}
    names = [entry["name"] for entry in value["codecs"]]
    assert names == (["bytes", "crc32c"] if codec == "raw" else ["bytes", "blosc", "crc32c"])
    assert ("configuration" in value["codecs"][0]) == (np.dtype(code).itemsize > 1)
    if codec == "blosc":
        assert value["codecs"][1]["configuration"]["typesize"] == np.dtype(code).itemsize
    assert np.array(value["fill_value"]).sum() == 0
    assert isinstance(value["fill_value"], list) == code.endswith(("c8", "c16"))


def test_the_metadata_of_a_group() -> None:
    assert json.loads(group_metadata({"step": 3})) == {
        "zarr_format": 3,
        "node_type": "group",
        "attributes": {"deltastore": {"step": 3}},
    }


def test_a_specification_counts_its_chunks() -> None:
    assert [ArraySpec("uint8", length, 10, "raw").chunk_count for length in (1, 10, 11, 20)] == [1, 1, 2, 2]
