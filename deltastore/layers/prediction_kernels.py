"""The passes over memory of predictions: bit for bit what :mod:`deltastore.layers.arithmetic` computes (spec 9.9)."""

from __future__ import annotations

from typing import Any

import numpy as np

from deltastore.layers.arithmetic import FLOOR, LANES, NAN
from deltastore.layers.blocks import BLOCK_ELEMENTS
from deltastore.layers.compiled import compiled


@compiled
def block_sum(values: Any, lanes: Any) -> Any:
    """Give the sum of a block, added in lanes."""
    lanes[:] = np.float32(0)
    whole = len(values) // LANES * LANES
    for first in range(0, whole, LANES):
        for lane in range(LANES):
            lanes[lane] += values[first + lane]
    for lane in range(len(values) - whole):
        lanes[lane] += values[whole + lane]
    width = LANES // 2
    while width:
        for lane in range(width):
            lanes[lane] += lanes[lane + width]
        width //= 2
    return lanes[0]


@compiled
def adam_units(v: Any, unit: Any, lanes: Any, units: Any) -> None:
    """Fill in the unit of each element's code."""
    mean = block_sum(v, lanes) / np.float32(len(v))
    if mean != 0:
        floor = FLOOR * np.sqrt(mean)
        for i in range(len(v)):
            root = np.sqrt(v[i])
            units[i] = root if root > floor else floor
    else:
        units[: len(v)] = unit


@compiled
def adam_gradients(integers: Any, scale: Any, zero: Any, units: Any, gradients: Any, extras: Any) -> None:
    """Turn codes into what stands for the gradient, and what zeros of the code add to exp_avg_sq."""
    for i in range(len(integers)):
        size = scale * units[i]
        gradients[i] = (np.float32(integers[i]) * scale) * units[i]
        extras[i] = (zero * size) * size if integers[i] == 0 else np.float32(0)


@compiled
def adam_step(
    w: Any, m: Any, v: Any, gradients: Any, extras: Any, constants: Any, keep: Any, rate: Any, correction: Any
) -> None:
    """Do one optimizer step of a block."""
    beta1, rest1, beta2, rest2 = constants[0], constants[1], constants[2], constants[3]
    guard, eps = constants[5], constants[6]
    for i in range(len(w)):
        g = gradients[i]
        first = beta1 * m[i] + rest1 * g
        second = beta2 * v[i] + ((rest2 * g) * g + extras[i])
        root = np.sqrt(second)
        least = guard * abs(first)
        d = (root if root > least else least) * correction + eps
        moved = w[i] * keep - (rate * first) / d
        m[i] = first if first == first else NAN
        v[i] = second if second == second else NAN
        w[i] = moved if moved == moved else NAN


@compiled
def adam_blocks(
    w: Any,
    m: Any,
    v: Any,
    starts: Any,
    ends: Any,
    slots: Any,
    sets: Any,
    integers: Any,
    scales: Any,
    constants: Any,
    steps: Any,
) -> None:
    """Bring blocks of Adam from one commit to the next.

    Parameters
    ----------
    w, m, v : ndarray of float32
    starts, ends, slots : ndarray of int64
        Where each block lies in these arrays, and the slot of its tensor.
    sets : ndarray of int64
        For each slot its set of constants, -1 to leave it as it is.
    integers : ndarray of int8
        As long as `w`.
    scales : ndarray of float32
        Of each block.
    constants : ndarray of float32, shape (sets, constants)
    steps : ndarray of int64
        Optimizer steps of each set.
    """
    lanes = np.empty(LANES, np.float32)
    units = np.empty(BLOCK_ELEMENTS, np.float32)
    gradients = np.empty(BLOCK_ELEMENTS, np.float32)
    extras = np.empty(BLOCK_ELEMENTS, np.float32)
    for block in range(len(starts)):
        number = sets[slots[block]]
        if number < 0:
            continue
        first, last = starts[block], ends[block]
        scale, values = scales[block], constants[number]
        if scale != 0:
            adam_units(v[first:last], values[7], lanes, units)
            adam_gradients(integers[first:last], scale, values[4], units, gradients, extras)
        else:
            gradients[:] = np.float32(0)
            extras[:] = np.float32(0)
        for step in range(steps[number]):
            keep, rate, correction = values[8 + 3 * step], values[9 + 3 * step], values[10 + 3 * step]
            adam_step(w[first:last], m[first:last], v[first:last], gradients, extras, values, keep, rate, correction)


@compiled
def sgd_block(w: Any, m: Any, integers: Any, scale: Any, constants: Any, steps: Any) -> None:
    """Bring one block of SGD from one commit to the next."""
    momentum, of_code, of_momentum, unit = constants[0], constants[1], constants[2], constants[3]
    for step in range(steps):
        keep, rate = constants[4 + 2 * step], constants[5 + 2 * step]
        for i in range(len(w)):
            g = (np.float32(integers[i]) * scale) * unit
            first = momentum * m[i] + g
            moved = w[i] * keep - rate * (of_code * g + of_momentum * first)
            m[i] = first if first == first else NAN
            w[i] = moved if moved == moved else NAN


@compiled
def sgd_blocks(
    w: Any,
    m: Any,
    starts: Any,
    ends: Any,
    slots: Any,
    sets: Any,
    integers: Any,
    scales: Any,
    constants: Any,
    steps: Any,
) -> None:
    """Bring blocks of SGD from one commit to the next; see :func:`adam_blocks`."""
    for block in range(len(starts)):
        number = sets[slots[block]]
        if number >= 0:
            first, last = starts[block], ends[block]
            sgd_block(
                w[first:last], m[first:last], integers[first:last], scales[block], constants[number], steps[number]
            )


@compiled
def refine_blocks(v: Any, starts: Any, ends: Any, signs: Any, factors: Any, ups: Any) -> None:
    """Multiply exp_avg_sq of some blocks by a power of two, up or down as the signs say.

    Parameters
    ----------
    signs : ndarray of int8
        1 or -1 for each element of these blocks, one block after the other.
    factors : ndarray of uint8
        Of each block.
    ups : ndarray of float32
        The table :data:`deltastore.layers.codes.FACTORS`.
    """
    at = 0
    for block in range(len(starts)):
        up, down = ups[255 + factors[block]], ups[255 - factors[block]]
        for i in range(starts[block], ends[block]):
            value = v[i] * (up if signs[at] > 0 else down)
            v[i] = value if value == value else NAN
            at += 1
