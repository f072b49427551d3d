"""How near a commit is to the training state, as its record says it (spec 6.6)."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

from deltastore.errors import Corruption
from deltastore.ondisk.fields import Fields
from deltastore.types import Json

EXACT_FIDELITY: Json = {"exact": True}
_LARGEST_BITS = 0x7F7F_FFFF
"""The largest finite binary32."""


@dataclass(frozen=True, slots=True)
class TensorFidelity:
    """What a bounded commit says of one tensor that is not exact.

    Attributes
    ----------
    tensor : int
        Its index in the layout.
    bound : float
        Largest deviation of any element from the training state, the smallest binary32 not below it.
    threshold : float
        Deviations above it were stored.
    kept : int
        Elements that this commit stored.
    missing, whole : float or None
        2-norms of the deviation and of the tensor; None where they are not finite.
    """

    tensor: int
    bound: float
    threshold: float
    kept: int
    missing: float | None
    whole: float | None


@dataclass(frozen=True, slots=True)
class CommitFidelity:
    """What a commit says of its tensors; those that it does not list are exact.

    Attributes
    ----------
    budget, floor : int
        Bytes that the commit was meant to take, and those that it needs in any case; 0 in exact commits.
    """

    tensors: tuple[TensorFidelity, ...] = ()
    budget: int = 0
    floor: int = 0

    @property
    def exact(self) -> bool:
        """Whether every element of every tensor is exact."""
        return not self.tensors

    @property
    def bounds(self) -> dict[int, float]:
        """The bound of each tensor that is not exact."""
        return {tensor.tensor: tensor.bound for tensor in self.tensors}


def encode_fidelity(fidelity: CommitFidelity) -> Json:
    """Return the member `fidelity` of a record."""
    if fidelity.exact:
        return EXACT_FIDELITY
    return {
        "exact": False,
        "budget": fidelity.budget,
        "floor": fidelity.floor,
        "tensors": [
            [t.tensor, float_bits(t.bound), float_bits(t.threshold), t.kept, _short(t.missing), _short(t.whole)]
            for t in fidelity.tensors
        ],
    }


def parse_fidelity(value: Json, where: str) -> CommitFidelity:
    """Return what a record says of its fidelity.

    Raises
    ------
    Corruption
        It does not follow the spec.
    """
    fields = Fields(value, where)
    if fields.raw("exact") is True:
        return CommitFidelity()
    if fields.raw("exact") is not False:
        raise fields.fault("exact", "true or false")
    tensors = tuple(_parse_tensor(item, fields) for item in fields.items("tensors"))
    numbers = [tensor.tensor for tensor in tensors]
    if not tensors or numbers != sorted(set(numbers)):
        raise fields.fault("tensors", "the tensors that are not exact, in the order of the layout")
    return CommitFidelity(tensors, fields.integer("budget"), fields.integer("floor"))


def _parse_tensor(value: Json, fields: Fields) -> TensorFidelity:
    if not isinstance(value, list) or len(value) != 6 or not all(type(item) is int and item >= 0 for item in value[:4]):
        raise fields.fault("tensors", "lists of [tensor, bound, threshold, kept, missing, whole]")
    number, bound, threshold, kept, missing, whole = value
    if not 0 < bound <= _LARGEST_BITS or threshold > _LARGEST_BITS:
        raise fields.fault("tensors", "bounds above 0 and thresholds, as the bits of finite binary32 numbers")
    return TensorFidelity(
        number, bits_float(bound), bits_float(threshold), kept, _norm(missing, fields), _norm(whole, fields)
    )


def _norm(value: Json, fields: Fields) -> float | None:
    if value is not None and (type(value) not in (int, float) or value < 0):
        raise fields.fault("tensors", "norms of 0 or more, or null")
    return None if value is None else float(value)


def float_bits(value: float) -> int:
    """Return the bits of a number that is a binary32."""
    bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return bits


def bits_float(bits: int) -> float:
    """Return the binary32 that has these bits."""
    value: float = struct.unpack("<f", struct.pack("<I", bits))[0]
    return value


def _short(value: float | None) -> float | None:
    """Return a norm with the digits that anybody looks at: records are part of the budget."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.4g}")


def check_tensors(fidelity: CommitFidelity, tensors: int, where: str) -> None:
    """Raise Corruption if a record speaks of tensors that its layout does not have."""
    if fidelity.tensors and fidelity.tensors[-1].tensor >= tensors:
        raise Corruption(
            f"{where}: the fidelity lists tensor {fidelity.tensors[-1].tensor} of {tensors}",
            where=where,
            expected=tensors,
            found=fidelity.tensors[-1].tensor,
        )
