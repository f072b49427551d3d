"""The Checkpointer in a running loop: names, options, handles, failures, figures."""

from __future__ import annotations

import errno
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import deltastore
from deltastore.adapters.pytorch import Checkpointer
from deltastore.errors import Backend, InvalidInput, NotFound, ReadOnly, Timeout
from deltastore.testing.compare import assert_same
from tests.adapters.training import Net, Run, losses_of, make_run

_numbers = itertools.count()


@pytest.fixture
def root() -> str:
    return f"memory://pytorch-{next(_numbers)}"


@pytest.fixture
def run() -> Run:
    return make_run()


class Gate:
    """Holds back, or refuses, whatever a store writes."""

    def __init__(self, store: deltastore.Store) -> None:
        self.open = threading.Event()
        self.entered = threading.Event()
        self.error: Backend | None = None
        self._tier = store._tier
        self._stage = store._tier.stage
        store._tier.stage = self  # type: ignore[method-assign, assignment]

    def __call__(self, name: str, *args: Any) -> Any:
        if not name.startswith("packs/"):
            return self._stage(name, *args)
        self.entered.set()
        assert self.open.wait(30)
        if self.error is not None:
            raise self.error
        return self._stage(name, *args)


@pytest.fixture
def store(root: str) -> Iterator[deltastore.Store]:
    with deltastore.open(root, max_pending=1) as store:
        yield store


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"interval": 0}, "interval"),
        ({"interval": True}, "interval"),
        ({"interval": 1.5}, "interval"),
        ({"on_pressure": "drop"}, "on_pressure"),
        ({"overhead": 0.1}, "overhead"),
        ({"rec_device": "cuda"}, "rec_device"),
        ({"policy": "exact"}, "policy"),
        ({"rng": nn.Linear(1, 1)}, "rng"),
        ({"extra": nn.Linear(1, 1)}, "extra"),
        ({"thing": 3}, "thing is a int"),
        ({"thing": nn.Linear}, "thing is a type"),
    ],
)
def test_what_cannot_be_used_is_refused_and_nothing_is_made(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        Checkpointer(tmp_path / "store", model=nn.Linear(1, 1), **options)
    assert not (tmp_path / "store").exists()


def test_objects_are_needed(root: str) -> None:
    with pytest.raises(InvalidInput, match="needs objects"):
        Checkpointer(root)


def test_an_object_that_can_only_be_loaded(root: str) -> None:
    class Half:
        def load_state_dict(self, state: Any) -> None: ...

    with pytest.raises(InvalidInput, match="no state_dict"):
        Checkpointer(root, half=Half())


@pytest.mark.parametrize(
    "step", [-1, 1.0, True, "1", None, np.True_, torch.tensor(True), torch.tensor(1.0), torch.tensor([1]), np.int64(-1)]
)
def test_steps_are_integers(root: str, run: Run, step: Any) -> None:
    with Checkpointer(root, interval=7, **run.objects) as checkpointer, pytest.raises(InvalidInput, match="step is"):
        checkpointer.step(step)


def test_integers_of_numpy_and_torch_are_steps(root: str, run: Run) -> None:
    steps: list[Any] = [0, np.int64(1), torch.tensor(2), np.array(3), np.uint8(4)]
    with Checkpointer(root, **run.objects) as checkpointer:
        handles = [checkpointer.step(step) for step in steps]
        assert [(handle.step, type(handle.step)) for handle in handles] == [(step, int) for step in range(5)]
        assert checkpointer.wait(steps[1]).step == 1


def test_a_store_for_reading_is_refused(tmp_path: Path, run: Run) -> None:
    with deltastore.open(tmp_path) as store:
        store.commit(0, {"model": run.model.state_dict()})
    with deltastore.open(tmp_path, "r") as store, pytest.raises(ReadOnly, match=r"store\.at\(ref\)\.load_into\(model="):
        Checkpointer(store, **run.objects)


def test_what_the_format_cannot_hold_is_named(root: str, run: Run) -> None:
    with Checkpointer(root, **run.objects) as checkpointer:
        checkpointer.extra["when"] = object()
        with pytest.raises(InvalidInput, match="extra/when"):
            checkpointer.step(0)
        del checkpointer.extra["when"]
        checkpointer.step(0).wait()


def test_a_closed_one_is_refused(root: str, run: Run) -> None:
    checkpointer = Checkpointer(root, **run.objects)
    checkpointer.step(0)
    checkpointer.close()
    for act in (lambda: checkpointer.step(1), checkpointer.restore, checkpointer.flush, checkpointer.__enter__):
        with pytest.raises(InvalidInput, match="closed"):
            act()
    assert checkpointer.wait(0).step == 0
    assert checkpointer.stats.commits == 1
    assert checkpointer.plan


def test_no_step_within_an_edit(root: str, run: Run) -> None:
    with Checkpointer(root, **run.objects) as checkpointer:
        checkpointer.step(0)
        with checkpointer.edit():
            with torch.no_grad():
                run.model.get_parameter("norm.weight").fill_(3.0)
            for act in (lambda: checkpointer.step(1), checkpointer.restore, checkpointer.flush):
                with pytest.raises(InvalidInput, match="within edit"):
                    act()
        checkpointer.step(1).wait()
        assert checkpointer.store.at(1)["model", "norm.weight"][0] == 3.0


# ---------------------------------------------------------------- what is stored


def test_every_step_is_the_state_of_that_step(root: str) -> None:
    parameters = nn.ParameterList(nn.Parameter(torch.zeros(50_000)) for _ in range(4))
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    with Checkpointer(root, model=parameters, optimizer=optimizer) as checkpointer:
        for step in range(1, 11):
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, -1.0)
            optimizer.step()
            with (torch.no_grad(), torch.enable_grad(), torch.inference_mode())[step % 3]:
                checkpointer.step(step)  # no wait: training goes on at once
        checkpointer.flush()
        for step in range(1, 11):
            for lazy in checkpointer.store.at(step)["model"].values():
                assert (lazy[...] == step).all()
                assert not lazy[...].requires_grad


