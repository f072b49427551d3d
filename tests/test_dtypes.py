"""Logical dtypes and what stores them."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch

from deltastore.dtypes import LOGICAL, NATIVE, from_numpy, storage_dtype, word_dtype, words_per_element
from deltastore.errors import InvalidInput, UnsupportedFormat

# Typed in again from the format, not imported: the table may grow, a line of it may not change.
VERSION_1 = """
bool |u1 u1 1
float16 <f2 u2 1
float32 <f4 u4 1
float64 <f8 u8 1
int8 |i1 u1 1
int16 <i2 u2 1
int32 <i4 u4 1
int64 <i8 u8 1
uint8 |u1 u1 1
uint16 <u2 u2 1
uint32 <u4 u4 1
uint64 <u8 u8 1
complex64 <c8 u8 1
complex128 <c16 u8 2
bfloat16 <u2 u2 1
complex32 <u4 u4 1
float8_e4m3fn |u1 u1 1
float8_e5m2 |u1 u1 1
float8_e4m3fnuz |u1 u1 1
float8_e5m2fnuz |u1 u1 1
float8_e8m0fnu |u1 u1 1
float4_e2m1fn_x2 |u1 u1 1
"""
TABLE = [line.split() for line in VERSION_1.split("\n") if line]


@pytest.mark.parametrize(("name", "storage", "word", "words"), TABLE)
def test_the_table_of_version_1(name: str, storage: str, word: str, words: str) -> None:
    assert storage_dtype(name).str == storage
    assert word_dtype(name) == np.dtype(f"<{word}")
    assert words_per_element(name) == int(words)
    assert word_dtype(name).itemsize * int(words) == storage_dtype(name).itemsize


def test_the_table_is_complete() -> None:
    assert set(LOGICAL) == {row[0] for row in TABLE}


@pytest.mark.parametrize("name", [row[0] for row in TABLE])
def test_an_element_has_the_size_that_torch_gives_it(name: str) -> None:
    assert getattr(torch, name).itemsize == storage_dtype(name).itemsize


@pytest.mark.parametrize("name", ["float128", "", "Float32", "qint8"])
def test_an_unknown_name_is_named(name: str) -> None:
    with pytest.raises(UnsupportedFormat, match=f"dtype {name!r} is not known") as caught:
        storage_dtype(name)
    assert caught.value.dtype == name


@pytest.mark.parametrize("name", sorted(NATIVE))
@pytest.mark.parametrize("order", ["<", ">", "="])
def test_numpy_dtypes_in_any_byte_order(name: str, order: Literal["<", ">", "="]) -> None:
    assert from_numpy(NATIVE[name].newbyteorder(order)) == name


def test_both_kinds_of_long_are_int64() -> None:
    assert from_numpy(np.dtype(np.longlong)) == from_numpy(np.dtype(np.int64)) == "int64"


@pytest.mark.parametrize("dtype", [object, "U3", "S3", "V4", "M8[s]", "m8[s]", np.longdouble, np.clongdouble, "f4,i4"])
def test_other_numpy_dtypes_are_refused(dtype: object) -> None:
    with pytest.raises(InvalidInput, match="cannot be stored"):
        from_numpy(np.dtype(dtype))  # type: ignore[call-overload]


def test_a_new_style_dtype_is_refused() -> None:
    with pytest.raises(InvalidInput, match="StringDType"):
        from_numpy(np.dtypes.StringDType())
