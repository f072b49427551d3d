"""Predicted commits of real trainings: bounds, equal bits however they are read, and what happens when rules change."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import deltastore
from deltastore.adapters.pytorch import Checkpointer
from deltastore.errors import Corruption
from deltastore.history.chain import open_chain
from deltastore.layers import codes
from deltastore.ondisk.predictions import PredictionRecord
from deltastore.policy import Policy
from deltastore.reader import State
from deltastore.store import Store

NEVER = 1e9
"""A restore cost at which no base is due."""


class Model(nn.Module):
    """An embedding, two layers with small and large tensors, and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(200, 96)
        self.first = nn.Linear(96, 384)
        self.second = nn.Linear(384, 96)
        self.norm = nn.LayerNorm(96)
        self.head = nn.Linear(96, 200, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.norm(self.second(torch.relu(self.first(self.embed(tokens))))))
        return found


class Training:
    """A model with its optimizer, and the true state of every step."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer], seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = Model()
        self.optimizer = make(self.model.parameters())
        self.truth: dict[int, dict[tuple[Any, ...], torch.Tensor]] = {}

    def step(self) -> None:
        tokens = torch.randint(0, 150, (16,))  # the other rows of the embedding are never touched
        loss: Any = nn.functional.cross_entropy(self.model(tokens), tokens.roll(1))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def commit(self, ckpt: Checkpointer, step: int) -> None:
        ckpt.step(step)
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        self.truth[step] = {
            **{("model", name): value.detach().clone() for name, value in self.model.state_dict().items()},
            **{
                ("optimizer", "state", names[id(parameter)], slot): value.clone()
                for parameter, slots in self.optimizer.state.items()
                for slot, value in slots.items()
                if isinstance(value, torch.Tensor)
            },
        }

    def check(self, state: State) -> None:
        """Every element lies within the bound that is recorded for it."""
        for path, value in self.truth[state.commit.step].items():
            read = state[path]
            assert isinstance(read, deltastore.reader.LazyTensor)
            deviation = (read[...].double() - value.double()).abs().max().item()
            bound = state.fidelity.bound(*path)
            assert deviation <= bound, path
            assert float(np.nextafter(np.float32(bound), np.float32(0))) < deviation or bound == 0, path


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1),
    "adam with l2": lambda p: torch.optim.Adam(p, lr=1e-3, weight_decay=0.01),
    "adam maximize": lambda p: torch.optim.Adam(p, lr=1e-4, maximize=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "sgd nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
}


def predictions(store: Store, ref: int | str = "latest") -> tuple[PredictionRecord, ...]:
    commit = store.at(ref).commit
    view = store._view
    return open_chain(view.packs, view.catalog, view.catalog.by_id[commit.id]).record.predictions


def run(training: Training, ckpt: Checkpointer, steps: range) -> None:
    for step in steps:
        training.step()
        training.commit(ckpt, step)


@pytest.fixture
def store(tmp_path: Any) -> Iterator[Store]:
    with deltastore.open(tmp_path / "store") as opened:
        yield opened


def checkpointer(store: Store, training: Training, budget: float = 0.05, **more: Any) -> Checkpointer:
    policy = Policy(budget=budget, restore_cost=NEVER, **more)
    return Checkpointer(store, policy=policy, model=training.model, optimizer=training.optimizer)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("budget", [0.035, 0.1])
def test_every_step_lies_within_its_bound(store: Store, name: str, budget: float) -> None:
    training = Training(OPTIMIZERS[name])
    with checkpointer(store, training, budget) as ckpt:
        training.step()
        training.commit(ckpt, 0)
        run(training, ckpt, range(1, 8))
        store.flush()
        for step in (1, 4, 7):
            training.check(store.at(step))
        assert {p.kind for p in predictions(store, 7)} == {"sgd" if "sgd" in name else "adam"}
    assert store.verify(deep=True).ok


@pytest.mark.parametrize("name", ["adamw", "sgd nesterov"])
def test_the_prediction_is_nearer_than_holding(tmp_path: Any, name: str) -> None:
    missing = {}
    for prediction in ("auto", "hold"):
        training = Training(OPTIMIZERS[name])
        with (
            deltastore.open(tmp_path / prediction) as store,
            checkpointer(store, training, prediction=prediction) as ckpt,
        ):
            run(training, ckpt, range(20))
            store.flush()
            missing[prediction] = store.at(19).fidelity.residual("param")
            assert bool(predictions(store, 19)) == (prediction == "auto")
    assert missing["auto"] < 0.4 * missing["hold"]


def exact(store: Store, training: Training) -> Checkpointer:
    return Checkpointer(store, model=training.model, optimizer=training.optimizer)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_exact_commits_by_replay(store: Store, name: str) -> None:
    training = Training(OPTIMIZERS[name])
    with exact(store, training) as ckpt:
        run(training, ckpt, range(7))
        store.flush()
        kinds = {kind for step in range(2, 7) for kind in (p.kind for p in predictions(store, step))}
        assert kinds == {"replay-sgd" if "sgd" in name else "replay-adam"}
        for step in range(7):
            state = store.at(step)
            assert state.commit.exact
            training.check(state)
        base, *deltas = store.commits()
        share = 0.45 if "sgd" in name else 0.35  # of a small state records and container are a part
        assert all(commit.kind == "delta" and commit.bytes < share * base.bytes for commit in deltas)
    assert store.verify(deep=True).ok


@pytest.mark.parametrize("spoil", ["accumulate in place", "several steps", "clip after", "edit", "skipped"])
def test_gradients_that_are_not_what_the_optimizer_saw_cost_bytes_not_bits(store: Store, spoil: str) -> None:
    training = Training(OPTIMIZERS["adamw"])
    with exact(store, training) as ckpt:
        run(training, ckpt, range(2))
        for step in range(2, 6):
            tokens = torch.randint(0, 150, (16,))
            loss: Any = nn.functional.cross_entropy(training.model(tokens), tokens.roll(1))
            loss.backward()
            if spoil != "skipped":
                training.optimizer.step()
            if spoil == "several steps":
                training.optimizer.step()
            if spoil == "clip after":
                nn.utils.clip_grad_norm_(training.model.parameters(), 0.01)
            if spoil == "edit":
                with torch.no_grad():
                    training.model.first.weight.mul_(0.99)
                    next(iter(training.optimizer.state.values()))["exp_avg"].zero_()
            training.optimizer.zero_grad(set_to_none=spoil != "accumulate in place")
            training.commit(ckpt, step)
        store.flush()
        for step in range(6):
            training.check(store.at(step))


def test_holding_may_be_asked_for(store: Store) -> None:
    training = Training(OPTIMIZERS["adamw"])
    policy = Policy(budget=None, prediction="hold")
    with Checkpointer(store, policy=policy, model=training.model, optimizer=training.optimizer) as ckpt:
        run(training, ckpt, range(3))
        store.flush()
        assert not predictions(store, 2)


def test_slices_and_whole_states_have_equal_bits(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(OPTIMIZERS["adamw"])
    with checkpointer(store, training) as ckpt:
        run(training, ckpt, range(10))
        store.flush()
        state = store.at(9)
        whole = state.to_state_dict()
        for name, value in whole["model"].items():
            lazy = state["model", name]
            assert torch.equal(lazy[...], value)
            assert torch.equal(lazy[1:3], value[1:3])
            assert torch.equal(lazy[-1:], value[-1:])
        monkeypatch.setattr("deltastore.parallel.threads", lambda: 1)
        again = store.at(9).to_state_dict()
        assert all(torch.equal(again["model"][name], value) for name, value in whole["model"].items())


def test_another_arithmetic_is_corruption(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(OPTIMIZERS["adamw"])
    with checkpointer(store, training) as ckpt:
        run(training, ckpt, range(6))
        store.flush()
    scales = codes.SCALES.copy()
    scales.view(np.uint32)[1:] += 1
    monkeypatch.setattr("deltastore.history.predicted.SCALES", scales)
    with pytest.raises(Corruption, match="CRC-32C"):
        store.at(4).to_state_dict()


def test_going_on_from_a_predicted_commit(tmp_path: Any) -> None:
    training = Training(OPTIMIZERS["adamw"])
    with deltastore.open(tmp_path) as store, checkpointer(store, training) as ckpt:
        run(training, ckpt, range(8))
        store.flush()
        ids = [commit.id for commit in store.commits()]
    with deltastore.open(tmp_path) as store:
        again = Training(OPTIMIZERS["adamw"], seed=1)
        ckpt = checkpointer(store, again)
        assert ckpt.restore(ids[5]) == 6
        run(again, ckpt, range(6, 10))
        store.flush()
        for step in range(6, 10):
            assert store.at(step).commit.kind == "delta"
            again.check(store.at(step))
        assert all(predictions(store, step) for step in range(6, 10))
        training.check(store.at(ids[5]))
        ckpt.close()


def test_rules_that_change_on_the_way(store: Store) -> None:
    training = Training(OPTIMIZERS["adamw"])
    with checkpointer(store, training) as ckpt:
        run(training, ckpt, range(3))
        training.optimizer.param_groups[0]["lr"] = 0.1
        run(training, ckpt, range(3, 5))
        training.commit(ckpt, 5)  # nothing stepped
        training.model.first.weight.requires_grad_(False)
        run(training, ckpt, range(6, 8))
        with ckpt.edit(), torch.no_grad():
            training.model.second.weight.fill_(float("nan"))
            training.model.embed.weight[3] = float("inf")
        training.commit(ckpt, 8)
        with ckpt.edit(), torch.no_grad():
            training.model.second.weight.normal_()
            training.model.embed.weight[3] = 1e30
        training.commit(ckpt, 9)
        store.flush()
        for step in (*range(8), 9):
            training.check(store.at(step))
        read = store.at(8)["model", "second.weight"]
        assert read[...].isnan().all()


def test_several_optimizer_steps_of_one_commit(store: Store) -> None:
    training = Training(OPTIMIZERS["adamw"])
    with checkpointer(store, training, 0.1) as ckpt:
        for step in range(6):
            for _ in range(1 + step % 3):
                training.step()
            training.commit(ckpt, step)
        store.flush()
        assert {count for p in predictions(store, 5) for count in p.steps} == {3}
        for step in range(6):
            training.check(store.at(step))


def test_a_new_parameter_and_another_optimizer(store: Store) -> None:
    training = Training(OPTIMIZERS["adamw"])
    with checkpointer(store, training) as ckpt:
        run(training, ckpt, range(3))
    training.model.extra = nn.Linear(96, 96)
    training.optimizer = torch.optim.SGD(training.model.parameters(), lr=0.1, momentum=0.9)
    with checkpointer(store, training) as ckpt:
        run(training, ckpt, range(3, 8))
        store.flush()
        for step in range(3, 8):
            training.check(store.at(step))


def test_an_unknown_optimizer_is_held(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    training = Training(lambda p: torch.optim.RMSprop(p, lr=1e-3))
    with caplog.at_level(logging.WARNING), checkpointer(store, training) as ckpt:
        run(training, ckpt, range(4))
        store.flush()
        assert not predictions(store, 3)
        training.check(store.at(3))
    assert "optimizer (RMSprop): no prediction is known" in caplog.text


def test_a_machine_that_computes_otherwise_holds(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("deltastore.deltas.kernels_agree", lambda: False)
    training = Training(OPTIMIZERS["adamw"])
    with caplog.at_level(logging.WARNING), checkpointer(store, training) as ckpt:
        run(training, ckpt, range(4))
        store.flush()
        assert not predictions(store, 3)
        training.check(store.at(3))
    assert caplog.text.count("does not compute what the format says") == 1
