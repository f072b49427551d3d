"""interval="auto": commits as often as a share of the training's time allows, in simulated and in real trainings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deltastore.adapters._interval import FIRST_QUIET, LARGEST, REFRESH, AutoInterval, make_interval
from deltastore.adapters.pytorch import Checkpointer
from deltastore.errors import InvalidInput
from tests.adapters.training import make_run


class Training:
    """A training on a clock of its own.

    Parameters
    ----------
    iteration : float
        Seconds that an iteration takes while nothing is written.
    stall, slow, writes : float
        What a commit does: how long it holds the training, by which factor an iteration beside it is longer, and for
        how many iterations it is written.
    """

    def __init__(self, overhead: float, *, iteration: float, stall: float, slow: float, writes: int) -> None:
        self.auto = AutoInterval(overhead)
        self.iteration, self.stall, self.slow, self.writes = iteration, stall, slow, writes
        self.pause: Callable[[int], float] = lambda _step: 0.0
        self.now = 100.0
        self.step = 0
        self._writing = 0
        self.commits: list[int] = []

    def run(self, steps: int) -> float:
        """Return by how much of its time without commits it became longer."""
        began = self.now
        quiet = 0.0
        for _ in range(steps):
            pause = self.pause(self.step)
            self.now += self.iteration * (1 + (self.slow if self._writing else 0.0)) + pause
            quiet += self.iteration + pause
            self._writing = max(0, self._writing - 1)
            self.auto.begin(self.now)
            is_due = self.auto.is_due(self.step)
            if is_due:
                first = 20 if not self.commits else 1  # a base
                self.now += self.stall * first
                self._writing += self.writes * first
                self.commits.append(self.step)
            self.auto.end(self.now, committed=is_due, is_writing=self._writing > 0)
            self.step += 1
        return (self.now - began) / quiet - 1


@pytest.mark.parametrize("overhead", [0.01, 0.035, 0.2])
@pytest.mark.parametrize(("stall", "slow", "writes"), [(0.02, 0.0, 1), (0.001, 0.3, 2), (0.01, 0.1, 5), (0.3, 1.0, 3)])
def test_the_overhead_is_kept_and_used(overhead: float, stall: float, slow: float, writes: int) -> None:
    training = Training(overhead, iteration=0.1, stall=stall, slow=slow, writes=writes)
    training.run(600)
    interval = training.auto.interval
    found = training.run(3000)
    one = (stall + slow * writes * 0.1) / 300
    assert found <= overhead * 1.1 + one
    assert interval == 1 or found >= overhead * 0.5
    assert training.auto.interval == pytest.approx(interval, abs=max(2, 0.2 * interval))


def test_commits_that_cost_nothing_are_taken_at_every_step() -> None:
    training = Training(0.035, iteration=0.1, stall=1e-4, slow=0.0, writes=0)
    training.run(500)
    assert training.auto.interval == 1
    assert training.commits[-50:] == list(range(450, 500))


def test_it_follows_in_both_directions() -> None:
    training = Training(0.05, iteration=0.1, stall=0.02, slow=0.0, writes=1)
    training.run(500)
    before = training.auto.interval
    training.stall = 0.2
    training.run(1000)
    slower = training.auto.interval
    training.stall = 0.02
    training.run(2000)
    assert before == pytest.approx(4, abs=1)
    assert slower == pytest.approx(40, abs=2)
    assert training.auto.interval == pytest.approx(before, abs=1)


def test_evaluations_and_single_hitches_are_not_the_commits_fault() -> None:
    training = Training(0.035, iteration=0.1, stall=0.01, slow=0.1, writes=1)
    training.run(500)
    before = training.auto.interval
    training.pause = lambda step: 30.0 if step % 97 == 0 else 0.0
    training.run(2000)
    assert training.auto.interval == pytest.approx(before, abs=2)


def test_what_is_always_busy_is_looked_at_again() -> None:
    training = Training(10.0, iteration=0.1, stall=0.0, slow=0.2, writes=1)
    training.run(300)
    late = [b - a for a, b in zip(training.commits[20:], training.commits[21:], strict=False) if b - a > 1]
    assert late
    assert len(late) <= 300 / REFRESH + 1


def test_the_first_step_is_committed_and_a_hopeless_one_rarely() -> None:
    training = Training(1e-6, iteration=0.001, stall=5.0, slow=0.0, writes=1)
    training.run(40_000)
    assert training.commits[0] == 0
    assert training.commits[1] <= 20 + FIRST_QUIET + 2  # once the base is written
    assert training.auto.interval == LARGEST


@pytest.mark.parametrize(
    ("interval", "overhead"),
    [
        ("often", None),
        ("auto", 0.0),
        ("auto", -1),
        ("auto", True),
        ("auto", float("nan")),
        (1, 0.03),
        (0, None),
        (True, None),
    ],
)
def test_what_cannot_be_meant_is_refused(interval: Any, overhead: Any) -> None:
    with pytest.raises(InvalidInput, match=r"overhead|interval"):
        make_interval(interval, overhead)


def test_a_real_training_commits_its_last_step(tmp_path: Path) -> None:
    run = make_run()
    with Checkpointer(tmp_path / "store", interval="auto", overhead=0.5, **run.objects) as ckpt:
        for step in range(30):
            run.step(step)
            ckpt.step(step)
    stats = ckpt.stats
    assert stats.steps == 30
    assert stats.commits + stats.skipped >= 30
    assert 1 <= stats.interval <= 30
    with Checkpointer(tmp_path / "store", **make_run().objects) as again:
        assert again.restore() == 30
