"""Checked access to the members of untrusted JSON objects."""

from __future__ import annotations

from reprlib import Repr
from typing import Any

from deltastore.errors import Corruption
from deltastore.ondisk.limits import MAX_NUMBER
from deltastore.types import Json

_repr = Repr()
_repr.maxstring = _repr.maxlong = _repr.maxother = 80


def _show(value: Json) -> str:
    # Not plain repr: what a stranger wrote may be nested deeper than that can go.
    return _repr.repr(value)[:80]


class Fields:
    """Takes members out of one JSON object; every fault is Corruption that names the member.

    Parameters
    ----------
    value : Json
        What should be an object.
    where : str
        File and entry, for the error.
    """

    def __init__(self, value: Json, where: str) -> None:
        if not isinstance(value, dict):
            raise Corruption(f"{where}: expected an object, found {type(value).__name__}", where=where)
        self._value: dict[str, Any] = value
        self.where = where

    def fault(self, name: str, expected: str) -> Corruption:
        """Return the error for a member that is not as expected."""
        found = _show(self._value.get(name))
        return Corruption(
            f"{self.where}: member {name!r} is {found}, expected {expected}",
            where=self.where,
            expected=expected,
            found=found,
        )

    def integer(self, name: str, top: int = MAX_NUMBER) -> int:
        """Return an integer of 0..top."""
        value = self._value.get(name)
        if type(value) is not int or not 0 <= value <= top:
            raise self.fault(name, f"an integer of 0..{top}")
        return value

    def text(self, name: str) -> str:
        """Return a string."""
        value = self._value.get(name)
        if not isinstance(value, str):
            raise self.fault(name, "a string")
        return value

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        """Return one of the given strings."""
        value = self._value.get(name)
        if value not in choices:
            raise self.fault(name, "one of " + ", ".join(choices))
        return str(value)

    def items(self, name: str) -> list[Any]:
        """Return a list."""
        value = self._value.get(name)
        if not isinstance(value, list):
            raise self.fault(name, "a list")
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        """Return an object."""
        value = self._value.get(name)
        if not isinstance(value, dict):
            raise self.fault(name, "an object")
        return value

    def numbers(self, name: str, count: int | None = None) -> list[int]:
        """Return a list of integers of 0..MAX_NUMBER."""
        values = self.items(name)
        if (count is not None and len(values) != count) or not all(
            type(v) is int and 0 <= v <= MAX_NUMBER for v in values
        ):
            raise self.fault(name, f"{'a list' if count is None else count} of integers")
        return values

    def has(self, name: str) -> bool:
        """Return whether the member is there and not null."""
        return self._value.get(name) is not None

    def nullable(self, name: str) -> bool:
        """Return whether a member, which must be there, is not null."""
        if name not in self._value:
            raise self.fault(name, "to be there, null where it says nothing")
        return self.has(name)

    def raw(self, name: str) -> Json:
        """Return a member as it is, None where it is absent."""
        return self._value.get(name)
