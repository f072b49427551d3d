"""What an optimizer did between two commits, and the constants with which a reader does it again (spec 9.9)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from deltastore.ondisk.predictions import ADAM, SGD

ZERO_SQUARE = 0.02
"""What a ternary zero adds to exp_avg_sq, of the square of its scale."""


@dataclass(frozen=True, slots=True)
class AdamStep:
    """One step of Adam: learning rate, factor of the weights (decoupled decay), number of the step."""

    rate: float
    keep: float
    count: float


@dataclass(frozen=True, slots=True)
class AdamRule:
    """Steps of Adam or AdamW with one set of constants."""

    beta1: float
    beta2: float
    eps: float
    steps: tuple[AdamStep, ...]
    l2: float = 0.0
    """Weight decay that is added to the gradient."""
    sign: float = 1.0
    """-1: the gradient is followed uphill."""

    kind = ADAM

    @property
    def guard(self) -> float:
        """Return the c of ``exp_avg_sq >= c * exp_avg ** 2``, which every true state obeys (Cauchy-Schwarz)."""
        if self.beta1**2 >= self.beta2 or self.beta1 >= 1:
            return 0.0
        return (1 - self.beta2) * (1 - self.beta1**2 / self.beta2) / (1 - self.beta1) ** 2

    def constants(self, unit: float) -> tuple[int, ...]:
        """Return the constants as bits of binary32; `unit` is the scale where exp_avg_sq is 0."""
        shared = (
            self.beta1,
            1 - self.beta1,
            self.beta2,
            1 - self.beta2,
            ZERO_SQUARE * (1 - self.beta2),
            math.sqrt(self.guard),
            self.eps,
            unit,
        )
        each = (
            (step.keep, step.rate / (1 - self.beta1**step.count), 1 / math.sqrt(1 - self.beta2**step.count))
            for step in self.steps
        )
        return _bits([*shared, *(value for values in each for value in values)])

    def replayed(self) -> tuple[int, ...]:
        """Return the constants with which a gradient is replayed; of one step."""
        (step,) = self.steps
        shared = (1 - self.beta1, self.beta2, 1 - self.beta2, self.eps, self.sign, self.l2)
        each = (step.keep, step.rate / (1 - self.beta1**step.count), math.sqrt(1 - self.beta2**step.count))
        return _bits([*shared, *each])


@dataclass(frozen=True, slots=True)
class SgdRule:
    """Steps of SGD with momentum; `steps` are pairs of learning rate and factor of the weights."""

    momentum: float
    nesterov: bool
    steps: tuple[tuple[float, float], ...]
    dampening: float = 0.0
    l2: float = 0.0
    sign: float = 1.0

    kind = SGD

    def replayed(self) -> tuple[int, ...]:
        """Return the constants with which a gradient is replayed; of one step."""
        ((rate, _keep),) = self.steps
        return _bits([self.momentum, 1 - self.dampening, self.sign, self.l2, float(self.nesterov), rate])

    def constants(self, unit: float) -> tuple[int, ...]:
        """Return the constants as bits of binary32."""
        of_code, of_momentum = (1.0, self.momentum) if self.nesterov else (0.0, 1.0)
        each = ((keep, rate) for rate, keep in self.steps)
        return _bits([self.momentum, of_code, of_momentum, unit, *(value for values in each for value in values)])


Rule = AdamRule | SgdRule


def _bits(values: Iterable[float]) -> tuple[int, ...]:
    return tuple(np.array(list(values), np.float32).view(np.uint32).tolist())


def as_floats(constants: Iterable[int]) -> np.ndarray:
    """Return constants as binary32."""
    return np.array(list(constants), np.uint32).view(np.float32)


def padded(sets: Sequence[Sequence[int]]) -> np.ndarray:
    """Return sets of constants as rows of one array, binary32, with zeros behind the shorter ones."""
    rows = np.zeros((len(sets), max(map(len, sets), default=0)), np.float32)
    for row, constants in zip(rows, sets, strict=True):
        row[: len(constants)] = as_floats(constants)
    return rows
