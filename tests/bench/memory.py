"""The process whose memory is watched: python -m tests.bench.memory FOLDER COMMITS."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import psutil
import torch

import deltastore
from tests.bench.states import nbytes, train, weights


def main(root: str, commits: int) -> None:
    """Commit many times and print resident bytes as JSON."""
    tensors = weights(20)
    process = psutil.Process()
    with deltastore.open(root + "-warm") as store:  # what torch and numpy load at the first commit is not ours to count
        store.commit(0, {"x": torch.zeros(10)})
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forget the peak of the imports
    start = process.memory_info().rss
    resident = []
    with deltastore.open(root, retention={"keep_last": 10}) as store:
        for step in range(commits):
            train(tensors, 0.001, step)
            store.commit(step, {"model": tensors}, metrics={"loss": 1.0 / (step + 1)})
            resident.append(process.memory_info().rss)
    tenth = commits // 10
    # The allocator keeps what the first bases needed, which are rare: from the middle on nothing may be added.
    early = sorted(resident[4 * tenth : 5 * tenth])[tenth // 2]
    last = sorted(resident[-tenth:])[tenth // 2]
    peak = _peak()
    facts = {
        "state": nbytes(tensors),
        "start": start,
        "early": early,
        "last": last,
        "peak": peak,
        "series": resident[tenth - 1 :: tenth],
    }
    print(json.dumps(facts))


def _peak() -> int:
    # Not getrusage: its peak is that of the parent where that one was larger.
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
