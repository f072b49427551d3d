"""O23, O36: memory is bounded by a setting, and the number of files by the volume of data."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cases.kit import Store, files, freeze, same
from tests.cases.warm import child

# ---------------------------------------------------------------- O23: a slow tier


@pytest.mark.parametrize("update", ["w += 1", "w[::200] += 1"], ids=["everything changes", "little changes"])
def test_saves_on_a_slow_device_do_not_pile_up_in_memory(tmp_path: Path, update: str) -> None:
    script = child(f"""
        import resource
        fsync = os.fsync
        os.fsync = lambda descriptor: (time.sleep(0.1), fsync(descriptor))[1]  # a slow device
        peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        store = Store({str(tmp_path / "store")!r}, max_pending=2)
        w = torch.randn(4_000_000)  # 16 MB a step
        store.save(0, {{"model": {{"w": w}}}})
        store.wait()
        base = peak()
        for step in range(1, 13):
            {update}
            store.save(step, {{"model": {{"w": w}}}})
        store.wait()
        grown = (peak() - base) / 2**20
        assert grown < 15 * 6, f"grew by {{grown:.0f}} MiB over 12 saves of 15 MiB"
        assert store.steps() == list(range(13))
        assert torch.equal(store.read(12)["model"]["w"], w)
        store.close()
    """)
    assert script.wait(180) == 0


def test_a_save_waits_while_as_many_are_pending(tmp_path: Path) -> None:
    script = child(f"""
        gate = threading.Event()
        fsync = os.fsync
        store = Store({str(tmp_path / "store")!r}, max_pending=2)
        os.fsync = lambda descriptor: (gate.wait(60), fsync(descriptor))[1]
        store.save(0, {{"model": {{"w": torch.ones(3)}}}})
        store.save(1, {{"model": {{"w": torch.ones(3)}}}})
        assert store.product.busy()
        third = threading.Thread(target=store.save, args=(2, {{"model": {{"w": torch.ones(3)}}}}))
        third.start()
        third.join(0.3)
        assert third.is_alive(), "the third save did not wait"
        gate.set()
        third.join(60)
        assert not third.is_alive()
        store.wait()
        assert not store.product.busy()
        assert store.steps() == [0, 1, 2]
        store.close()
    """)
    assert script.wait(120) == 0


# ---------------------------------------------------------------- O36: thousands of small files


def test_the_number_of_files_follows_the_commits_not_the_tensors(tmp_path: Path) -> None:
    root = tmp_path / "store"
    state: dict[str, Any] = {
        "model": {f"layer.{i}.lora_{ab}": torch.randn(4, 8) for i in range(500) for ab in "AB"},
        "optim": {
            "state": {
                i: {"step": torch.tensor(0.0), "m": torch.zeros(4, 8), "v": torch.zeros(4, 8)} for i in range(1000)
            }
        },
    }
    with Store(root) as store:
        for step in range(10):
            for tensor in state["model"].values():
                tensor += 0.01
            store.save(step, state)
        store.wait()
        truth = freeze(state)
        same(truth, store.read(9))
    folders = [root, *(path for path in root.rglob("*") if path.is_dir())]
    assert len(files(root)) < 10 * 6
    assert max(len(list(folder.iterdir())) for folder in folders) < 1000
    started = time.monotonic()
    with Store(root, owner=False) as reader:
        assert reader.steps() == list(range(10))
    assert time.monotonic() - started < 0.5


def test_a_hundred_tiny_commits_stay_small(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with Store(root) as store:
        for step in range(100):
            store.save(step, {"model": {"w": torch.full((64,), float(step))}, "user": {"step": step}})
        store.wait()
        sizes = [commit.bytes for commit in store.product.commits()]
        assert max(sizes) < 6000
    assert len(files(root)) < 100 + 10
    with Store(root, owner=False) as reader:
        assert (reader.read(57)["model"]["w"] == 57).all()


def test_deleting_steps_deletes_files(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with Store(root) as store:
        for step in range(30):
            store.save(step, {"model": {"w": torch.randn(1000 + step)}})
        store.wait()
        store.product.prune(keep_last=3, dry_run=False)
        assert store.steps() == [27, 28, 29]
    assert len(list((root / "packs").iterdir())) == 3
