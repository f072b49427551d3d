"""The time between two optimizer steps, in which a staged state is copied while the training goes on (spec 10.7)."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deltastore.layout import FORWARD, Partition
from deltastore.parallel import run_beside


@dataclass(frozen=True, slots=True)
class Part:
    """What is still to be copied of one partition."""

    partition: Partition
    copy: Callable[[], None]


class Window:
    """Copies the rest of a staged state: small partitions at once, large ones from the backward pass on.

    Parameters
    ----------
    parts : sequence of Part
        What is to be copied; the window gives the order.
    is_whole : callable
        Returns, once everything is copied, whether the state is still the one of the beginning.
    patience_seconds : float
        How long :meth:`wait` leaves the large partitions to the backward pass.
    """

    def __init__(self, parts: Sequence[Part], is_whole: Callable[[], bool], patience_seconds: float = 0.0) -> None:
        self._state = threading.Condition()
        ordered = sorted(parts, key=lambda part: (part.partition.window != FORWARD, part.partition.bytes))
        self._small = deque(part for part in ordered if part.partition.window == FORWARD)
        self._large = deque(part for part in ordered if part.partition.window != FORWARD)
        self._is_whole = is_whole
        self._patience_seconds = patience_seconds
        self._is_released = not self._large
        self._in_work = 0
        self._error: BaseException | None = None
        self._whole: bool | None = None

    def open(self) -> None:
        """Begin with the small partitions, beside the caller."""
        run_beside(self._run)

    def release(self) -> None:
        """The backward pass has begun: go on with the large partitions."""
        with self._state:
            if self._is_released:
                return
            self._is_released = True
            self._state.notify_all()
        run_beside(self._run)

    def finish(self) -> bool:
        """Copy in this thread what nobody has begun, wait for the rest, and return whether the state stayed as it was.

        An error of a copy is no change: :meth:`wait` raises it, for the commit fails, and the training goes on.
        """
        with self._state:
            self._is_released = True
        self._run()
        with self._state:
            self._state.wait_for(lambda: self._whole is not None)
            return self._error is not None or bool(self._whole)

    def wait(self) -> bool:
        """Wait for all copies, and return whether the state stayed as it was.

        Raises
        ------
        BaseException
            What a copy raised.
        """
        with self._state:
            self._state.wait_for(lambda: self._is_released, self._patience_seconds)
        self.release()
        with self._state:
            self._state.wait_for(lambda: self._whole is not None)
            if self._error is not None:
                raise self._error
            return bool(self._whole)

    def _run(self) -> None:
        while True:
            with self._state:
                part = self._next()
                if part is None:
                    return
                self._in_work += 1
            try:
                part.copy()
            except BaseException as error:
                self._error = error
                if not isinstance(error, Exception):  # Ctrl-C is the caller's
                    raise
            finally:
                self._settle()

    def _next(self) -> Part | None:
        if self._small:
            return self._small.popleft()
        return self._large.popleft() if self._large and self._is_released else None

    def _settle(self) -> None:
        with self._state:
            self._in_work -= 1
            if self._small or self._large or self._in_work:
                return
            self._whole = self._error is None and self._is_whole()
            self._state.notify_all()