def test_names_and_roles(root: str, run: Run) -> None:
    with Checkpointer(root, **run.objects) as checkpointer:
        before = checkpointer.plan
        losses_of(run, range(1), checkpointer)
        checkpointer.flush()
        state = checkpointer.store.at(0)
        assert ("model", "head.weight") in state
        assert ("optimizer", "state", "embedding.weight", "exp_avg") in state
        assert ("scheduler", "last_epoch") in state
        assert state["extra", "losses"] == 1
        assert {path[1] for path in state if path[0] == "rng"} == {"python", "numpy", "torch"}
        plan = checkpointer.plan
        assert before is None
        assert plan is not None
        roles = {name: part["role"] for part in plan for name in part["tensors"]}
        assert roles["model/norm.weight"] == "param"
        assert roles["model/norm.running_mean"] == "buffer"
        assert roles["optimizer/state/norm.weight/exp_avg_sq"] == "exp_avg_sq"
        assert roles["optimizer/state/norm.weight/step"] == "step"
        assert roles["rng/torch"] == "other"
        # Weights and moments lie beside each other: the partitions of one group list them in the same order.
        group = next(part["group"] for part in plan if "model/body.0.weight" in part["tensors"])
        together = {part["role"]: part["tensors"] for part in plan if part["group"] == group}
        assert [name.split("/")[1] for name in together["param"]] == [
            name.split("/")[2] for name in together["exp_avg"]
        ]


def test_wrapped_and_plain_models_share_their_names(root: str) -> None:
    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.module = inner

    def make(model: nn.Module) -> dict[str, Any]:
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)}

    inner = Net()
    objects = make(Wrapper(inner))
    inner(torch.arange(8)).sum().backward()
    objects["optimizer"].step()
    with Checkpointer(root, **objects) as checkpointer:
        checkpointer.step(0).wait()
        assert ("optimizer", "state", "norm.weight", "momentum_buffer") in checkpointer.store.at(0)
    plain = Net()
    others = make(plain)
    with Checkpointer(root, **others) as checkpointer:
        checkpointer.restore()
        checkpointer.step(1).wait()
        assert checkpointer.store.commits()[-1].kind == "delta"
    assert_same(dict(inner.state_dict()), dict(plain.state_dict()))
    assert_same(objects["optimizer"].state_dict(), others["optimizer"].state_dict())


