"""What a bounded commit at every step costs the training: with windows, and with the whole state copied in `step`."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import torch

import deltastore
from deltastore.adapters.pytorch import Checkpointer
from tests.bench.frequency import Job
from tests.bench.measure import Clock, Figure, at_most, median, shown

MAX_COPIES = 0.1
"""The stall, as a share of a copy of the state in memory."""
MAX_SLOWDOWN = 0.02
BATCH = 8, 128
"""Sequences and their length."""
STEPS, ROUNDS = 6, 4


def windows(folder: Path, quick: bool, full: bool) -> list[Figure]:
    """Stall and slowdown at a fixed batch, one core left free."""
    sizes = [(256, 4)] if quick else [(320, 8), (768, 7), *([(768, 17)] if full else [])]
    cores = torch.get_num_threads()
    torch.set_num_threads(max(cores - 1, 1))
    try:
        return [figure for size in sizes for figure in _one(folder, *size)]
    finally:
        torch.set_num_threads(cores)


def _one(folder: Path, width: int, layers: int) -> list[Figure]:
    job = Job(width, layers, BATCH)
    job.step()
    runs = {"windows": _checkpointer(folder / "windows", job), "whole copy": _checkpointer(folder / "whole", job)}
    for probe in runs["whole copy"]._windows._probes:
        probe.reason = "the ablation: everything is copied in step"
    walls: dict[str, list[float]] = {"none": [], **{name: [] for name in runs}}
    stalls: dict[str, list[float]] = {name: [] for name in runs}
    for ckpt in runs.values():
        for step in range(3):  # base, probe, compilation
            job.step()
            ckpt.step(step)
        job.step()
        ckpt.flush()
    done = 3
    for _ in range(ROUNDS):
        for name, found in walls.items():
            for step in range(done, done + STEPS):
                with Clock() as clock:
                    job.step()
                    if name in runs:
                        if step > done:  # the gate of the commit before is behind, its stall is complete
                            stalls[name].append(runs[name].stats.last_stall_seconds)
                        runs[name].step(step)
                found.append(clock.wall)
            if name in runs:
                runs[name].flush()
        done += STEPS
    elements = 3 * sum(parameter.numel() for parameter in job.model.parameters())
    copy = _copy_seconds(elements)
    figures = []
    title = f"{elements / 3e6:.0f} M parameters"
    for name, ckpt in runs.items():
        detail: dict[str, float | str] = {
            "p95 ms": 1e3 * float(np.percentile(stalls[name], 95)), "median ms": 1e3 * median(stalls[name]),
            "copy ms": 1e3 * copy, "step ms": 1e3 * median(walls["none"]),
        }  # fmt: skip
        figures.append(
            at_most(
                f"stall / copy of the state, {title}, {name}", median(stalls[name]) / copy, MAX_COPIES, "x", **detail
            )
        )
        slower = median(walls[name]) / median(walls["none"]) - 1
        figures.append(at_most(f"  slowdown, {name}", slower, MAX_SLOWDOWN, "of a step"))
        figures.append(
            shown("  state stored for a commit", ckpt.stats.stored_bytes / ckpt.stats.commits / 4 / elements, "x")
        )
        ckpt.close()
    for path in folder.iterdir():
        shutil.rmtree(path)
    return figures


def _checkpointer(root: Path, job: Job) -> Checkpointer:
    return Checkpointer(root, policy=deltastore.Policy(), model=job.model, optimizer=job.optimizer)


def _copy_seconds(elements: int) -> float:
    source = np.ones(elements, np.float32)
    target = source.copy()
    found = []
    for _ in range(5):
        with Clock() as clock:
            target[:] = source
        found.append(clock.wall)
    return median(found)
