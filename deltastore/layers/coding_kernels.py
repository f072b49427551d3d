"""The writer's passes over memory: which codes bring a prediction nearest to the training state.

Nothing here is format: a reader only sees the codes. The rules are those of differential coding in closed loop: what a
code misses is part of what the next one codes, and a share of the error of the weights is fed back.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from deltastore.layers.arithmetic import LANES
from deltastore.layers.blocks import BLOCK_ELEMENTS
from deltastore.layers.compiled import compiled, vector_loop
from deltastore.layers.prediction_kernels import adam_gradients, adam_step, adam_units, sgd_block
from deltastore.layers.wish_kernels import adam_wishes, sgd_wishes

BIT, TERNARY, PAIR = 2, 3, 4
"""Codes by their number of digits."""
ROOT_MEAN_SQUARE = 0.4528 / 3
"""Scale of a pair code: its inner level is 3, its outer one 10, of a normal distribution's best four."""
PAIR_BORDER = 0.9816
WIDEST = 8.0
FARTHEST_FEEDBACK = 6.0


@vector_loop
def combine(innovation: Any, error: Any, width: Any, feedback: Any) -> Any:
    """Add the share of the weights' error that is fed back, both clamped; give the sums of magnitudes and squares."""
    sums = np.float32(0)
    squares = np.float32(0)
    far, farthest = np.float32(FARTHEST_FEEDBACK) * width, np.float32(WIDEST) * width
    for i in range(len(innovation)):
        back = error[i]
        back = back if back < far else far
        back = back if back > -far else -far
        value = innovation[i] + feedback * back
        value = value if value < farthest else farthest
        value = value if value > -farthest else -farthest
        innovation[i] = value
        sums += abs(value)
        squares += value * value
    return sums, squares


@vector_loop
def kept_sum(values: Any, border: Any) -> Any:
    """Give how many magnitudes are above the border, and their sum."""
    count = np.uint32(0)
    total = np.float32(0)
    for i in range(len(values)):
        above = np.uint32(abs(values[i]) > border)
        count = np.uint32(count + above)
        total += np.float32(above) * abs(values[i])
    return np.float32(count), total


@compiled
def scale_byte(scale: Any) -> Any:
    """Give the byte of the scale nearest to one; 0 where it is too small or no number."""
    if not scale > 0 or scale > 1e30:
        return 0
    code = round(8 * (math.log2(scale) + 16)) + 1
    return 0 if code < 1 else min(code, 255)


@vector_loop
def _to_bits(values: Any, integers: Any) -> None:
    for i in range(len(values)):
        integers[i] = np.int8(1) if values[i] > 0 else np.int8(-1)


@vector_loop
def _to_ternary(values: Any, limit: Any, integers: Any) -> None:
    for i in range(len(values)):
        upper = np.int8(1) if values[i] > limit else np.int8(0)
        integers[i] = np.int8(-1) if values[i] < -limit else upper


@vector_loop
def _to_pairs(values: Any, limit: Any, integers: Any) -> None:
    for i in range(len(values)):
        upper = np.int8(10) if values[i] > limit else np.int8(3)
        lower = np.int8(-10) if values[i] < -limit else np.int8(-3)
        integers[i] = upper if values[i] > 0 else lower


@compiled
def quantise(values: Any, code: int, sums: Any, squares: Any, border: Any, integers: Any) -> Any:
    """Fill in the integers of a block and give its scale byte: 0 where the values are no numbers."""
    count = np.float32(len(values))
    if code == BIT:
        _to_bits(values, integers)
        return scale_byte(sums / count)
    if code == TERNARY:
        limit = np.float32(border * sums / count)
        kept, total = kept_sum(values, limit)
        _to_ternary(values, limit, integers)
        return scale_byte(total / kept)
    spread = np.float32(math.sqrt(squares / count))
    _to_pairs(values, np.float32(PAIR_BORDER) * spread, integers)
    return scale_byte(np.float32(ROOT_MEAN_SQUARE) * spread)


@compiled
def code_adam(
    truth: Any,
    first: Any,
    w: Any,
    m: Any,
    v: Any,
    starts: Any,
    ends: Any,
    slots: Any,
    sets: Any,
    constants: Any,
    steps: Any,
    widths: Any,
    feedbacks: Any,
    code: int,
    border: Any,
    integers: Any,
    scales: Any,
    table: Any,
) -> None:
    """Choose the codes of blocks of Adam and bring the reader's arrays to this commit.

    Parameters
    ----------
    truth, first : ndarray of float32
        The true weights and exp_avg.
    widths, feedbacks : ndarray of float32
        For each slot the median innovation (at least 1), and the share of the weights' error that is fed back.
    border : float
        Of a ternary code: what is below it, of the mean magnitude, is 0.
    integers : ndarray of int8
    scales : ndarray of uint8
    table : ndarray of float32
        Scale of each byte.
    """
    lanes = np.empty(LANES, np.float32)
    units = np.empty(BLOCK_ELEMENTS, np.float32)
    moved = np.empty(BLOCK_ELEMENTS, np.float32)
    gain = np.empty(BLOCK_ELEMENTS, np.float32)
    innovation = np.empty(BLOCK_ELEMENTS, np.float32)
    error = np.empty(BLOCK_ELEMENTS, np.float32)
    for block in range(len(starts)):
        slot = slots[block]
        number = sets[slot]
        if number < 0:
            continue
        lo, hi = starts[block], ends[block]
        values = constants[number]
        adam_units(v[lo:hi], values[7], lanes, units)
        adam_wishes(
            truth[lo:hi],
            first[lo:hi],
            w[lo:hi],
            m[lo:hi],
            v[lo:hi],
            units[: hi - lo],
            values,
            steps[number],
            moved[: hi - lo],
            gain[: hi - lo],
            innovation[: hi - lo],
            error[: hi - lo],
        )
        sums, squares = combine(innovation[: hi - lo], error, widths[slot], feedbacks[slot])
        scales[block] = quantise(innovation[: hi - lo], code, sums, squares, border, integers[lo:hi])
        scale = table[scales[block]]
        if scale != 0:
            adam_gradients(integers[lo:hi], scale, values[4], units, innovation, error)
        else:
            innovation[:] = np.float32(0)
            error[:] = np.float32(0)
        for step in range(steps[number]):
            keep, rate, correction = values[8 + 3 * step], values[9 + 3 * step], values[10 + 3 * step]
            adam_step(w[lo:hi], m[lo:hi], v[lo:hi], innovation, error, values, keep, rate, correction)


