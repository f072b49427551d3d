"""Integers of codes to bytes and back, over memory, as :mod:`deltastore.layers.codes` does it (spec 9.10)."""

from __future__ import annotations

from typing import Any

import numpy as np

from deltastore.layers.codes import LANE_BYTES
from deltastore.layers.compiled import compiled


@compiled
def unpack(base: int, packed: Any, integers: Any) -> bool:
    """Fill in the integers of whole groups of bytes; give whether every byte was one of the code.

    Parameters
    ----------
    base : {2, 3, 4}
        Digits of the code: bit, ternary, pair.
    """
    digits = 8 if base == 2 else 5 if base == 3 else 4
    largest = np.uint8(0)
    for i in range(len(packed)):
        largest = max(largest, packed[i])
    if base == 3 and largest >= 243:
        return False
    rest = np.empty(LANE_BYTES, np.uint8)
    for group in range(len(packed) // LANE_BYTES):
        rest[:] = packed[group * LANE_BYTES : (group + 1) * LANE_BYTES]
        for digit in range(digits):
            at = (group * digits + digit) * LANE_BYTES
            target = integers[at : at + LANE_BYTES]
            if base == 2:
                _unpack_bit(rest, target)
            elif base == 3:
                _unpack_ternary(rest, target)
            else:
                _unpack_pair(rest, target)
    return True


@compiled
def _unpack_bit(rest: Any, integers: Any) -> None:
    for j in range(LANE_BYTES):
        byte = np.uint32(rest[j])
        integers[j] = np.int8(np.uint32(np.uint32(np.uint32(2) * np.uint32(byte & np.uint32(1))) - np.uint32(1)))
        rest[j] = np.uint8(byte >> np.uint32(1))


@compiled
def _unpack_ternary(rest: Any, integers: Any) -> None:
    for j in range(LANE_BYTES):
        byte = np.uint32(rest[j])
        others = np.uint32(byte // np.uint32(3))
        digit = np.uint32(byte - np.uint32(np.uint32(3) * others))
        integers[j] = np.int8(np.uint32(digit - np.uint32(np.uint32(3) * np.uint32(digit >> np.uint32(1)))))
        rest[j] = np.uint8(others)


@compiled
def _unpack_pair(rest: Any, integers: Any) -> None:
    for j in range(LANE_BYTES):
        byte = np.uint32(rest[j])
        sign = np.uint32(np.uint32(np.uint32(2) * np.uint32(byte & np.uint32(1))) - np.uint32(1))
        size = np.uint32(
            np.uint32(3) + np.uint32(np.uint32(7) * np.uint32(np.uint32(byte >> np.uint32(1)) & np.uint32(1)))
        )
        integers[j] = np.int8(np.uint32(sign * size))
        rest[j] = np.uint8(byte >> np.uint32(2))


@compiled
def pack(base: int, integers: Any, packed: Any) -> None:
    """Fill in whole groups of bytes; see :func:`unpack`."""
    digits = 8 if base == 2 else 5 if base == 3 else 4
    for group in range(len(packed) // LANE_BYTES):
        for j in range(LANE_BYTES):
            byte = 0
            power = 1
            for digit in range(digits):
                at = (group * digits + digit) * LANE_BYTES + j
                if at < len(integers):
                    value = integers[at]
                    if base == 2:
                        number = 1 if value > 0 else 0
                    elif base == 3:
                        number = 2 if value < 0 else 1 if value > 0 else 0
                    else:
                        number = (1 if value > 0 else 0) + (2 if abs(value) > 3 else 0)
                    byte += power * number
                power *= base
            packed[group * LANE_BYTES + j] = byte
