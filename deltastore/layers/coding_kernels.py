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

BIT, TERNARY, PAIR = 2, 3, 4
"""Codes by their number of digits."""
ROOT_MEAN_SQUARE = 0.4528 / 3
"""Scale of a pair code: its inner level is 3, its outer one 10, of a normal distribution's best four."""
PAIR_BORDER = 0.9816
WIDEST = 8.0
FARTHEST_FEEDBACK = 6.0


# One short loop in each function: the compiler turns these into vector instructions, and several in one it does not.
@vector_loop
def _shares(v: Any, first: Any, rate: Any, guard: Any, correction: Any, eps: Any, shares: Any) -> None:
    for i in range(len(v)):
        root, least = np.sqrt(v[i]), guard * abs(first[i])
        shares[i] = rate / ((root if root > least else least) * correction + eps)


@vector_loop
def _move(moved: Any, m: Any, shares: Any, keep: Any, kept: Any) -> None:
    for i in range(len(m)):
        moved[i] = moved[i] * keep - shares[i] * kept * m[i]


@vector_loop
def _gain(gain: Any, shares: Any, keep: Any, rest: Any) -> None:
    for i in range(len(shares)):
        gain[i] = gain[i] * keep + shares[i] * rest


@vector_loop
def _innovation(first: Any, m: Any, units: Any, kept: Any, rest: Any, innovation: Any) -> None:
    for i in range(len(m)):
        innovation[i] = (first[i] - kept * m[i]) / (rest * units[i])


@vector_loop
def _scale_gain(gain: Any, units: Any) -> None:
    for i in range(len(units)):
        gain[i] = gain[i] * units[i] + np.float32(1e-30)


@vector_loop
def _error(moved: Any, truth: Any, gain: Any, innovation: Any, error: Any) -> None:
    for i in range(len(moved)):
        error[i] = (moved[i] - truth[i]) / gain[i] - innovation[i]


@vector_loop
def _inverse(units: Any, rest: Any, inverse: Any) -> None:
    for i in range(len(units)):
        inverse[i] = np.float32(1) / (rest * units[i])


@vector_loop
def _innovation_of_step(first: Any, m: Any, inverse: Any, kept: Any, innovation: Any) -> None:
    for i in range(len(m)):
        innovation[i] = (first[i] - kept * m[i]) * inverse[i]


@vector_loop
def _distance(v: Any, first: Any, guard: Any, correction: Any, eps: Any, distance: Any) -> None:
    for i in range(len(v)):
        root, least = np.sqrt(v[i]), guard * abs(first[i])
        distance[i] = (root if root > least else least) * correction + eps


@vector_loop
def _error_of_step(w: Any, truth: Any, first: Any, inverse: Any, keep: Any, rate: Any, error: Any) -> None:
    per_rate = np.float32(1) / rate
    for i in range(len(w)):
        error[i] = ((w[i] * keep - truth[i]) * error[i] * per_rate - first[i]) * inverse[i]


@compiled
def adam_wishes(
    truth: Any,
    first: Any,
    w: Any,
    m: Any,
    v: Any,
    units: Any,
    constants: Any,
    steps: Any,
    moved: Any,
    gain: Any,
    innovation: Any,
    error: Any,
) -> None:
    """Fill in, in units, what the codes should be for exp_avg's sake, and how much more for the weights' sake.

    Parameters
    ----------
    truth, first : ndarray of float32
        The true weights and exp_avg of a block; w, m and v are the reader's.
    moved, gain : ndarray of float32
        Scratch memory: all arrays are of one length.
    """
    beta1, guard, eps = constants[0], constants[5], constants[6]
    if steps == 1:
        _inverse(units, constants[1], gain)
        _innovation_of_step(first, m, gain, beta1, innovation)
        _distance(v, first, guard, constants[10], eps, error)
        _error_of_step(w, truth, first, gain, constants[8], constants[9], error)
        return
    moved[:] = w
    gain[:] = np.float32(0)
    kept = np.float32(1)
    for step in range(steps):
        keep, rate, correction = constants[8 + 3 * step], constants[9 + 3 * step], constants[10 + 3 * step]
        kept = np.float32(kept * beta1)
        _shares(v, first, rate, guard, correction, eps, error)
        _move(moved, m, error, keep, kept)
        _gain(gain, error, keep, np.float32(1) - kept)
    _innovation(first, m, units, kept, np.float32(1) - kept, innovation)
    _scale_gain(gain, units)
    _error(moved, truth, gain, innovation, error)


@vector_loop
def sgd_wishes(truth: Any, first: Any, w: Any, m: Any, constants: Any, steps: Any, innovation: Any, error: Any) -> None:
    """Do the same for SGD; the unit is one for all."""
    momentum, of_code, of_momentum, unit = constants[0], constants[1], constants[2], constants[3]
    for i in range(len(w)):
        kept = np.float32(1)
        sums = np.float32(0)
        moved, gain = w[i], np.float32(0)
        for step in range(steps):
            keep, rate = constants[4 + 2 * step], constants[5 + 2 * step]
            kept *= momentum
            sums = sums * momentum + np.float32(1)
            moved = moved * keep - rate * of_momentum * kept * m[i]
            gain = gain * keep + rate * (of_code + of_momentum * sums)
        wanted = (first[i] - kept * m[i]) / (sums * unit)
        innovation[i] = wanted
        error[i] = (moved - truth[i]) / (gain * unit + np.float32(1e-30)) - wanted


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
) -> int:
    """Fill in magnitudes of innovations and errors of sampled blocks; give how many there are."""
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
    return at


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
) -> int:
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
    return at


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


@compiled
def pack(base: int, integers: Any, packed: Any) -> None:
    """Fill in whole groups of bytes; see :func:`deltastore.layers.prediction_kernels.unpack`."""
    digits = 8 if base == 2 else 5 if base == 3 else 4
    lane = 64
    for group in range(len(packed) // lane):
        for j in range(lane):
            byte = 0
            power = 1
            for digit in range(digits):
                at = (group * digits + digit) * lane + j
                if at < len(integers):
                    value = integers[at]
                    if base == 2:
                        number = 1 if value > 0 else 0
                    elif base == 3:
                        number = 2 if value < 0 else 1 if value > 0 else 0
                    else:
                        number = (1 if value > 0 else 0) + (2 if abs(value) > 3 else 0)
                    byte += power * number
                power *= base
            packed[group * lane + j] = byte
