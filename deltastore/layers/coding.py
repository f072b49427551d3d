"""Dense codes of a commit: how many bits the budget buys, and the codes of every group (spec 9.9)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from deltastore.layers.codes import BIT, CODES, FACTORS, PAIR, SCALES, TERNARY
from deltastore.layers.encoded import EncodedPrediction, encode_arrays
from deltastore.layers.groups import RuledGroup
from deltastore.layers.passes import passes
from deltastore.layers.rules import AdamRule, Rule, padded
from deltastore.layout import Layout
from deltastore.ondisk.codecs import BLOSC
from deltastore.ondisk.predictions import ADAM, SHARED, PredictionRecord, count_steps
from deltastore.parallel import run_all

UNIT = 2.0**-12
"""Scale of codes where nothing else is known: from 4e-9 to 13 times the integers."""
FEEDBACK = 0.3
"""Share of the weights' error that a code makes good, at most; stable with every code."""
USUAL_ERROR = 3.0
"""Where the weights' median error is larger than this, in units, less of it is fed back."""
BURST = 3.0
"""A median innovation above this is a start or a burst: some commits with the finest codes."""
REFRESHED = 10
"""Commits of a refresh."""
SAMPLED_SHARE = 1 / 61
MIN_BLOCKS = 8
"""A sample has a share of the blocks of a tensor, and at least so many."""
BORDERS = (0.6, 2.2)
"""Borders of ternary codes, from the finest to the coarsest."""
SCALE_BYTES = 1 / 256
REFINE_PERIOD = {True: 8, False: 16}
"""Commits between two refinements of a block: of a beta2 up to 0.98, and of a larger one."""

Arrays = dict[int, np.ndarray]


@dataclass
class CodingState:
    """What the coding remembers from one commit to the next; nothing of it is needed to read."""

    phase: int = 0
    refresh: dict[tuple[int, ...], int] = field(default_factory=dict)
    """Partitions of a group -> commits for which it gets the finest codes."""
    scale: float = 1.0
    """Bytes of the codes of commits before, over what was expected."""

    def learn(self, scale: float) -> None:
        """Remember what the codes of a commit took, over what :func:`expected_bytes` says."""
        self.scale = min(max((self.scale + scale) / 2, 0.5), 2.0)


@dataclass(frozen=True)
class Choice:
    """How all groups of a commit are coded.

    Attributes
    ----------
    border : float
        Of ternary codes: magnitudes below it, of the block's mean, are 0.
    """

    code: str
    border: float = 1.0


def ternary_bytes(border: float) -> float:
    """Return the bytes of an element's code at the entropy of normally distributed values."""
    zeros = math.erf(border * math.sqrt(2 / math.pi) / math.sqrt(2))
    rest = 1 - zeros
    return (-zeros * math.log2(zeros) - rest * math.log2(rest) + rest) / 8 if 0 < rest < 1 else 0.0


BYTES = {BIT: 1 / 8, PAIR: 0.2385}
"""Bytes of an element's code; of pairs at their entropy."""


def choose(elements: int, room: float, refined: float) -> Choice | None:
    """Return the finest code that fits; None where even the coarsest does not.

    Parameters
    ----------
    elements : int
        How many are coded.
    room : float
        Bytes for codes and scales.
    refined : float
        Bytes of an element that go into refinements.
    """
    each = room / elements - SCALE_BYTES - refined if elements else 0.0
    if each >= BYTES[PAIR]:
        return Choice(PAIR)
    finest, coarsest = BORDERS
    if each < ternary_bytes(coarsest):
        return None
    low, high = finest, coarsest
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if ternary_bytes(middle) > each else (low, middle)
    # Between these a bit for each sign buys more than a ternary code with many zeros.
    return Choice(BIT) if BYTES[BIT] <= each < ternary_bytes(BIT_BORDER) else Choice(TERNARY, high)


def expected_bytes(choice: Choice, refined: float) -> float:
    """Return what an element takes."""
    code = BYTES[choice.code] if choice.code in BYTES else ternary_bytes(choice.border)
    return code + SCALE_BYTES + refined


BIT_BORDER = 1.35
"""Border of the ternary code that is as good as one bit."""


def code_groups(
    layout: Layout,
    groups: Sequence[RuledGroup],
    choice: Choice,
    current: Arrays,
    rec: Arrays,
    commit: str,
    state: CodingState,
) -> list[EncodedPrediction]:
    """Return the predictions of a commit; the partitions of `rec` are brought to it in place."""
    made = run_all(lambda group: _Coder(layout, group, choice, current, rec, commit, state).run(), groups)
    state.phase += 1
    return made


