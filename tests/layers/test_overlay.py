"""Overlays: positions in blocks, and every way in which the three arrays cannot be one overlay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltastore.errors import Corruption
from deltastore.layers import encoded, overlay
from deltastore.layers.encoded import BLOCK_ELEMENTS
from deltastore.layers.overlay import Overlay, encode_overlay, positions

B = BLOCK_ELEMENTS
BORDERS = [0, 1, B - 1, B, B + 1, 2 * B - 1, 2 * B, 3 * B + 5]
LENGTHS = [1, 2, B - 1, B, B + 1, 2 * B, 3 * B + 6]
DTYPES = ["u1", "<u2", "<f4", "<f8", "<c16"]


@st.composite
def changes(draw: st.DrawFn) -> tuple[int, np.ndarray]:
    """The length of a partition and the sorted elements that changed, mostly at the borders of its blocks."""
    length = draw(st.sampled_from(LENGTHS))
    element = st.sampled_from([b for b in BORDERS if b < length] + [length - 1]) | st.integers(0, length - 1)
    return length, np.array(sorted(draw(st.sets(element, max_size=12))), np.int64)


@given(changes(), st.sampled_from(DTYPES))
def test_an_overlay_assigns_exactly_what_changed(change: tuple[int, np.ndarray], dtype: str) -> None:
    length, changed = change
    current = (np.arange(length) % 251).astype(dtype)
    made = encode_overlay(changed, current)
    assert (made.indptr.dtype, made.gaps.dtype, made.values.dtype) == (np.dtype("<u4"), np.dtype("<u2"), current.dtype)
    assert len(made.indptr) == -(-length // B) + 1
    places = positions(made, 0, length, "here")
    assert (places == changed).all()
    rec = np.zeros(length, dtype)
    rec[places] = made.values
    assert (rec[changed] == current[changed]).all()
    assert not np.delete(rec, changed).any()


@given(changes(), st.data())
def test_some_blocks_of_an_overlay_can_be_read_alone(change: tuple[int, np.ndarray], data: st.DataObject) -> None:
    length, changed = change
    made = encode_overlay(changed, np.zeros(length, "<f4"))
    first = data.draw(st.integers(0, len(made.indptr) - 2))
    last = data.draw(st.integers(first + 1, len(made.indptr) - 1))
    low, high = made.indptr[first], made.indptr[last]
    part = Overlay(made.indptr[first : last + 1] - low, made.gaps[low:high], made.values[low:high])
    expected = changed[(changed >= first * B) & (changed < last * B)]
    assert (positions(part, first, length, "here") == expected).all()


def test_all_elements_of_a_block() -> None:
    changed = np.arange(B, 2 * B)
    made = encode_overlay(changed, np.arange(3 * B, dtype="<f4"))
    assert made.indptr.tolist() == [0, 0, B, B]
    assert (positions(made, 0, 3 * B, "here") == changed).all()


def test_gaps_are_those_of_the_spec() -> None:
    made = encode_overlay(np.array([3, 5, B - 1, 2 * B, 2 * B + 7]), np.arange(2 * B + 8, dtype="<f4"))
    assert made.indptr.tolist() == [0, 3, 3, 5]
    assert made.gaps.tolist() == [3, 2, B - 6, 0, 7]


def damaged(indptr: list[int], gaps: list[int], values: int | None = None) -> Overlay:
    count = len(gaps) if values is None else values
    return Overlay(np.array(indptr, "<u4"), np.array(gaps, "<u2"), np.zeros(count, "<f4"))


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (damaged([1, 2], [5, 5]), "fit"),  # does not begin with 0
        (damaged([0, 2, 1], [5]), "fit"),  # falls
        (damaged([0, 2, 1, 2], [5, 5]), "fit"),  # falls, and ends as it should
        (damaged([0, 1], [5, 5]), "fit"),  # leaves entries out
        (damaged([0, 3], [5, 5]), "fit"),  # asks for more entries
        (damaged([0, 2], [5, 5], values=1), "fit"),  # values missing
        (damaged([0, 2], [5, 5], values=3), "fit"),  # values too many
        (damaged([0, 2], [B - 1, 1]), "outside"),  # runs into the next block
        (damaged([0, 3], [B - 1, B - 1, B - 1]), "outside"),
        (damaged([0, 2], [5, 0]), "outside"),  # one element twice
        (damaged([0, 0, 2], [5, 0]), "outside"),
        (damaged([0, 0, 1], [10]), "outside"),  # behind the last element
        (damaged([0, 1, 2], [B - 1, 10]), "outside"),
    ],
)
def test_arrays_that_are_no_overlay_are_refused(bad: Overlay, problem: str) -> None:
    with pytest.raises(Corruption, match=f"here.*{problem}") as caught:
        positions(bad, 0, B + 10, "here")
    assert caught.value.where == "here"


@pytest.mark.parametrize("good", [damaged([0, 0, 0], []), damaged([0, 1, 2], [B - 1, 9]), damaged([0, 1], [0])])
def test_arrays_at_the_limits_are_taken(good: Overlay) -> None:
    assert len(positions(good, 0, B + 10, "here")) == len(good.gaps)


@given(
    st.lists(st.integers(0, 6), min_size=2, max_size=4),
    st.lists(st.integers(0, 16), max_size=6),
    st.integers(0, 6),
)
def test_whatever_the_arrays_say_nothing_outside_is_assigned(indptr: list[int], gaps: list[int], values: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for module in (encoded, overlay):
            patch.setattr(module, "BLOCK_ELEMENTS", 16)
        length = 16 * (len(indptr) - 1) - 3
        try:
            found: Any = positions(damaged(indptr, gaps, values), 0, length, "here")
        except Corruption:
            return
        assert len(found) == len(gaps) == values
        assert all(0 <= place < length for place in found)
        assert (np.diff(found) > 0).all()
