"""Logical dtypes (what the training sees) and the numpy dtypes that store them (spec: dtypes).

A logical dtype is named as torch names it. numpy has no bfloat16, no float8 and no half-precision complex: those are
stored as unsigned integers of the same size, bit for bit. numpy only: a machine without torch checks stores too.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from deltastore.errors import InvalidInput, UnsupportedFormat

_NATIVE = {
    "bool": "|b1",
    "float16": "<f2",
    "float32": "<f4",
    "float64": "<f8",
    "int8": "|i1",
    "int16": "<i2",
    "int32": "<i4",
    "int64": "<i8",
    "uint8": "|u1",
    "uint16": "<u2",
    "uint32": "<u4",
    "uint64": "<u8",
    "complex64": "<c8",
    "complex128": "<c16",
}

_BITS = {
    "bool": "|u1",
    "bfloat16": "<u2",
    "complex32": "<u4",
    "float8_e4m3fn": "|u1",
    "float8_e5m2": "|u1",
    "float8_e4m3fnuz": "|u1",
    "float8_e5m2fnuz": "|u1",
    "float8_e8m0fnu": "|u1",
    "float4_e2m1fn_x2": "|u1",
}

LOGICAL: Mapping[str, np.dtype] = MappingProxyType({name: np.dtype(code) for name, code in (_NATIVE | _BITS).items()})
"""Logical dtype -> little-endian storage dtype, every one that format version 1 knows."""

NATIVE: Mapping[str, np.dtype] = MappingProxyType({name: np.dtype(code) for name, code in _NATIVE.items()})
"""Logical dtypes that numpy has itself -> the dtype of such an array (bool as bool)."""

_BY_KIND = {(dtype.kind, dtype.itemsize): name for name, dtype in NATIVE.items()}
_OWN_CHARACTERS = frozenset("?" + np.typecodes["AllInteger"] + np.typecodes["AllFloat"])
_WORD_BYTES = 8


def storage_dtype(name: str) -> np.dtype:
    """Return the little-endian numpy dtype that stores a logical dtype.

    Raises
    ------
    UnsupportedFormat
        This version does not know the name.
    """
    try:
        return LOGICAL[name]
    except (KeyError, TypeError):
        known = ", ".join(sorted(LOGICAL))
        raise UnsupportedFormat(
            f"dtype {name!r} is not known to this version of deltastore; it knows {known}", dtype=name
        ) from None


def word_dtype(name: str) -> np.dtype:
    """Return the unsigned integer dtype in which elements are compared and xored.

    It has the size of an element, 8 bytes at most: see :func:`words_per_element`.
    """
    return np.dtype(f"<u{min(storage_dtype(name).itemsize, _WORD_BYTES)}")


def words_per_element(name: str) -> int:
    """Return how many words of :func:`word_dtype` one element has: 2 for complex128, else 1."""
    return max(1, storage_dtype(name).itemsize // _WORD_BYTES)


def from_numpy(dtype: np.dtype) -> str:
    """Return the logical dtype of a numpy array or scalar, in whatever byte order its elements are.

    Raises
    ------
    InvalidInput
        Objects, strings, structures, dates, extended precision, and dtypes that other packages registered.
    """
    name = _BY_KIND.get((dtype.kind, dtype.itemsize))
    # A dtype of another package may claim numpy's kind and size for a format of its own, but not its character.
    if name is None or dtype.char not in _OWN_CHARACTERS:
        raise InvalidInput(
            f"numpy dtype {dtype} cannot be stored; convert it to one of {', '.join(sorted(NATIVE))}", dtype=str(dtype)
        )
    return name
