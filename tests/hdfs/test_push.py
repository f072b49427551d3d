"""A run that is pushed to a real HDFS while it is written, and what is left when its machine is lost."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import torch

import deltastore
from deltastore.testing.compare import assert_same
from tests.hdfs.cluster import HdfsCluster
from tests.history.test_push import STEPS, state_of

ROOT = Path(__file__).parents[2]
OPTIONS = {"connect_seconds": 4.0, "read_seconds": 6.0}


def test_the_machine_is_lost_and_the_run_goes_on_elsewhere(tmp_path: Path, url: str) -> None:
    with deltastore.open(tmp_path / "run") as store:
        for step in range(STEPS):
            store.commit(step, state_of(step)).wait()
            if step % 4 == 3:
                deltastore.push(tmp_path / "run", url)
    shutil.rmtree(tmp_path / "run")
    with deltastore.open(url, "r") as remote:
        assert remote.durable("remote") == STEPS - 1
        assert remote.verify(deep=True).ok
        assert len({remote._view.catalog.by_id[commit.id].pack for commit in remote.commits()}) == 3
    deltastore.push(url, tmp_path / "elsewhere")
    with deltastore.open(tmp_path / "elsewhere") as store:
        assert_same(state_of(STEPS - 1), store.restore().to_state_dict())
        store.commit(STEPS, state_of(STEPS)).wait()
    assert deltastore.push(tmp_path / "elsewhere", url).commits == 1


def test_a_push_that_is_killed_is_continued(tmp_path: Path, url: str) -> None:
    with deltastore.open(tmp_path / "run") as store:
        for step in range(STEPS):
            store.commit(step, state_of(step))
    program = (
        "import os, sys, deltastore\n"
        "deltastore.push(sys.argv[1], sys.argv[2], pack_bytes=60_000, progress=lambda *_: os.kill(os.getpid(), 9))\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "run"), url]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == -signal.SIGKILL
    with deltastore.open(url, "r") as remote:
        arrived = remote.commits()
        assert 0 < len(arrived) < STEPS
        assert_same(state_of(arrived[-1].step), remote.at(arrived[-1].id).to_state_dict())
    command = [sys.executable, "-m", "deltastore.cli", "push", str(tmp_path / "run"), url]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"pushed {STEPS - len(arrived)} commits" in done.stdout
    with deltastore.open(url, "r") as remote:
        assert remote.verify(deep=True).ok
        assert [commit.step for commit in remote.commits()] == list(range(STEPS))


def test_a_datanode_dies_and_the_namenode_starts_again(tmp_path: Path, whole: HdfsCluster, url: str) -> None:
    with deltastore.open(tmp_path / "run") as store:
        for step in range(STEPS):
            store.commit(step, state_of(step))

    def fail(done: int, _total: int) -> None:
        if done == 1:  # the base alone fills the first pack
            whole.kill("dn0")
            whole.kill("nn")
            whole.start_namenode()
            whole.start_datanode(0)

    report = deltastore.push(tmp_path / "run", url, pack_bytes=60_000, storage_options=OPTIONS, progress=fail)
    assert report.commits == STEPS
    with deltastore.open(url, "r") as remote:
        assert remote.verify(deep=True).ok
        for step in range(STEPS):
            assert_same(state_of(step), remote.at(step).to_state_dict())


def test_small_files_are_merged_in_place(tmp_path: Path, url: str) -> None:
    with deltastore.open(tmp_path / "run") as store:
        for step in range(12):
            store.commit(step, {"w": torch.full((2000,), float(step))}).wait()
    deltastore.push(tmp_path / "run", url, pack_bytes=1)
    with deltastore.open(url, "r") as reader:
        early = reader.at(3)
        with deltastore.open(url) as store:
            done = store.compact(dry_run=False)
            assert (done.packs_before, done.packs_after) == (12, 1)
        assert early["w"][5].item() == 3
        assert reader.at(7)["w"][5].item() == 7
    with deltastore.open(url, "r") as store:
        assert store.verify(deep=True).ok
        assert [commit.step for commit in store.commits()] == list(range(12))
