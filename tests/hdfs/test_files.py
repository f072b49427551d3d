"""Many small commits become few files: a NameNode keeps every one of them in memory."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import deltastore
from deltastore.store import Store
from deltastore.tiers.local import LocalTier
from deltastore.urls import open_tier
from tests.bench.counting import UnsyncedOps

BLOCK_BYTES = 64 << 10
PUSHES = 3
OPTIONS = {"block_bytes": BLOCK_BYTES}


@pytest.mark.parametrize("commits", [400, pytest.param(10_000, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])])
def test_files_follow_the_bytes_and_not_the_commits(commits: int, tmp_path: Path, url: str) -> None:
    weights = torch.randn(512, generator=torch.Generator().manual_seed(0))
    with Store(LocalTier(tmp_path / "run", UnsyncedOps()), writable=True) as store:
        for step in range(commits):
            weights[step % 512] += 1
            store.commit(step, {"w": weights, "step": step})
            if step % (commits // PUSHES) == 0 or step == commits - 1:
                store.flush()
                deltastore.push(tmp_path / "run", url, pack_bytes=BLOCK_BYTES, storage_options=OPTIONS)
    shutil.rmtree(tmp_path / "run")
    files = open_tier(url).list("")
    assert len(files) <= 1.2 * sum(info.size for info in files) / BLOCK_BYTES + 10
    with deltastore.open(url, "r") as remote:
        assert [commit.step for commit in remote.commits()] == list(range(commits))
        for step in (0, commits // 2, commits - 1):
            assert remote.at(step)["step"] == step
        assert torch.equal(remote.at("latest")["w"][...], weights)
