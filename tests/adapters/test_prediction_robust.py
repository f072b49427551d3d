"""Predicted and replayed commits of trainings in which anything may happen between two steps."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import deltastore
from deltastore.adapters.pytorch import Checkpointer
from deltastore.history.chain import open_chain
from deltastore.policy import Policy
from deltastore.store import Store
from tests.bounded_kit import measured
from tests.cases.kit import bits, walk
from tests.layers.reference import round_up

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1),
    "adam with l2": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.01),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "dampened": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.8, dampening=0.3),
    "plain sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "unknown": lambda p: torch.optim.RMSprop(p, lr=1e-3),
}
POLICIES = {
    "exact": None,
    "bounded": Policy(budget=0.1, restore_cost=1e9),
    "rich": Policy(budget=0.4, restore_cost=1e9),
    "held": Policy(budget=0.1, restore_cost=1e9, prediction="hold"),
}
QUIET = ["train", "train", "train", "train"]
SITUATIONS = [
    *("nothing", "twice", "accumulate", "rate", "clip", "keep gradients"),
    *("explode", "not a number", "overflow", "freeze", "unfreeze", "cut off"),
    *("grow", "edit", "forget", "replace", "exact", "restore", "resume", "dtype"),
]


class Model(nn.Module):
    """A tied embedding of which most rows are never touched, and one layer that is large enough to be predicted."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(150, 64)
        self.layers = nn.ModuleList([nn.Linear(64, 128), nn.Linear(128, 64)])
        self.head = nn.Linear(64, 150, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        values = self.embed(tokens)
        for layer in self.layers:
            values = torch.tanh(layer(values[..., : layer.in_features].to(layer.weight.dtype)))
        found: torch.Tensor = self.head(values[..., :64].float())
        return found


class Run:
    """A training, its Checkpointer, and the true state of every commit of its line."""

    def __init__(self, store: Store, optimizer: str, policy: str) -> None:
        torch.manual_seed(0)
        self.store = store
        self.make = OPTIMIZERS[optimizer]
        self.policy = POLICIES[policy]
        self.truth: dict[int, dict[tuple[Any, ...], Any]] = {}
        self.count = 0
        self.oldest = 0
        """The first commit with the parameters and optimizers of today."""
        self.keeps = False
        self.model = Model()
        self.optimizer = self.make(self.model.parameters())
        self.attach()

    def attach(self) -> None:
        self.ckpt = Checkpointer(self.store, policy=self.policy, model=self.model, optimizer=self.optimizer)

    def gradients(self) -> None:
        tokens = torch.randint(0, 40, (8,))
        loss: Any = nn.functional.cross_entropy(self.model(tokens), tokens.roll(1))
        if loss.requires_grad:
            loss.backward()

    def step(self) -> None:
        self.gradients()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=not self.keeps)

    def commit(self, exact: bool | None = None) -> None:
        self.ckpt.step(self.count, exact=exact)
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        state = {
            "model": self.model.state_dict(),
            "optimizer": {
                "state": {names[id(parameter)]: slots for parameter, slots in self.optimizer.state.items()},
            },
        }
        self.truth[self.count] = dict(walk(copy.deepcopy(state)))
        self.count += 1

    def restore(self, step: int) -> None:
        """Go back within the process."""
        assert self.ckpt.restore(step) == step + 1
        self.truth = {number: state for number, state in self.truth.items() if number <= step}
        self.count = step + 1

    def resume(self) -> None:
        """Begin again as a new process would."""
        self.ckpt.close()
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        groups = [[names[id(parameter)] for parameter in group["params"]] for group in self.optimizer.param_groups]
        self.model = copy.deepcopy(self.model)
        for parameter in self.model.parameters():
            parameter.detach().zero_()
        parameters = dict(self.model.named_parameters())
        first, *others = [[parameters[name] for name in group] for group in groups]
        self.optimizer = self.make(first)
        for group in others:
            self.optimizer.add_param_group({"params": group})
        self.attach()
        assert self.ckpt.restore() == self.count

    def do(self, what: str) -> bool | None:
        """Let something happen, and a step or none; return whether the commit is to be exact."""
        parameters = list(self.model.parameters())
        with torch.no_grad():
            self.prepare(what, parameters)
        match what:
            case "nothing":
                pass
            case "twice":
                self.step()
                self.step()
            case "accumulate":
                self.gradients()
                self.step()
            case "explode" | "not a number" | "overflow" | "clip":
                self.gradients()
                spoil(what, parameters)
                if what != "overflow":  # as a GradScaler leaves out a step
                    self.optimizer.step()
                self.optimizer.zero_grad()
            case _:
                self.step()
        return True if what == "exact" else None

    def prepare(self, what: str, parameters: list[nn.Parameter]) -> None:
        if what in ("cut off", "grow", "replace", "dtype"):
            self.oldest = self.count
        match what:
            case "rate":
                for group in self.optimizer.param_groups:
                    group["lr"] *= 0.3
            case "keep gradients":
                self.keeps = not self.keeps
            case "freeze":
                parameters[1].requires_grad_(False)
                parameters[1].grad = None
            case "unfreeze":
                parameters[1].requires_grad_(True)
            case "cut off":
                if len(self.optimizer.param_groups[0]["params"]) > 1:
                    self.optimizer.state.pop(self.optimizer.param_groups[0]["params"].pop(), None)
            case "grow":
                layer = nn.Linear(64, 128)
                self.model.layers.append(layer)
                self.optimizer.add_param_group({"params": list(layer.parameters()), "lr": 1e-3})
            case "edit":
                parameters[1].mul_(1.01)
            case "forget":
                self.optimizer.state.clear()
            case "replace":
                self.optimizer = self.make(self.model.parameters())
                self.ckpt.close()
                self.attach()
            case "restore" if self.oldest < self.count:
                self.restore(max(self.oldest, self.count - 3))
            case "resume":
                self.resume()
            case "dtype":
                self.model.layers[0].to(torch.bfloat16)
                self.optimizer.state.clear()