def test_metrics_are_remembered(root: str, run: Run) -> None:
    with Checkpointer(root, **run.objects) as checkpointer:
        commit = checkpointer.step(0, metrics={"loss": torch.tensor(0.5), "lr": 1e-3}).wait()
    assert commit.metrics == {"loss": 0.5, "lr": 1e-3}


def test_the_model_may_change_between_steps(root: str) -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(10, 4)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    truth: dict[int, Any] = {}
    with Checkpointer(root, model=model, optimizer=optimizer) as checkpointer:

        def step(number: int) -> None:
            optimizer.zero_grad()
            total: Any = sum((parameter.float() ** 2).sum() for parameter in model.parameters())
            total.backward()
            optimizer.step()
            truth[number] = {key: value.clone() for key, value in model.state_dict().items()}
            checkpointer.step(number)

        step(0)
        with checkpointer.edit():
            model["embedding"] = nn.Embedding(12, 4)
            optimizer.param_groups[0]["params"] = list(model.parameters())
            optimizer.state.clear()
        step(1)
        with checkpointer.edit():
            model["extra"] = nn.Linear(4, 4)
            optimizer.add_param_group({"params": list(model["extra"].parameters()), "lr": 1e-5})
        step(2)
        with checkpointer.edit():
            model.to(torch.bfloat16)
            optimizer.state.clear()
        step(3)
        checkpointer.flush()
        for number, expected in truth.items():
            assert_same(expected, dict(checkpointer.store.at(number)["model"].to_state_dict()))
        assert checkpointer.restore(3) == 4
        with pytest.raises(InvalidInput, match=r"float32 \(10, 4\) in the commit, bfloat16 \(12, 4\)"):
            checkpointer.restore(0)


# ---------------------------------------------------------------- steps that are left out


def test_the_interval_leaves_steps_out(root: str, run: Run) -> None:
    with Checkpointer(root, interval=3, **run.objects) as checkpointer:
        handles = [checkpointer.step(step) for step in range(5)]
        assert [handle.skipped for handle in handles] == [False, True, True, False, True]
        assert [handle.id is None for handle in handles] == [False, True, True, False, True]
        assert handles[1].wait(timeout=30).step == 3
        assert handles[1].done()
        assert checkpointer.wait(3).step == 3
        assert not handles[4].done()
        with pytest.raises(Timeout):
            handles[4].wait(timeout=0)
        with pytest.raises(Timeout):
            checkpointer.wait(4, timeout=0)
        assert checkpointer.step(5, exact=True).wait().step == 5
        assert handles[4].wait().step == 5
        last = checkpointer.step(7)
    assert last.wait().step == 7
    assert checkpointer.stats.skipped == 4


def test_who_waits_for_a_commit_that_never_comes_is_told(root: str, run: Run) -> None:
    handles: list[deltastore.Handle] = []

    def fail() -> None:
        with Checkpointer(root, interval=3, **run.objects) as checkpointer:
            handles.append(checkpointer.step(1))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    with pytest.raises(NotFound, match="no commit followed"):
        handles[0].wait(timeout=30)


def test_under_pressure_steps_are_skipped(store: deltastore.Store, run: Run) -> None:
    gate = Gate(store)
    with Checkpointer(store, on_pressure="skip", **run.objects) as checkpointer:
        handles = [checkpointer.step(step) for step in range(3)]
        assert [handle.skipped for handle in handles] == [False, True, True]
        gate.open.set()
        checkpointer.flush()
        assert not checkpointer.step(3).skipped
        assert handles[1].wait(timeout=30).step == 3
    assert [commit.step for commit in store.commits()] == [0, 3]


def test_without_skipping_a_step_waits_for_the_writer(store: deltastore.Store, run: Run) -> None:
    gate = Gate(store)
    with Checkpointer(store, **run.objects) as checkpointer:
        checkpointer.step(0)
        assert gate.entered.wait(30)
        second = threading.Thread(target=checkpointer.step, args=(1,))
        second.start()
        second.join(0.05)
        assert second.is_alive()
        gate.open.set()
        second.join()
    assert [commit.step for commit in store.commits()] == [0, 1]


# ---------------------------------------------------------------- failures of the background


