"""The rotating checks of a reconstruction: which blocks a phase covers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltastore.checksums import crc32c
from deltastore.layers.checks import MAX_SHARES, covered_crc
from deltastore.layers.encoded import BLOCK_ELEMENTS

B = BLOCK_ELEMENTS


def blocks_covered(length: int, phase: int | None) -> list[int]:
    """Flip one byte in each block and see whether the check moves."""
    values = np.zeros(length, np.uint8)
    clean = covered_crc(values, phase)
    found = []
    for block in range(-(-length // B)):
        last = min((block + 1) * B, length) - 1
        values[last] = 1
        if covered_crc(values, phase) != clean:
            found.append(block)
        values[last] = 0
    return found


@given(st.sampled_from([1, B - 1, B, B + 1, 3 * B, 16 * B, 16 * B + 1, 20 * B + 7]), st.integers(0, 100))
def test_a_phase_covers_its_share(length: int, phase: int) -> None:
    blocks = -(-length // B)
    shares = min(MAX_SHARES, blocks)
    assert blocks_covered(length, phase) == [block for block in range(blocks) if block % shares == phase % shares]


@pytest.mark.parametrize("blocks", [1, 2, 5, 16, 17, 40])
def test_consecutive_phases_cover_everything_once(blocks: int) -> None:
    shares = min(MAX_SHARES, blocks)
    covered = [block for phase in range(7, 7 + shares) for block in blocks_covered(blocks * B, phase)]
    assert sorted(covered) == list(range(blocks))


def test_no_phase_covers_all_blocks() -> None:
    values = np.arange(3 * B + 5, dtype="<f4")
    assert covered_crc(values, None) == crc32c(values.tobytes())
    assert blocks_covered(3 * B + 5, None) == [0, 1, 2, 3]


def test_the_order_of_the_covered_blocks_counts() -> None:
    values = np.zeros(17 * B, np.uint8)
    values[0] = 1  # blocks 0 and 16 belong to phase 0
    swapped = np.roll(values, 16 * B)
    assert covered_crc(values, 0) == crc32c(values[:B].tobytes() + values[16 * B :].tobytes())
    assert covered_crc(values, 0) != covered_crc(swapped, 0)


def test_a_partial_block_is_not_padded() -> None:
    assert covered_crc(np.zeros(5, "<c16"), 3) == crc32c(bytes(80))
