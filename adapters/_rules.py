"""What torch's optimizers did between two commits: the rules by which a reader can predict it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from deltastore.layers.rules import AdamRule, AdamStep, Rule, SgdRule
from deltastore.ondisk.predictions import MAX_STEPS
from deltastore.torch_bridge import TORCH


class OptimizerWatch:
    """Remembers with which constants an optimizer stepped since the commit before.

    They are taken right after each step: a scheduler may have changed them when the commit is taken.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._is_adam = _is_one_of(optimizer, torch.optim.Adam, torch.optim.AdamW)
        self._is_sgd = _is_one_of(optimizer, torch.optim.SGD)
        self._steps: list[list[dict[str, Any]]] = []
        self._counts: dict[int, float] = {}
        self._now: dict[int, float] = {}
        self.keeps_gradients = False
        """Hold on to the gradients of the last step: an exact commit stores them in place of what they did."""
        self._gradients: dict[int, torch.Tensor] = {}
        self._handle: Any = None
        if self.is_known:
            self._handle = optimizer.register_step_post_hook(self._stepped)

    @property
    def is_known(self) -> bool:
        """Whether its steps can be predicted."""
        return self._is_adam or self._is_sgd

    def close(self) -> None:
        """Take the hook away."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _stepped(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if len(self._steps) <= MAX_STEPS:
            self._steps.append([_constants(group) for group in optimizer.param_groups])
        if self.keeps_gradients:
            parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
            # Not those of a device: a reference would keep memory there that the next step needs.
            self._gradients = {id(p): p.grad for p in parameters if p.grad is not None and p.grad.is_cpu}

    def gradients(self) -> dict[int, np.ndarray]:
        """Return the gradients of the last step, by ``id`` of their parameters; those that are plain CPU float32."""
        plain = {
            number: gradient.detach()
            for number, gradient in self._gradients.items()
            if gradient.dtype == torch.float32 and gradient.layout == torch.strided and TORCH.is_plain(gradient)
        }
        return {number: TORCH.as_array(gradient) for number, gradient in plain.items()}

    def mark(self, *, taken: bool) -> None:
        """Begin anew: the state is that of a commit.

        Parameters
        ----------
        taken : bool
            It is the one for which :meth:`rules` was asked last: the steps were counted then.
        """
        self._steps = []
        self._gradients = {}
        if self.is_known and not (taken and self._is_adam):  # what SGD counts begins anew
            self._now = {id(parameter): self._count(parameter) for parameter in self._optimizer.state}
        self._counts, self._now = self._now, {}

    def rules(self) -> dict[int, Rule]:
        """Return the rule of each parameter, by its ``id``; none where nothing is known or nothing moved."""
        if not self.is_known:
            return {}
        found: dict[int, Rule] = {}
        made: dict[tuple[Any, ...], Rule] = {}
        self._now = {id(parameter): self._count(parameter) for parameter in self._optimizer.state}
        now = [_constants(group) for group in self._optimizer.param_groups]
        for number, group in enumerate(self._optimizer.param_groups):
            for parameter in group["params"]:
                before = self._counts.get(id(parameter))
                count = self._now.get(id(parameter))
                if before is None or count is None or not 0 < count - before <= MAX_STEPS:
                    continue
                key = (number, before, count)
                if key not in made:
                    steps = [step[number] for step in self._steps if number < len(step)]
                    wanted = round(count - before)
                    steps = [*[now[number]] * (wanted - len(steps)), *steps[-wanted:]]
                    made[key] = _adam(steps, before) if self._is_adam else _sgd(steps)
                found[id(parameter)] = made[key]
        return found

    def _count(self, parameter: torch.Tensor) -> float:
        """Return how many steps a parameter has made; SGD counts none, so that its own count is taken."""
        state: Mapping[str, Any] = self._optimizer.state[parameter]
        return float(state.get("step", 0.0)) if self._is_adam else float(len(self._steps))


def _is_one_of(optimizer: Any, *kinds: type) -> bool:
    # A subclass may step in another way: only torch's own.
    return type(optimizer) in kinds


def _constants(group: Mapping[str, Any]) -> dict[str, Any]:
    names = (
        *("lr", "betas", "eps", "weight_decay", "decoupled_weight_decay", "maximize"),
        *("momentum", "dampening", "nesterov"),
    )
    return {name: group[name] for name in names if name in group} | {"lr": float(group["lr"])}


def _adam(steps: list[dict[str, Any]], before: float) -> AdamRule:
    last = steps[-1]
    beta1, beta2 = (float(beta) for beta in last["betas"])
    is_decoupled = bool(last.get("decoupled_weight_decay"))
    decay = float(last["weight_decay"])
    return AdamRule(
        beta1,
        beta2,
        float(last["eps"]),
        tuple(
            AdamStep(step["lr"], 1 - step["lr"] * float(step["weight_decay"]) if is_decoupled else 1.0, before + number)
            for number, step in enumerate(steps, 1)
        ),
        l2=0.0 if is_decoupled else decay,
        sign=-1.0 if last["maximize"] else 1.0,
    )


def _sgd(steps: list[dict[str, Any]]) -> SgdRule:
    last = steps[-1]
    return SgdRule(
        float(last["momentum"]),
        bool(last["nesterov"]),
        tuple((step["lr"], 1.0) for step in steps),
        dampening=float(last["dampening"]),
        l2=float(last["weight_decay"]),
        sign=-1.0 if last["maximize"] else 1.0,
    )
