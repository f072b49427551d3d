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

    def __init__(self, width: int, layers: int, batch: tuple[int, int] = (4, 64)) -> None:
        torch.manual_seed(0)
        block = nn.TransformerEncoderLayer(width, 8, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.model = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.data = torch.randn(*batch, width)

    def step(self) -> None:
        """Train one step."""
        (self.model(self.data) - self.data.roll(1, 1)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        """Return what a full checkpoint holds."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def frequency(folder: Path, quick: bool) -> list[Figure]:
    """Extra seconds that one checkpoint costs a training, everything until it is durable included.

    Twice: a training that leaves one core free, as one on an accelerator does, and one that needs all of them.
    """
    cores = torch.get_num_threads()
    try:
        torch.set_num_threads(max(cores - 1, 1))
        figures = _extra(folder, "one core free", quick)
    finally:
        torch.set_num_threads(cores)
    return figures + _extra(folder, "no core free", quick)


def _extra(folder: Path, title: str, quick: bool) -> list[Figure]:
    job = Job(256 if quick else 512, 4 if quick else 6)
    job.step()
    steps, rounds = 10, 3
    roots = {name: folder / name.partition(" ")[0].rstrip(",") for name in METHODS}
    methods = {}
    for name, method in METHODS.items():
        roots[name].mkdir(parents=True)
        methods[name] = method(job, roots[name])
        methods[name].save(0)  # what belongs to the start of a run: a base, compilation, fresh memory
        methods[name].wait()
    found: dict[str, list[float]] = {name: [] for name in METHODS}
    done = 0
    for _ in range(rounds):
        for name, used in methods.items():
            with Clock() as clock:
                for step in range(done + 1, done + steps + 1):
                    job.step()
                    used.save(step)
                used.wait()
            done += steps
            found[name].append(clock.wall / steps)
    for name, used in methods.items():
        used.close()
        shutil.rmtree(roots[name])
    alone = statistics.median(found.pop("none"))
    extra = {name: statistics.median(walls) - alone for name, walls in found.items()}
    ours = extra.pop("deltastore, 2 %")
    size = sum(p.nbytes for p in job.model.parameters()) * 3 / 1e6
    figures = [
        shown(
            f"extra time of a bounded commit, {title}", 1e3 * ours, "ms", **{"step ms": 1e3 * alone, "state MB": size}
        )
    ]
    figures += [
        at_least(
            f"  commits for one checkpoint of {name}", cost / max(ours, 1e-6), TARGET, "x", **{"its ms": 1e3 * cost}
        )
        for name, cost in extra.items()
    ]
    return figures


def _bounded(job: Job, root: Path) -> Method:
    store = deltastore.open(root / "store")
    ckpt = Checkpointer(store, policy=deltastore.Policy(), model=job.model, optimizer=job.optimizer)

    def close() -> None:
        ckpt.close()
        store.close()

    return Method(ckpt.step, ckpt.flush, close)


def _torch_save(job: Job, root: Path) -> Method:
    newest: list[Path] = []

    def save(step: int) -> None:
        newest.append(root / f"{step}.pt")
        with newest[-1].open("wb") as file:
            torch.save(job.state(), file)
            file.flush()
            os.fsync(file.fileno())
        for old in newest[:-1]:
            old.unlink()
        del newest[:-1]

    return Method(save)


def _dcp(job: Job, root: Path) -> Method:
    waiting: list[Future[Any]] = []
    newest: list[Path] = []

    def save(step: int) -> None:
        wait()  # as its users do: one at a time
        for old in newest[:-1]:
            shutil.rmtree(old)
        del newest[:-1]
        newest.append(root / f"{step}")
        answer: Any = async_save(job.state(), checkpoint_id=str(newest[-1]))
        waiting.append(getattr(answer, "upload_completion", answer))

    def wait() -> None:
        while waiting:
            waiting.pop().result()

    return Method(save, wait)


METHODS: dict[str, Callable[[Job, Path], Method]] = {
    "none": lambda _job, _root: Method(lambda _step: None),
    "deltastore, 2 %": _bounded,
    "torch.save + fsync": _torch_save,
    "DCP async_save": _dcp,
}
