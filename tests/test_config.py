"""What users may set, checked once."""

from __future__ import annotations

from typing import Any

import pytest

from deltastore.config import Retention, WriterOptions, parse_retention
from deltastore.errors import InvalidInput


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
