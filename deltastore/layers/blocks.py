"""Blocks of a partition, the unit of dense codes: runs of up to 256 elements that share a scale (spec 9.9)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from deltastore.layout import Layout

BLOCK_ELEMENTS = 256
"""The most that share a scale."""
MIN_ROW = 64
"""Rows of a tensor that are as long as this are not mixed in a block."""


@dataclass(frozen=True)
class Blocks:
    """The blocks of one partition, in order; elements between tensors belong to none.

    Attributes
    ----------
    starts, ends : ndarray of int64
        First element of each block in the partition, and the one after its last.
    tensors : ndarray of int64
        Index of each block's tensor in the layout.
    """

    starts: np.ndarray
    ends: np.ndarray
    tensors: np.ndarray

    def __len__(self) -> int:
        return len(self.starts)

    def covering(self, first: int, last: int) -> tuple[int, int]:
        """Return which blocks have elements in first..last."""
        return (
            int(np.searchsorted(self.ends, first, side="right")),
            int(np.searchsorted(self.starts, last, side="left")),
        )

    @cached_property
    def slots(self) -> np.ndarray:
        """For each block the number of its tensor among those of the partition, int64."""
        return np.cumsum(np.diff(self.tensors, prepend=self.tensors[:1]) != 0)

    @cached_property
    def heads(self) -> np.ndarray:
        """For each slot its first block."""
        return np.searchsorted(self.slots, np.arange(int(self.slots[-1]) + 1 if len(self) else 0))

    def sets_of(self, ranges: Sequence[tuple[int, int, int]]) -> np.ndarray:
        """Return for each slot the set of constants of the range in which its tensor begins; -1 for none."""
        firsts = self.starts[self.heads]
        sets = np.full(len(firsts), -1, np.int64)
        for first, last, number in ranges:
            sets[np.searchsorted(firsts, first) : np.searchsorted(firsts, last)] = number
        return sets

    def spans_of(self, ranges: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        """Return the elements of each tensor that begins in a range, with the range's set."""
        lasts = np.append(self.heads[1:], len(self)) - 1
        rows = zip(
            self.starts[self.heads].tolist(), self.ends[lasts].tolist(), self.sets_of(ranges).tolist(), strict=True
        )
        return [(first, last, number) for first, last, number in rows if number >= 0]

    def refined(self, period: int, phase: int) -> np.ndarray:
        """Return the numbers of the blocks whose turn it is to be refined."""
        return np.arange(phase, len(self), period)


def blocks_of(layout: Layout, partition: int) -> Blocks:
    """Return the blocks of a partition; worked out once for a layout."""
    known: dict[int, Blocks] = layout.__dict__.setdefault("_blocks", {})
    if partition not in known:
        known[partition] = _plan(layout, partition)
    return known[partition]


def _plan(layout: Layout, partition: int) -> Blocks:
    found: list[tuple[int, int, np.ndarray]] = []
    for index, entry in enumerate(layout.tensors):
        start = 0
        row = math.prod(entry.shape[1:])
        for piece in entry.pieces:
            if piece.partition == partition:
                edges = _edges(start, piece.count, row)
                found.append((piece.offset, index, piece.offset + edges))
            start += piece.count
    found.sort(key=lambda item: item[0])
    empty = np.zeros(0, np.int64)
    return Blocks(
        np.concatenate([empty, *(edges[:-1] for _, _, edges in found)]),
        np.concatenate([empty, *(edges[1:] for _, _, edges in found)]),
        np.concatenate([empty, *(np.full(len(edges) - 1, index, np.int64) for _, index, edges in found)]),
    )


def _edges(start: int, count: int, row: int) -> np.ndarray:
    """Return where the blocks of a piece begin, and its end: relative to it, for the elements start.. of its tensor."""
    if row < MIN_ROW:
        return np.append(np.arange(0, count, BLOCK_ELEMENTS, dtype=np.int64), count)
    parts = -(-row // BLOCK_ELEMENTS)
    within = np.arange(parts, dtype=np.int64) * row // parts
    rows = np.arange(start // row, -(-(start + count) // row), dtype=np.int64) * row
    edges = (rows[:, None] + within).reshape(-1) - start
    inner = edges[(edges > 0) & (edges < count)]
    return np.concatenate([np.zeros(1, np.int64), inner, np.full(1, count, np.int64)])
