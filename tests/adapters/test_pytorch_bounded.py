"""Training with a byte budget: how a run ends, what a restore says, and how the chain goes on."""

from __future__ import annotations

import itertools
import logging
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deltastore
from deltastore.adapters.pytorch import Checkpointer
from deltastore.errors import InvalidInput
from deltastore.policy import Policy
from deltastore.reader import State
from deltastore.testing.compare import assert_same
from tests.adapters.conftest import Ended
from tests.adapters.training import Run, losses_of, seed_everything
from tests.bounded_kit import check_tensors

POLICY = Policy(budget=0.2, restore_cost=1e9)
"""More than the floor of so small a state."""
RunScript = Callable[[str], Ended]
_numbers = itertools.count()


class Block(nn.Module):
    """Attention's and the feed-forward's weights, embedding tied to the head."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(80, width)
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.head = nn.Linear(width, 80, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        given = self.embedding(tokens)
        hidden = given + self.down(torch.relu(self.up(self.norm(self.mix(given)))))
        return self.head(hidden)  # type: ignore[no-any-return]


def make_run(seed: int = 0) -> Run:
    """Return a fresh run with AdamW, and seed everything that it draws from."""
    seed_everything(seed)
    model = Block()
    return Run(model, {"optimizer": torch.optim.AdamW(model.parameters(), lr=0.01)})


def state_of(run: Run) -> dict[str, Any]:
    """Copies of the model's tensors and of the optimizer's, by parameter name."""
    names = {id(value): name for name, value in run.model.named_parameters()}
    optimizer = run.optimizers["optimizer"]
    slots = {names[id(p)]: {key: v.clone() for key, v in slot.items()} for p, slot in optimizer.state.items()}
    return {"model": {key: v.clone() for key, v in run.model.state_dict().items()}, "slots": slots}


def read_of(state: State) -> dict[str, Any]:
    """The same of a commit."""
    read = state.to_named_state()
    return {"model": dict(read["model"]), "slots": {n: dict(slot) for n, slot in read["optimizer"]["state"].items()}}


@pytest.fixture
def root() -> str:
    return f"memory://bounded-{next(_numbers)}"


def trained(root: str, steps: int = 5) -> Run:
    """A run whose commits are all bounded but for the first and the last."""
    run = make_run()
    with Checkpointer(root, policy=POLICY, **run.objects) as checkpointer:
        losses_of(run, range(steps), checkpointer)
    return run


def kinds(root: str) -> list[tuple[int, str, bool]]:
    with deltastore.open(root, "r") as store:
        return [(commit.step, commit.kind, commit.exact) for commit in store.commits()]


# ---------------------------------------------------------------- how a run ends


def test_steps_are_bounded_and_a_clean_end_is_exact(root: str) -> None:
    trained(root, 4)
    bounded = [(step, "delta", False) for step in range(1, 4)]
    assert kinds(root)[0] == (0, "base", True)
    assert kinds(root)[2:] == [*bounded[1:], (3, "base", True)]


def test_the_newest_commit_of_a_clean_end_is_the_state(root: str) -> None:
    run = trained(root)
    with deltastore.open(root, "r") as store:
        assert_same(state_of(run), read_of(store.at("latest")))


def test_close_is_a_clean_end_too(root: str) -> None:
    run = make_run()
    checkpointer = Checkpointer(root, policy=POLICY, **run.objects)
    losses_of(run, range(3), checkpointer)
    checkpointer.close()
    assert kinds(root)[-1] == (2, "base", True)


def test_a_clean_end_after_an_exact_step_writes_nothing_more(root: str) -> None:
    run = make_run()
    with Checkpointer(root, policy=POLICY, **run.objects) as checkpointer:
        losses_of(run, range(3), checkpointer)
        run.step(3)
        checkpointer.step(3, exact=True)
    assert [step for step, _, _ in kinds(root)] == [0, 1, 2, 3]


def test_an_exception_writes_nothing_more(root: str) -> None:
    run = make_run()
    checkpointer = Checkpointer(root, policy=POLICY, **run.objects)
    losses_of(run, range(3), checkpointer)
    checkpointer.__exit__(ZeroDivisionError, ZeroDivisionError("the user's own"), None)
    assert kinds(root)[-1] == (2, "delta", False)


def test_a_budget_of_none_takes_no_last_commit(root: str) -> None:
    run = make_run()
    with Checkpointer(root, policy=Policy(budget=None), **run.objects) as checkpointer:
        losses_of(run, range(3), checkpointer)
    assert [(step, exact) for step, _, exact in kinds(root)] == [(0, True), (1, True), (2, True)]


PREAMBLE = """
import os, signal
from deltastore.adapters.pytorch import Checkpointer
from tests.adapters.test_pytorch_bounded import POLICY, make_run
from tests.adapters.training import losses_of
run = make_run()
def terminate(): os.kill(os.getpid(), signal.SIGTERM)
"""

WITHIN = """
with Checkpointer(root, policy=POLICY, **run.objects) as checkpointer:
    losses_of(run, range(3), checkpointer)
    run.step(3)
    terminate()
    checkpointer.step(3)
