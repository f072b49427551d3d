"""What is stored per step: the user's choice between every bit and a byte budget (spec 9.8)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from deltastore.errors import InvalidInput
from deltastore.types import Path

T = TypeVar("T")

EXACT = "exact"
FILTER = "filter"
EXACT_RESTORE_COST = 8.0
"""How many times the bytes of a full load an exact commit may cost to read (design: bases)."""
BOUNDED_RESTORE_COST = 2.0
"""The same for bounded commits."""

Rule = str | float
"""What becomes of a role: "exact", "filter", or the share of its elements that each step stores."""


@dataclass(frozen=True)
class Policy:
    """What is stored at each step.

    Parameters
    ----------
    budget : float or None
        Bytes of a delta commit, everything included, over bytes of the full state. Elements whose change matters least
        are then stored later: every commit records, for each tensor, a bound that no element exceeds. None stores every
        step exactly.
    prediction : {"auto", "hold"}
        How the reader predicts a step. "auto": by the formula of the optimizer, where an adapter knows it (Adam, AdamW,
        SGD with momentum); "hold": by the parent's values.
    roles : mapping of str to {"exact", "filter"} or float, optional
        Role ("param", "exp_avg", ...) or pattern of "object/key" names -> what to store of it. A number is the share of
        its elements that each step stores, whatever the budget says. The first that matches counts; what none matches
        is filtered.
    restore_cost : float, optional
        A base is written when reading the next commit would cost more than this many full loads; 2 for bounded
        commits, 8 for exact ones.
    max_deviation : float or mapping of str to float, optional
        No element of the role or pattern ever deviates by more, whatever that costs.
    """

    budget: float | None = 0.02
    prediction: str = "auto"
    roles: Mapping[str, Rule] | None = None
    restore_cost: float | None = None
    max_deviation: float | Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        if self.budget is not None and not (_is_number(self.budget) and 0 < self.budget <= 1):
            raise InvalidInput(f"budget is {self.budget!r}, expected a share of 0..1, or None for exact commits")
        if self.restore_cost is not None and not (_is_number(self.restore_cost) and self.restore_cost >= 1):
            raise InvalidInput(f"restore_cost is {self.restore_cost!r}, expected 1 or more")
        if self.prediction not in ("auto", "hold"):
            raise InvalidInput(f"prediction is {self.prediction!r}, expected 'auto' or 'hold'")
        _check_roles(self.roles)
        _check_deviation(self.max_deviation)
        if self.budget is None and (self.roles or self.max_deviation is not None):
            raise InvalidInput("roles and max_deviation belong to a budget; budget=None stores everything exactly")

    @property
    def exact(self) -> bool:
        """Whether every commit is restored bit for bit."""
        return self.budget is None

    @property
    def chain_cost(self) -> float:
        """How many full loads a commit may cost to read."""
        default = EXACT_RESTORE_COST if self.exact else BOUNDED_RESTORE_COST
        return default if self.restore_cost is None else self.restore_cost

    def rule(self, path: Path, role: str) -> Rule:
        """Return what becomes of a tensor."""
        return _first_match(self.roles or {}, path, role, FILTER)

    def limit(self, path: Path, role: str) -> float:
        """Return what no element of a tensor may deviate by more than; infinity without such a bound."""
        if isinstance(self.max_deviation, Mapping):
            return _first_match(self.max_deviation, path, role, math.inf)
        return math.inf if self.max_deviation is None else self.max_deviation


def check_policy(policy: Any) -> Policy | None:
    """Return a policy, or None: every bit.

    Raises
    ------
    InvalidInput
        It is something else.
    """
    if policy is not None and not isinstance(policy, Policy):
        raise InvalidInput(f"policy is {policy!r}, expected a deltastore.Policy or None")
    return policy


def _first_match(rules: Mapping[str, T], path: Path, role: str, default: T) -> T:
    name = "/".join(map(str, path))
    return next((rule for key, rule in rules.items() if key == role or fnmatchcase(name, key)), default)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_roles(roles: Any) -> None:
    if roles is None:
        return
    if not isinstance(roles, Mapping):
        raise InvalidInput(f"roles is {roles!r}, expected a dict such as {{'param': 'exact', 'exp_avg': 0.05}}")
    for name, rule in roles.items():
        share = _is_number(rule) and 0 < rule <= 1
        if not isinstance(name, str) or not (rule in (EXACT, FILTER) or share):
            raise InvalidInput(
                f"roles[{name!r}] is {rule!r}, expected 'exact', 'filter', or a share of the elements in 0..1"
            )


def _check_deviation(deviation: Any) -> None:
    values = deviation if isinstance(deviation, Mapping) else {"max_deviation": deviation}
    for name, value in values.items():
        if value is not None and not (_is_number(value) and 0 <= value < math.inf):
            raise InvalidInput(f"max_deviation: {name!r} is {value!r}, expected a number of 0 or more")
