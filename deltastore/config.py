"""What users may set, validated once."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deltastore.errors import InvalidInput


def as_integer(value: Any, name: str) -> int:
    """Return a Python, numpy or torch integer as an int.

    Raises
    ------
    InvalidInput
        A bool, a float, or no number at all.
    """
    if isinstance(value, bool):
        raise InvalidInput(f"{name} is {value!r}, expected an integer")
    try:
        return operator.index(value)
    except (TypeError, ValueError, RuntimeError):
        raise InvalidInput(f"{name} is {value!r}, expected an integer") from None


def check_timeout(timeout: Any) -> None:
    """Raise InvalidInput unless a timeout is None or a number of seconds."""
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout >= 0):
        raise InvalidInput(f"timeout is {timeout!r}, expected seconds, or None to wait for ever")


@dataclass(frozen=True, slots=True)
class Retention:
    """Which commits are kept: the last ones, and those of round steps; tagged ones always."""

    keep_last: int
    keep_every: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("keep_last", self.keep_last), ("keep_every", self.keep_every)):
            if (value is not None or name == "keep_last") and (type(value) is not int or value < 1):
                raise InvalidInput(f"{name} is {value!r}, expected an integer of 1 or more")

    def keeps_step(self, step: int) -> bool:
        """Return whether a commit of this step is kept for ever."""
        return self.keep_every is not None and step % self.keep_every == 0


def parse_retention(value: Mapping[str, Any] | Retention | None) -> Retention | None:
    """Return the retention that a user wrote as a dict."""
    if value is None or isinstance(value, Retention):
        return value
    if not isinstance(value, Mapping):
        raise InvalidInput(f"retention is {value!r}, expected a dict such as {{'keep_last': 10, 'keep_every': 100}}")
    unknown = set(value) - {"keep_last", "keep_every"}
    if unknown:
        raise InvalidInput(
            f"retention has unknown members {sorted(map(str, unknown))}; known are keep_last and keep_every"
        )
    if not value:
        raise InvalidInput("retention is empty; None keeps everything, {'keep_last': n} the last n commits")
    return Retention(value.get("keep_last", 1), value.get("keep_every"))


@dataclass(frozen=True, slots=True)
class WriterOptions:
    """How a store writes."""

    codec: str = "auto"
    """"auto": full layers of forward partitions raw, of backward ones compressed; "raw" or "blosc": all full layers."""
    max_pending: int = 2
    """States that may be in memory beside the reconstruction; `commit` waits while there are as many."""
    give_up_seconds: float = 3.0
    """How long a pack that cannot be written is tried again."""
    wait_for_space: bool = False
    """Try for ever instead (on_limit="wait" with a lag limit unset)."""

    def __post_init__(self) -> None:
        if self.codec not in ("auto", "raw", "blosc"):
            raise InvalidInput(f"codec is {self.codec!r}, expected 'auto', 'raw' or 'blosc'")
        if type(self.max_pending) is not int or self.max_pending < 1:
            raise InvalidInput(f"max_pending is {self.max_pending!r}, expected an integer of 1 or more")


@dataclass(frozen=True, slots=True)
class TierLimits:
    """How far the remote tiers may be behind, and what happens beyond that."""

    max_local_bytes: int | None = None
    max_lag_steps: int | None = None
    max_lag_seconds: float | None = None
    wait: bool = True
    """Let the training wait; False: the commit fails."""

    def __post_init__(self) -> None:
        for name in ("max_local_bytes", "max_lag_steps"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise InvalidInput(f"{name} is {value!r}, expected an integer of 1 or more")
