"""Bounded layers: the importance filter over all partitions of a commit, within a byte budget (spec 9.8)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from deltastore.layers.coding import CodingState
from deltastore.layers.encoded import EncodedLayer, encode_layer
from deltastore.layers.groups import Group, RuledGroup, apply_rules, find_groups
from deltastore.layers.importance import (
    Cut,
    Range,
    Target,
    cut,
    entry_bytes,
    find_targets,
    itemsizes,
    plan_ranges,
    solve_share,
)
from deltastore.layers.overlay import encode_overlay
from deltastore.layers.passes import passes
from deltastore.layers.rules import Rule
from deltastore.layout import Layout, Partition
from deltastore.ondisk.codecs import BLOSC
from deltastore.ondisk.fidelity import TensorFidelity
from deltastore.ondisk.predictions import HOLD
from deltastore.ondisk.records import OVERLAY
from deltastore.parallel import run_all
from deltastore.policy import Policy
from deltastore.types import Path

SCALE = (0.5, 1.5)
"""How far the bytes of entries may be from :func:`entry_bytes` to be expected again."""

STEEP = (0.25, 4.0)
"""The powers that are believed."""

Arrays = dict[int, np.ndarray]
"""Partition number -> its elements."""


@dataclass
class FilterState:
    """What the filter remembers from one commit to the next; nothing of it is needed to read."""

    phase: int = 0
    """Moves the samples."""
    scale: float = 1.0
    """Bytes of the entries of the commit before, over what :func:`entry_bytes` says."""
    turns: dict[Path, int] = field(default_factory=dict)
    """Tensors with equal deviations: the element whose turn is next."""
    overhead: tuple[int, int] | None = None
    """Of the commit before: its layers, and its bytes beside them (record, metadata, container)."""
    exact_bytes: int = 0
    """What the elements took that are exact beside filtered ones."""
    has_told_floor: bool = False
    """The user knows that the floor is larger than the budget."""
    has_told_disagreement: bool = False
    """The user knows that nothing is predicted."""
    coding: CodingState = field(default_factory=CodingState)
    _targets: tuple[Layout, Policy, list[Target]] | None = None
    _groups: tuple[Layout, list[Group]] | None = None

    def targets(self, layout: Layout, policy: Policy) -> list[Target]:
        """Return the tensors that are filtered, worked out once for a layout."""
        if self._targets is None or self._targets[0] is not layout or self._targets[1] != policy:
            self._targets = layout, policy, find_targets(layout, policy)
        return self._targets[2]

    def groups(self, layout: Layout, policy: Policy, rules: Mapping[Path, Rule]) -> list[RuledGroup]:
        """Return what is predicted."""
        if policy.prediction == HOLD or not rules:
            return []
        return apply_rules(self.known_groups(layout), rules, layout, policy)

    def known_groups(self, layout: Layout) -> list[Group]:
        """Return what could be predicted, worked out once for a layout."""
        if self._groups is None or self._groups[0] is not layout:
            self._groups = layout, find_groups(layout)
        return self._groups[1]


@dataclass(frozen=True)
class _Run:
    """What a range's pass found."""

    range: Range
    kept: int
    largest: float
    missing: float
    whole: float


@dataclass(frozen=True)
class _Pass:
    """The filter's pass over one partition, and how to take it back."""

    partition: Partition
    places: np.ndarray
    old: np.ndarray
    runs: list[_Run]
    layer: EncodedLayer | None


