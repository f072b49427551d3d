"""Timing of alternatives in turn, and the figures that come out."""

from __future__ import annotations

import gc
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

REPETITIONS = 5


@dataclass(frozen=True)
class Figure:
    """One measured number with its target."""

    name: str
    value: float
    unit: str = "x"
    target: str = ""
    met: bool | None = None
    """None: a figure without a target, shown for comparison."""
    detail: dict[str, float | int | str] = field(default_factory=dict)

    def line(self) -> str:
        """Return the figure as one line of the report."""
        verdict = {True: "met", False: "MISSED", None: ""}[self.met]
        more = ", ".join(f"{name} {_short(value)}" for name, value in self.detail.items())
        return f"{self.name:<58} {_short(self.value):>9} {self.unit:<5} {self.target:<16} {verdict:<7} {more}"

    def as_json(self) -> dict[str, Any]:
        """Return the figure for a file."""
        return asdict(self)


def at_least(name: str, value: float, target: float, unit: str = "x", **detail: float | str) -> Figure:
    """Return a figure whose target is a lower bound."""
    return Figure(name, value, unit, f">= {target:g} {unit}", value >= target, detail)


def at_most(name: str, value: float, target: float, unit: str = "x", **detail: float | str) -> Figure:
    """Return a figure whose target is an upper bound."""
    return Figure(name, value, unit, f"<= {target:.4g} {unit}", value <= target, detail)


def shown(name: str, value: float, unit: str, **detail: float | str) -> Figure:
    """Return a figure without a target."""
    return Figure(name, value, unit, detail=detail)


def _short(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def alternate(
    candidates: Mapping[str, Callable[[], Mapping[str, float]]], repetitions: int = REPETITIONS
) -> dict[str, dict[str, list[float]]]:
    """Run every candidate once in each round, in an order that turns, and return what each measured.

    The disk and the page cache are shared with whatever else the machine does: a slow minute hits all candidates.
    """
    names = list(candidates)
    found: dict[str, dict[str, list[float]]] = {name: {} for name in names}
    for turn in range(repetitions):
        shift = turn % len(names)
        order = names[shift:] + names[:shift]
        for name in order if turn % 2 == 0 else order[::-1]:
            gc.collect()
            os.sync()
            for key, value in candidates[name]().items():
                found[name].setdefault(key, []).append(value)
    return found


def median(values: list[float]) -> float:
    """Return the median."""
    return statistics.median(values)


def ratio(theirs: list[float], ours: list[float]) -> tuple[float, str]:
    """Return how many times faster we are: the median over the rounds, and the range of the rounds."""
    rounds = [a / b for a, b in zip(theirs, ours, strict=True)]
    return statistics.median(rounds), f"{min(rounds):.2f}..{max(rounds):.2f}"


class Clock:
    """Wall and CPU seconds of a block."""

    def __enter__(self) -> Clock:
        self._cpu = time.process_time()
        self._wall = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall = time.perf_counter() - self._wall
        self.cpu = time.process_time() - self._cpu


def forget(*paths: Path) -> None:
    """Take files out of the page cache (they must be synced)."""
    for path in paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file():
                fd = os.open(file, os.O_RDONLY)
                try:
                    os.fsync(fd)
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(fd)


def sync_path(path: Path) -> None:
    """Make a file and its name durable."""
    for target in (path, path.parent):
        fd = os.open(target, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def machine() -> dict[str, str]:
    """Return what a reader must know of the machine to judge the figures."""
    model = next((line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "?")
    memory = next((line.split(":")[1].strip() for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), "?")
    return {
        "cores": str(len(os.sched_getaffinity(0))),
        "cpu": model,
        "memory": memory,
        "load": f"{os.getloadavg()[0]:.2f} of other jobs at the start",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
