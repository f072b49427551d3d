"""O03: chains of deltas: tiny updates, skipped steps, tensors that never change."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.cases.kit import Store, freeze, same


def test_tiny_updates_and_skipped_steps_add_up_exactly(tmp_path: Path) -> None:
    w = torch.randn(4096)
    frozen = torch.randn(256)
    rows = torch.zeros(64, 64)
    truth = {}
    with Store(tmp_path / "store") as store:
        for step in range(401):
            w += 1e-6 * w.abs()  # each step is far below any threshold of importance
            if step % 6 == 0 and step // 6 < 64:
                rows[step // 6] = step + 1.0  # some rows change between two saves only
            if step % 10 == 0:
                store.save(step, {"model": {"w": w, "rows": rows, "frozen": frozen}})
                truth[step] = freeze({"model": {"w": w, "rows": rows, "frozen": frozen}})
        store.wait()
        for step, state in truth.items():
            same(state, store.read(step))
        kinds = {commit.kind for commit in store.product.commits()}
        assert kinds == {"base", "delta"}


@pytest.mark.parametrize("restore_cost", [1.0, 2.0, 8.0, 1e9])
def test_bases_hold_everything_also_what_never_changed(tmp_path: Path, restore_cost: float) -> None:
    root = tmp_path / "store"
    frozen = torch.randn(5000)
    moving = torch.randn(5000)
    truth = []
    with Store(root) as store:
        store.product.set_restore_cost(restore_cost)
        for step in range(12):
            moving += torch.randn(5000)
            truth.append(freeze({"model": {"frozen": frozen, "moving": moving}, "user": {"never": "changes"}}))
            store.save(step, truth[-1])
        store.wait()
        bases = [commit.step for commit in store.product.commits() if commit.kind == "base"]
        newest = bases[-1]
        for commit in store.product.commits():
            if commit.step < newest:  # whatever came before a base is not needed for it
                (pack,) = root.glob(f"packs/e*-{commit.step}-*.zip")
                pack.unlink()
        assert len(bases) > 1 or restore_cost > 2
    with Store(root, owner=False) as reader:
        for step in range(newest, 12):
            same(truth[step], reader.read(step))


def test_changes_that_come_and_go_leave_no_trace(tmp_path: Path) -> None:
    """A value that returns to what it was, far apart, near each other and at the edges of blocks."""
    w = torch.zeros(200_000)
    truth = []
    with Store(tmp_path / "store") as store:
        changes = [(0, 1.0), (65_535, 2.0), (65_536, 3.0), (199_999, 4.0), (0, 0.0), (65_535, 0.0)]
        for step, (place, value) in enumerate(changes * 2):
            w[place] = value
            w[131_072 - step : 131_072 + step] = float(step)
            truth.append(w.clone())
            store.save(step, {"model": {"w": w}})
        store.wait()
        for step, tensor in enumerate(truth):
            same({"model": {"w": tensor}}, store.read(step))
            lazy = store.product.at(step)["model", "w"]
            for low, high in ((0, 1), (65_530, 65_540), (131_000, 131_100), (199_999, 200_000)):
                same(tensor[low:high], lazy[low:high])
