"""Whether this machine's compiled passes compute what the spec says: asked once, before anything is predicted."""

from __future__ import annotations

from functools import cache

import numpy as np

from deltastore.layers.arithmetic import predict_block, replay
from deltastore.layers.codes import CODES, SCALES
from deltastore.layers.passes import passes
from deltastore.layers.rules import AdamRule, AdamStep, Rule, SgdRule, as_floats, padded
from deltastore.ondisk.predictions import ADAM, MEMBERS, REPLAYS

ELEMENTS = 203
UNIT = 2.0**-12


@cache
def kernels_agree() -> bool:
    """Return whether predictions and replays of a few hundred elements have the bits of the plain arithmetic."""
    rules: list[Rule] = [
        AdamRule(0.9, 0.999, 1e-8, (AdamStep(1e-3, 0.999, 3),), l2=0.01),
        SgdRule(0.9, True, ((0.1, 1.0),), l2=0.01),
    ]
    return all(_predicts(rule) and _replays(rule) for rule in rules)


def _predicts(rule: Rule) -> bool:
    kernels = passes("prediction_kernels")
    generator = np.random.default_rng(0)
    integers = generator.choice(np.array(CODES["ternary"].values, np.int8), ELEMENTS)
    scale = SCALES[120]
    constants = padded([rule.constants(UNIT)])
    fast, slow = _group(rule.kind), _group(rule.kind)
    run = kernels.adam_blocks if rule.kind == ADAM else kernels.sgd_blocks
    zero, end = np.zeros(1, np.int64), np.full(1, ELEMENTS, np.int64)
    run(*fast, zero, end, zero, zero, integers, np.full(1, scale, np.float32), constants, np.ones(1, np.int64))
    predict_block(rule.kind, slow, integers, scale, constants[0])
    return _same(fast, slow)


def _replays(rule: Rule) -> bool:
    kernels = passes("replay_kernels")
    gradient = np.random.default_rng(1).standard_normal(ELEMENTS).astype(np.float32)
    constants = as_floats(rule.replayed())
    fast, slow = _group(rule.kind), _group(rule.kind)
    run = kernels.replay_adam if rule.kind == ADAM else kernels.replay_sgd
    run(*fast, gradient, constants)
    replay(REPLAYS[rule.kind], slow, gradient, constants)
    return _same(fast, slow)


def _group(kind: str) -> list[np.ndarray]:
    generator = np.random.default_rng(2)
    arrays = [generator.standard_normal(ELEMENTS).astype(np.float32) for _ in MEMBERS[kind]]
    arrays[-1] = np.abs(arrays[-1]) * np.float32(1e-3)
    arrays[0][0] = np.nan
    return arrays


def _same(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return all(a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=True))
