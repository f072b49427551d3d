"""O13: deleting old commits never changes what the others read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deltastore.errors import DeltaStoreError
from tests.cases.kit import Store, biggest, raises, same


def ten_steps(store: Store) -> dict[int, dict[str, dict[str, torch.Tensor]]]:
    w = torch.randn(100_000)
    truth = {}
    for step in range(10):
        w[step * 100 : (step + 1) * 100] += 1
        truth[step] = {"model": {"w": w.clone()}}
        store.save(step, truth[step])
    store.wait()
    return truth


def test_pruning_keeps_what_kept_commits_need(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with Store(root) as store:
        truth = ten_steps(store)
        for step in (3, 6, 8):
            store.product.tag(f"keep-{step}", step)
    with Store(root) as store:
        report = store.product.prune(keep_last=1)
        assert report.dry_run
        assert store.steps() == list(range(10))
        store.product.prune(keep_last=1, dry_run=False)
        assert {3, 6, 8, 9} <= set(store.steps())
        for step in store.steps():
            same(truth[step], store.read(step))
        assert not store.verify()
    biggest(root).unlink()  # now a base disappears behind the store's back
    with Store(root, owner=False) as reader:
        hurt = 0
        for step in (3, 6, 8, 9):
            try:
                got = reader.read(step)
            except DeltaStoreError:  # a clear error is right, other data is not
                hurt += 1
                continue
            same(truth[step], got)
        assert hurt
        assert reader.verify()


@pytest.mark.parametrize("restore_cost", [1.0, 8.0])
def test_retention_while_writing_keeps_the_promised_steps(tmp_path: Path, restore_cost: float) -> None:
    with Store(tmp_path / "store", retention={"keep_last": 2, "keep_every": 4}) as store:
        store.product.set_restore_cost(restore_cost)
        truth = ten_steps(store)
        assert {0, 4, 8, 9} <= set(store.steps())
        assert len(store.steps()) < 10
        for step in store.steps():
            same(truth[step], store.read(step))
        assert not store.verify()


def test_what_a_writer_goes_on_from_is_not_pruned(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with Store(root) as store:
        for step in range(5):
            store.save(step, {"model": {"w": torch.full((1000 + step,), float(step))}})  # a base each
        store.wait()
        store.product.restore(2)
        store.product.prune(keep_last=1, dry_run=False)
        state = {"model": {"w": torch.full((1002,), 7.0)}}
        store.product.commit(3, state).wait()
        same(state, store.read(3))
    with Store(root, owner=False) as reader:
        same(state, reader.read(3))
        assert not reader.verify()


def test_a_state_that_is_being_read_survives_its_deletion(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with Store(root, retention={"keep_last": 1}) as store:
        truth = {}
        for step in range(2):
            truth[step] = {"model": {"w": torch.randn(1000 + step)}}  # a base each
            store.save(step, truth[step])
            store.wait()
        reader = Store(root, owner=False)
        held = reader.product.at(1)
        for step in range(2, 5):
            store.save(step, {"model": {"w": torch.randn(1000 + step)}})
        store.wait()
        assert store.steps() == [4]
        same(truth[1], held.to_state_dict())
        same(truth[1]["model"]["w"][5:9], held["model", "w"][5:9])
        error = raises(lambda: store.read(1), LookupError)
        assert "step 1" in str(error)
        reader.close()
