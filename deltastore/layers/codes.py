"""Dense low-bit codes: a small integer for every element, a logarithmic scale for every block (spec 9.9)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from deltastore.errors import Corruption

BIT: Final = "bit"
TERNARY: Final = "ternary"
PAIR: Final = "pair"


LANE_BYTES: Final = 64
"""Bytes of a group; byte j holds the elements j, 64 + j, 128 + j, ... of the group, the first in the lowest digit."""


@dataclass(frozen=True)
class Code:
    """How integers stand in bytes.

    Attributes
    ----------
    values : tuple of int
        What each digit stands for.
    digits : int
        Digits of a byte.
    """

    name: str
    values: tuple[int, ...]
    digits: int

    @property
    def group(self) -> int:
        """Elements of a group of bytes."""
        return LANE_BYTES * self.digits

    def packed_length(self, elements: int) -> int:
        """Return how many bytes the integers of so many elements take: whole groups."""
        return -(-elements // self.group) * LANE_BYTES


CODES: Final = {
    code.name: code for code in (Code(BIT, (-1, 1), 8), Code(TERNARY, (0, 1, -1), 5), Code(PAIR, (-3, 3, -10, 10), 4))
}

_MANTISSAS = """
000000 0164D2 02CD87 043A29 05AAC3 071F62 08980F 0A14D5 0B95C2 0D1ADF 0EA43A 1031DC 11C3D3 135A2B 14F4F0 16942D
1837F0 19E046 1B8D3A 1D3EDA 1EF532 20B051 227043 243516 25FED7 27CD94 29A15B 2B7A3A 2D583F 2F3B79 3123F6 3311C4
3504F3 36FD92 38FBAF 3AFF5B 3D08A4 3F179A 412C4D 4346CD 45672A 478D75 49B9BE 4BEC15 4E248C 506334 52A81E 54F35B
5744FD 599D16 5BFBB8 5E60F5 60CCDF 633F89 65B907 68396A 6AC0C7 6D4F30 6FE4BA 728177 75257D 77D0DF 7A83B3 7D3E0C
"""
_STEPS = 64
SCALE_STEPS = 8
"""Steps of a scale byte for each power of two."""
FACTOR_STEPS = 64
"""The same for a factor byte."""
SCALE_BIAS = 16
"""Scale byte 1 is 2 ** -16."""


def _powers() -> np.ndarray:
    """Return 2 ** (k / 64) for k of 0..63, rounded to binary32: constants, for no machine's pow need agree."""
    bits = np.array([int(text, 16) for text in _MANTISSAS.split()], np.uint32)
    return (bits + np.uint32(0x3F80_0000)).view(np.float32)


def _scales() -> np.ndarray:
    codes = np.arange(255)
    mantissas = _powers()[codes % SCALE_STEPS * (_STEPS // SCALE_STEPS)]
    return np.append(np.zeros(1, np.float32), np.ldexp(mantissas, codes // SCALE_STEPS - SCALE_BIAS))


def _factors() -> np.ndarray:
    codes = np.arange(-255, 256)
    factors: np.ndarray = np.ldexp(_powers()[codes % FACTOR_STEPS], codes // FACTOR_STEPS)
    return factors


SCALES: Final[np.ndarray] = _scales()
"""Scale byte -> scale, binary32: 0, then 2 ** ((c - 1) / 8 - 16)."""
FACTORS: Final[np.ndarray] = _factors()
"""255 + (plus or minus factor byte) -> 2 ** (that / 64), binary32."""


def unpack(code: str, packed: np.ndarray, where: str) -> np.ndarray:
    """Return the integers of whole groups of bytes, int8.

    Raises
    ------
    Corruption
        A byte is none of the code.
    """
    known = CODES[code]
    limit = len(known.values) ** known.digits
    if len(packed) and int(packed.max()) >= limit:
        raise Corruption(f"{where}: a byte is {int(packed.max())}, bytes of {code} codes are below {limit}")
    places = np.array([len(known.values) ** place for place in range(known.digits)], np.uint16)[None, :, None]
    digits = packed.reshape(-1, 1, LANE_BYTES) // places % len(known.values)
    return np.array(known.values, np.int8)[digits].reshape(-1)


def pack(code: str, integers: np.ndarray) -> np.ndarray:
    """Return the bytes of integers that the code has; places behind the last one hold the first digit."""
    known = CODES[code]
    digit = np.zeros(256, np.uint8)
    digit[np.array(known.values, np.int8).view(np.uint8)] = np.arange(len(known.values))
    padded = np.zeros(known.packed_length(len(integers)) * known.digits, np.uint8)
    padded[: len(integers)] = digit[integers.view(np.uint8)]
    places = np.array([len(known.values) ** place for place in range(known.digits)], np.uint8)[None, :, None]
    packed: np.ndarray = (padded.reshape(-1, known.digits, LANE_BYTES) * places).sum(axis=1, dtype=np.uint8).reshape(-1)
    return packed
