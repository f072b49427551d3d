"""Which elements are worth their bytes: one threshold a tensor, from a sample (spec 9.8). Pure planning.

The rule is that of SIC (layer-aware filter, dynamic thresholds), against the reconstruction instead of the step before:
what is not stored keeps its deviation, and is stored once that is among the largest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from deltastore.dtypes import storage_dtype
from deltastore.layout import Layout, Piece
from deltastore.policy import EXACT, Policy
from deltastore.types import Path

FILTERED_DTYPES = frozenset({"float32", "float64", "bfloat16", "float16"})
"""Everything else is exact."""
MIN_ELEMENTS = 4096
"""Smaller tensors are exact."""
SAMPLED_SHARE = 1 / 256
SAMPLE = (8192, 65_536)
"""Elements of a sample, at least and at most."""
TIED_SHARE = 0.05
"""Where more of the elements to be kept have equal deviations, they take turns."""
LARGEST = float(np.nextafter(np.finfo(np.float32).max, np.float32(0)))
"""The largest threshold: what lies below it in binary32 has a finite bound."""
_BISECTIONS = 24

Numbers: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor that is filtered.

    Attributes
    ----------
    tensor : int
        Its index in the layout.
    share : float or None
        The share of its elements that each commit keeps; None: as the budget allows.
    limit : float
        No element may deviate by more.
    """

    tensor: int
    path: Path
    dtype: str
    pieces: tuple[Piece, ...]
    elements: int
    share: float | None
    limit: float

    @property
    def sampled(self) -> int:
        """How many elements its sample has."""
        return min(max(int(self.elements * SAMPLED_SHARE), SAMPLE[0]), SAMPLE[1], self.elements)


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a tensor's deviations are cut.

    Attributes
    ----------
    threshold : float
        A binary32: what deviates by more is kept.
    turn : float
        Share of the elements whose turn it is: of these, what deviates by just the threshold is kept too.
    """

    threshold: float
    turn: float = 0.0


@dataclass(frozen=True, slots=True)
class Range:
    """Elements of a partition with one threshold; 0 keeps every change.

    `target` is the index of the target that they belong to, None for elements that are exact.
    """

    first: int
    last: int
    threshold: float
    target: int | None


def find_targets(layout: Layout, policy: Policy) -> list[Target]:
    """Return the tensors that a policy filters."""
    names: dict[int, list[Path]] = {}
    for index, entry in enumerate(layout.tensors):
        names.setdefault(index if entry.alias is None else entry.alias, []).append(entry.path)
    found = []
    for index, paths in names.items():
        entry = layout.tensors[index]
        if entry.elements < MIN_ELEMENTS or entry.dtype not in FILTERED_DTYPES:
            continue
        role = layout.by_id[entry.pieces[0].partition].role
        # Tied tensors are one: the strictest of what is said of its names counts.
        rules = [policy.rule(path, role) for path in paths]
        limit = min(policy.limit(path, role) for path in paths)
        if EXACT not in rules and limit > 0:
            shares = [float(rule) for rule in rules if not isinstance(rule, str)]
            share = max(shares, default=None)
            found.append(Target(index, entry.path, entry.dtype, entry.pieces, entry.elements, share, limit))
    return found


def entry_bytes(itemsize: Numbers, share: Numbers) -> Numbers:
    """Return what a kept element takes: its value, and its gap at the entropy of a random choice.

    Parameters
    ----------
    itemsize, share : ndarray of float64
        Bytes of an element, and share of the elements that is kept; of equal lengths.
    """
    kept = np.clip(share, 1e-300, 1.0)
    rest = np.maximum(1 - kept, 1e-300)
    entropy = -np.log2(kept) - rest / kept * np.log2(rest)
    return np.where(share > 0, itemsize + np.minimum(entropy / 8, 2.0), 0.0)


def itemsizes(dtypes: Iterable[str]) -> Numbers:
    """Return the bytes of an element of each dtype."""
    return np.array([storage_dtype(dtype).itemsize for dtype in dtypes], np.float64)


def solve_share(targets: Sequence[Target], samples: Sequence[np.ndarray], room: float) -> float:
    """Return the share of each tensor's elements that fills `room` bytes.

    Parameters
    ----------
    samples : sequence of ndarray of uint32
        Bits of the deviations of each target.
    room : float
        Bytes for all entries, by the measure of :func:`entry_bytes`.
    """
    least = np.array([_forced(target, sample) for target, sample in zip(targets, samples, strict=True)])
    most = np.array([np.count_nonzero(sample) / len(sample) for sample in samples])
    fixed = np.array([np.nan if target.share is None else target.share for target in targets])
    elements = np.array([target.elements for target in targets], np.float64)
    sizes = itemsizes(target.dtype for target in targets)

    def cost(share: float) -> float:
        kept = np.minimum(np.maximum(np.where(np.isnan(fixed), share, fixed), least), most)
        return float(np.sum(elements * kept * entry_bytes(sizes, kept)))

    low, high = 0.0, 1.0
    if cost(high) <= room:
        return high
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if cost(middle) <= room else (low, middle)
    return low


def _forced(target: Target, sample: np.ndarray) -> float:
    """Return the share that is kept in any case: above the user's bound, or not finite."""
    limit = np.float32(min(target.limit, LARGEST)).view(np.uint32)
    return float(np.count_nonzero(sample > limit) / len(sample))


