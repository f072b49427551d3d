"""The importance filter element by element, without haste: what the kernels and the commits are compared with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

WORDS = {"float32": "<u4", "float64": "<u8", "bfloat16": "<u2", "float16": "<u2"}
"""Logical dtype -> words of its size."""
FORMATS = {"float32": (8, 23), "float64": (11, 52), "bfloat16": (8, 7), "float16": (5, 10)}
"""Logical dtype -> bits of the exponent, bits of the mantissa."""
LARGEST = float(np.finfo(np.float32).max)


def specials(dtype: str) -> np.ndarray:
    """Return the words of zeros, subnormals, ones, the largest, infinities and NaNs of several payloads."""
    exponent, mantissa = FORMATS[dtype]
    one = ((1 << (exponent - 1)) - 1) << mantissa
    infinite = ((1 << exponent) - 1) << mantissa
    quiet = infinite + (1 << (mantissa - 1))
    finite = [0, 1, (1 << mantissa) - 1, 1 << mantissa, one, one + 1, one + 3, infinite - 2, infinite - 1]
    magnitudes = [*finite, infinite, infinite + 1, quiet, quiet + 5]
    sign = 1 << (exponent + mantissa)
    return np.array([word | negative for word in magnitudes for negative in (0, sign)], WORDS[dtype])


def to_words(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return floats as words; bfloat16 is cut off, not rounded."""
    with np.errstate(all="ignore"):
        if dtype == "bfloat16":
            return (values.astype("<f4").view("<u4") >> np.uint32(16)).astype("<u2")
        return values.astype(dtype).view(WORDS[dtype])


def to_values(words: np.ndarray, dtype: str) -> np.ndarray:
    """Return words as numbers in the width in which they are compared: binary32, binary64 for float64."""
    with np.errstate(all="ignore"):
        if dtype == "bfloat16":
            return (words.astype("<u4") << np.uint32(16)).view("<f4")
        values = words.view(dtype)
        return values.astype("<f4") if dtype == "float16" else values


def wide_deviations(current: np.ndarray, rec: np.ndarray, dtype: str) -> np.ndarray:
    """Return |a - b| in binary64; 0 where the bits are equal (spec 6.6)."""
    with np.errstate(all="ignore"):
        wide = np.abs(to_values(current, dtype).astype("<f8") - to_values(rec, dtype).astype("<f8"))
    return np.where(current == rec, 0.0, wide)


def narrow_deviations(current: np.ndarray, rec: np.ndarray, dtype: str) -> np.ndarray:
    """Return |a - b| in the width in which it is compared with the threshold."""
    with np.errstate(all="ignore"):
        return np.asarray(np.abs(to_values(current, dtype) - to_values(rec, dtype)))


def round_up(deviation: float) -> float:
    """Return the smallest binary32 that is not below a number."""
    with np.errstate(all="ignore"):
        near = np.float32(deviation)
        return float(near) if float(near) >= deviation else float(np.nextafter(near, np.float32(np.inf)))


@dataclass(frozen=True)
class Filtered:
    """What the filter makes of a range."""

    places: np.ndarray
    old: np.ndarray
    rec: np.ndarray
    largest: float
    missing: float
    whole: float


def filtered(current: np.ndarray, rec: np.ndarray, first: int, last: int, threshold: float, dtype: str) -> Filtered:
    """Keep the elements first..last that differ and deviate by more than the threshold, or by nothing comparable."""
    narrow = narrow_deviations(current, rec, dtype)
    # The threshold has the width of the deviations: 1e-45 is the smallest subnormal of binary32, 1.4e-45.
    limit = np.float64(threshold if dtype == "float64" else np.float32(threshold))
    waits = (narrow > 0) & (narrow <= limit)
    inside = np.zeros(len(current), bool)
    inside[first:last] = True
    places = np.flatnonzero(inside & (current != rec) & ~waits)
    after = rec.copy()
    after[places] = current[places]
    rest = wide_deviations(current, after, dtype)[first:last]
    with np.errstate(all="ignore"):
        missing = float(np.sum(np.where(np.isfinite(rest), rest, 0.0) ** 2))
        whole = float(np.sum(to_values(current, dtype)[first:last].astype("<f8") ** 2))
    return Filtered(places, rec[places], after, float(rest.max(initial=0.0)), missing, whole)
