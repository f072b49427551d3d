"""What the codes of a block should be, over memory: for the sake of the optimizer's buffers, and of the weights.

The writer's own choice: no reader needs to know it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from deltastore.layers.compiled import compiled, vector_loop


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