class _Coder:
    """The coding of one group."""

    def __init__(
        self,
        layout: Layout,
        ruled: RuledGroup,
        choice: Choice,
        current: Arrays,
        rec: Arrays,
        commit: str,
        state: CodingState,
    ) -> None:
        self._layout = layout
        self._ruled = ruled
        self._group = ruled.group
        self._choice = choice
        self._commit = commit
        self._state = state
        self._truth = [current[number] for number in self._group.partitions]
        self._rec = [rec[number] for number in self._group.partitions]
        self._kernels = passes("coding_kernels")
        self._constants, self._ranges = ruled.sets(UNIT)
        self._rows = padded(self._constants)
        self._steps = np.array(count_steps(self._group.kind, self._constants), np.int64)
        self._sets = self._group.blocks.sets_of(self._ranges)

    def run(self) -> EncodedPrediction:
        widths, feedbacks = self._measure()
        refreshed = self._refreshed(widths)
        choice = Choice(PAIR) if refreshed else self._choice
        code = CODES[choice.code]
        blocks = self._group.blocks
        integers = np.zeros(len(self._rec[0]), np.int8)
        scales = np.zeros(len(blocks), np.uint8)
        is_adam = self._group.kind == ADAM
        run = self._kernels.code_adam if is_adam else self._kernels.code_sgd
        run(
            self._truth[0],
            self._truth[1],
            *self._rec,
            blocks.starts,
            blocks.ends,
            blocks.slots,
            self._sets,
            self._rows,
            self._steps,
            widths,
            feedbacks,
            len(code.values),
            choice.border,
            integers,
            scales,
            SCALES,
        )
        packed = np.empty(code.packed_length(len(integers)), np.uint8)
        passes("packing_kernels").pack(len(code.values), integers, packed)
        arrays = {"codes": packed, "scales": scales}
        refine = self._refine(arrays, refreshed) if is_adam else None
        carrier = self._layout.by_id[self._group.partitions[1]]
        digests, encoded, stored = encode_arrays(carrier, "codes", arrays, BLOSC, self._commit)
        record = PredictionRecord(
            self._group.kind, self._group.partitions, choice.code, digests, self._constants, self._ranges, refine
        )
        return EncodedPrediction(record, encoded, stored)

    def _measure(self) -> tuple[np.ndarray, np.ndarray]:
        """Return for each slot the width of its innovations and the share of the weights' error to feed back."""
        blocks = self._group.blocks
        widths = np.ones(len(self._ruled.rules), np.float32)
        feedbacks = np.zeros(len(self._ruled.rules), np.float32)
        edges = [*blocks.heads.tolist(), len(blocks)]
        for slot, rule in enumerate(self._ruled.rules):
            if rule is None:
                continue
            first, last = edges[slot], edges[slot + 1]
            wanted = min(last - first, max(MIN_BLOCKS, int((last - first) * SAMPLED_SHARE)))
            numbers = np.linspace(first, last - 1, wanted).astype(np.int64)
            innovations, errors = self._probe(numbers, int(self._sets[slot]))
            nonzero = innovations[innovations > 0]
            if len(nonzero):
                widths[slot] = max(1.0, float(np.median(nonzero)))
            if _moves(rule) and len(errors):
                feedbacks[slot] = FEEDBACK * min(1.0, USUAL_ERROR / max(float(np.median(errors)), 1e-9))
        return widths, feedbacks

    def _probe(self, numbers: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
        blocks = self._group.blocks
        starts, ends = blocks.starts[numbers], blocks.ends[numbers]
        innovations, errors = (np.empty(int((ends - starts).sum()), np.float32) for _ in range(2))
        probe = self._kernels.probe_adam if self._group.kind == ADAM else self._kernels.probe_sgd
        probe(
            self._truth[0],
            self._truth[1],
            *self._rec,
            starts,
            ends,
            self._rows[number],
            int(self._steps[number]),
            innovations,
            errors,
        )
        innovations, errors = (np.abs(values[np.isfinite(values)]) for values in (innovations, errors))
        return innovations, errors

    def _refreshed(self, widths: np.ndarray) -> bool:
        """Return whether the group is in a start or a burst; SGD has no unit by which to tell."""
        if self._group.kind != ADAM:
            return False
        key = self._group.partitions
        sizes = np.array([slot.elements for slot in self._group.slots])
        # At the start of a run exp_avg_sq is small by what Adam corrects, and innovations are large by as much.
        corrections = self._rows[self._sets, SHARED[ADAM] + 2]
        if sizes[(widths > BURST * corrections) & (self._sets >= 0)].sum() > sizes.sum() / 4:
            self._state.refresh[key] = REFRESHED
        left = self._state.refresh.get(key, 0)
        self._state.refresh[key] = max(left - 1, 0)
        return left > 0

    def _refine(self, arrays: dict[str, np.ndarray], refreshed: bool) -> tuple[int, int]:
        """Correct exp_avg_sq of the blocks whose turn it is, and return period and phase."""
        fast = any(isinstance(rule, AdamRule) and rule.beta2 <= 0.98 for rule in self._ruled.rules)
        period = 1 if refreshed else REFINE_PERIOD[fast]
        phase = self._state.phase % period
        blocks = self._group.blocks
        numbers = blocks.refined(period, phase)
        starts, ends = blocks.starts[numbers], blocks.ends[numbers]
        signs = np.empty(int((ends - starts).sum()), np.int8)
        factors = np.zeros(len(numbers), np.uint8)
        self._kernels.refine_adam(self._truth[2], self._rec[2], starts, ends, signs, factors)
        factors[self._sets[blocks.slots[numbers]] < 0] = 0
        passes("prediction_kernels").refine_blocks(self._rec[2], starts, ends, signs, factors, FACTORS)
        bit = CODES[BIT]
        packed = np.empty(bit.packed_length(len(signs)), np.uint8)
        passes("packing_kernels").pack(len(bit.values), signs, packed)
        arrays |= {"signs": packed, "factors": factors}
        return period, phase


def _moves(rule: Rule) -> bool:
    """Return whether the weights follow the buffers: not at a learning rate of 0."""
    return any(step.rate for step in rule.steps) if isinstance(rule, AdamRule) else any(rate for rate, _ in rule.steps)
