"""Small real trainings whose losses depend on everything that a checkpoint must bring back."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from deltastore.adapters.pytorch import Checkpointer


class Net(nn.Module):
    """Embedding tied to the head, batch norm, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.norm = nn.BatchNorm1d(8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2))
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.norm(self.embedding(tokens))))  # type: ignore[no-any-return]


@dataclass
class Run:
    """What one training consists of."""

    model: nn.Module
    optimizers: dict[str, torch.optim.Optimizer]
    others: dict[str, Any] = field(default_factory=dict)

    @property
    def objects(self) -> dict[str, Any]:
        """Everything that the state consists of."""
        return {"model": self.model, **self.optimizers, **self.others}

    def step(self, step: int) -> float:
        """Train one step; the batch is that of the step, its noise comes from the global generators."""
        tokens = torch.randint(20, (16,), generator=torch.Generator().manual_seed(step))
        shift = random.randrange(20) + int(np.random.randint(20))  # noqa: NPY002 - the global state is meant
        loss = functional.cross_entropy(self.model(tokens), (tokens + shift) % 20)
        scaler = self.others.get("scaler")
        if scaler is None:
            loss.backward()  # type: ignore[no-untyped-call]
            for optimizer in self.optimizers.values():
                optimizer.step()
        else:
            scaler.scale(loss * (float("inf") if step == 3 else 1.0)).backward()  # step 3 overflows and is left out
            for optimizer in self.optimizers.values():
                scaler.step(optimizer)
            scaler.update()
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()
        if "scheduler" in self.others:
            self.others["scheduler"].step()
        return float(loss.detach())


def seed_everything(seed: int) -> None:
    """Seed the global generators."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - as above
    torch.manual_seed(seed)


def make_run(kind: str = "adamw", seed: int = 0) -> Run:
    """Return a fresh run, and seed everything that it draws from."""
    seed_everything(seed)
    model = Net()
    if kind == "adamw":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        return Run(model, {"optimizer": optimizer}, {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)})
    if kind == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=40)
        return Run(model, {"optimizer": optimizer}, {"scheduler": scheduler})
    if kind == "scaled adam":
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02, amsgrad=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        return Run(model, {"optimizer": optimizer}, {"scaler": scaler})
    if kind == "several":
        inner = torch.optim.AdamW(model.body.parameters(), lr=0.02)
        outer = torch.optim.SGD([*model.embedding.parameters(), *model.norm.parameters()], lr=0.1, momentum=0.9)
        return Run(model, {"inner": inner, "outer": outer})
    raise AssertionError(kind)


def losses_of(run: Run, steps: range, checkpointer: Checkpointer | None = None) -> list[float]:
    """Train, and commit each step if there is a checkpointer."""
    losses = []
    for step in steps:
        losses.append(run.step(step))
        if checkpointer is not None:
            checkpointer.extra["losses"] = len(losses)
            checkpointer.step(step, metrics={"loss": losses[-1]})
    return losses
