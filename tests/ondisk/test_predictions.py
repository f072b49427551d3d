"""Predictions in commit records: round trip, and what is refused (spec 6.7)."""

from __future__ import annotations

from typing import Any

import pytest

from deltastore.errors import Corruption
from deltastore.ondisk.predictions import EACH, SHARED, encode_prediction, parse_predictions

KINDS = {"adam": 3, "sgd": 2, "replay-adam": 3, "replay-sgd": 2}


def good(kind: str) -> dict[str, Any]:
    is_coded = not kind.startswith("replay")
    names = ("codes", "scales") if is_coded else ("gradient",)
    if kind == "adam":
        names = (*names, "signs", "factors")
    return {
        "kind": kind,
        "partitions": list(range(KINDS[kind])),
        "code": "bit" if is_coded else None,
        "constants": [[7] * (SHARED[kind] + EACH[kind])],
        "ranges": [[0, 5, 0]],
        "refine": {"period": 8, "phase": 7} if kind == "adam" else None,
        "arrays": dict.fromkeys(names, f"1:{'0' * 64}"),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_read(kind: str) -> None:
    (record,) = parse_predictions([good(kind)], "here")
    assert encode_prediction(record) == good(kind)


@pytest.mark.parametrize("name", good("adam"))
@pytest.mark.parametrize("kind", KINDS)
def test_no_member_may_be_missing(kind: str, name: str) -> None:
    value = good(kind)
    del value[name]
    with pytest.raises(Corruption, match="here: member"):
        parse_predictions([value], "here")


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("adam", "kind", "hold"),
        ("adam", "partitions", [0, 1]),
        ("adam", "partitions", [0, 1, True]),
        ("sgd", "code", None),
        ("sgd", "code", "byte"),
        ("replay-sgd", "code", "bit"),
        ("sgd", "refine", {"period": 8, "phase": 0}),
        ("adam", "refine", {"period": 8, "phase": 8}),
        ("adam", "refine", {"period": 8}),
        ("adam", "refine", False),
        ("adam", "arrays", {"codes": "", "scales": ""}),
        ("replay-adam", "arrays", {"codes": "", "scales": ""}),
        ("adam", "constants", [[1, 2]]),
        ("adam", "constants", [[1 << 32] * (SHARED["adam"] + EACH["adam"])]),
        ("replay-adam", "constants", [[1] * (SHARED["replay-adam"] + 2 * EACH["replay-adam"])]),
        ("adam", "ranges", [[0, 5, 1]]),
        ("adam", "ranges", [[5, 5, 0]]),
        ("adam", "ranges", [[0, 5, 0], [4, 9, 0]]),
        ("adam", "ranges", [[0, 5]]),
    ],
)
def test_what_does_not_follow_the_spec_is_refused(kind: str, name: str, value: Any) -> None:
    changed = good(kind) | {name: value}
    with pytest.raises(Corruption, match="here"):
        parse_predictions([changed], "here")


def test_no_partition_is_predicted_twice() -> None:
    with pytest.raises(Corruption, match="twice"):
        parse_predictions([good("adam"), good("sgd")], "here")
