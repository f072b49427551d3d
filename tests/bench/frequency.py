"""How often one can checkpoint at the same cost to the training: bounded commits against full checkpoints."""

from __future__ import annotations

import os
import shutil
import statistics
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import async_save

import deltastore
from deltastore.adapters.pytorch import Checkpointer
from tests.bench.measure import Clock, Figure, at_least, shown

TARGET = 9.0
"""The least that SIC reports, against full checkpoints."""

Save = Callable[[int], object]


@dataclass(frozen=True)
class Method:
    """How a training is checkpointed: after a step, until all is durable, and cleaning up, which is not measured."""

    save: Save
    wait: Callable[[], object] = lambda: None
    close: Callable[[], object] = lambda: None


class Job:
    """A GPT-like stack with AdamW on fixed random data."""

    def __init__(self, width: int, layers: int) -> None:
        torch.manual_seed(0)
        block = nn.TransformerEncoderLayer(width, 8, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.model = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.data = torch.randn(4, 64, width)

    def step(self) -> None:
        """Train one step."""
        (self.model(self.data) - self.data.roll(1, 1)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        """Return what a full checkpoint holds."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def frequency(folder: Path, quick: bool) -> list[Figure]:
    """Extra seconds that one checkpoint costs a training, everything until it is durable included."""
    job = Job(256 if quick else 512, 4 if quick else 6)
    job.step()
    steps, rounds = (8, 3) if quick else (16, 5)
    methods: dict[str, Callable[[Path], Method]] = {
        "none": lambda _root: Method(lambda _step: None),
        "deltastore, 2 %": lambda root: _bounded(job, root),
        "torch.save + fsync": lambda root: Method(_torch_save(job, root)),
        "DCP async_save": lambda root: _dcp(job, root),
    }
    found: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(rounds):
        for name, method in methods.items():
            root = folder / "run"
            root.mkdir()
            used = method(root)
            with Clock() as clock:
                for step in range(steps):
                    job.step()
                    used.save(step)
                used.wait()
            found[name].append(clock.wall / steps)
            used.close()
            shutil.rmtree(root)
    alone = statistics.median(found.pop("none"))
    extra = {name: statistics.median(walls) - alone for name, walls in found.items()}
    ours = extra.pop("deltastore, 2 %")
    size = sum(p.nbytes for p in job.model.parameters()) * 3 / 1e6
    figures = [shown("extra time of a bounded commit", 1e3 * ours, "ms", **{"step ms": 1e3 * alone, "state MB": size})]
    figures += [
        at_least(f"commits for one checkpoint of {name}", cost / max(ours, 1e-6), TARGET, "x", **{"its ms": 1e3 * cost})
        for name, cost in extra.items()
    ]
    return figures


def _bounded(job: Job, root: Path) -> Method:
    store = deltastore.open(root / "store")
    ckpt = Checkpointer(store, policy=deltastore.Policy(), model=job.model, optimizer=job.optimizer)
    ckpt.step(0)  # the base and the compilation belong to the start of a run
    ckpt.flush()

    def close() -> None:
        ckpt.close()
        store.close()

    return Method(lambda step: ckpt.step(step + 1), ckpt.flush, close)


def _torch_save(job: Job, root: Path) -> Save:
    def save(step: int) -> None:
        with (root / f"{step}.pt").open("wb") as file:
            torch.save(job.state(), file)
            file.flush()
            os.fsync(file.fileno())
        (root / f"{step - 1}.pt").unlink(missing_ok=True)

    return save


def _dcp(job: Job, root: Path) -> Method:
    waiting: list[Future[Any]] = []

    def save(step: int) -> None:
        while waiting:  # as its users do: one at a time
            waiting.pop().result()
        answer: Any = async_save(job.state(), checkpoint_id=str(root / f"{step}"))
        waiting.append(getattr(answer, "upload_completion", answer))
        shutil.rmtree(root / f"{step - 2}", ignore_errors=True)

    return Method(save, lambda: [future.result() for future in waiting])
