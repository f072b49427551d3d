"""The cheapest exact layer of a partition (spec 9, "For implementers")."""

from __future__ import annotations

import numpy as np

from deltastore.layers.encoded import EncodedLayer, encode_layer
from deltastore.layers.overlay import MAX_DENSITY, encode_overlay
from deltastore.layers.xor import encode_xor
from deltastore.layout import Partition
from deltastore.ondisk.codecs import BLOSC
from deltastore.ondisk.records import FULL, OVERLAY, XOR

SPARSE_DENSITY = 0.01
"""Below this share an overlay is always the smallest."""
POOR_SHARE = 0.9
"""An xor that saves less than this of the raw bytes is compared with a full layer."""


def choose_layer(partition: Partition, current: np.ndarray, rec: np.ndarray, commit: str) -> EncodedLayer | None:
    """Return the smallest layer that turns `rec` into `current` bit for bit; None if they are equal.

    Parameters
    ----------
    current, rec : ndarray
        New values and the parent's reconstruction, storage dtype, 1-D, equal lengths.
    """
    difference = encode_xor(current, rec, partition.dtype)
    changed = _changed_elements(difference, len(current))
    if not len(changed):
        return None
    density = len(changed) / len(current)
    candidates: list[EncodedLayer] = []
    if density <= MAX_DENSITY:
        overlay = encode_overlay(changed, current)
        arrays = {"indptr": overlay.indptr, "gaps": overlay.gaps, "values": overlay.values}
        candidates.append(encode_layer(partition, OVERLAY, arrays, BLOSC, commit))
    if density > SPARSE_DENSITY:
        candidates.append(encode_layer(partition, XOR, {"xor": difference}, BLOSC, commit))
        if candidates[-1].stored_bytes > POOR_SHARE * current.nbytes:
            candidates.append(encode_layer(partition, FULL, {"data": current}, BLOSC, commit))
    return min(candidates, key=lambda layer: layer.stored_bytes)


def _changed_elements(difference: np.ndarray, elements: int) -> np.ndarray:
    if len(difference) == elements:
        return np.flatnonzero(difference)
    return np.flatnonzero(difference.reshape(elements, -1).any(axis=1))
