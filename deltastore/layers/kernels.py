"""The passes over memory of the importance filter.

Elements come as words (:func:`as_words`), so that bits are compared, and are widened to binary32 (binary64 for float64)
for the arithmetic.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from deltastore.layers.compiled import (
    as_f32,
    as_f64,
    as_u32,
    as_u64,
    compiled,
    lowest_bit,
    overload,
    types,
    vector_loop,
)

BLOCK = 4096
"""Elements that are scanned, then collected, while they are in the cache."""
RUN = 32
"""Neighbouring elements that a sample takes together: two cache lines of binary32, which are fetched together."""

_WORDS = {"float32": "<u4", "float64": "<u8", "bfloat16": "<u2", "float16": "<i2"}
"""Logical dtype -> the words in which the kernels get it; signed ones tell float16 from bfloat16."""

FILTERED_DTYPES = frozenset(_WORDS)
"""What can be filtered; everything else is exact."""


def as_words(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return the elements of a partition as the kernels take them, without a copy."""
    return values.view(_WORDS[dtype])


def threshold_bits(threshold: float, dtype: str) -> np.unsignedinteger[Any]:
    """Return a threshold as the bits of the dtype in which deviations are compared."""
    if dtype == "float64":
        return np.uint64(np.float64(threshold).view(np.uint64))
    return np.uint32(np.float32(threshold).view(np.uint32))


def _wide(word: Any) -> Any:
    """Give the bits of a word in the width of the arithmetic: numba compares shorter ones slowly."""
    raise NotImplementedError(word)


@overload(_wide, strict=False, inline="always")
def _wide_of(word: Any) -> Any:
    if word == types.uint64:
        return lambda word: word
    if word == types.int16:
        return lambda word: np.uint32(np.uint16(word))
    return lambda word: np.uint32(word)


def _value(word: Any) -> Any:
    """Widen a word to the float that it stands for."""
    raise NotImplementedError(word)


@overload(_value, strict=False, inline="always")
def _value_of(word: Any) -> Any:
    if word == types.uint32:
        return lambda word: as_f32(word)
    if word == types.uint64:
        return lambda word: as_f64(word)
    if word == types.uint16:  # bfloat16: the upper half of a binary32
        return lambda word: as_f32(np.uint32(_wide(word) << np.uint32(16)))
    if word == types.int16:
        return lambda word: _half(_wide(word))
    return None


@compiled
def _half(bits: Any) -> Any:
    """Widen the bits of a binary16."""
    sign = np.uint32((bits & np.uint32(0x8000)) << np.uint32(16))
    shifted = np.uint32((bits & np.uint32(0x7FFF)) << np.uint32(13))
    scaled = as_u32(as_f32(shifted) * np.float32(2.0**112))  # exact, for subnormals too
    infinite = np.uint32(shifted | np.uint32(0x7F800000))
    return as_f32(np.uint32(sign | (infinite if shifted >= np.uint32(0x0F800000) else scaled)))


def _magnitude(difference: Any) -> Any:
    """Give the bits of an absolute value: unsigned order is the order of the values, NaN above all."""
    raise NotImplementedError(difference)


@overload(_magnitude, strict=False, inline="always")
def _magnitude_of(difference: Any) -> Any:
    if difference == types.float32:
        return lambda difference: np.uint32(as_u32(difference) & np.uint32(0x7FFFFFFF))
    if difference == types.float64:
        return lambda difference: np.uint64(as_u64(difference) & np.uint64(0x7FFFFFFFFFFFFFFF))
    return None


def _float(bits: Any) -> Any:
    """Give the float that magnitude bits stand for."""
    raise NotImplementedError(bits)


@overload(_float, strict=False, inline="always")
def _float_of(bits: Any) -> Any:
    if bits == types.uint32:
        return lambda bits: as_f32(bits)
    if bits == types.uint64:
        return lambda bits: as_f64(bits)
    return None


def _above(deviation: Any, threshold: Any) -> Any:
    """Give whether magnitude bits are above the threshold, or 0: one comparison of unsigned numbers."""
    raise NotImplementedError(deviation, threshold)


