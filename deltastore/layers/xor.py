"""Xor: the bits of the new values against the prediction (spec 9.4)."""

from __future__ import annotations

import numpy as np

from deltastore.dtypes import word_dtype


def words(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return a partition's values as unsigned words: one an element, two for 16-byte elements."""
    return values.view(word_dtype(dtype))


def encode_xor(current: np.ndarray, predicted: np.ndarray, dtype: str, out: np.ndarray) -> np.ndarray:
    """Return the xor layer's array, in the memory of `out`: bytes, as many as the partition has or more."""
    difference = words(out[: current.nbytes], dtype)
    np.bitwise_xor(words(current, dtype), words(predicted, dtype), out=difference)
    return difference


def apply_xor(rec: np.ndarray, layer: np.ndarray, dtype: str) -> None:
    """Turn the prediction in `rec` into the new values, in place."""
    target = words(rec, dtype)
    np.bitwise_xor(target, layer, out=target)