def failing(store: deltastore.Store) -> Gate:
    gate = Gate(store)
    gate.open.set()
    gate.error = Backend("no permission", errno=errno.EACCES)
    return gate


@pytest.mark.parametrize("where", ["step", "skipped step", "flush", "restore", "close", "exit"])
def test_a_failure_is_raised_once_at_the_next_call(store: deltastore.Store, run: Run, where: str) -> None:
    checkpointer = Checkpointer(store, interval=2 if where == "skipped step" else 1, **run.objects)
    checkpointer.step(0).wait()
    gate = failing(store)
    failed = checkpointer.step(2)
    while failed.error is None:
        gate.entered.wait()
    gate.error = None
    calls: dict[str, Callable[[], object]] = {
        "step": lambda: checkpointer.step(3),
        "skipped step": lambda: checkpointer.step(3),
        "flush": checkpointer.flush,
        "restore": checkpointer.restore,
        "close": checkpointer.close,
        "exit": lambda: checkpointer.__exit__(None, None, None),
    }
    with pytest.raises(Backend, match="no permission"):
        calls[where]()
    if where in ("close", "exit"):
        return
    losses_of(run, range(4, 5))
    checkpointer.step(4).wait()  # told once; the next commit is whole again
    assert store.commits()[-1].kind == "base"
    assert checkpointer.stats.failed == 1
    checkpointer.close()


def test_a_failure_that_was_seen_is_not_raised_again(store: deltastore.Store, run: Run) -> None:
    with Checkpointer(store, **run.objects) as checkpointer:
        checkpointer.step(0).wait()
        gate = failing(store)
        with pytest.raises(Backend, match="no permission"):
            checkpointer.step(1).wait()
        gate.error = None
        checkpointer.step(2)


# ---------------------------------------------------------------- figures and ends


def test_figures(root: str, run: Run) -> None:
    with Checkpointer(root, interval=2, **run.objects) as checkpointer:
        assert checkpointer.stats.commits == 0
        losses_of(run, range(5), checkpointer)
        checkpointer.flush()
        stats = checkpointer.stats
        commits = checkpointer.store.commits()
        assert (stats.steps, stats.commits, stats.skipped, stats.pending, stats.failed) == (5, 3, 2, 0, 0)
        assert stats.stored_bytes == sum(commit.bytes for commit in commits)
        assert stats.base_bytes == sum(commit.bytes for commit in commits if commit.kind == "base")
        assert stats.last_stall_seconds > 0
        assert stats.median_stall_seconds <= stats.total_stall_seconds
        assert stats.interval == 2
        assert stats.last_bytes == commits[-1].bytes
        work = stats.last_work
        assert work is not None
        assert min(work.queue_seconds, work.encode_seconds, work.write_seconds) >= 0
        assert sum(work.predictions.values()) == pytest.approx(1.0)
        scalars = stats.scalars("run/")
        assert scalars["run/commits"] == 3
        assert scalars["run/last_write_seconds"] == work.write_seconds
        assert all(type(value) is float for value in scalars.values())
        assert stats.state_bytes > 1000
        assert "5 steps, 3 commits" in str(stats)
        assert root in repr(checkpointer)


def test_a_store_that_was_open_stays_open(store: deltastore.Store, run: Run) -> None:
    with Checkpointer(store, **run.objects) as checkpointer:
        checkpointer.step(0)
    assert [commit.step for commit in store.commits()] == [0]
    store.commit(1, {"more": 1}).wait()


def test_a_store_that_was_opened_is_closed(tmp_path: Path, run: Run) -> None:
    with Checkpointer(tmp_path, **run.objects) as checkpointer:
        checkpointer.step(0)
    with deltastore.open(tmp_path) as store:  # the lock is free
        store.commit(1, {"more": 1})


def test_an_exact_policy_sets_the_restore_cost(root: str, run: Run) -> None:
    with Checkpointer(root, policy=deltastore.Policy(budget=None, restore_cost=1.0), **run.objects) as checkpointer:
        losses_of(run, range(4), checkpointer)
        checkpointer.flush()
        kinds = [commit.kind for commit in checkpointer.store.commits()]
    assert kinds.count("base") >= 2