@overload(_above, strict=False, inline="always")
def _above_of(deviation: Any, threshold: Any) -> Any:
    if deviation == threshold == types.uint32:
        return lambda deviation, threshold: np.uint32(deviation - np.uint32(1)) >= threshold
    if deviation == threshold == types.uint64:
        return lambda deviation, threshold: np.uint64(deviation - np.uint64(1)) >= threshold
    return None


def _zero(bits: Any) -> Any:
    """Give 0 of the same type: numba widens the result of an operator."""
    raise NotImplementedError(bits)


@overload(_zero, strict=False, inline="always")
def _zero_of(bits: Any) -> Any:
    if bits == types.uint32:
        return lambda bits: np.uint32(0)
    if bits == types.uint64:
        return lambda bits: np.uint64(0)
    return None


def _rest(deviation: Any, threshold: Any) -> Any:
    """Give magnitude bits that are at most the threshold, else 0."""
    raise NotImplementedError(deviation, threshold)


@overload(_rest, strict=False, inline="always")
def _rest_of(deviation: Any, threshold: Any) -> Any:
    return lambda deviation, threshold: deviation if deviation <= threshold else _zero(threshold)


@vector_loop
def _scan(current: Any, rec: Any, threshold: Any, scale: Any, mask: Any) -> Any:
    """Mark what is kept; give the largest deviation that is not, and scaled sums of squares of these and of the values.

    Kept are, of other bits, those above the threshold, NaN included, and zeros of the other sign.
    """
    largest = _zero(threshold)
    missing = _float(largest)
    whole = _float(largest)
    for i in range(len(current)):
        word = current[i]
        before = rec[i]
        value = _value(word)
        deviation = _magnitude(value - _value(before))
        mask[i] = (_wide(word) != _wide(before)) & _above(deviation, threshold)
        rest = _rest(deviation, threshold)
        largest = max(largest, rest)  # a conditional expression is not turned into vector instructions
        part = _float(rest) * scale
        missing += part * part
        scaled = value * scale
        whole += scaled * scaled
    return largest, missing, whole


@vector_loop
def _pack_bits(mask: Any, bits: Any) -> None:
    """Turn marks, one a byte and eight a word, into bits."""
    words = mask.view(np.uint64)
    for i in range(len(words)):
        bits[i] = np.uint8(np.uint64(words[i] * np.uint64(0x0102040810204080)) >> np.uint64(56))


def _scale(threshold: Any) -> Any:
    """Give a power of two near 1 / threshold: squares of what it scales stay within binary32."""
    raise NotImplementedError(threshold)


@overload(_scale, strict=False)
def _scale_of(threshold: Any) -> Any:
    if threshold == types.uint64:
        return lambda threshold: _scale_64(threshold)
    return lambda threshold: _scale_32(threshold)


@compiled
def _scale_32(threshold: Any) -> Any:
    exponent: Any = min(max(np.int64(254) - np.int64(threshold >> np.uint32(23)), 67), 187)  # 2**-60 to 2**60
    return as_f32(np.uint32(np.uint32(exponent) << np.uint32(23)))


@compiled
def _scale_64(threshold: Any) -> Any:
    exponent: Any = min(max(np.int64(2046) - np.int64(threshold >> np.uint64(52)), 723), 1323)  # 2**-300 to 2**300
    return as_f64(np.uint64(np.uint64(exponent) << np.uint64(52)))


def _precise(current: Any, rec: Any, largest: Any) -> Any:
    """Give the largest deviation in binary64: it is one of those that are the largest when rounded to binary32."""
    raise NotImplementedError(current, rec, largest)


@overload(_precise, strict=False)
def _precise_of(current: Any, rec: Any, largest: Any) -> Any:
    del rec
    if largest == types.uint64:
        return lambda current, rec, largest: as_f64(largest)
    return lambda current, rec, largest: (
        _precise_32(current, rec, largest) if _rounded(current, rec, largest) else np.float64(as_f32(largest))
    )


