"""One optimizer step with its gradient: bit for bit :func:`deltastore.layers.arithmetic.replay` (spec 9.11)."""

from __future__ import annotations

from typing import Any

import numpy as np

from deltastore.layers.arithmetic import NAN
from deltastore.layers.compiled import compiled

RUN = 4096
"""Elements that are worked on together: they stay in the cache."""


@compiled
def _see(w: Any, gradient: Any, sign: Any, decay: Any, seen: Any) -> None:
    for i in range(len(w)):
        seen[i] = np.float32(np.float64(decay) * np.float64(w[i]) + np.float64(sign * gradient[i]))


@compiled
def _first(m: Any, seen: Any, rest: Any) -> None:
    for i in range(len(m)):
        value = np.float32(np.float64(rest) * np.float64(seen[i] - m[i]) + np.float64(m[i]))
        m[i] = value if value == value else NAN


@compiled
def _second(v: Any, seen: Any, beta: Any, rest: Any) -> None:
    for i in range(len(v)):
        value = np.float32(np.float64(rest * seen[i]) * np.float64(seen[i]) + np.float64(beta * v[i]))
        v[i] = value if value == value else NAN


@compiled
def _weights(w: Any, m: Any, v: Any, keep: Any, rate: Any, root: Any, eps: Any) -> None:
    for i in range(len(w)):
        value = w[i] * keep + (-rate * m[i]) / (np.sqrt(v[i]) / root + eps)
        w[i] = value if value == value else NAN


@compiled
def replay_adam(w: Any, m: Any, v: Any, gradient: Any, constants: Any) -> None:
    """Do one step of Adam in place."""
    seen = np.empty(RUN, np.float32)
    for first in range(0, len(w), RUN):
        last = min(first + RUN, len(w))
        part = seen[: last - first]
        _see(w[first:last], gradient[first:last], constants[4], constants[5], part)
        _first(m[first:last], part, constants[0])
        _second(v[first:last], part, constants[1], constants[2])
        _weights(w[first:last], m[first:last], v[first:last], constants[6], constants[7], constants[8], constants[3])


@compiled
def replay_sgd(w: Any, m: Any, gradient: Any, constants: Any) -> None:
    """Do one step of SGD in place."""
    momentum, share, sign, decay = constants[0], constants[1], constants[2], constants[3]
    nesterov, rate = constants[4], constants[5]
    for i in range(len(w)):
        g = np.float32(np.float64(decay) * np.float64(w[i]) + np.float64(sign * gradient[i]))
        first = np.float32(np.float64(share) * np.float64(g) + np.float64(momentum * m[i]))
        along = np.float32(np.float64(momentum) * np.float64(first) + np.float64(g)) if nesterov != 0 else first
        value = np.float32(np.float64(-rate) * np.float64(along) + np.float64(w[i]))
        m[i] = first if first == first else NAN
        w[i] = value if value == value else NAN
