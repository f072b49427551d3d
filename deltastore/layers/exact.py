"""The cheapest exact layer of a partition (spec 9, "For implementers")."""

from __future__ import annotations

import threading

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
    difference = _difference(partition, current, rec)
    nonzero = int(np.count_nonzero(difference))
    if not nonzero:
        return None
    density: float = nonzero / len(difference)
    candidates: list[EncodedLayer] = []
    # The numbers of the changed elements take eight bytes each: not asked for where nearly all of them changed.
    changed = _changed_elements(difference, len(current)) if density <= MAX_DENSITY else None
    if changed is not None and (density := len(changed) / len(current)) <= MAX_DENSITY:
        overlay = encode_overlay(changed, current)
        arrays = {"indptr": overlay.indptr, "gaps": overlay.gaps, "values": overlay.values}
        candidates.append(encode_layer(partition, OVERLAY, arrays, BLOSC, commit))
    if density > SPARSE_DENSITY:
        candidates.append(encode_layer(partition, XOR, {"xor": difference}, BLOSC, commit))
        if candidates[-1].stored_bytes > POOR_SHARE * current.nbytes:
            candidates.append(encode_layer(partition, FULL, {"data": current}, BLOSC, commit))
    return min(candidates, key=lambda layer: (layer.stored_bytes, layer.record.kind != FULL))


_scratch = threading.local()


def _difference(partition: Partition, current: np.ndarray, rec: np.ndarray) -> np.ndarray:
    """Return the xor of a partition, in memory that the next call of this thread uses again.

    What is made of it is compressed, so that nothing keeps it; new memory at each commit would cost more than the xor.
    """
    memory: np.ndarray | None = getattr(_scratch, "memory", None)
    if memory is None or memory.nbytes < current.nbytes:
        memory = _scratch.memory = np.empty(current.nbytes, np.uint8)
    return encode_xor(current, rec, partition.dtype, memory)


def _changed_elements(difference: np.ndarray, elements: int) -> np.ndarray:
    if len(difference) == elements:
        return np.flatnonzero(difference)
    return np.flatnonzero(difference.reshape(elements, -1).any(axis=1))