def cut(target: Target, sample: np.ndarray, share: float, turn: int = 0) -> Cut:
    """Return the threshold above which about `share` of a tensor's elements lie.

    Where many deviations are equal (sign updates, coarse dtypes) no threshold does that: these take turns.

    Parameters
    ----------
    sample : ndarray of uint32
        Bits of deviations, evenly spread and in the order of the elements.
    turn : int
        The element with which the next turn begins.
    """
    limit = below(target.limit)
    wanted = (share if target.share is None else target.share) * len(sample)
    if wanted <= 0:
        return Cut(min(LARGEST, limit))
    if wanted >= len(sample):
        return Cut(0.0)
    rank = int(wanted)
    bits = np.partition(sample, len(sample) - 1 - rank)[len(sample) - 1 - rank]
    value = _finite(bits)
    if value >= limit:
        return Cut(limit)
    if value == 0:
        return Cut(0.0)
    above = np.count_nonzero(sample > bits)
    tied = sample == bits
    if np.count_nonzero(tied) > max(1.0, TIED_SHARE * wanted):
        return Cut(value, _turn_share(tied, wanted - above, turn / target.elements))
    larger = sample[sample > bits]
    upper = _finite(larger.min()) if len(larger) else value
    return Cut(min(float(np.float32(upper + (value - upper) * (wanted - rank))), limit))


def _turn_share(tied: np.ndarray, wanted: float, start: float) -> float:
    """Return the share of the elements, from `start` on, that hold so many tied ones.

    They are not spread evenly: those that had their turn last are not tied any more.
    """
    found = np.cumsum(np.roll(tied, -int(start * len(tied))))
    at = int(np.searchsorted(found, wanted))
    before = int(found[at - 1]) if at else 0
    return min((at + max(wanted - before, 0.0)) / len(tied), 1.0)


def _finite(bits: np.uint32) -> float:
    value = float(bits.view(np.float32))
    return value if value <= LARGEST else LARGEST


def below(limit: float) -> float:
    """Return the threshold under which nothing deviates by more than `limit`, also before it is rounded to binary32."""
    if limit > LARGEST:
        return LARGEST
    rounded = np.float32(limit)
    return _before(_before(float(rounded)) if rounded > limit else float(rounded))


def _before(value: float) -> float:
    """Return the binary32 next to one, towards 0."""
    return float(np.nextafter(np.float32(value), np.float32(0)))


def plan_ranges(
    layout: Layout, targets: Sequence[Target], cuts: Sequence[Cut], turns: Sequence[int]
) -> dict[int, list[Range]]:
    """Return how each partition that holds a target is filtered: ranges that cover all of its elements.

    Parameters
    ----------
    turns : sequence of int
        For each target the element with which its turn begins.
    """
    found: dict[int, list[Range]] = {}
    for number, (target, where, turn) in enumerate(zip(targets, cuts, turns, strict=True)):
        start = 0
        for piece in target.pieces:
            for first, last, in_turn in _split(start, start + piece.count, target.elements, turn, where.turn):
                threshold = _before(where.threshold) if in_turn else where.threshold
                offset = piece.offset - start
                found.setdefault(piece.partition, []).append(Range(offset + first, offset + last, threshold, number))
            start += piece.count
    return {number: list(_covering(ranges, layout.by_id[number].length)) for number, ranges in found.items()}


def _split(first: int, last: int, elements: int, turn: int, share: float) -> Iterator[tuple[int, int, bool]]:
    """Yield the parts of a tensor's elements first..last, and whether it is their turn; the turn wraps around."""
    end = turn + round(share * elements)
    marks = [(turn, min(end, elements)), (0, end - elements)]
    edges = sorted({first, last, *(edge for mark in marks for edge in mark if first < edge < last)})
    for low, high in pairwise(edges):
        yield low, high, any(begin <= low < stop for begin, stop in marks)


def _covering(ranges: list[Range], length: int) -> Iterator[Range]:
    at = 0
    for item in sorted(ranges, key=lambda item: item.first):
        if at < item.first:
            yield Range(at, item.first, 0.0, None)
        yield item
        at = item.last
    if at < length:
        yield Range(at, length, 0.0, None)
