"""What both trainings of the demo share: arguments, one step, and how they report to their parent."""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Callable
from typing import Any

import torch

from deltastore.cli._demo_model import Shape, Training, start_training

SEED = 1234


def parser(about: str | None) -> argparse.ArgumentParser:
    """Return the arguments that decide what is trained; they must be equal for runs that are compared."""
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--steps", type=int, required=True)
    for name, value in (("layers", 4), ("heads", 4), ("width", 200), ("context", 64), ("batch", 8), ("threads", 1)):
        made.add_argument(f"--{name}", type=int, default=value)
    return made


def start(options: argparse.Namespace) -> Training:
    """Return the run at its beginning, and report its size."""
    shape = Shape(options.layers, options.heads, options.width, options.context)
    training = start_training(shape, steps=options.steps, batch=options.batch, seed=SEED, threads=options.threads)
    report("start", parameters=sum(parameter.numel() for parameter in training.model.parameters()))
    return training


def report(event: str, **facts: Any) -> None:
    """Tell the parent; a line that is out stays, even if this process is killed right after it."""
    print(json.dumps({"event": event, **facts}), flush=True)


def train_step(training: Training, interrupt: Callable[[], None] = lambda: None) -> tuple[float, float]:
    """Do one step; return its loss and seconds. `interrupt` is called between the gradients and the update."""
    begin = time.perf_counter()
    inputs, targets = training.data.draw()
    loss: torch.Tensor = training.model(inputs, targets)
    loss.backward()  # type: ignore[no-untyped-call]
    interrupt()
    training.optimizer.step()
    training.scheduler.step()
    training.optimizer.zero_grad()
    return loss.item(), time.perf_counter() - begin


def digest(training: Training) -> str:
    """Return a SHA-256 over the bits of all weights and moments."""
    total = hashlib.sha256()
    state = training.optimizer.state_dict()["state"]
    tensors = list(training.model.state_dict().values())
    tensors += [state[number][name] for number in sorted(state) for name in sorted(state[number])]
    for tensor in tensors:
        total.update(tensor.contiguous().numpy().tobytes())
    return total.hexdigest()
