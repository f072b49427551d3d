"""The choice among exact layers: always right, and the smallest of what was tried."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltastore.dtypes import LOGICAL, storage_dtype
from deltastore.layers import exact
from deltastore.layers.encoded import BLOCK_ELEMENTS, EncodedLayer, encode_layer
from deltastore.layers.exact import choose_layer
from deltastore.layers.overlay import Overlay, positions
from deltastore.layers.xor import apply_xor
from deltastore.layout import FORWARD, Partition
from deltastore.ondisk.codecs import RAW, decode_blosc, digest_values
from deltastore.ondisk.pack import PackArray

B = BLOCK_ELEMENTS
COMMIT = "c" * 32


def partition_of(dtype: str, length: int) -> Partition:
    return Partition(3, dtype, length, "param", FORWARD, None)


def decoded(array: PackArray) -> np.ndarray:
    """The values of an encoded array."""
    parts = []
    for chunk in array.chunks:
        values = np.empty(array.spec.chunk, np.dtype(array.spec.dtype))
        if array.spec.codec == RAW:
            values = np.frombuffer(chunk.parts[0], values.dtype)
        else:
            decode_blosc(chunk.parts[0], values, "here")
        parts.append(values)
    return np.concatenate(parts)[: array.spec.length]


def arrays_of(layer: EncodedLayer) -> dict[str, np.ndarray]:
    found = {}
    for array in layer.arrays:
        commit, name = array.path.split("/")
        assert (commit, name.split(".")[0]) == (COMMIT, f"p{layer.record.partition}")
        found[name.split(".")[1]] = decoded(array)
        assert layer.record.arrays[name.split(".")[1]] == digest_values(found[name.split(".")[1]], array.spec.chunk)
    return found


def applied(partition: Partition, layer: EncodedLayer, rec: np.ndarray) -> np.ndarray:
    result, arrays = rec.copy(), arrays_of(layer)
    if layer.record.kind == "full":
        return arrays["data"]
    if layer.record.kind == "xor":
        apply_xor(result, arrays["xor"], partition.dtype)
        return result
    found = Overlay(arrays["indptr"], arrays["gaps"], arrays["values"])
    result[positions(found, 0, len(rec), "here")] = found.values
    return result


@given(
    st.sampled_from(sorted(LOGICAL)),
    st.sampled_from([1, 5, B - 1, B, B + 1, 2 * B + 3]),
    st.sampled_from(["none", "one", "borders", "few", "third", "half", "all", "noise"]),
    st.integers(0, 2**32 - 1),
)
def test_the_layer_gives_the_new_values_bit_for_bit(dtype: str, length: int, how: str, seed: int) -> None:
    generator = np.random.default_rng(seed)
    partition = partition_of(dtype, length)
    width = storage_dtype(dtype).itemsize
    rec = np.frombuffer(generator.bytes(length * width), storage_dtype(dtype)).copy()
    current = rec.copy()
    octets = current.view(np.uint8).reshape(length, width)
    density = {"few": 0.005, "third": 0.3, "half": 0.5, "all": 1.0}.get(how, 0.0)
    changed = np.flatnonzero(generator.random(length) < density)
    if how == "one":
        changed = generator.integers(0, length, 1)
    elif how == "borders":
        changed = np.array([e for e in (0, B - 1, B, 2 * B - 1, 2 * B, length - 1) if e < length])
    octets[changed, generator.integers(0, width)] ^= 1  # one byte, the high word of 16-byte elements too
    if how == "noise":
        octets[:] = generator.integers(0, 256, octets.shape)
    before = rec.copy()
    layer = choose_layer(partition, current, rec, COMMIT)
    assert rec.tobytes() == before.tobytes()
    if current.tobytes() == rec.tobytes():
        assert layer is None
        return
    assert layer is not None
    assert layer.record.partition == 3
    assert layer.stored_bytes == sum(chunk.stored_bytes for array in layer.arrays for chunk in array.chunks)
    assert applied(partition, layer, rec).tobytes() == current.tobytes()


@pytest.mark.parametrize(
    ("density", "noisy", "kinds"),
    [
        (0.001, False, ["overlay"]),
        (0.1, False, ["overlay", "xor"]),
        (0.9, False, ["xor"]),
        (1.0, True, ["full", "xor"]),
    ],
)
def test_the_smallest_candidate_is_chosen(
    monkeypatch: pytest.MonkeyPatch, density: float, noisy: bool, kinds: list[str]
) -> None:
    generator = np.random.default_rng(0)
    tried: list[EncodedLayer] = []

    def watched(*arguments: Any) -> EncodedLayer:
        tried.append(encode_layer(*arguments))
        return tried[-1]

    monkeypatch.setattr(exact, "encode_layer", watched)
    rec = np.frombuffer(generator.bytes(4 * 100_000), "<u4").copy()
    mask = generator.random(len(rec)) < density
    current = rec ^ (mask * (generator.integers(0, 2**32, len(rec), dtype=np.uint32) if noisy else np.uint32(1)))
    chosen = choose_layer(partition_of("uint32", len(rec)), current, rec, COMMIT)
    assert chosen is not None
    assert sorted(layer.record.kind for layer in tried) == kinds
    assert chosen.stored_bytes == min(layer.stored_bytes for layer in tried)


def test_values_that_all_became_equal_are_stored_in_full() -> None:
    rec = np.frombuffer(np.random.default_rng(0).bytes(40_000), "<u4").copy()
    chosen = choose_layer(partition_of("uint32", len(rec)), np.zeros_like(rec), rec, COMMIT)
    assert chosen is not None
    assert chosen.record.kind == "full"
    assert chosen.stored_bytes < 1000


def test_of_two_layers_of_one_size_the_full_one_is_chosen() -> None:
    old, new = (np.frombuffer(np.random.default_rng(seed).bytes(40_000), "<u4").copy() for seed in (0, 1))
    chosen = choose_layer(partition_of("uint32", len(old)), new, old, COMMIT)
    assert chosen is not None
    assert chosen.record.kind == "full"


def test_a_layer_does_not_live_in_the_scratch_memory() -> None:
    """The memory of the xor is used again by the next call of the thread."""
    partition, zeros = partition_of("float32", 1000), np.zeros(1000, "<f4")
    ones, twos = np.ones(1000, "<f4"), np.full(1000, 2, "<f4")
    first = choose_layer(partition, ones, zeros, COMMIT)
    assert choose_layer(partition, twos, zeros, COMMIT) is not None
    assert first is not None
    assert (applied(partition, first, zeros) == ones).all()
