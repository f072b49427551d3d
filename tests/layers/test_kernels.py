"""The compiled passes against the reference, bit for bit, on every kind of number."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from deltastore.dtypes import storage_dtype
from deltastore.layers import kernels
from tests.layers.reference import (
    LARGEST,
    WORDS,
    Filtered,
    filtered,
    narrow_deviations,
    specials,
    to_words,
    wide_deviations,
)

DTYPES = sorted(WORDS)
LENGTHS = [1, 15, 64, 65, 4095, 4096, 4097, 8192, 9999]
THRESHOLDS = [0.0, 1e-45, 1e-40, 2.0**-126, 1e-3, 1.0, 1e30, LARGEST]


@dataclass(frozen=True)
class Case:
    """Elements of a partition, a range of them, and a threshold."""

    dtype: str
    current: np.ndarray
    rec: np.ndarray
    first: int
    last: int
    threshold: float

    @property
    def expected(self) -> Filtered:
        return filtered(self.current, self.rec, self.first, self.last, self.threshold, self.dtype)


def some_words(generator: np.random.Generator, dtype: str, kind: str, length: int) -> np.ndarray:
    if kind == "special":
        return generator.choice(specials(dtype), length)
    if kind == "bits":
        return np.frombuffer(generator.bytes(length * np.dtype(WORDS[dtype]).itemsize), WORDS[dtype]).copy()
    return to_words(generator.standard_normal(length), dtype)


def changed(generator: np.random.Generator, rec: np.ndarray, dtype: str, how: str) -> np.ndarray:
    length = len(rec)
    if how == "nudged":
        return np.asarray(rec ^ generator.integers(0, 4, length).astype(rec.dtype))
    if how == "signs":  # a few deviations that many elements share
        return to_words(generator.choice([-0.5, 0.0, 0.25, 0.5], length), dtype)
    density = {"same": 0.0, "few": 0.01, "half": 0.5, "all": 1.0}[how]
    kind = str(generator.choice(["special", "bits", "normal"]))
    drawn = some_words(generator, dtype, kind, length)
    return np.asarray(np.where(generator.random(length) < density, drawn, rec))


@st.composite
def cases(draw: DrawFn) -> Case:
    dtype = draw(st.sampled_from(DTYPES))
    length = draw(st.sampled_from(LENGTHS))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    how = draw(st.sampled_from(["same", "few", "half", "all", "nudged", "signs"]))
    rec = some_words(generator, dtype, draw(st.sampled_from(["special", "bits", "normal"])), length)
    if how == "signs":
        rec = np.zeros_like(rec)
    current = changed(generator, rec, dtype, how)
    found = narrow_deviations(current, rec, dtype)
    with np.errstate(all="ignore"):
        found = found.astype("<f4")
    met = found[np.isfinite(found)]
    threshold = draw(st.sampled_from(THRESHOLDS))
    if len(met) and draw(st.booleans()):
        threshold = float(generator.choice(met))  # one that elements meet exactly
    first = draw(st.integers(0, length - 1) | st.just(0))
    last = draw(st.integers(first + 1, length) | st.just(length))
    return Case(dtype, current, rec, first, last, threshold)


@dataclass(frozen=True)
class Result:
    """What the kernel gives."""

    places: np.ndarray
    old: np.ndarray
    rec: np.ndarray
    largest: float
    missing: float
    whole: float


def as_words(words: np.ndarray, dtype: str) -> Any:
    return kernels.as_words(words.view(storage_dtype(dtype)), dtype)


def run(case: Case, count: int = 0) -> Result:
    rec = case.rec.copy()
    current, target = as_words(case.current, case.dtype), as_words(rec, case.dtype)
    places = np.full(count + len(rec), 77, np.uint32)
    old = np.full(count + len(rec), 77, target.dtype)
    bits = kernels.threshold_bits(case.threshold, case.dtype)
    end, largest, missing, whole = kernels.filter_run(current, target, case.first, case.last, bits, places, old, count)
    assert (places[:count] == 77).all()
    assert (old[:count] == 77).all()
    return Result(places[count:end], old[count:end].view(rec.dtype), rec, largest, missing, whole)


def test_the_dtypes_are_those_of_the_reference() -> None:
    assert sorted(kernels.FILTERED_DTYPES) == DTYPES


@given(cases())
def test_the_filter_keeps_the_elements_of_the_reference(case: Case) -> None:
    assert run(case).places.tolist() == case.expected.places.tolist()


@given(cases())
def test_kept_elements_are_brought_up_to_date_and_no_others(case: Case) -> None:
    assert run(case).rec.tobytes() == case.expected.rec.tobytes()


@given(cases())
def test_what_the_reconstruction_had_is_given(case: Case) -> None:
    assert run(case).old.tobytes() == case.expected.old.tobytes()


@given(cases())
def test_the_largest_deviation_that_is_left_is_that_of_binary64(case: Case) -> None:
    assert run(case).largest == case.expected.largest


@given(cases())
def test_the_new_values_are_only_read(case: Case) -> None:
    before = case.current.copy()
    run(case)
    assert case.current.tobytes() == before.tobytes()


@given(cases(), st.integers(1, 100))
def test_places_are_appended(case: Case, count: int) -> None:
    assert run(case, count).places.tolist() == case.expected.places.tolist()


@given(cases())
def test_reverting_restores_every_bit(case: Case) -> None:
    found = run(case)
    kernels.revert(as_words(found.rec, case.dtype), found.places, as_words(found.old, case.dtype))
    assert found.rec.tobytes() == case.rec.tobytes()


@given(cases())
def test_filtering_again_finds_nothing_more(case: Case) -> None:
    found = run(case)
    again = Case(case.dtype, case.current, found.rec, case.first, case.last, case.threshold)
    assert len(run(again).places) == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_the_norms_have_four_digits(dtype: str, scale: float, seed: int) -> None:
    generator = np.random.default_rng(seed)
    rec = to_words(scale * generator.standard_normal(50_000), dtype)
    current = to_words(scale * generator.standard_normal(50_000), dtype)
    case = Case(dtype, current, rec, 3, 49_000, scale)
    found, expected = run(case), case.expected
    assert found.missing == pytest.approx(expected.missing, rel=1e-4)
    assert found.whole == pytest.approx(expected.whole, rel=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_largest_deviation_that_rounding_to_binary32_hides(dtype: str) -> None:
    """Two deviations that are one in binary32: the larger one counts, wherever it lies."""
    rec = to_words(np.zeros(3 * kernels.BLOCK), dtype)
    current = rec.copy()
    for place in (1, 2 * kernels.BLOCK + 1):
        current[place] = to_words(np.array([1.0]), dtype)[0]
    rec[2 * kernels.BLOCK + 1] = to_words(np.array([-(2.0**-40)]), dtype)[0]
    assert run(Case(dtype, current, rec, 0, len(rec), 1.5)).largest == 1.0 + 2.0**-40


# ---------------------------------------------------------------- samples


@st.composite
def samples(draw: DrawFn) -> tuple[Case, int, int]:
    """A case, a phase, and how many elements are taken."""
    dtype = draw(st.sampled_from(DTYPES))
    length = draw(st.sampled_from([4096, 5000, 20_000, 70_001]))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rec = some_words(generator, dtype, draw(st.sampled_from(["special", "bits", "normal"])), length)
    current = changed(generator, rec, dtype, draw(st.sampled_from(["same", "few", "half", "all"])))
    first = draw(st.integers(0, length - 4096) | st.just(0))
    last = draw(st.integers(first + 4096, length) | st.just(length))
    wanted = draw(st.sampled_from([1, 17, 4096]) | st.integers(1, min(last - first, 65_536)))
    return Case(dtype, current, rec, first, last, 0.0), draw(st.integers(0, 2**40)), wanted


def sampled(case: Case, phase: int, wanted: int) -> np.ndarray:
    out = np.full(wanted, 77, np.uint32)
    current, rec = as_words(case.current, case.dtype), as_words(case.rec, case.dtype)
    kernels.sample_deviations(current, rec, case.first, case.last, phase, out)
    return out


def deviation_bits(case: Case) -> np.ndarray:
    """The deviations of all elements of the range as bits of binary32; those below it are its smallest number."""
    current, rec = case.current[case.first : case.last], case.rec[case.first : case.last]
    with np.errstate(all="ignore"):
        narrow = narrow_deviations(current, rec, case.dtype).astype("<f4")
    bits = np.where(np.isnan(narrow), np.uint32(0x7FC00000), narrow.view("<u4"))
    return np.where(current == rec, np.uint32(0), np.maximum(bits, np.uint32(1)))


def canonical(bits: np.ndarray) -> np.ndarray:
    """All NaNs as one: their payloads say nothing."""
    return np.where(bits > 0x7F800000, np.uint32(0x7FC00000), bits)


@given(samples())
def test_samples_are_deviations_of_the_range(drawn: tuple[Case, int, int]) -> None:
    case, _, wanted = drawn
    found, all_of_them = canonical(sampled(*drawn)), deviation_bits(case)
    assert len(found) == wanted
    assert np.isin(found, all_of_them).all()


@given(samples())
def test_whole_runs_take_no_element_twice(drawn: tuple[Case, int, int]) -> None:
    case, phase, wanted = drawn
    wanted = max(wanted // kernels.RUN, 1) * kernels.RUN
    found = Counter(canonical(sampled(case, phase, wanted)).tolist())
    assert found <= Counter(deviation_bits(case).tolist())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [4096, 5000, 65_536])
def test_equal_bits_deviate_by_nothing(dtype: str, length: int, seed: int) -> None:
    words = some_words(np.random.default_rng(seed), dtype, "special", length)
    assert not sampled(Case(dtype, words, words.copy(), 0, length, 0.0), 5, 4096).any()


@pytest.mark.parametrize("length", [4096, 65_536])
def test_a_sample_as_long_as_the_range_has_every_element(length: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    case = Case("float32", some_words(generator, "float32", "normal", length), np.zeros(length, "<u4"), 0, length, 0.0)
    assert (np.sort(sampled(case, 3, length)) == np.sort(deviation_bits(case))).all()


def test_another_phase_takes_other_elements(seed: int) -> None:
    words = some_words(np.random.default_rng(seed), "float32", "normal", 65_536)
    case = Case("float32", words, np.zeros_like(words), 0, len(words), 0.0)
    assert (sampled(case, 1, 4096) != sampled(case, 2, 4096)).any()


def test_the_same_phase_takes_the_same_elements(seed: int) -> None:
    words = some_words(np.random.default_rng(seed), "float32", "normal", 65_536)
    case = Case("float32", words, np.zeros_like(words), 0, len(words), 0.0)
    assert (sampled(case, 1, 4096) == sampled(case, 1, 4096)).all()


def test_what_the_reference_calls_a_deviation(seed: int) -> None:
    """The reference itself, once by hand."""
    words = to_words(np.array([1.0, -0.0, np.nan, np.inf]), "float32")
    other = to_words(np.array([0.5, 0.0, np.nan, 1.0]), "float32")
    assert wide_deviations(words, other, "float32").tolist() == [0.5, 0.0, 0.0, np.inf]


def test_without_a_place_for_compiled_code_it_is_compiled_in_each_process() -> None:
    script = """if True:
        import numpy as np
        from numba.core import caching
        for kind in (caching.CacheImpl, *caching.CacheImpl.__subclasses__()):
            kind._locator_classes = []
        from deltastore.layers import kernels
        words = np.arange(9, dtype=np.uint32)
        places, old = np.empty(9, np.uint32), np.empty(9, np.uint32)
        threshold = kernels.threshold_bits(0.0, "float32")
        print(kernels.filter_run(words, np.zeros(9, np.uint32), 0, 9, threshold, places, old, 0)[0])
    """
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (found.stdout, found.returncode) == ("8\n", 0), found.stderr
