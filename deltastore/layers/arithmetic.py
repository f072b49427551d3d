"""The arithmetic of predictions as the spec writes it, in numpy: slow, and what the kernels must equal (spec 9.9).

Every operation is one of binary32 in the order that is written: numpy fuses none.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deltastore.layers.codes import FACTORS
from deltastore.ondisk.predictions import EACH, REPLAY_SGD, SGD, SHARED

LANES = 16
"""Sums of a block are made in so many lanes."""
FLOOR = np.float32(0.05)
"""Of the root of a block's mean exp_avg_sq: the least unit of its elements."""
NAN = np.float32(np.uint32(0x7FC0_0000).view(np.float32))
"""What every NaN becomes: processors do not agree on their bits."""


def block_sum(values: np.ndarray) -> np.float32:
    """Return the sum of a block: element i goes to lane i % 16, then the upper half of the lanes to the lower."""
    lanes = np.zeros(LANES, np.float32)
    for first in range(0, len(values), LANES):
        part = values[first : first + LANES]
        lanes[: len(part)] += part
    width = LANES // 2
    while width:
        lanes[:width] += lanes[width : 2 * width]
        width //= 2
    return np.float32(lanes[0])


def predict_block(
    kind: str, arrays: Sequence[np.ndarray], integers: np.ndarray, scale: np.float32, constants: np.ndarray
) -> None:
    """Bring one block of a group from one commit to the next, in place.

    Parameters
    ----------
    arrays : sequence of ndarray of float32
        The block of each partition of the group, in the order of the record.
    integers : ndarray of int8
    scale : float32
        The block's, 0 for none.
    constants : ndarray of float32
        The set of the block's tensor.
    """
    shared, each = constants[: SHARED[kind]], constants[SHARED[kind] :].reshape(-1, EACH[kind])
    with np.errstate(all="ignore"):
        if kind == SGD:
            _sgd(arrays[0], arrays[1], integers.astype(np.float32) * scale, shared, each)
        else:
            _adam(arrays[0], arrays[1], arrays[2], integers, scale, shared, each)
    for values in arrays:
        values[np.isnan(values)] = NAN


def _adam(
    w: np.ndarray,
    m: np.ndarray,
    v: np.ndarray,
    integers: np.ndarray,
    scale: np.float32,
    shared: np.ndarray,
    each: np.ndarray,
) -> None:
    beta1, rest1, beta2, rest2, zero, guard, eps, unit = shared
    g = extra = np.zeros(len(w), np.float32)
    if scale != 0:
        mean = block_sum(v) / np.float32(len(v))
        r = _larger(np.sqrt(v), FLOOR * np.sqrt(mean)) if mean != 0 else np.full(len(v), unit, np.float32)
        g = (integers.astype(np.float32) * scale) * r
        size = scale * r
        extra = np.where(integers == 0, (zero * size) * size, np.float32(0))
    for keep, rate, correction in each:
        m[:] = beta1 * m + rest1 * g
        v[:] = beta2 * v + ((rest2 * g) * g + extra)
        d = _larger(np.sqrt(v), guard * np.abs(m)) * correction + eps
        w[:] = w * keep - (rate * m) / d


def _larger(one: np.ndarray, other: np.ndarray | np.float32) -> np.ndarray:
    """Return `one` where it is larger, else `other`, which a NaN makes of it."""
    return np.where(one > other, one, other)


def _sgd(w: np.ndarray, m: np.ndarray, coded: np.ndarray, shared: np.ndarray, each: np.ndarray) -> None:
    momentum, of_code, of_momentum, unit = shared
    g = coded * unit
    for keep, rate in each:
        m[:] = momentum * m + g
        w[:] = w * keep - rate * (of_code * g + of_momentum * m)


def _fused(a: np.ndarray | np.float32, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Return a * b + c, computed in binary64 and rounded to binary32."""
    wide: np.ndarray = np.asarray(a, np.float64) * b.astype(np.float64) + c.astype(np.float64)
    return wide.astype(np.float32)


def replay(kind: str, arrays: Sequence[np.ndarray], gradient: np.ndarray, constants: np.ndarray) -> None:
    """Do one optimizer step with its gradient, in place.

    Parameters
    ----------
    arrays : sequence of ndarray of float32
        Each partition of the group, in the order of the record.
    constants : ndarray of float32
        The set of these elements.
    """
    with np.errstate(all="ignore"):
        if kind == REPLAY_SGD:
            _replay_sgd(arrays[0], arrays[1], gradient, constants)
        else:
            _replay_adam(arrays[0], arrays[1], arrays[2], gradient, constants)
    for values in arrays:
        values[np.isnan(values)] = NAN


def _replay_adam(w: np.ndarray, m: np.ndarray, v: np.ndarray, gradient: np.ndarray, constants: np.ndarray) -> None:
    rest1, beta2, rest2, eps, sign, decay, keep, rate, root = constants
    g = _fused(decay, w, sign * gradient)
    m[:] = _fused(rest1, g - m, m)
    v[:] = _fused(rest2 * g, g, beta2 * v)
    w[:] = w * keep + (-rate * m) / (np.sqrt(v) / root + eps)


def _replay_sgd(w: np.ndarray, m: np.ndarray, gradient: np.ndarray, constants: np.ndarray) -> None:
    momentum, share, sign, decay, nesterov, rate = constants
    g = _fused(decay, w, sign * gradient)
    m[:] = _fused(share, g, momentum * m)
    w[:] = _fused(-rate, _fused(momentum, m, g) if nesterov else m, w)


def refine_block(v: np.ndarray, signs: np.ndarray, factor: int) -> None:
    """Multiply or divide the exp_avg_sq of one block, element by element, by the power of two of a factor byte."""
    with np.errstate(all="ignore"):
        v *= np.where(signs > 0, FACTORS[255 + factor], FACTORS[255 - factor])
    v[np.isnan(v)] = NAN
