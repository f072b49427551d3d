"""One training process of the demo: ``python -m deltastore.cli._demo_train --steps 40 [--store URL] [--kill-at 20]``.

Without a store it is the reference: a plain loop that writes a full checkpoint with torch.save after each step. With one it
resumes from the newest commit, if there is any, and commits each step. It reports what it does as one JSON object on
each line of stdout.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch

from deltastore.adapters.pytorch import Checkpointer
from deltastore.cli._demo_model import Shape, Training, start_training
from deltastore.store import open

SEED = 1234


def main() -> None:
    """Run one process of the demo."""
    options = _options()
    shape = Shape(options.layers, options.heads, options.width, options.context)
    training = start_training(
        shape, steps=options.steps, batch=options.batch, seed=SEED, threads=options.threads
    )
    report("start", parameters=sum(parameter.numel() for parameter in training.model.parameters()))
    if options.store is None:
        run_reference(training, options)
    else:
        run_with_commits(training, options)
    report("end", digest=digest(training))


def report(event: str, **facts: Any) -> None:
    """Tell the parent; a line that is out stays, even if this process is killed right after it."""
    print(json.dumps({"event": event, **facts}), flush=True)


def run_reference(training: Training, options: argparse.Namespace) -> None:
    """Train without interruption, and save a full checkpoint after each step."""
    for step in range(options.steps):
        loss, seconds = train_step(training, lambda: None)
        begin = time.perf_counter()
        with open_file(options.checkpoint) as file:
            torch.save(training.state_dict(), file)
            file.flush()
            os.fsync(file.fileno())
        stall = time.perf_counter() - begin
        size = os.path.getsize(options.checkpoint)
        if step == options.copy_at:
            os.replace(options.checkpoint, options.copy)
        report("step", step=step, loss=loss.hex(), train_seconds=seconds, stall_seconds=stall, bytes=size)


def open_file(path: str) -> Any:
    """Return a file to write; `open` is the store's here."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666), "wb")


def run_with_commits(training: Training, options: argparse.Namespace) -> None:
    """Go on where the store's newest commit is, and commit each step."""
    parts = {
        "model": training.model,
        "optimizer": training.optimizer,
        "scheduler": training.scheduler,
        "data": training.data,
    }
    with open(options.store) as store:
        with Checkpointer(store, **parts) as checkpointer:
            begin = time.perf_counter()
            start = checkpointer.restore()
            report("restored", start=start, seconds=time.perf_counter() - begin)
            for step in range(start, options.steps):

                def interrupt(step: int = step) -> None:
                    if step == options.kill_at:
                        report("kill", step=step, acknowledged=store.durable())
                        os.kill(os.getpid(), signal.SIGKILL)

                loss, seconds = train_step(training, interrupt)
                begin = time.perf_counter()
                checkpointer.step(step, metrics={"loss": loss})
                stall = time.perf_counter() - begin
                report("step", step=step, loss=loss.hex(), train_seconds=seconds, stall_seconds=stall)
            begin = time.perf_counter()
    report("drained", seconds=time.perf_counter() - begin)


def train_step(training: Training, interrupt: Callable[[], None]) -> tuple[float, float]:
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
    tensors += [value for number in sorted(state) for value in state[number].values()]
    for tensor in tensors:
        total.update(tensor.contiguous().numpy().tobytes())
    return total.hexdigest()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    for name, value in (("layers", 4), ("heads", 4), ("width", 200), ("context", 64), ("batch", 8), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--store", help="commit each step here")
    parser.add_argument("--kill-at", type=int, help="die by SIGKILL in the middle of this step")
    parser.add_argument("--checkpoint", help="where the reference writes its full checkpoints")
    parser.add_argument("--copy-at", type=int, help="keep the checkpoint of this step")
    parser.add_argument("--copy", help="where to keep it")
    return parser.parse_args()


if __name__ == "__main__":
    main()
