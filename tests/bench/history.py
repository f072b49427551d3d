"""Long histories: opening 10,000 commits, and memory over 1,000 more."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

import deltastore
from deltastore.config import WriterOptions
from deltastore.layout import BACKWARD_BYTES
from deltastore.store import Store
from deltastore.tiers.local import LocalTier
from tests.bench.counting import UnsyncedOps, counted_store
from tests.bench.measure import REPETITIONS, Clock, Figure, alternate, at_most, forget, median, shown

COMMITS = 10_000
MAX_GROWTH_BYTES = 5_000_000
"""What the catalog of 1,000 commits may take."""


def opening(_folder: Path, quick: bool) -> list[Figure]:
    """Opening a store of 10,000 commits and listing them, with and without the catalog cache."""
    count = COMMITS // 10 if quick else COMMITS
    root = _long_store(count)
    kept = sorted((root / "cache").iterdir())
    aside = root.parent / f"{root.name}-cache"

    def opened(cold: bool) -> Mapping[str, float]:
        if cold:
            forget(root)
        with Clock() as clock:
            store, ops = counted_store(root)
            found = store.commits()
        assert len(found) == count
        with Clock() as latest:
            store.at("latest")
        store.close()
        return {"wall": clock.wall, "reads": ops.reads, "latest": latest.wall, "cpu": clock.cpu}

    def without(cold: bool) -> Mapping[str, float]:
        shutil.move(root / "cache", aside)
        try:
            return opened(cold)
        finally:
            shutil.move(aside, root / "cache")

    assert kept, "the writer left no catalog cache"
    repetitions = 3 if quick else REPETITIONS
    candidates: dict[str, Callable[[], Mapping[str, float]]] = {
        "with": lambda: opened(False),
        "with, cold": lambda: opened(True),
    }
    found = alternate(candidates, repetitions)
    found |= alternate({"without": lambda: without(False)}, 2)
    figures = [
        at_most(
            f"open {count:,} commits, {name.replace('with', 'catalog cache', 1)}",
            median(result["wall"]),
            1.0,
            "s",
            **{
                "reads": median(result["reads"]),
                "at(latest) s": median(result["latest"]),
                "cpu": median(result["cpu"]),
            },
        )
        for name, result in found.items()
        if name != "without"
    ]
    bare = found["without"]
    one_each = count + 3  # beside the packs: FORMAT.json, and the tails that at("latest") needs again
    figures.append(
        shown(f"open {count:,} commits, no catalog cache", median(bare["wall"]), "s", cpu=median(bare["cpu"]))
    )
    figures.append(at_most("  reads without the cache", median(bare["reads"]), one_each, "reads", commits=count))
    return figures


def _long_store(count: int) -> Path:
    """Return a store of many tiny commits; it is made once and kept in the temporary folder."""
    version = deltastore.__version__
    root = Path(tempfile.gettempdir()) / "deltastore-bench" / f"commits-{count}-{version}"
    done = root / ".done"
    if done.exists():
        return root
    shutil.rmtree(root, ignore_errors=True)
    root.parent.mkdir(exist_ok=True)
    tensor = torch.zeros(1024)
    store = Store(LocalTier(root, UnsyncedOps()), options=WriterOptions(max_pending=8))
    for step in range(count):
        tensor[step % 1024] = step
        store.commit(step, {"w": tensor}, metrics={"loss": 1.0 / (step + 1)})
    store.close()
    done.touch()
    return root


def memory(folder: Path, quick: bool) -> list[Figure]:
    """Resident memory of a process that commits all the time."""
    commits = 200 if quick else 2000
    command = [sys.executable, "-m", "tests.bench.memory", str(folder / "memory"), str(commits)]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    facts = json.loads(out.splitlines()[-1])
    megabyte = 1e6
    growth = (facts["last"] - facts["early"]) / megabyte
    return [
        at_most(
            f"memory after {commits:,} commits - after {commits // 2:,}",
            growth,
            MAX_GROWTH_BYTES / megabyte,
            "MB",
            **{
                "series MB": " ".join(f"{value / megabyte:.0f}" for value in facts["series"]),
                "state MB": facts["state"] / megabyte,
                "resident MB": facts["last"] / megabyte,
            },
        ),
        at_most(
            "  peak over the start: 2 staged + the reconstruction + 2 partitions a core",
            (facts["peak"] - facts["start"]) / megabyte,
            (3 * facts["state"] + 2 * BACKWARD_BYTES * len(os.sched_getaffinity(0))) / megabyte,
            "MB",
            **{"in states": (facts["peak"] - facts["start"]) / facts["state"]},
        ),
    ]
