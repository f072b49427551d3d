"""A reader that somebody wrote from `spec/` alone restores what this library committed.

`stock/spec_reader.py` is kept as its author left it, who had the specification, a store to try, and none of this code.
It is not changed when this code changes: if it stops reading, the format has changed.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import deltastore
from deltastore.torch_bridge import TORCH

READER = Path(__file__).parent / "stock" / "spec_reader.py"

Truth = dict[str, list[Any]]


def about(tensor: torch.Tensor) -> list[Any]:
    array = TORCH.as_array(tensor.detach().contiguous())
    return [array.dtype.name, list(tensor.shape), hashlib.sha256(array.tobytes()).hexdigest()]


def fill(root: Path) -> list[Truth]:
    """Commit a base, an overlay, an xor, a patched layout, a second base and a branch; return what each step holds."""
    torch.manual_seed(0)
    weights, half, counts = torch.randn(1_300_000), torch.randn(70_000).bfloat16(), torch.arange(1000)
    truth: list[Truth] = []

    def commit(store: deltastore.Store, **more: torch.Tensor) -> None:
        step = len(truth)
        model = {"w": weights, "tied": weights, "half": half, "counts": counts, "empty": torch.empty(0, 3), **more}
        user = {"step": step, "history": [0.5 * k for k in range(step)], "names": ("a", None, True, 2**70, b"xyz")}
        store.commit(step, {"model": model, "user": user}).wait()
        truth.append({f"model/{name}": about(tensor) for name, tensor in model.items()})

    with deltastore.open(root) as store:
        commit(store)
        weights[::1000] += 1
        half[5] = float("nan")
        commit(store)
        weights += 0.001 * torch.randn_like(weights)
        commit(store)
        commit(store, new=torch.ones(5, dtype=torch.float8_e5m2))
        counts[7] = -1
        store.restore(3)
        commit(store)
        assert [entry.kind for entry in store.commits()] == ["base", "delta", "delta", "delta", "delta"]
    return truth


def read(root: Path, step: int) -> subprocess.CompletedProcess[str]:
    guard = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__'); "
    guard += "assert not any(name.startswith('deltastore') for name in sys.modules)"
    return subprocess.run(
        [sys.executable, "-I", "-c", guard, str(READER), str(root), str(step)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_it_reads_every_step(tmp_path: Path) -> None:
    truth = fill(tmp_path / "store")
    for step, expected in enumerate(truth):
        done = read(tmp_path / "store", step)
        assert done.returncode == 0, done.stderr
        tensors, document = map(json.loads, done.stdout.splitlines())
        assert tensors == expected
        assert document["user"]["step"] == step
        assert document["user"]["history"] == [0.5 * k for k in range(step)]
        assert document["user"]["names"][:4] == ["a", None, True, 2**70]


@pytest.mark.parametrize("where", [0.2, 0.5, 0.9, 0.999])
def test_it_refuses_damage(tmp_path: Path, where: float) -> None:
    fill(tmp_path / "store")
    base = max((tmp_path / "store" / "packs").iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(base.read_bytes())
    data[int(where * len(data))] ^= 16
    base.write_bytes(data)
    done = read(tmp_path / "store", 0)
    assert done.returncode != 0
    assert "ValueError" in done.stderr


def test_it_reads_bounded_steps_as_the_library_does(tmp_path: Path) -> None:
    torch.manual_seed(0)
    weights = torch.randn(70_000)
    with deltastore.open(tmp_path / "store") as store:
        store.set_policy(deltastore.Policy(budget=0.05, restore_cost=50))
        for step in range(3):
            store.commit(step, {"model": {"w": weights, "small": weights[:9].clone()}}).wait()
            weights += 0.001 * torch.randn_like(weights)
        assert [entry.exact for entry in store.commits()] == [True, False, False]
        for step in range(3):
            done = read(tmp_path / "store", step)
            assert done.returncode == 0, done.stderr
            state = store.at(step)
            tensors, _document = map(json.loads, done.stdout.splitlines())
            assert tensors == {f"model/{name}": about(state["model", name][...]) for name in ("w", "small")}