@compiled
def _rounded(current: Any, rec: Any, largest: Any) -> Any:
    """Give how many of the largest deviations were rounded: of coarse dtypes many are equal, and none is."""
    found = np.uint32(0)
    for i in range(len(current)):
        value = _value(current[i])
        before = _value(rec[i])
        difference = value - before
        inexact = (difference + before != value) | (value - difference != before)
        found = np.uint32(found + np.uint32((_magnitude(difference) == largest) & inexact))
    return found


@compiled
def _precise_32(current: Any, rec: Any, largest: Any) -> Any:
    found = 0.0
    for i in range(len(current)):
        value = _value(current[i])
        before = _value(rec[i])
        if _magnitude(value - before) == largest:
            found = max(found, abs(np.float64(value) - np.float64(before)))
    return found


@compiled
def filter_run(current: Any, rec: Any, first: int, last: int, threshold: Any, places: Any, old: Any, count: int) -> Any:
    """Filter the elements first..last of a partition against its reconstruction, which is brought up to date.

    An element is kept if its bits differ and its deviation is above the threshold, is NaN, or is 0 (the other zero).

    Parameters
    ----------
    current, rec : ndarray of words
        The new values, and what a reader has; kept values are written to `rec`.
    threshold : unsigned integer
        Bits of the threshold, see :func:`threshold_bits`. 0 keeps every change of bits.
    places : ndarray of uint32
        Gets the numbers of the kept elements from index `count` on.
    old : ndarray of words
        Gets what `rec` had there.

    Returns
    -------
    tuple of int, float, float, float
        New count, largest deviation that is left, sum of the squares of what is left, and of the new values.
    """
    scale = _scale(threshold)
    mask = np.zeros(BLOCK, np.uint8)
    bits = np.zeros(BLOCK // 8, np.uint8)
    groups = bits.view(np.uint64)
    top = _zero(threshold)
    largest = 0.0
    missing = 0.0
    whole = 0.0
    for begin in range(first, last, BLOCK):
        end = min(begin + BLOCK, last)
        if end - begin < BLOCK:
            mask[:] = 0
        new = current[begin:end]
        have = rec[begin:end]
        rest, squares, total = _scan(new, have, threshold, scale, mask)
        missing += squares
        whole += total
        if rest >= top and rest:  # equal ones may differ in binary64
            top = rest
            largest = max(largest, _precise(new, have, rest))
        _pack_bits(mask, bits)
        for group in range(len(groups)):
            marks = groups[group]
            while marks:
                i = np.int64(64 * group) + np.int64(lowest_bit(marks))
                marks &= marks - np.uint64(1)
                places[count] = begin + i
                old[count] = have[i]
                have[i] = new[i]
                count += 1
    square = np.float64(scale) * np.float64(scale)
    return count, largest, missing / square, whole / square


@compiled
def sample_deviations(current: Any, rec: Any, first: int, last: int, phase: int, out: Any) -> None:
    """Fill `out` with deviations of the elements first..last, as bits of binary32: short runs, evenly spread.

    Parameters
    ----------
    phase : int
        Moves the runs: another number, other elements.
    out : ndarray of uint32
        At most as long as the elements are; 0 only where the bits are equal, NaN above all.
    """
    wanted = len(out)
    runs = (wanted + RUN - 1) // RUN
    stride = (last - first) / runs
    state = np.uint64(phase) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(1)
    for run in range(runs):
        state = state * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
        room = max(stride - RUN, 0.0)
        begin = first + int(run * stride + room * (np.float64(state >> np.uint64(11)) / 9007199254740992.0))
        begin = max(first, min(begin, last - RUN))
        for i in range(RUN * run, min(RUN * run + RUN, wanted)):
            at = begin + i - RUN * run
            same = current[at] == rec[at]
            deviation = np.float32(_value(current[at]) - _value(rec[at]))
            out[i] = np.uint32(0) if same else max(_magnitude(deviation), np.uint32(1))


@compiled
def revert(rec: Any, places: Any, old: Any) -> None:
    """Give the elements of a reconstruction back what they had before :func:`filter_run`."""
    for i in range(len(places)):
        rec[places[i]] = old[i]
