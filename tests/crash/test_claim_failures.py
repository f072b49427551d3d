"""A store whose start fails, at any request, can be started again: nothing stays locked, no number is used twice."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from deltastore.config import WriterOptions
from deltastore.errors import DeltaStoreError
from deltastore.store import Store
from deltastore.testing.faulty import FailAt, FaultyTier, no_faults
from deltastore.tiers.local import LocalTier
from tests.crash._states import make_state

OPTIONS = WriterOptions(give_up_seconds=0.0)
POINTS = ("create", "lock", "clean", "list", "stage", "stage:after", "publish:before", "publish:after", "read", "sync")


def first_commit(store: Store) -> None:
    store.commit(1, make_state(1, 1)).wait()


def first_restore(store: Store) -> None:
    store.restore("latest")


def restore_of_a_writer(store: Store) -> None:
    store.commit(1, make_state(1, 1)).wait()
    store.restore("latest")


def requests(root: Path, start: Callable[[Store], None]) -> Counter[str]:
    tier = prepared(root)
    with Store(tier, options=OPTIONS) as store:
        start(store)
        return Counter(tier.calls)


def prepared(root: Path) -> FaultyTier:
    with Store(LocalTier(root), options=OPTIONS) as store:
        store.commit(0, make_state(1, 0)).wait()
    return FaultyTier(LocalTier(root), no_faults)


@pytest.mark.parametrize("start", [first_commit, first_restore, restore_of_a_writer])
@pytest.mark.parametrize("point", POINTS)
def test_a_start_that_fails_can_be_repeated(tmp_path: Path, start: Callable[[Store], None], point: str) -> None:
    times = requests(tmp_path / "counted", start)[point]
    for first in range(1, times + 1):
        tier = prepared(tmp_path / f"{first}")
        # Opening reads FORMAT.json; that it fails then is the caller's to see, and nothing has begun.
        with Store(tier, options=OPTIONS) as store:
            tier.plan = FailAt(point, errno.EIO, first, 1)
            try:
                start(store)
            except DeltaStoreError:
                tier.plan = no_faults
            for step in (2, 3):
                store.commit(step, make_state(1, step), metrics={"serial": step}).wait()
            assert store.restore("latest").commit.step == 3
            report = store.verify(deep=True)
            assert report.ok, report.findings
            assert len({(c.epoch, c.id) for c in store.commits()}) == len(store.commits())


def test_a_failed_restore_does_not_move_the_writer(tmp_path: Path) -> None:
    """A typo in restore() leaves the writer where it was: behind the commit that it had gone back to."""
    with Store(LocalTier(tmp_path / "store"), options=OPTIONS) as store:
        for step in range(4):
            store.commit(step, make_state(1, step)).wait()
        there = store.restore(1).commit
        with pytest.raises(DeltaStoreError):
            store.restore("no-such-tag")
        assert store.commit(2, make_state(1, 9)).wait().parent == there.id
