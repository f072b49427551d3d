"""Planning of the importance filter: shares, thresholds, turns and ranges. No elements are touched."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from deltastore.layers.importance import (
    LARGEST,
    MIN_ELEMENTS,
    SAMPLE,
    Cut,
    Range,
    Target,
    below,
    cut,
    entry_bytes,
    find_targets,
    itemsizes,
    plan_ranges,
    solve_share,
)
from deltastore.layout import FORWARD, Layout, LayoutInput, Partition, Piece, TensorEntry, plan
from deltastore.policy import Policy

N = 65_536
KINDS = ["normal", "uniform", "mostly zero", "infinite", "ties", "two values", "heavy"]


def entry(dtype: str, share: float) -> float:
    return float(entry_bytes(itemsizes([dtype]), np.array([share]))[0])


def target(elements: int = N, *, dtype: str = "float32", share: float | None = None, limit: float = math.inf) -> Target:
    return Target(0, ("w",), dtype, (Piece(0, 0, elements),), elements, share, limit)


def deviations(kind: str, seed: int, count: int = N) -> np.ndarray:
    """Bits of deviations, one for each element: the sample is the tensor."""
    generator = np.random.default_rng(seed)
    values = np.abs(generator.standard_normal(count)).astype("<f4") + np.float32(1e-6)
    if kind == "uniform":
        values = generator.random(count, dtype=np.float32) + np.float32(1e-6)
    elif kind == "mostly zero":
        values[generator.random(count) < 0.9] = 0
    elif kind == "infinite":
        values[generator.random(count) < 0.001] = np.inf
        values[generator.random(count) < 0.001] = np.nan
    elif kind == "ties":
        values = generator.integers(1, 6, count).astype("<f4")
    elif kind == "two values":
        values = np.where(generator.random(count) < 0.5, np.float32(0.25), np.float32(0.5))
    elif kind == "heavy":
        values = np.exp(4 * generator.standard_normal(count)).astype("<f4")
    return values.view("<u4")


def kept_share(bits: np.ndarray, where: Cut) -> float:
    """The share of the elements that a cut keeps, turns included; NaN and infinity are above all."""
    threshold = np.float32(where.threshold).view(np.uint32)
    above = np.count_nonzero(bits > threshold)
    equal = np.count_nonzero(bits[: round(where.turn * len(bits))] == threshold)
    return float((above + equal) / len(bits))


# ---------------------------------------------------------------- cuts


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [0.005, 0.02, 0.05])
def test_a_cut_keeps_about_the_wanted_share(kind: str, share: float, seed: int) -> None:
    bits = deviations(kind, seed)
    where = cut(target(), bits.copy(), share)
    assert kept_share(bits, where) == pytest.approx(share, rel=0.05, abs=2 / N)


@pytest.mark.parametrize("share", [0.005, 0.02, 0.5])
def test_equal_deviations_take_turns(share: float) -> None:
    bits = np.full(N, 0.5, "<f4").view("<u4")
    where = cut(target(), bits, share)
    assert where.threshold == 0.5
    assert where.turn == pytest.approx(share, abs=1 / N)


def test_fewer_changes_than_wanted_are_all_kept(seed: int) -> None:
    bits = deviations("mostly zero", seed)
    assert cut(target(), bits, 0.2) == Cut(0.0)


def test_unchanged_tensors_have_the_cut_zero() -> None:
    assert cut(target(), np.zeros(N, "<u4"), 0.02) == Cut(0.0)


def test_no_share_keeps_what_must_be_kept_only() -> None:
    assert cut(target(), np.full(N, 0.5, "<f4").view("<u4"), 0.0) == Cut(LARGEST)
    assert cut(target(limit=0.25), np.full(N, 0.5, "<f4").view("<u4"), 0.0) == Cut(below(0.25))


def test_a_sample_that_is_not_finite_gives_a_finite_threshold() -> None:
    bits = np.full(N, np.nan, "<f4").view("<u4")
    assert cut(target(), bits, 0.02).threshold <= LARGEST


def test_the_whole_share_keeps_every_change(seed: int) -> None:
    bits = deviations("uniform", seed)
    assert kept_share(bits, cut(target(), bits.copy(), 1.0)) == 1.0


@pytest.mark.parametrize("kind", KINDS)
def test_a_share_of_the_user_goes_before_the_budget(kind: str, seed: int) -> None:
    bits = deviations(kind, seed)
    where = cut(target(share=0.03), bits.copy(), 0.001)
    assert kept_share(bits, where) == pytest.approx(0.03, rel=0.05, abs=2 / N)


@given(
    st.sampled_from(KINDS),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.0, 0.02, 0.5, 1.0]),
    st.sampled_from([1e-45, 1e-6, 0.1, 1.0, 1e30, 1e300]),
)
def test_no_threshold_is_above_the_limit(kind: str, seed: int, share: float, limit: float) -> None:
    where = cut(target(limit=limit), deviations(kind, seed, 4096), share)
    assert 0 <= where.threshold <= min(below(limit), LARGEST)


@given(st.sampled_from(KINDS), st.integers(0, 2**32 - 1), st.floats(0, 1))
def test_thresholds_are_binary32(kind: str, seed: int, share: float) -> None:
    where = cut(target(), deviations(kind, seed, 4096), share)
    assert float(np.float32(where.threshold)) == where.threshold
    assert 0 <= where.turn <= 1


@given(st.floats(0, 1e39, exclude_min=True) | st.sampled_from([0.1, 0.7, 1e-3, 1e-45, 3e-45, 2.0**-149, LARGEST]))
def test_what_is_rounded_to_a_threshold_below_a_limit_is_below_it_too(limit: float) -> None:
    """Binary64 deviations are compared as binary32: the largest that is rounded down to the threshold counts."""
    threshold = np.float32(below(limit))
    assert float(threshold) <= limit
    if limit <= LARGEST:
        above = float(np.nextafter(threshold, np.float32(np.inf)))
        assert (float(threshold) + above) / 2 <= limit or threshold == 0


def test_no_limit_gives_the_largest_threshold() -> None:
    assert below(math.inf) == LARGEST


# ---------------------------------------------------------------- shares


@pytest.mark.parametrize("kind", ["normal", "uniform", "ties", "heavy", "infinite"])
@pytest.mark.parametrize("share", [0.005, 0.02, 0.2])
def test_the_share_fills_the_room(kind: str, share: float, seed: int) -> None:
    targets = [target(N, dtype="float32"), target(5 * N, dtype="bfloat16")]
    samples = [deviations(kind, seed), deviations(kind, seed + 1)]
    room = sum(t.elements * share * entry(t.dtype, share) for t in targets)
    assert solve_share(targets, samples, room) == pytest.approx(share, rel=1e-3)


def test_what_a_frozen_tensor_does_not_need_goes_to_the_others(seed: int) -> None:
    room = 2 * N * 0.02 * entry("float32", 0.02)
    samples = [deviations("normal", seed), np.zeros(N, "<u4")]
    assert solve_share([target(), target()], samples, room) == pytest.approx(0.042, rel=0.05)


def test_room_for_everything_gives_the_whole_share(seed: int) -> None:
    assert solve_share([target()], [deviations("normal", seed)], 8.0 * N) == 1.0


def test_no_room_gives_no_share(seed: int) -> None:
    assert solve_share([target()], [deviations("normal", seed)], 0.0) == pytest.approx(0.0, abs=1e-9)


def test_what_must_be_kept_leaves_less_for_the_rest(seed: int) -> None:
    samples = [deviations("normal", seed), deviations("normal", seed + 1)]
    room = 2 * N * 0.05 * entry("float32", 0.05)
    share = solve_share([target(limit=1.9), target()], samples, room)
    assert 0 < share < 0.05


def test_a_share_of_the_user_is_paid_from_the_same_room(seed: int) -> None:
    samples = [deviations("normal", seed), deviations("normal", seed + 1)]
    room = 2 * N * 0.05 * entry("float32", 0.05)
    assert solve_share([target(share=0.09), target()], samples, room) < 0.02


@given(st.sampled_from(["float32", "float64", "bfloat16", "float16"]), st.floats(1e-9, 1.0))
def test_an_entry_takes_its_value_and_at_most_two_bytes_more(dtype: str, share: float) -> None:
    width = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}[dtype]
    assert width <= entry(dtype, share) <= width + 2


@pytest.mark.parametrize("elements", [4096, 5000, 10**6, 2 * 10**7, 10**9])
def test_samples_have_a_256th_of_the_elements_within_their_limits(elements: int) -> None:
    assert target(elements).sampled == min(max(elements // 256, SAMPLE[0]), SAMPLE[1], elements)


# ---------------------------------------------------------------- ranges


@st.composite
def layouts(draw: DrawFn) -> tuple[Layout, list[Target]]:
    """Tensors in order, cut over partitions with holes between them; some are targets."""
    sizes = draw(st.lists(st.integers(1, 50), min_size=1, max_size=5))
    partitions: list[list[int]] = [[draw(st.integers(0, 3))]]  # lengths so far
    entries: list[TensorEntry] = []
    for number, size in enumerate(sizes):
        pieces: list[Piece] = []
        left = size
        while left:
            if draw(st.integers(0, 3)) == 0:
                partitions.append([0])
            count = draw(st.integers(1, left))
            pieces.append(Piece(len(partitions) - 1, partitions[-1][0], count))
            partitions[-1][0] += count + draw(st.sampled_from([0, 0, 3]))
            left -= count
        entries.append(TensorEntry((f"t{number}",), "float32", (size,), tuple(pieces)))
    table = [Partition(n, "float32", length, "param", FORWARD, None) for n, (length,) in enumerate(partitions)]
    chosen = [
        Target(number, entry.path, "float32", entry.pieces, entry.elements, None, math.inf)
        for number, entry in enumerate(entries)
        if draw(st.booleans())
    ]
    return Layout(tuple(entries), tuple(table)), chosen


@st.composite
def planned(draw: DrawFn) -> tuple[Layout, list[Target], list[Cut], list[int], dict[int, list[Range]]]:
    layout, targets = draw(layouts())
    shares = st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0])
    cuts = [Cut(float(number + 1), draw(shares)) for number in range(len(targets))]
    turns = [draw(st.integers(0, t.elements - 1)) for t in targets]
    return layout, targets, cuts, turns, plan_ranges(layout, targets, cuts, turns)


@given(planned())
def test_ranges_cover_every_element_of_a_partition_once(drawn: Any) -> None:
    layout, targets, _, _, ranges = drawn
    assert set(ranges) == {piece.partition for t in targets for piece in t.pieces}
    for number, found in ranges.items():
        assert (found[0].first, found[-1].last) == (0, layout.by_id[number].length)
        assert all(one.last == other.first for one, other in pairwise(found))
        assert all(item.first < item.last for item in found)


@given(planned())
def test_ranges_belong_to_the_tensor_whose_elements_they_are(drawn: Any) -> None:
    layout, targets, _, _, ranges = drawn
    owners = {n: np.full(layout.by_id[n].length, -1) for n in ranges}
    for number, item in enumerate(targets):
        for piece in item.pieces:
            owners[piece.partition][piece.offset : piece.offset + piece.count] = number
    for number, found in ranges.items():
        for item in found:
            expected = -1 if item.target is None else item.target
            assert (owners[number][item.first : item.last] == expected).all()


@given(planned())
def test_what_is_no_target_keeps_every_change(drawn: Any) -> None:
    ranges = drawn[4]
    assert all(item.threshold == 0 for found in ranges.values() for item in found if item.target is None)


@given(planned())
def test_a_turn_covers_its_share_and_wraps_around(drawn: Any) -> None:
    _, targets, cuts, turns, ranges = drawn
    for number, (item, where, turn) in enumerate(zip(targets, cuts, turns, strict=True)):
        in_turn: list[bool] = []
        for piece in item.pieces:
            for one in ranges[piece.partition]:
                if one.target == number and piece.offset <= one.first < piece.offset + piece.count:
                    in_turn += [one.threshold < where.threshold] * (one.last - one.first)
        expected = {(turn + i) % item.elements for i in range(round(where.turn * item.elements))}
        assert {i for i, mine in enumerate(in_turn) if mine} == expected


def test_in_its_turn_a_threshold_keeps_what_deviates_by_just_that() -> None:
    layout = Layout(
        (TensorEntry(("t",), "float32", (8,), (Piece(0, 0, 8),)),), (Partition(0, "float32", 8, "", FORWARD, None),)
    )
    targets = [Target(0, ("t",), "float32", (Piece(0, 0, 8),), 8, None, math.inf)]
    ranges = plan_ranges(layout, targets, [Cut(0.5, 0.5)], [6])[0]
    lower = float(np.nextafter(np.float32(0.5), np.float32(0)))
    assert ranges == [Range(0, 2, lower, 0), Range(2, 6, 0.5, 0), Range(6, 8, lower, 0)]


# ---------------------------------------------------------------- targets


def found_by(
    policy: Policy, dtype: str = "float32", shape: tuple[int, ...] = (64, 64), role: str = "param"
) -> list[Target]:
    return find_targets(plan([LayoutInput(("model", "w"), dtype, shape, None, role, "w")]), policy)


@pytest.mark.parametrize(
    ("dtype", "is_filtered"),
    [("float32", True), ("float64", True), ("bfloat16", True), ("float16", True)]
    + [(name, False) for name in ("int32", "uint16", "int16", "bool", "complex64", "float8_e5m2", "uint8")],
)
def test_only_these_dtypes_are_filtered(dtype: str, is_filtered: bool) -> None:
    assert bool(found_by(Policy(), dtype)) is is_filtered


@pytest.mark.parametrize(("count", "is_filtered"), [(MIN_ELEMENTS - 1, False), (MIN_ELEMENTS, True)])
def test_small_tensors_are_exact(count: int, is_filtered: bool) -> None:
    assert bool(found_by(Policy(), shape=(count,))) is is_filtered


def test_the_smallest_tensor_that_is_filtered_has_4096_elements() -> None:
    assert MIN_ELEMENTS == 4096


@pytest.mark.parametrize("name", ["param", "model/w", "model/*", "*"])
def test_a_role_or_a_pattern_makes_exact(name: str) -> None:
    assert found_by(Policy(roles={name: "exact"})) == []


@pytest.mark.parametrize("name", ["exp_avg", "model/v", "w"])
def test_what_does_not_match_is_filtered(name: str) -> None:
    assert [item.share for item in found_by(Policy(roles={name: "exact"}))] == [None]


@pytest.mark.parametrize("name", ["param", "model/w"])
def test_a_role_or_a_pattern_gives_a_share(name: str) -> None:
    assert [item.share for item in found_by(Policy(roles={name: 0.25}))] == [0.25]


def test_no_limit_without_one() -> None:
    assert [item.limit for item in found_by(Policy())] == [math.inf]


@pytest.mark.parametrize("limit", [0.5, {"param": 0.5}, {"model/*": 0.5}])
def test_a_target_has_its_limit(limit: Any) -> None:
    assert [item.limit for item in found_by(Policy(max_deviation=limit))] == [0.5]


@pytest.mark.parametrize("limit", [0.0, {"param": 0}])
def test_a_limit_of_nothing_makes_exact(limit: Any) -> None:
    assert found_by(Policy(max_deviation=limit)) == []


def tied(policy: Policy) -> list[Target]:
    inputs = [LayoutInput(("model", name), "float32", (64, 64), "same", "param", name) for name in ("emb", "head")]
    return find_targets(plan(inputs), policy)


def test_an_alias_is_no_target_of_its_own() -> None:
    assert [item.path for item in tied(Policy())] == [("model", "emb")]


@pytest.mark.parametrize("policy", [Policy(roles={"model/head": "exact"}), Policy(max_deviation={"model/head": 0.0})])
def test_a_rule_for_the_alias_counts(policy: Policy) -> None:
    assert tied(policy) == []


def test_a_target_has_the_pieces_of_its_tensor() -> None:
    layout = plan([LayoutInput(("model", "w"), "float32", (3000, 1000), None, "param", "w")])
    [item] = find_targets(layout, Policy())
    assert len(item.pieces) > 1
    assert sum(piece.count for piece in item.pieces) == item.elements == 3_000_000
    assert item.pieces == layout.tensors[0].pieces