def spoil(what: str, parameters: list[nn.Parameter]) -> None:
    """Do to gradients what trainings do."""
    if what == "clip":
        nn.utils.clip_grad_norm_(parameters, 0.01)
        return
    for parameter in parameters:
        if parameter.grad is not None:
            match what:
                case "explode":
                    parameter.grad.mul_(1e6)
                case "not a number":
                    parameter.grad.flatten()[3] = math.nan
                    parameter.grad.flatten()[70:75] = math.inf


def check(store: Store, truth: Mapping[int, Mapping[tuple[Any, ...], Any]]) -> None:
    """Every commit is what it was: bit for bit, or within a bound that is not larger than it must be."""
    for step, expected in truth.items():
        state = store.at(step)
        read = dict(walk(state.to_named_state()))
        for path, value in expected.items():
            if not isinstance(value, torch.Tensor):
                assert read[path] == value, (step, path)
                continue
            bound = state.fidelity.bound(*path)
            if bound == 0:
                assert bits(read[path]) == bits(value), (step, path)
            else:
                assert round_up(measured(value, read[path])) == bound, (step, path)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=settings().max_examples // 3)
@given(data=st.data())
def test_whatever_happens_between_two_steps(
    policy: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("run") / "store"
    optimizer = data.draw(st.sampled_from(list(OPTIMIZERS)))
    with deltastore.open(root) as store:
        run = Run(store, optimizer, policy)
        run.step()
        run.commit()
        for what in data.draw(st.lists(st.sampled_from([*QUIET, *SITUATIONS]), min_size=4, max_size=14)):
            run.commit(run.do(what))
        run.ckpt.close()
    with deltastore.open(root, mode="r") as store:
        check(store, run.truth)
        assert store.verify(deep=True).ok


@pytest.mark.parametrize(("policy", "kind"), [("exact", "replay-adam"), ("bounded", "adam"), ("rich", "adam")])
def test_what_is_tried_above_is_predicted(policy: str, kind: str, tmp_path: Path) -> None:
    with deltastore.open(tmp_path / "store") as store:
        run = Run(store, "adamw", policy)
        for _ in range(4):
            run.step()
            run.commit()
        run.ckpt.close()
        chain = open_chain(store._view.packs, store._view.catalog, store._view.resolve(2))
        assert [prediction.kind for prediction in chain.record.predictions] == [kind]


def test_a_buffer_that_begins_anew_after_it_was_predicted(tmp_path: Path) -> None:
    """It is stored whole in the middle of a chain; what comes before it is still needed to read the weights."""
    with deltastore.open(tmp_path / "store") as store:
        run = Run(store, "adamw", "exact")
        for what in ["train", "train", "train", "forget", "train", "train"]:
            run.commit(run.do(what))
        run.ckpt.close()
        check(store, run.truth)
