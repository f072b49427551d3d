"""Which steps are committed: every so many, or as often as the training can bear (design 6)."""

from __future__ import annotations

import math
import statistics
from collections import deque

from deltastore.errors import InvalidInput

AUTO = "auto"
OVERHEAD = 0.035
"""Share of the training's time that commits may take where the user names none: CheckFreq's figure."""
QUIET = 8
"""Iterations of which the usual length is taken: those that began while nothing was written."""
FIRST_QUIET = 3
"""So many of them are waited for before a commit is judged."""
COMMITS = 5
"""Commits of which the usual cost is taken: of a few, one is a base, or an evaluation falls beside it."""
REFRESH = 50
"""After so many commits without a quiet iteration, the next one waits for one."""
LARGEST = 10_000


class FixedInterval:
    """Commits the steps that are multiples of a number."""

    def __init__(self, interval: int) -> None:
        self.interval = interval

    def is_due(self, step: int) -> bool:
        """Return whether a step is committed."""
        return step % self.interval == 0

    def begin(self, now: float) -> None:
        """A step of the training is over."""

    def end(self, now: float, *, committed: bool, is_writing: bool) -> None:
        """The training goes on."""


class AutoInterval:
    """Commits as often as it costs the training no more than a share of its time.

    What a commit costs is measured: the time within :meth:`Checkpointer.step`, and by how much iterations during which
    something is written are longer than quiet ones. The interval follows it in both directions.

    Parameters
    ----------
    overhead : float
        Share of the training's time, above 0.

    Attributes
    ----------
    interval : int
        Iterations from one commit to the next, at present.
    """

    def __init__(self, overhead: float) -> None:
        self.interval = 1
        self._overhead = overhead
        self._quiet: deque[float] = deque(maxlen=QUIET)
        self._costs: deque[float] = deque(maxlen=COMMITS)
        self._since = 0
        """Iterations since the newest commit."""
        self._unrefreshed = 0
        """Commits since the newest quiet iteration."""
        self._commits = 0
        self._stall = self._busy_seconds = 0.0
        self._busy_count = 0
        """What the newest commit has cost so far."""
        self._began = 0.0
        self._iteration_began: float | None = None
        self._is_writing = True

    def is_due(self, _step: int) -> bool:
        """Return whether a step is committed."""
        # Put off until an iteration was seen that nothing disturbs: without it nothing can be judged.
        is_unsure = len(self._quiet) < FIRST_QUIET or self._unrefreshed >= REFRESH
        return not self._commits or (self._since >= self.interval and not is_unsure)

    def begin(self, now: float) -> None:
        """A step of the training is over: its length is known.

        Parameters
        ----------
        now : float
            Seconds of a clock that never goes back.
        """
        self._began = now
        self._since += 1
        if self._iteration_began is None:
            return
        seconds = now - self._iteration_began
        if self._is_writing:
            self._busy_seconds += seconds
            self._busy_count += 1
        else:
            self._quiet.append(seconds)
            self._unrefreshed = 0

    def end(self, now: float, *, committed: bool, is_writing: bool) -> None:
        """The training goes on; after a commit it is known what the one before has cost."""
        if committed:
            # The first is a base, and whatever is done only once is done with it.
            if self._commits > 1 and len(self._quiet) >= FIRST_QUIET:
                self._learn(statistics.median(self._quiet))
            self._commits += 1
            self._unrefreshed += 1
            self._stall, self._busy_seconds = now - self._began, 0.0
            self._since = self._busy_count = 0
        self._iteration_began = now
        self._is_writing = is_writing

    def _learn(self, usual: float) -> None:
        self._costs.append(self._stall + max(0.0, self._busy_seconds - self._busy_count * usual))
        wanted = statistics.median(self._costs) / (self._overhead * usual) if usual > 0 else 1.0
        # One costly commit does not put off the next for long: it may have been a base.
        self.interval = min(max(1, math.ceil(wanted)), 2 * self.interval, LARGEST)


Interval = FixedInterval | AutoInterval


def make_interval(interval: int | str, overhead: float | None) -> Interval:
    """Return what says which steps are committed.

    Raises
    ------
    InvalidInput
        One of them cannot be used, or they do not fit each other.
    """
    if interval == AUTO:
        share = OVERHEAD if overhead is None else overhead
        if not isinstance(share, int | float) or isinstance(share, bool) or not 0 < share < math.inf:
            raise InvalidInput(f"overhead is {overhead!r}, expected a share of the training's time such as 0.035")
        return AutoInterval(float(share))
    if type(interval) is not int or interval < 1:
        raise InvalidInput(f"interval is {interval!r}, expected an integer of 1 or more, or 'auto'")
    if overhead is not None:
        raise InvalidInput(f"overhead is {overhead!r}, and interval is {interval}: it only guides interval='auto'")
    return FixedInterval(interval)