@compiled
def code_sgd(
    truth: Any,
    first: Any,
    w: Any,
    m: Any,
    starts: Any,
    ends: Any,
    slots: Any,
    sets: Any,
    constants: Any,
    steps: Any,
    widths: Any,
    feedbacks: Any,
    code: int,
    border: Any,
    integers: Any,
    scales: Any,
    table: Any,
) -> None:
    """Choose the codes of blocks of SGD and bring the reader's arrays to this commit; see :func:`code_adam`."""
    innovation = np.empty(BLOCK_ELEMENTS, np.float32)
    error = np.empty(BLOCK_ELEMENTS, np.float32)
    for block in range(len(starts)):
        slot = slots[block]
        number = sets[slot]
        if number < 0:
            continue
        lo, hi = starts[block], ends[block]
        values = constants[number]
        sgd_wishes(truth[lo:hi], first[lo:hi], w[lo:hi], m[lo:hi], values, steps[number], innovation, error)
        # The unit says nothing of a tensor's scale: each block is its own measure.
        mean = np.float32(0)
        for i in range(hi - lo):
            mean += abs(innovation[i]) / np.float32(hi - lo)
        width = mean if mean < np.float32(1e30) else np.float32(1e30)
        sums, squares = combine(innovation[: hi - lo], error, width, feedbacks[slot])
        scales[block] = quantise(innovation[: hi - lo], code, sums, squares, border, integers[lo:hi])
        sgd_block(w[lo:hi], m[lo:hi], integers[lo:hi], table[scales[block]], values, steps[number])


@compiled
def probe_adam(
    truth: Any,
    first: Any,
    w: Any,
    m: Any,
    v: Any,
    starts: Any,
    ends: Any,
    constants: Any,
    steps: int,
    innovations: Any,
    errors: Any,
) -> None:
    """Fill in the innovations and errors of sampled blocks, one block after the other."""
    lanes = np.empty(LANES, np.float32)
    units = np.empty(BLOCK_ELEMENTS, np.float32)
    moved = np.empty(BLOCK_ELEMENTS, np.float32)
    gain = np.empty(BLOCK_ELEMENTS, np.float32)
    at = 0
    for block in range(len(starts)):
        lo, hi = starts[block], ends[block]
        adam_units(v[lo:hi], constants[7], lanes, units)
        adam_wishes(
            truth[lo:hi],
            first[lo:hi],
            w[lo:hi],
            m[lo:hi],
            v[lo:hi],
            units[: hi - lo],
            constants,
            steps,
            moved[: hi - lo],
            gain[: hi - lo],
            innovations[at : at + hi - lo],
            errors[at : at + hi - lo],
        )
        at += hi - lo


@compiled
def probe_sgd(
    truth: Any,
    first: Any,
    w: Any,
    m: Any,
    starts: Any,
    ends: Any,
    constants: Any,
    steps: int,
    innovations: Any,
    errors: Any,
) -> None:
    """Do the same for SGD."""
    at = 0
    for block in range(len(starts)):
        lo, hi = starts[block], ends[block]
        sgd_wishes(
            truth[lo:hi],
            first[lo:hi],
            w[lo:hi],
            m[lo:hi],
            constants,
            steps,
            innovations[at : at + hi - lo],
            errors[at : at + hi - lo],
        )
        at += hi - lo


@compiled
def refine_adam(truth: Any, v: Any, starts: Any, ends: Any, signs: Any, factors: Any) -> None:
    """Choose signs and factor bytes that bring exp_avg_sq of blocks nearer to the truth, in powers of two."""
    at = 0
    for block in range(len(starts)):
        total = 0.0
        count = 0
        for i in range(starts[block], ends[block]):
            distance = math.log2(truth[i] / v[i]) if truth[i] > 0 and v[i] > 0 else 0.0
            if abs(distance) < 200:
                total += min(abs(distance), 4.0)
                count += 1
            signs[at] = 1 if distance > 0 else -1
            at += 1
        factors[block] = min(round(64 * total / max(count, 1)), 255)
