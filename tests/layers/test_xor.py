"""Xor layers: bits against a prediction, for every dtype."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltastore.dtypes import LOGICAL, storage_dtype, word_dtype, words_per_element
from deltastore.layers.xor import apply_xor, encode_xor, words


@given(st.sampled_from(sorted(LOGICAL)), st.integers(1, 9), st.data())
def test_an_xor_turns_the_prediction_into_the_new_values(dtype: str, length: int, data: st.DataObject) -> None:
    size = length * storage_dtype(dtype).itemsize
    octets = st.binary(min_size=size, max_size=size)
    current, rec = (np.frombuffer(data.draw(octets), storage_dtype(dtype)).copy() for _ in range(2))
    before = rec.copy()
    scratch = np.full(size + data.draw(st.integers(0, 40)), 0xAA, np.uint8)
    layer = encode_xor(current, rec, dtype, scratch)
    assert (layer.dtype, len(layer)) == (word_dtype(dtype), length * words_per_element(dtype))
    assert np.shares_memory(layer, scratch)
    assert rec.tobytes() == before.tobytes()
    apply_xor(rec, layer, dtype)
    assert rec.tobytes() == current.tobytes()
    assert not words(encode_xor(current, rec, dtype, scratch), dtype="uint64" if size % 8 == 0 else "uint8").any()


def test_an_element_of_sixteen_bytes_is_two_words() -> None:
    values = np.array([1 + 2j, 3 - 0j], "<c16")
    assert words(values, "complex128").dtype == np.dtype("<u8")
    assert len(words(values, "complex128")) == 4


def test_the_payload_of_a_nan_and_the_sign_of_zero_come_back() -> None:
    current = np.array([0x7FF0000000000001, 0x8000000000000000], "<u8").view("<f8")
    rec = np.zeros(2, "<f8")
    apply_xor(rec, encode_xor(current, rec, "float64", np.empty(16, np.uint8)), "float64")
    assert rec.view("<u8").tolist() == [0x7FF0000000000001, 0x8000000000000000]


def test_a_layer_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="broadcast"):
        apply_xor(np.zeros(4, "<f4"), np.zeros(5, "<u4"), "float32")
