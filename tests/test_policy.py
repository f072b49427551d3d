"""What is stored per step: the options of a policy, checked once."""

from __future__ import annotations

import math
from typing import Any

import pytest

from deltastore.errors import InvalidInput
from deltastore.policy import Policy, check_policy


@pytest.mark.parametrize("budget", [None, 1e-9, 0.02, 1, 1.0])
def test_budgets(budget: float | None) -> None:
    assert Policy(budget=budget).exact == (budget is None)


@pytest.mark.parametrize("budget", [0, -0.1, 1.1, math.nan, math.inf])
def test_budgets_that_cannot_be_used(budget: float) -> None:
    with pytest.raises(InvalidInput, match="budget"):
        Policy(budget=budget)


@pytest.mark.parametrize("cost", [0.99, 0, -1, math.nan])
def test_restore_costs_that_cannot_be_used(cost: float) -> None:
    with pytest.raises(InvalidInput, match="restore_cost"):
        Policy(restore_cost=cost)


@pytest.mark.parametrize("arguments", [{"budget": "2%"}, {"restore_cost": "8"}, {"budget": [0.1]}])
def test_what_is_no_number_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        Policy(**arguments)


def test_the_restore_cost_of_a_policy() -> None:
    assert Policy(budget=None).chain_cost == 8.0
    assert Policy().chain_cost == 2.0
    assert Policy(restore_cost=1).chain_cost == 1
    assert Policy(budget=None, restore_cost=math.inf).chain_cost == math.inf


@pytest.mark.parametrize(
    "arguments",
    [
        {"prediction": "adamw"},
        {"roles": ["param"]},
        {"roles": {"param": "drop"}},
        {"roles": {"param": 0}},
        {"roles": {"param": True}},
        {"roles": {1: "exact"}},
        {"max_deviation": -1},
        {"max_deviation": {"param": math.nan}},
        {"max_deviation": {"param": "1e-3"}},
        {"budget": None, "roles": {"param": "exact"}},
        {"budget": None, "max_deviation": 0.1},
    ],
)
def test_policies_that_cannot_be_used(arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        Policy(**arguments)


def test_what_is_no_policy() -> None:
    assert check_policy(None) is None
    with pytest.raises(InvalidInput, match="'exact'"):
        check_policy("exact")


def test_the_first_rule_that_matches_counts() -> None:
    policy = Policy(roles={"model/*.bias": "exact", "param": 0.05}, max_deviation={"exp_avg": 1e-3, "model/head*": 0.0})
    assert policy.rule(("model", "0.bias"), "param") == "exact"
    assert policy.rule(("model", "0.weight"), "param") == 0.05
    assert policy.rule(("optimizer", "state", "0.weight", "exp_avg"), "exp_avg") == "filter"
    assert policy.limit(("optimizer", "state", "0.weight", "exp_avg"), "exp_avg") == 1e-3
    assert policy.limit(("model", "head.weight"), "param") == 0.0
    assert policy.limit(("model", "0.weight"), "param") == math.inf
    assert Policy(max_deviation=0.5).limit(("x",), "param") == 0.5
