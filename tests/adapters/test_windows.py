"""Windows: a state that is copied beside the training is that of one step, or is not committed."""

from __future__ import annotations

import copy
import io
import logging
import shutil
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import deltastore
from deltastore import staging
from deltastore.adapters import windows as windows_module
from deltastore.adapters._probe import Probe
from deltastore.adapters.pytorch import Checkpointer
from deltastore.errors import DeltaStoreError, NotFound
from deltastore.layout import Layout, LayoutInput, plan
from deltastore.window import Part, Window

WIDTH = 160
"""Weights of 100 KiB: large enough for a window."""


class Uniform(nn.Module):
    """A model whose weights all hold one number, the count of its steps."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.linears = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)]
        self.layers = nn.ModuleList(self.linears)
        self.norm = nn.BatchNorm1d(WIDTH)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.zero_()

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = self.norm(values)
        for layer in self.linears:
            total = total + layer(values)
        return total


class Counting(torch.optim.Optimizer):
    """Adds one to every element, through `.data` half of the time: that raises no version."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for number, parameter in enumerate(group["params"]):
                state = self.state[parameter]
                state.setdefault("seen", torch.zeros_like(parameter.data))
                (parameter.data if number % 2 else parameter.detach()).add_(1)
                state["seen"].add_(1)


class Training:
    """One model with two optimizers, each for a part of it."""

    def __init__(self, root: str, **options: Any) -> None:
        self.model = Uniform()
        first, *rest = self.model.linears
        self.optimizers: dict[str, Any] = {
            "first": Counting([*first.parameters(), *self.model.norm.parameters()]),
            "rest": Counting([parameter for layer in rest for parameter in layer.parameters()]),
        }
        self.ckpt = Checkpointer(root, model=self.model, **self.optimizers, **options)
        self.truth: dict[int, dict[str, Any]] = {}
        self.count = 0

    def pass_(self, *, grad: bool = True) -> None:
        with torch.set_grad_enabled(grad):
            loss = self.model(torch.randn(4, WIDTH)).square().mean()
            if grad:
                loss.backward()

    def step(self) -> None:
        self.pass_()
        for optimizer in self.optimizers.values():
            optimizer.step()
            optimizer.zero_grad()

    def commit(self, exact: bool | None = None) -> deltastore.Handle:
        self.truth[self.count] = copy.deepcopy({"model": self.model.state_dict()})
        handle = self.ckpt.step(self.count, exact=exact)
        self.count += 1
        return handle

    def check(self, root: str) -> list[int]:
        with deltastore.open(root, "r") as store:
            steps = [commit.step for commit in store.commits()]
            for step in dict.fromkeys(steps):
                state = store.at(step).to_state_dict()
                for name, value in self.truth[step]["model"].items():
                    assert torch.equal(state["model"][name], value), (step, name)
                numbers = {
                    int(value.flatten()[0]) for name, value in state["model"].items() if name.startswith("layers.")
                }
                assert len(numbers) == 1, (step, numbers)
        return steps


SITUATIONS = ["train", "train", "train", "accumulate", "evaluate", "skip", "edit", "load", "flush", "exact", "backward"]


