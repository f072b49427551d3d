"""Stores on HDFS: written, read with few requests, verified, and opened by who knows only the URL."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import torch

import deltastore
from deltastore.errors import NotFound
from deltastore.testing.compare import assert_same
from deltastore.tiers.local import LocalTier
from deltastore.urls import open_tier

ROWS = 1024


def state_of(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(7)
    model = {f"layer{number}": torch.randn(ROWS, 256, generator=generator) for number in range(4)}
    model["layer0"][step] += step
    return {"model": model, "step": step, "note": f"step {step}"}


class CountingSession(requests.Session):
    """A session of the user's that counts the operations which it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()

    def request(self, method: Any, url: Any, *arguments: Any, **named: Any) -> requests.Response:
        params: dict[str, str] = named.get("params") or {}
        found = re.search(r"[?&]op=(\w+)", str(url))
        self.operations[params.get("op") or ("DATA:" + found[1] if found else "other")] += 1
        return super().request(method, url, *arguments, **named)


@pytest.fixture
def session() -> Iterator[CountingSession]:
    with CountingSession() as session:
        yield session


@pytest.fixture
def filled(url: str) -> str:
    with deltastore.open(url) as store:
        for step in range(4):
            store.commit(step, state_of(step), tag="first" if step == 0 else None)
    return url


def test_every_step_comes_back(filled: str) -> None:
    with deltastore.open(filled, "r") as store:
        assert store.tier_names == ("remote",)
        assert store.durable("remote") == 3
        assert [commit.step for commit in store.commits()] == [0, 1, 2, 3]
        for step in range(4):
            assert_same(state_of(step), store.at(step).to_state_dict())
        assert store.at("first").commit.step == 0
        report = store.verify(deep=True)
        assert report.ok, report.findings


def test_a_slice_takes_few_requests(filled: str, session: CountingSession) -> None:
    with deltastore.open(filled, "r", storage_options={"requests_session": session}) as store:
        state = store.at(3)
        assert state["note"] == "step 3"
        opening = session.operations.copy()
        session.operations.clear()
        assert torch.equal(state["model", "layer0"][2:5], state_of(3)["model"]["layer0"][2:5])
    assert opening.total() <= 26, opening
    assert session.operations.total() <= 2 * 5, session.operations  # a range of each layer, each in two steps


def test_the_session_of_the_user_is_asked_by_all_threads(filled: str, session: CountingSession) -> None:
    with deltastore.open(filled, "r", storage_options={"requests_session": session}) as store:
        assert_same(state_of(3), store.at("latest").to_state_dict())
    assert session.operations["OPEN"] > 4


def test_files_that_were_copied_are_a_store(url: str, tmp_path: Path) -> None:
    with deltastore.open(tmp_path / "run") as store:
        for step in range(3):
            store.commit(step, state_of(step))
    local, remote = LocalTier(tmp_path / "run"), open_tier(url)
    remote.create()
    for info in local.list(""):
        if info.name != "LOCK" and not info.name.startswith("tmp/"):
            remote.publish_new(info.name, [local.read(info.name)], "copy")
    with deltastore.open(url, "r") as copy:
        assert_same(state_of(2), copy.at(2).to_state_dict())
        assert copy.verify(deep=True).ok


def test_no_store_there(url: str) -> None:
    with pytest.raises(NotFound, match="no store here"):
        deltastore.open(url, "r")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)


PROGRAM = """
import os, sys, deltastore
from tests.hdfs.test_store import state_of
store = deltastore.open(sys.argv[1])
start = 0
if store.commits():
    start = store.restore().commit.step + 1
for step in range(start, start + 3):
    store.commit(step, state_of(step)).wait()
    print(step, flush=True)
store.commit(start + 3, state_of(start + 3))
os.kill(os.getpid(), 9)
"""


def test_a_writer_that_was_killed_is_followed_by_the_next(url: str) -> None:
    told: list[int] = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, url],
            capture_output=True,
            text=True,
            cwd=Path(__file__).parents[2],
            check=False,
        )
        assert done.returncode == -9, done.stderr
        told += map(int, done.stdout.split())
    with deltastore.open(url, "r") as store:
        steps = [commit.step for commit in store.lineage()]
        assert set(told) <= set(steps)
        for step in told:
            assert_same(state_of(step), store.at(step).to_state_dict())
        assert store.verify(deep=True).ok


def test_the_command_line(filled: str) -> None:
    done = run("-m", "deltastore.cli", "log", filled)
    assert done.returncode == 0, done.stderr
    assert "first" in done.stdout


MEMORY = """
import resource, sys
from deltastore.urls import open_tier
tier = open_tier(sys.argv[1])
tier.create()
tier.publish_new("packs/small", [bytes(1 << 20)], "s")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
piece = bytes(1 << 20)
tier.publish_new("packs/large", (piece for _ in range(256)), "s")
with tier.open("packs/large") as file:
    target = memoryview(bytearray(8 << 20))
    for at in range(0, file.size, target.nbytes):
        file.readinto(at, [target])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


def test_memory_stays_flat(url: str) -> None:
    done = run("-c", MEMORY, url)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 48, "MiB more for a file of 256"
