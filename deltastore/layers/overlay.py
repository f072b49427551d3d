"""Overlay: the values of the elements that changed, assigned to their places (spec 9.3)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deltastore.errors import Corruption
from deltastore.layers.encoded import BLOCK_ELEMENTS

MAX_DENSITY = 0.25
"""Above this share of changed elements another kind is always smaller."""


@dataclass(frozen=True)
class Overlay:
    """The three arrays of an overlay."""

    indptr: np.ndarray
    """u32, one more than there are blocks: where each block's entries begin."""
    gaps: np.ndarray
    """u16: the first entry of a block is its offset in the block, later ones the distance to the one before."""
    values: np.ndarray
    """Storage dtype of the partition."""


def encode_overlay(changed: np.ndarray, current: np.ndarray) -> Overlay:
    """Return the overlay that assigns `current` at the positions `changed`.

    Parameters
    ----------
    changed : ndarray of int64
        Sorted element numbers.
    current : ndarray
        The partition's new values.
    """
    blocks = -(-len(current) // BLOCK_ELEMENTS)
    starts = np.arange(blocks + 1, dtype=np.int64) * BLOCK_ELEMENTS
    indptr = np.searchsorted(changed, starts).astype("<u4")
    gaps = np.diff(changed, prepend=0)
    filled = indptr[:-1][np.diff(indptr.astype(np.int64)) > 0]
    gaps[filled] = changed[filled] % BLOCK_ELEMENTS
    return Overlay(indptr, gaps.astype("<u2"), current[changed])


def positions(overlay: Overlay, first_block: int, length: int, where: str) -> np.ndarray:
    """Return the element numbers of an overlay, or of the blocks of one that were read.

    Parameters
    ----------
    overlay : Overlay
        `indptr` begins with 0 and belongs to the blocks from `first_block` on.
    length : int
        Elements of the partition.

    Raises
    ------
    Corruption
        The arrays do not fit each other or point outside of the partition.
    """
    indptr = overlay.indptr.astype(np.int64)
    counts = np.diff(indptr)
    if (
        indptr[0] != 0
        or (counts < 0).any()
        or indptr[-1] != len(overlay.gaps)
        or len(overlay.gaps) != len(overlay.values)
    ):
        raise Corruption(f"{where}: the arrays of an overlay do not fit each other", where=where)
    filled = np.flatnonzero(counts)
    begins, ends = indptr[filled], indptr[filled + 1]
    found: np.ndarray = np.cumsum(overlay.gaps, dtype=np.int64)
    before = found[begins] - overlay.gaps[begins]
    # Places ascend within a block if no gap but the first is 0.
    ascending = np.count_nonzero(overlay.gaps) + np.count_nonzero(overlay.gaps[begins] == 0) == len(found)
    if not ascending or (found[ends - 1] - before >= BLOCK_ELEMENTS).any():
        raise Corruption(f"{where}: an overlay points outside of its block", where=where)
    found += np.repeat((first_block + filled) * BLOCK_ELEMENTS - before, counts[filled])
    if len(found) and found[-1] >= length:
        raise Corruption(f"{where}: an overlay points outside of its block", where=where)
    return found
