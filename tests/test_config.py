"""What users may set, checked once."""

from __future__ import annotations

import math
from typing import Any

import pytest

from deltastore.config import (
    EXACT_RESTORE_COST,
    Policy,
    Retention,
    WriterOptions,
    exact_restore_cost,
    parse_retention,
)
from deltastore.errors import InvalidInput


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


def test_the_restore_cost_of_exact_policies() -> None:
    assert exact_restore_cost(None) == exact_restore_cost(Policy(budget=None)) == EXACT_RESTORE_COST == 8.0
    assert exact_restore_cost(Policy(budget=None, restore_cost=1)) == 1
    assert exact_restore_cost(Policy(budget=None, prediction="hold", restore_cost=math.inf)) == math.inf


@pytest.mark.parametrize(
    "arguments",
    [{}, {"budget": 0.02}, {"budget": None, "prediction": "adam"}, {"budget": None, "roles": {"exp_avg": "drop"}},
     {"budget": None, "max_deviation": {"param": 0.1}}],
)  # fmt: skip
def test_bounded_policies_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="not part of this version"):
        exact_restore_cost(Policy(**arguments))


@pytest.mark.parametrize("value", [{"keep_last": 3, "keep_every": 10}, Retention(3, 10)])
def test_retentions(value: Any) -> None:
    assert parse_retention(value) == Retention(3, 10)


def test_parts_of_a_retention() -> None:
    assert parse_retention(None) is None
    assert parse_retention({"keep_last": 3}) == Retention(3, None)
    assert parse_retention({"keep_every": 5}) == Retention(1, 5)


@pytest.mark.parametrize(
    "value",
    [5, "keep_last=3", [("keep_last", 3)], {"keep": 1}, {"keep_last": 0}, {"keep_last": -1}, {"keep_last": True},
     {"keep_last": 1.0}, {"keep_last": "3"}, {"keep_last": 1, "keep_every": 0}],
)  # fmt: skip
def test_retentions_that_cannot_be_used(value: Any) -> None:
    with pytest.raises(InvalidInput):
        parse_retention(value)


def test_a_retention_keeps_a_number_of_commits() -> None:
    with pytest.raises(InvalidInput):
        parse_retention({"keep_last": None})


@pytest.mark.parametrize(("every", "kept"), [(None, []), (1, [0, 1, 2, 3, 4]), (2, [0, 2, 4]), (100, [0])])
def test_round_steps_are_kept(every: int | None, kept: list[int]) -> None:
    assert [step for step in range(5) if Retention(1, every).keeps_step(step)] == kept


@pytest.mark.parametrize(
    ("name", "value"),
    [("codec", "lz4"), ("codec", None), ("max_pending", 0), ("max_pending", True), ("max_pending", 2.0)],
)
def test_options_that_cannot_be_used(name: str, value: Any) -> None:
    with pytest.raises(InvalidInput, match=name):
        WriterOptions(**{name: value})
