"""Commits as users see them, and the handles of commits that are still written."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from typing import Protocol

from deltastore.config import check_timeout
from deltastore.errors import Conflict, DeltaStoreError, Internal, InvalidInput, Timeout
from deltastore.types import Json
from deltastore.window import Window


@dataclass(frozen=True, slots=True)
class Commit:
    """One version of the state at one step."""

    id: str
    step: int
    parent: str | None
    epoch: int
    kind: str
    """"base" or "delta"."""
    bytes: int
    """Stored bytes, everything included."""
    exact: bool
    created: str
    """UTC, ISO 8601."""
    tags: tuple[str, ...]
    metrics: dict[str, Json]


@dataclass(frozen=True, slots=True)
class Work:
    """What a commit took in the background.

    Attributes
    ----------
    queue_seconds : float
        From its submission until it was its turn, and its window was over.
    encode_seconds : float
        What became of its state: layers, or chunks that are compressed while they are written.
    write_seconds : float
        Until it was durable.
    predictions : dict of str to float
        Share of the state's bytes that each prediction was used for; empty in a base.
    """

    queue_seconds: float
    encode_seconds: float
    write_seconds: float
    predictions: dict[str, float]


HELD_SECONDS = "deltastore.held_seconds"
"""Metric of a commit that a limit of the further tiers kept waiting before its state was taken."""
HELD_BY = "deltastore.held_by"
"""Which limit that was."""


class Failure:
    """An error of the background, raised once to whoever asks first and then to those who hold its handles."""

    def __init__(self, error: DeltaStoreError) -> None:
        self.error = error
        self.seen = False


class FurtherTiers(Protocol):
    """What is known of the tiers behind the store's own root."""

    def has(self, tier: str, commit: str | None) -> bool:
        """Return whether a tier has a commit and its chain."""

    def is_broken(self, commit: str | None) -> bool:
        """Return whether a commit can never be brought there, since it or its chain is damaged at the root."""

    def wait(self, tier: str, commit: str, timeout: float | None) -> None:
        """Wait until it does."""


class Handle:
    """What `commit` returns at once; the commit itself is written in the background.

    Attributes
    ----------
    id : str or None
        Id of the commit; None where the step is not committed.
    step : int
        The step that was given.
    skipped : bool
        The step was left out (`interval`, pressure, or changed while it was taken): `wait` then waits for the next
        commit that follows it.
    work : Work or None
        What it took, once it is acknowledged; None where nothing had to be written.
    """

    def __init__(
        self,
        step: int,
        commit_id: str | None,
        tiers: tuple[str, ...],
        *,
        skipped: bool = False,
        window: Window | None = None,
        further: FurtherTiers | None = None,
    ) -> None:
        self.id = commit_id
        self.step = step
        self.skipped = skipped
        self.work: Work | None = None
        self._tiers = tiers
        self._pid = os.getpid()
        self._settled = threading.Event()
        self._commit: Commit | None = None
        self._failure: Failure | None = None
        self._next: Handle | None = None
        self._window = window
        self._further = further

    @property
    def error(self) -> DeltaStoreError | None:
        """Why the commit failed; None while it is written and after it succeeded."""
        if self._next is not None:
            return self._next.error
        return None if self._failure is None else self._failure.error

    def done(self, tier: str | None = None) -> bool:
        """Return whether the commit is acknowledged by a tier."""
        self._check_tier(tier)
        if self._next is not None:
            return self._next.done(tier)
        is_here = self._commit is not None
        if tier in (None, self._tiers[0]) or self._further is None:
            return is_here
        return is_here and self._further.has(tier, self.id)

    def wait(self, tier: str | None = None, timeout: float | None = None) -> Commit:
        """Wait until a tier has acknowledged the commit, and return it.

        Parameters
        ----------
        tier : str, optional
            "memory", "local" or "remote" ("remote:1", ...): then the commit and its chain are there, read back and
            verified; it is pushed at once. The store's own root by default.
        timeout : float, optional
            Seconds.

        Raises
        ------
        Timeout
            The time is over; the commit is still being written.
        DeltaStoreError
            Whatever made the commit fail.
        """
        self._check_tier(tier)
        check_timeout(timeout)
        if os.getpid() != self._pid:
            raise Conflict(
                f"step {self.step}: its commit belongs to process {self._pid}, from which this one was forked",
                pid=self._pid,
            )
        end = None if timeout is None else time.monotonic() + timeout
        if not self._settled.wait(timeout):
            raise Timeout(
                f"step {self.step}: not acknowledged within {timeout} s; it is still being written",
                step=self.step,
                timeout=timeout,
            )
        if self._next is not None:
            return self._next.wait(tier, None if end is None else max(0.0, end - time.monotonic()))
        if self._failure is not None:
            self._failure.seen = True
            raise self._failure.error
        if self._commit is None:
            raise Internal(f"step {self.step}: settled without a commit or an error")
        if tier not in (None, self._tiers[0]) and self._further is not None:
            self._further.wait(tier, self._commit.id, None if end is None else max(0.0, end - time.monotonic()))
        return self._commit

    def __repr__(self) -> str:
        state = "skipped" if self.skipped else "failed" if self.error else "acknowledged" if self.done() else "pending"
        return f"Handle(step={self.step}, id={self.id!r}, {state})"

    def _check_tier(self, tier: str | None) -> None:
        if tier is not None and tier not in self._tiers:
            raise InvalidInput(f"the store has no tier {tier!r}; it has {', '.join(self._tiers)}", tier=tier)

    def _succeed(self, commit: Commit, work: Work | None = None) -> None:
        self.id = commit.id
        self.work = work
        self._commit = commit
        self._settled.set()

    def _fail(self, failure: Failure) -> None:
        self._failure = failure
        self._settled.set()

    def _skip(self) -> None:
        """Say that the commit will not come: :meth:`_follow` tells which one comes in its place."""
        self.id = None
        self.skipped = True

    def _follow(self, following: Handle) -> None:
        self._next = following
        self._settled.set()
