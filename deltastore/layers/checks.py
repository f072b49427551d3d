"""The checks that writer and reader make of a reconstruction (spec 9.6)."""

from __future__ import annotations

import numpy as np

from deltastore.checksums import crc32c
from deltastore.layers.encoded import BLOCK_ELEMENTS
from deltastore.ondisk.codecs import bytes_of

MAX_SHARES = 16


def covered_crc(rec: np.ndarray, phase: int | None) -> int:
    """Return the CRC-32C of the blocks of a partition that `phase` covers, in order; None covers all."""
    if phase is None:
        return crc32c(bytes_of(rec))
    blocks = -(-len(rec) // BLOCK_ELEMENTS)
    shares = min(MAX_SHARES, blocks)
    crc = 0
    for block in range(phase % shares, blocks, shares):
        crc = crc32c(bytes_of(rec[block * BLOCK_ELEMENTS : (block + 1) * BLOCK_ELEMENTS]), crc)
    return crc