"""

AFTER = """
checkpointer = Checkpointer(root, policy=POLICY, **run.objects)
losses_of(run, range(4), checkpointer)
terminate()
checkpointer.close()
"""


@pytest.mark.parametrize("body", [WITHIN, AFTER], ids=["before the step", "before the close"])
def test_the_last_commit_at_sigterm_is_exact(run_script: RunScript, tmp_path: Path, body: str) -> None:
    ended = run_script(PREAMBLE + body + 'print("never")')
    assert ended.status == -signal.SIGTERM, ended.output
    assert "never" not in ended.output
    assert "step 3 is durable" in ended.output
    assert kinds(str(tmp_path / "store"))[-1] == (3, "base", True)


def test_a_run_goes_on_after_sigterm_as_if_nothing_had_been(run_script: RunScript, tmp_path: Path) -> None:
    ended = run_script(PREAMBLE + AFTER)
    assert ended.status == -signal.SIGTERM, ended.output
    expected = losses_of(make_run(), range(8))
    run = make_run(seed=5)
    with Checkpointer(tmp_path / "store", policy=POLICY, **run.objects) as checkpointer:
        start = checkpointer.restore()
        assert start == 4
        assert losses_of(run, range(start, 8)) == expected[start:]


# ---------------------------------------------------------------- restoring a bounded commit


def test_a_restore_logs_how_far_each_role_is_off(root: str, caplog: pytest.LogCaptureFixture) -> None:
    trained(root)
    run = make_run(1)
    checkpointer = Checkpointer(root, policy=POLICY, **run.objects)
    with caplog.at_level(logging.WARNING, "deltastore"):
        assert checkpointer.restore(2) == 3
    [message] = [text for text in caplog.messages if "not exact" in text]
    state = checkpointer.store.at(2)
    for role in ("param", "exp_avg", "exp_avg_sq"):
        worst = max(tensor.bound for _, other, tensor in state.fidelity.inexact() if other == role)
        assert f"{role} by at most {worst:.3g}" in message
    checkpointer.close()


def test_a_restore_of_an_exact_commit_logs_no_bound(root: str, caplog: pytest.LogCaptureFixture) -> None:
    trained(root)
    run = make_run(1)
    with Checkpointer(root, policy=POLICY, **run.objects) as checkpointer:
        with caplog.at_level(logging.WARNING, "deltastore"):
            checkpointer.restore()
        assert not [text for text in caplog.messages if "not exact" in text]


def test_a_restore_gives_what_the_commit_holds(root: str) -> None:
    trained(root)
    run = make_run(1)
    checkpointer = Checkpointer(root, policy=POLICY, **run.objects)
    checkpointer.restore(2)
    assert_same(read_of(checkpointer.store.at(2)), state_of(run))
    checkpointer.close()


def test_a_load_reports_the_tensors_that_are_inexact(root: str) -> None:
    trained(root)
    run = make_run(1)
    run.step(0)
    with deltastore.open(root, "r") as store:
        state = store.at(2)
        report = state.load_into(**run.objects)
        listed = {"/".join(map(str, entry.path)) for entry, _, _ in state.fidelity.inexact()}
    assert listed <= set(report.inexact)
    assert "model/up.weight" in report.inexact
    assert "model/norm.weight" not in report.inexact


def test_strict_exact_refuses_a_bounded_commit(root: str) -> None:
    trained(root)
    run = make_run(1)
    checkpointer = Checkpointer(root, policy=POLICY, **run.objects)
    with pytest.raises(InvalidInput, match=r"step 2 .* is not exact"):
        checkpointer.restore(2, strict_exact=True)
    checkpointer.close()


def test_strict_exact_leaves_the_objects_as_they_were(root: str) -> None:
    trained(root)
    run = make_run(1)
    run.step(0)
    before = state_of(run)
    checkpointer = Checkpointer(root, policy=POLICY, **run.objects)
    with pytest.raises(InvalidInput):
        checkpointer.restore(2, strict_exact=True)
    assert_same(before, state_of(run))
    checkpointer.close()


def test_strict_exact_leaves_the_store_as_it_was(root: str) -> None:
    trained(root)
    before = kinds(root)
    run = make_run(1)
    checkpointer = Checkpointer(root, policy=POLICY, **run.objects)
    with pytest.raises(InvalidInput):
        checkpointer.restore(2, strict_exact=True)
    with deltastore.open(root) as other:  # nobody has claimed it
        other.commit(9, {"x": torch.zeros(1)}).wait()
    checkpointer.close()
    assert kinds(root)[:-1] == before


def test_strict_exact_takes_an_exact_commit(root: str) -> None:
    expected = trained(root)
    run = make_run(1)
    with Checkpointer(root, policy=POLICY, **run.objects) as checkpointer:
        assert checkpointer.restore(strict_exact=True) == 5
        assert_same(state_of(expected), state_of(run))


# ---------------------------------------------------------------- going on


def test_going_on_from_a_bounded_commit_goes_on_with_its_chain(root: str) -> None:
    trained(root)
    run = make_run(1)
    checkpointer = Checkpointer(root, policy=POLICY, **run.objects)
    start = checkpointer.restore(2)
    parent = checkpointer.store.at(2).commit
    assert not parent.exact
    run.step(start)
    commit = checkpointer.step(start).wait()
    assert (commit.kind, commit.parent) == ("delta", parent.id)
    checkpointer.close()


def test_the_bounds_after_a_restore_are_those_of_the_run_that_goes_on(root: str) -> None:
    trained(root)
    run = make_run(1)
    checkpointer = Checkpointer(root, policy=POLICY, **run.objects)
    start = checkpointer.restore(2)
    for step in range(start, start + 3):
        run.step(step)
        commit = checkpointer.step(step).wait()
        check_tensors(checkpointer.store.at(commit.id), {"model": state_of(run)["model"]})
    checkpointer.close()


def test_what_did_not_change_since_a_restore_is_exact(root: str) -> None:
    """The reconstruction of the chain is what was restored: the same state again needs nothing."""
    trained(root)
    run = make_run(1)
    checkpointer = Checkpointer(root, policy=POLICY, **run.objects)
    start = checkpointer.restore(2)
    commit = checkpointer.step(start).wait()
    assert (commit.kind, commit.exact) == ("delta", True)
    assert_same(read_of(checkpointer.store.at(2)), read_of(checkpointer.store.at(commit.id)))
    checkpointer.close()


def test_a_step_that_is_asked_to_be_exact(root: str) -> None:
    run = make_run()
    checkpointer = Checkpointer(root, policy=POLICY, **run.objects)
    losses_of(run, range(3), checkpointer)
    run.step(3)
    commit = checkpointer.step(3, exact=True).wait()
    assert (commit.kind, commit.exact) == ("base", True)
    assert_same(state_of(run), read_of(checkpointer.store.at(3)))
    checkpointer.close()


def test_the_steps_after_an_exact_one_are_bounded_again(root: str) -> None:
    run = make_run()
    with Checkpointer(root, policy=POLICY, **run.objects) as checkpointer:
        losses_of(run, range(2), checkpointer)
        checkpointer.step(2, exact=True)
        losses_of(run, range(3, 5), checkpointer)
    assert kinds(root)[3:5] == [(3, "delta", False), (4, "delta", False)]


def test_every_step_of_a_run_lies_within_its_bounds(root: str) -> None:
    run, truth = make_run(), []
    checkpointer = Checkpointer(root, policy=POLICY, **run.objects)
    for step in range(5):
        run.step(step)
        checkpointer.step(step).wait()
        truth.append({"model": state_of(run)["model"]})
    for step, expected in enumerate(truth):
        check_tensors(checkpointer.store.at(step), expected)
    checkpointer.close()