@given(data=st.data())
def test_every_commit_is_of_one_step(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    root = str(tmp_path_factory.mktemp("windows") / "run")
    training = Training(root)
    with training.ckpt:
        for what in data.draw(st.lists(st.sampled_from(SITUATIONS), min_size=8, max_size=24)):
            match what:
                case "accumulate":
                    training.pass_()
                    training.step()
                case "evaluate":
                    training.pass_(grad=False)
                    training.step()
                case "skip":
                    training.pass_()
                case "edit":
                    with training.ckpt.edit(), torch.no_grad():
                        for parameter in training.model.parameters():
                            parameter.add_(1)
                case "load":
                    training.model.load_state_dict(copy.deepcopy(training.model.state_dict()))
                    training.step()
                case "flush":
                    training.step()
                    training.ckpt.flush()
                case "backward":
                    training.pass_()
                    training.pass_()
                    training.step()
                case _:
                    training.step()
            training.commit(exact=True if what == "exact" else None)
        assert set(training.ckpt.windows.values()) <= {"open", "probing"}
    assert training.check(root) == list(range(training.count))


def warm(root: str, **options: Any) -> Training:
    training = Training(root, **options)
    for _ in range(2):
        training.step()
        training.commit()
    training.step()
    assert training.ckpt.windows == {"first": "open", "rest": "open"}
    return training


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing be copied beside the training: all of it is left to the gate."""
    monkeypatch.setattr(Window, "open", lambda _self: None)
    monkeypatch.setattr(Window, "release", lambda _self: None)


def test_what_the_window_left_is_taken_before_the_optimizer_steps(held: None, tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    training = warm(root)
    for _ in range(3):
        assert training.commit()._window is not None
        training.step()
    training.ckpt.close()
    assert training.check(root) == [0, 1, 2, 3, 4]


def test_without_the_gate_it_would_be_torn(held: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check that the tests above can fail."""
    training = warm(str(tmp_path / "run"))
    monkeypatch.setattr(training.ckpt._windows, "gate", lambda: None)
    handle = training.commit()
    training.step()
    assert handle._window is not None
    assert not handle._window.finish()


def test_without_the_probe_an_edit_of_every_step_would_be_committed_torn(
    held: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same for the probe: an optimizer that nobody watched changes weights behind torch's back, in part."""

    def edit(training: Training) -> None:
        with torch.no_grad():
            training.model.linears[0].weight.data[5, :9].add_(0.5)

    def run(root: str) -> tuple[Training, bool]:
        training = Training(root)
        for _ in range(3):
            training.step()
            training.commit()
            edit(training)
        training.ckpt.close()
        try:
            training.check(root)
        except AssertionError:
            return training, False
        return training, True

    training, whole = run(str(tmp_path / "probed"))
    assert whole
    assert "tensors changed between step and the optimizer's step" in training.ckpt.windows["first"]
    assert training.ckpt.windows["rest"] == "open"

    monkeypatch.setattr(Probe, "is_open", True, raising=False)
    monkeypatch.setattr(Probe, "compare", lambda _self, stepped: None)
    monkeypatch.setattr(Probe, "__init__", _open_at_once(Probe.__init__))
    assert not run(str(tmp_path / "trusted"))[1]


def _open_at_once(make: Callable[..., None]) -> Callable[..., None]:
    def init(self: Probe, name: str, optimizer: torch.optim.Optimizer) -> None:
        make(self, name, optimizer)
        self.is_open = True

    return init


def spoil_by_torch(parameter: torch.Tensor) -> None:
    with torch.no_grad():
        parameter[3].add_(1)  # one row, as max_norm of an embedding does


def spoil_by_data(parameter: torch.Tensor) -> None:
    parameter.data.add_(1)


def spoil_by_numpy(parameter: torch.Tensor) -> None:
    parameter.detach().numpy()[:] += 1


@pytest.mark.parametrize("copied", [False, True], ids=["before the copy", "after the copy"])
@pytest.mark.parametrize("spoil", [spoil_by_torch, spoil_by_data, spoil_by_numpy])
def test_an_unannounced_edit_is_left_out_and_closes_the_windows(
    copied: bool,
    spoil: Callable[[torch.Tensor], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    root = str(tmp_path / "run")
    training = warm(root)
    begun, edited = threading.Event(), threading.Event()
    copy_next = Window._settle

    def settle(self: Window) -> None:
        begun.set()
        assert edited.wait(60)
        copy_next(self)

    if copied:
        monkeypatch.setattr(Window, "_settle", settle)
    else:
        monkeypatch.setattr(Window, "open", lambda _self: None)
        monkeypatch.setattr(Window, "release", lambda _self: None)
    handle = training.commit()
    if copied:
        assert begun.wait(60)
    spoil(training.model.linears[1].weight)
    edited.set()
    with caplog.at_level(logging.WARNING, "deltastore"):
        training.step()
    monkeypatch.undo()
    assert handle.skipped
    assert handle.id is None
    assert "step 2 was changed while it was taken" in caplog.text
    assert all("without edit()" in state for state in training.ckpt.windows.values())
    with torch.no_grad():
        for layer in training.model.linears:
            layer.weight.fill_(7)
    follower = training.commit()
    assert follower._window is None
    assert handle.wait(timeout=60).step == 3
    assert follower.wait(timeout=60).kind == "base"
    stats = training.ckpt.stats
    assert (stats.steps, stats.commits, stats.skipped) == (4, 3, 1)
    training.ckpt.close()
    assert training.check(root) == [0, 1, 3]


def test_a_run_that_ends_after_an_edit_commits_its_last_state(held: None, tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    training = warm(root)
    handle = training.commit()
    spoil_by_data(training.model.linears[1].weight)
    training.truth[2] = copy.deepcopy({"model": training.model.state_dict()})
    training.ckpt.close()
    assert handle.skipped
    assert handle.wait().step == 2
    with deltastore.open(root, "r") as store:
        assert [commit.step for commit in store.commits()] == [0, 1, 2]
        assert torch.equal(store.at(2).to_state_dict()["model"]["layers.1.weight"], training.model.linears[1].weight)


def test_an_exit_by_exception_completes_the_open_window(held: None, tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    training = warm(root)

    def fail() -> None:
        with training.ckpt:
            training.commit()
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        fail()
    assert training.check(root) == [0, 1, 2]


def test_updates_by_hand_are_told_once_and_taken_within_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = str(tmp_path / "run")
    training = Training(root)
    with caplog.at_level(logging.WARNING, "deltastore"), training.ckpt:
        for _ in range(4):
            training.pass_()
            with torch.no_grad():
                for layer in training.model.linears:
                    layer.weight.add_(1)
            assert training.commit()._window is None
    assert "no step of the optimizer was seen" in caplog.text
    assert len([record for record in caplog.records if "ckpt.edit()" in record.getMessage()]) == 2
    assert training.check(root) == [0, 1, 2, 3]


def test_waiting_for_a_commit_needs_no_backward_pass(tmp_path: Path) -> None:
    training = warm(str(tmp_path / "run"))
    assert training.commit().wait(timeout=60).step == 2
    training.ckpt.close()


def test_a_copy_of_the_model_has_no_part_in_the_windows(tmp_path: Path) -> None:
    training = warm(str(tmp_path / "run"))
    twin = copy.deepcopy(training.model)
    file = io.BytesIO()
    torch.save(training.model, file)
    assert b"deltastore" not in file.getvalue()
    training.commit()
    twin.load_state_dict(training.model.state_dict())
    handle = training.ckpt._windows._handle
    assert handle is not None
    training.ckpt.close()


def test_bounded_commits_keep_their_bound_against_a_frozen_copy(tmp_path: Path) -> None:
    torch.manual_seed(0)
    root = str(tmp_path / "run")
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    truth = {}
    taken = 0
    with Checkpointer(root, policy=deltastore.Policy(budget=0.05), model=model, optimizer=optimizer) as ckpt:
        for step in range(8):
            model(torch.randn(8, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            truth[step] = copy.deepcopy(model.state_dict())
            taken += ckpt.step(step)._window is not None
    assert taken >= 6
    with deltastore.open(root, "r") as store:
        for step, expected in truth.items():
            state = store.at(step)
            bounds = {entry.path: tensor.bound for entry, _role, tensor in state.fidelity.inexact()}
            for name, value in expected.items():
                found = state["model", name][...]
                assert (found - value).abs().max().item() <= bounds.get(("model", name), 0.0)


SIGTERM_SCRIPT = """
import logging, os, random, signal, sys, threading
from tests.adapters.test_windows import Training
logging.basicConfig(level="WARNING", stream=sys.stdout, format="%(message)s")
training = Training(root)
random.seed({seed})
threading.Timer(random.uniform(0.0, 0.3), os.kill, (os.getpid(), signal.SIGTERM)).start()
with training.ckpt:
    while True:
        training.step()
        training.commit()
"""


def terminate_at_random(run_script: Callable[[str], Any], root: Path, seed: int) -> None:
    ended = run_script(SIGTERM_SCRIPT.format(seed=seed))
    assert ended.status in (-signal.SIGTERM, 128 + signal.SIGTERM), ended.output
    with deltastore.open(root / "store", "r") as store:
        commits = store.commits()
        steps = [commit.step for commit in commits]
        assert steps == list(range(len(steps)))
        assert f"SIGTERM: step {steps[-1]} is durable" in ended.output
        for commit in commits:
            state = store.at(commit.id).to_state_dict()
            for name in ("layers.0.weight", "layers.1.weight", "layers.2.weight"):
                assert bool((state["model"][name] == commit.step + 1).all()), (name, commit.step)
    shutil.rmtree(root)


@pytest.mark.parametrize("moment", range(3))
def test_sigterm_at_a_random_moment(run_script: Callable[[str], Any], tmp_path: Path, seed: int, moment: int) -> None:
    terminate_at_random(run_script, tmp_path, seed + moment)


@pytest.mark.soak
def test_sigterm_at_many_moments(run_script: Callable[[str], Any], tmp_path: Path, seed: int) -> None:
    for moment in range(200):
        tmp_path.mkdir(exist_ok=True)
        terminate_at_random(run_script, tmp_path, seed + moment)


def layout() -> Layout:
    return plan([LayoutInput(("w", n), "float32", (3 << 20,), None, "param", ("w", n)) for n in range(6)])


def test_small_partitions_come_first_and_large_ones_with_the_backward_pass() -> None:
    partitions = layout().partitions
    assert {partition.window for partition in partitions} == {"forward", "backward"}
    order: list[str] = []
    window = Window([Part(p, partial(order.append, p.window)) for p in partitions], lambda: True, 3600.0)
    window._run()
    assert set(order) == {"forward"}
    window.release()
    assert window.wait()
    assert order == sorted(order, reverse=True)
    assert len(order) == len(partitions)


def test_an_error_of_a_copy_is_the_commit_s_not_the_training_s() -> None:
    def fail() -> None:
        raise MemoryError("no room")

    window = Window([Part(layout().partitions[0], fail)], lambda: True)
    assert window.finish()
    with pytest.raises(MemoryError, match="no room"):
        window.wait()


def test_an_interrupt_of_a_copy_reaches_the_training_and_the_commit() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    first, second = layout().partitions[:2]
    window = Window([Part(first, interrupt), Part(second, lambda: None)], lambda: True)
    with pytest.raises(KeyboardInterrupt):
        window.finish()
    assert window.finish()
    with pytest.raises(KeyboardInterrupt):
        window.wait()


def test_a_copy_that_fails_is_told_at_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = str(tmp_path / "run")
    training = warm(root)

    def fail(*_: Any) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(Window, "open", lambda _self: None)
        patched.setattr(staging, "_copy_pieces", fail_for_large(staging._copy_pieces, fail))
        handle = training.commit()
        training.step()
    with pytest.raises(DeltaStoreError, match="no room"):
        handle.wait(timeout=60)
    assert not handle.skipped
    assert training.ckpt.windows == {"first": "open", "rest": "open"}
    assert training.commit().wait(timeout=60).kind == "base"
    training.step()
    training.commit()
    training.ckpt.close()
    assert training.check(root) == [0, 1, 3, 4]


def fail_for_large(copy: Callable[..., None], fail: Callable[..., None]) -> Callable[..., None]:
    def choose(values: Any, keys: Any, places: list[tuple[int, int, int, int]], target: Any) -> None:
        large = [place for place in places if place[3] * target.itemsize >= staging.SMALL_BYTES]
        (fail if large else copy)(values, keys, places, target)

    return choose


def test_the_patience_is_that_of_a_usual_forward_pass(tmp_path: Path) -> None:
    assert Training(str(tmp_path / "other")).ckpt._windows.patience_seconds == 0.0
    training = warm(str(tmp_path / "run"))
    assert 0.0 < training.ckpt._windows.patience_seconds < 60.0
    assert windows_module.PATIENCE >= 1.0
    training.ckpt.close()
    with pytest.raises(NotFound):
        training.ckpt.store.at(99)