class BoundedDelta:
    """The filtered partitions of one commit.

    Parameters
    ----------
    layout : Layout
        Of the commit.
    targets : sequence of Target
        What is filtered.
    current, rec : dict of int to ndarray
        New values, and what a reader has. :meth:`run` brings the filtered partitions of `rec` up to date.
    commit : str
        Id of the commit.
    """

    def __init__(
        self, layout: Layout, targets: Sequence[Target], current: Arrays, rec: Arrays, commit: str, state: FilterState
    ) -> None:
        self._layout = layout
        self._targets = targets
        self._current = current
        self._rec = rec
        self._commit = commit
        self._state = state
        self._kernels = passes("kernels")
        self._samples = run_all(self._sample, targets)
        self._cuts: list[Cut] = []
        self._passes: list[_Pass] = []
        self._scale = state.scale
        self._room = 0.0
        self._aimed = 0.0
        self._known: list[tuple[float, int]] = []
        """What was asked of the sample, and what all elements took: it may lie about the tails."""
        self.exact_bytes = state.exact_bytes
        """What the elements take that are exact beside filtered ones; before the first run, what they took before."""
        self._share = 0.0

    @property
    def partitions(self) -> int:
        """How many partitions are filtered."""
        return len({piece.partition for target in self._targets for piece in target.pieces})

    @property
    def layers(self) -> list[EncodedLayer]:
        """The layers, for the partitions of which something was kept."""
        return [made.layer for made in self._passes if made.layer is not None]

    @property
    def stored_bytes(self) -> int:
        """What the layers take."""
        return sum(layer.stored_bytes for layer in self.layers)

    def run(self, room: float) -> None:
        """Filter all partitions so that their layers take about `room` bytes."""
        self.take_back()
        self._room = room
        self._aimed = self._aim(room) if room > 0 else 0.0
        share = solve_share(self._targets, self._samples, self._aimed / self._scale) if room > 0 else 0.0
        self._share = share
        turns = [self._state.turns.get(target.path, 0) for target in self._targets]
        self._cuts = [
            cut(target, sample, share, turn)
            for target, sample, turn in zip(self._targets, self._samples, turns, strict=True)
        ]
        ranges = plan_ranges(self._layout, self._targets, self._cuts, turns)
        self._passes = run_all(lambda number: self._filter(number, ranges[number]), ranges)
        self.exact_bytes = round(self._scale * self._expected(exact=True))

    def can_change(self, *, more: bool) -> bool:
        """Return whether a run with more, or less, room may store more, or less, than the last one did.

        Where only what must be was kept, its bytes say nothing of what others would take.
        """
        return self._share > 0.0 and (self._share < 1.0 or not more)

    def take_back(self) -> None:
        """Give the reconstruction back what it had before :meth:`run`."""
        for made in self._passes:
            words = self._kernels.as_words(self._rec[made.partition.id], made.partition.dtype)
            self._kernels.revert(words, made.places, made.old)
        self._passes = []

    def settle(self) -> list[TensorFidelity]:
        """Return what the commit says of its tensors, and remember what the next one starts from."""
        self._calibrate()
        self._state.scale, self._state.exact_bytes = self._scale, self.exact_bytes
        self._state.phase += 1
        for target, where in zip(self._targets, self._cuts, strict=True):
            if where.turn > 0:
                begin = self._state.turns.get(target.path, 0)
                self._state.turns[target.path] = (begin + round(where.turn * target.elements)) % target.elements
        found: dict[int, list[_Run]] = {}
        for made in self._passes:
            for run in made.runs:
                if run.range.target is not None:
                    found.setdefault(run.range.target, []).append(run)
        fidelities = (self._fidelity(number, found[number]) for number in sorted(found))
        return [fidelity for fidelity in fidelities if fidelity is not None]

    def correct(self) -> None:
        """Learn from the bytes of the last run: another one comes nearer to its room."""
        found = self.stored_bytes - self.exact_bytes
        if found > 0 and self._room > 0:
            self._known.append((self._aimed, found))

    def _aim(self, room: float) -> float:
        """Return what to ask of the sample for `room` bytes: where two runs are known, along a power law through both.

        In the tails twice as much may be four times as much: a rule of three would pass over the goal for good.
        """
        if not self._known:
            return room
        aimed, found = self._known[-1]
        steep = 1.0
        if len(self._known) > 1:
            before, less = self._known[-2]
            if before != aimed and less != found:
                steep = min(max(math.log(found / less) / math.log(aimed / before), STEEP[0]), STEEP[1])
        return float(aimed * (room / found) ** (1 / steep))

    def _calibrate(self) -> None:
        expected = self._expected(exact=False) + self._expected(exact=True)
        if expected > 0:
            # Elements that became all alike (infinite, say) take nothing: no measure for those of the next commit.
            self._scale = min(max(self.stored_bytes / expected, SCALE[0]), SCALE[1])

    def _expected(self, *, exact: bool) -> float:
        """Return what the entries of the last run should take, by the measure of :func:`entry_bytes`."""
        runs = [
            (made.partition.dtype, run.kept, run.range.last - run.range.first)
            for made in self._passes
            for run in made.runs
            if run.kept and (run.range.target is None) == exact
        ]
        if not runs:
            return 0.0
        dtypes, *numbers = zip(*runs, strict=True)
        kept, lengths = (np.array(values, np.float64) for values in numbers)
        return float(np.sum(kept * entry_bytes(itemsizes(dtypes), kept / lengths)))

    def _sample(self, target: Target) -> np.ndarray:
        made = np.empty(target.sampled, np.uint32)
        done = start = 0
        for piece in target.pieces:
            start += piece.count
            until = round(target.sampled * start / target.elements)
            words = (self._words(arrays, piece.partition, target.dtype) for arrays in (self._current, self._rec))
            self._kernels.sample_deviations(
                *words, piece.offset, piece.offset + piece.count, self._state.phase, made[done:until]
            )
            done = until
        return made

    def _words(self, arrays: Arrays, partition: int, dtype: str) -> np.ndarray:
        words: np.ndarray = self._kernels.as_words(arrays[partition], dtype)
        return words

    def _filter(self, number: int, ranges: list[Range]) -> _Pass:
        partition = self._layout.by_id[number]
        current = self._words(self._current, number, partition.dtype)
        rec = self._words(self._rec, number, partition.dtype)
        places = np.empty(partition.length, np.uint32)
        old = np.empty(partition.length, rec.dtype)
        runs: list[_Run] = []
        count = 0
        for item in ranges:
            threshold = self._kernels.threshold_bits(item.threshold, partition.dtype)
            before = count
            count, largest, missing, whole = self._kernels.filter_run(
                current, rec, item.first, item.last, threshold, places, old, count
            )
            runs.append(_Run(item, count - before, largest, missing, whole))
        # Copies: the memory for all elements, of which most were never touched, goes back.
        places, old = places[:count].copy(), old[:count].copy()
        layer = None
        if count:
            overlay = encode_overlay(places.astype(np.int64), self._current[number])
            arrays = {"indptr": overlay.indptr, "gaps": overlay.gaps, "values": overlay.values}
            layer = encode_layer(partition, OVERLAY, arrays, BLOSC, self._commit)
        return _Pass(partition, places, old, runs, layer)

    def _fidelity(self, number: int, runs: list[_Run]) -> TensorFidelity | None:
        largest = max(run.largest for run in runs)
        if largest == 0:
            return None
        return TensorFidelity(
            tensor=self._targets[number].tensor,
            bound=_round_up(largest),
            threshold=self._cuts[number].threshold,
            kept=sum(run.kept for run in runs),
            missing=_norm(sum(run.missing for run in runs)),
            whole=_norm(sum(run.whole for run in runs)),
        )


def _round_up(deviation: float) -> float:
    """Return the smallest binary32 that is not below a binary64."""
    rounded = np.float32(deviation)
    # As Python floats: numpy would round the binary64 before it compares.
    return float(np.nextafter(rounded, np.float32(np.inf)) if float(rounded) < deviation else rounded)


def _norm(square: float) -> float | None:
    return math.sqrt(square) if math.isfinite(square) else None
