"""A tag whose write returned is there, and protects its commit from whoever deletes."""

from __future__ import annotations

import errno
import random
from pathlib import Path

import pytest

from deltastore.config import Retention, WriterOptions
from deltastore.errors import OutcomeUnknown
from deltastore.store import Store
from deltastore.testing.powerloss import SimulatedDisk
from deltastore.tiers.local import LocalTier
from tests.crash._states import make_state

OPTIONS = WriterOptions(give_up_seconds=0.0)


class FailingDisk(SimulatedDisk):
    """A disk that fails to sync a folder of tags once."""

    failing = False

    def fsync_folder(self, path: str) -> None:
        if self.failing and "/tags/" in path:
            self.failing = False
            raise OSError(errno.EIO, "I/O error", path)
        super().fsync_folder(path)


def test_a_tag_that_is_repeated_after_an_unknown_outcome_is_durable() -> None:
    """The entry is in its place, but was not synced: setting it again must not return before it is."""
    disk = FailingDisk()
    with Store(LocalTier(disk.store, disk), options=OPTIONS) as store:
        store.commit(0, make_state(1, 0)).wait()
        disk.failing = True
        with pytest.raises(OutcomeUnknown):
            store.tag("best", 0)
        store.tag("best", 0)
        for seed in range(20):
            after = disk.crash(random.Random(seed))
            with Store(LocalTier(after.store, after), writable=False) as survivor:
                assert survivor.at("best").commit.step == 0


def test_retention_of_a_live_run_sees_the_tags_of_others(tmp_path: Path) -> None:
    """A notebook tags a commit of a run that goes on; that must not be deleted under it."""
    root = tmp_path / "store"
    with Store(LocalTier(root), options=OPTIONS, retention=Retention(2)) as run:
        run.set_restore_cost(1.0)
        for step in range(4):
            run.commit(step, make_state(1, step)).wait()
        with Store(LocalTier(root), options=OPTIONS) as notebook:
            notebook.tag("mine", 3)
            tagged = notebook.at("mine").commit.id
        for step in range(4, 30):
            run.commit(step, make_state(1, step)).wait()
        with Store(LocalTier(root), writable=False) as notebook:
            assert notebook.at("mine").commit.id == tagged
            assert len(notebook.commits()) < 20


def test_tagging_leaves_nothing_below_tmp(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with Store(LocalTier(root), options=OPTIONS) as store:
        store.commit(0, make_state(1, 0)).wait()
    with Store(LocalTier(root), options=OPTIONS) as store:
        store.tag("mine", 0)
    assert list((root / "tmp").iterdir()) == []
