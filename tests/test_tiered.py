"""Stores with further tiers: movers, durability, reading and restoring over tiers, limits."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import deltastore
from deltastore import remotes
from deltastore.errors import Backend, Conflict, Corruption, InvalidInput, NotFound, Timeout
from deltastore.mover_process import MoverProcess
from deltastore.remotes import Remote
from deltastore.store import Store

PATIENCE = 60.0
"""Seconds for what another process does on a busy machine."""


class Run:
    """A store with one further tier, and what was committed to it."""

    def __init__(self, folder: Path, remote: str | None = None) -> None:
        self.local = folder / "local"
        self.remote = remote or (folder / "remote").as_uri()
        self.truth: dict[int, torch.Tensor] = {}

    def open(self, mode: str = "a", **options: object) -> Store:
        return deltastore.open(self.local, mode, tiers=[self.remote], **options)  # type: ignore[arg-type]

    def commit(self, store: Store, step: int) -> deltastore.Handle:
        values = torch.arange(20_000.0) if step == 0 else self.truth[max(self.truth)].clone()
        values[step] = -step
        self.truth[step] = values
        return store.commit(step, {"w": values})

    def check(self, store: Store, steps: range | None = None) -> None:
        for step in steps or self.truth:
            assert torch.equal(store.at(step)["w"][...], self.truth[step]), step


@pytest.fixture(params=["file", "memory"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    """With a mover in a process of its own, and with one in a thread."""
    return Run(tmp_path, f"memory://tiered-{secrets.token_hex(8)}" if request.param == "memory" else None)


@pytest.fixture
def far(tmp_path: Path) -> Run:
    return Run(tmp_path)


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def packs(folder: Path) -> list[Path]:
    return sorted((folder / "packs").glob("*.zip"))


def damage(folder: Path) -> None:
    """Flip a byte of the first chunk of every pack."""
    for pack in packs(folder):
        damage_at(pack, 4200)


def damage_at(pack: Path, offset: int) -> None:
    with pack.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


def test_commits_arrive_merged_and_are_waited_for(run: Run) -> None:
    with run.open() as store:
        assert store.tier_names == ("local", "remote")
        assert store.durable("remote") is None
        handle = [run.commit(store, step) for step in range(6)][-1]
        assert handle.wait("remote", timeout=PATIENCE).step == 5
        assert handle.done("remote")
        assert store.durable("remote") == store.durable() == store.durable("local") == 5
        assert store.wait(3, tier="remote", timeout=PATIENCE).step == 3
        with pytest.raises(InvalidInput, match="no tier 'tape'"):
            handle.wait("tape")
    with deltastore.open(run.remote, mode="r") as alone:
        run.check(alone)
        assert alone.verify(deep=True).ok
        assert len({entry.pack for entry in alone._view.catalog.by_id.values()}) <= 3


def test_what_is_committed_last_arrives_after_the_end(run: Run) -> None:
    with run.open() as store:
        for step in range(3):
            run.commit(store, step)

    def arrived() -> bool:
        try:
            with deltastore.open(run.remote, mode="r") as alone:
                return [commit.step for commit in alone.commits()] == [0, 1, 2]
        except NotFound:
            return False

    until(arrived)


def test_a_new_machine_restores_and_goes_on(run: Run) -> None:
    with run.open() as store:
        for step in range(5):
            run.commit(store, step).wait("remote", timeout=PATIENCE)
        store.tag("good", 2)
    if run.remote.startswith("file"):
        until((Path(run.remote.removeprefix("file://")) / "tags" / "good").exists)
    shutil.rmtree(run.local)
    with run.open(mode="r") as reader:
        assert not run.local.exists()
        assert (reader.durable("remote"), reader.durable()) == (4, None)
        assert [commit.step for commit in reader.commits()] == list(range(5))
        assert [commit.step for commit in reader.lineage()] == list(range(5))
        run.check(reader)
    with run.open() as store:
        state = store.restore()
        assert state.commit.step == 4
        assert torch.equal(state["w"][...], run.truth[4])
        commit = run.commit(store, 5).wait("remote", timeout=PATIENCE)
        assert (commit.epoch, commit.kind) == (2, "delta")
        assert [commit.step for commit in store.lineage()] == list(range(6))
        assert torch.equal(store.at("good")["w"][...], run.truth[2])
    with deltastore.open(run.local, mode="r") as alone:
        assert torch.equal(alone.at("latest")["w"][...], run.truth[5])


def test_going_back_to_a_step_that_only_the_remote_has(run: Run) -> None:
    with run.open() as store:
        for step in range(5):
            run.commit(store, step)
        store.wait(4, tier="remote", timeout=PATIENCE)
    shutil.rmtree(run.local)
    with run.open() as store:
        assert store.restore(2).commit.step == 2
        assert torch.equal(store.at(4)["w"][...], run.truth[4])


def test_a_first_commit_on_a_new_machine_does_not_begin_another_store(run: Run) -> None:
    with run.open() as store:
        run.commit(store, 0).wait("remote", timeout=PATIENCE)
    shutil.rmtree(run.local)
    with run.open() as store:
        commit = run.commit(store, 1).wait("remote", timeout=PATIENCE)
        assert commit.epoch == 2
        run.check(store)


def test_damage_is_read_around(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    with run.open() as store:
        for step in range(4):
            run.commit(store, step)
        store.wait(3, tier="remote", timeout=PATIENCE)
    damage(run.local)
    with run.open(mode="r") as reader:
        run.check(reader)
        assert torch.equal(reader.at(3)["w"][10:30], run.truth[3][10:30])
    assert "read from" in caplog.text
    with run.open() as store:
        assert torch.equal(store.restore()["w"][...], run.truth[3])
        assert run.commit(store, 4).wait("remote", timeout=PATIENCE).kind == "base"
        run.check(store)


def test_a_mover_that_dies_is_started_again(far: Run, caplog: pytest.LogCaptureFixture) -> None:
    with far.open() as store:
        far.commit(store, 0).wait("remote", timeout=PATIENCE)
        remote = store._remotes.named("remote")
        for step in range(1, 4):
            assert remote._process is not None
            killed = remote._process.pid
            os.kill(killed, signal.SIGKILL)
            far.commit(store, step).wait()
            until(partial(_is_another, remote, killed))
            store.wait(step, tier="remote", timeout=PATIENCE)
    assert "started again" in caplog.text


def _is_another(remote: Remote, killed: int) -> bool:
    return remote._process is not None and remote._process.pid != killed


TRAINER = """
import sys, torch, deltastore
with deltastore.open(sys.argv[1], tiers=[sys.argv[2]]) as store:
    for step in range(10_000):
        store.commit(step, {"w": torch.full((3000,), float(step))}).wait()
        print(step, flush=True)
"""


def test_a_mover_outlives_a_killed_training(far: Run) -> None:
    command = [sys.executable, "-c", TRAINER, str(far.local), far.remote]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]) as trainer:
        assert trainer.stdout is not None
        acknowledged = -1
        while acknowledged < 20:
            acknowledged = int(trainer.stdout.readline())
        trainer.kill()
        acknowledged = max([acknowledged, *map(int, trainer.stdout)])

    def arrived() -> bool:
        try:
            with deltastore.open(far.remote, mode="r") as alone:
                return alone.at("latest").commit.step >= acknowledged
        except NotFound:
            return False

    until(arrived)
    with deltastore.open(far.remote, mode="r") as alone:
        for step in range(acknowledged + 1):
            assert alone.at(step)["w"][5].item() == step


FORKS = """
import os, sys, time, torch, deltastore
store = deltastore.open(sys.argv[1], tiers=[sys.argv[2]])
store.commit(0, {"w": torch.zeros(3000)}).wait("remote")
worker = os.fork()
if worker == 0:
    os.close(1)
    time.sleep(600)
store.commit(1, {"w": torch.ones(3000)}).wait()
print(worker, store._remotes.named("remote")._process.pid, flush=True)
os._exit(0)
"""


def test_a_mover_does_not_wait_for_a_forked_worker(far: Run) -> None:
    found = subprocess.run(
        [sys.executable, "-c", FORKS, str(far.local), far.remote],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=PATIENCE,
        cwd=Path(__file__).parents[1],
    )
    worker, mover = map(int, found.stdout.split())
    try:
        until(lambda: not psutil.pid_exists(mover) or psutil.Process(mover).status() == psutil.STATUS_ZOMBIE)
        assert psutil.Process(worker).status() != psutil.STATUS_ZOMBIE
    finally:
        os.kill(worker, signal.SIGKILL)
    with deltastore.open(far.remote, mode="r") as alone:
        assert alone.at("latest").commit.step == 1


def test_a_dead_trainings_commits_are_pushed_by_the_next_writer(far: Run) -> None:
    with deltastore.open(far.local) as store:
        far.commit(store, 0)
        far.commit(store, 1)
    with far.open() as store:
        store.restore()
        far.commit(store, 2).wait("remote", timeout=PATIENCE)
    with deltastore.open(far.remote, mode="r") as alone:
        far.check(alone)


def test_local_room_is_made_of_what_the_remote_has(run: Run) -> None:
    with run.open(max_local_bytes=200_000) as store:
        for step in range(4):
            for number in range(3):  # three bases, each with what follows
                store.set_restore_cost(1 if number == 0 else 1e9)
                run.commit(store, 3 * step + number).wait("remote", timeout=PATIENCE)
            assert sum(pack.stat().st_size for pack in packs(run.local)) < 400_000
        run.check(store)
    with deltastore.open(run.local, mode="r") as alone:
        assert len(alone.commits()) < 12
        assert torch.equal(alone.at("latest")["w"][...], run.truth[11])


def test_going_back_to_what_was_freed_here(far: Run) -> None:
    with far.open(max_local_bytes=1) as store:
        for step in range(5):
            store.set_restore_cost(1)
            far.commit(store, step).wait("remote", timeout=PATIENCE)
        assert len(packs(far.local)) < 5
        state = store.restore(1)
        assert torch.equal(state["w"][...], far.truth[1])
        commit = store.commit(2, {"w": torch.ones(20_000)}).wait("remote", timeout=PATIENCE)
        assert commit.parent == state.commit.id
        assert [line.step for line in store.lineage()] == [0, 1, 2]


@pytest.fixture
def blocked(far: Run) -> Iterator[Run]:
    """Let the remote folder be a file: nothing can be written there."""
    place = Path(far.remote.removeprefix("file://"))
    place.write_text("in the way", encoding="ascii")
    yield far
    if place.is_file():
        place.unlink()


def test_a_limit_fails_commits_where_the_user_says_so(blocked: Run) -> None:
    with blocked.open(max_lag_steps=3, on_limit="fail") as store:
        for step in range(3):
            blocked.commit(store, step).wait()
        with pytest.raises(Backend, match="3 commits are only local, max_lag_steps is 3"):
            blocked.commit(store, 3)
        Path(blocked.remote.removeprefix("file://")).unlink()
        store.wait(2, tier="remote", timeout=PATIENCE)
        blocked.commit(store, 3).wait("remote", timeout=PATIENCE)
        blocked.check(store)


def test_a_limit_lets_the_training_wait(blocked: Run, caplog: pytest.LogCaptureFixture) -> None:
    with blocked.open(max_lag_steps=2) as store:
        for step in range(2):
            blocked.commit(store, step).wait()
        with pytest.raises(Timeout, match="it goes on"):
            store.wait(1, tier="remote", timeout=1.0)
        remover = subprocess.Popen(
            [sys.executable, "-c", f"import time, os; time.sleep(2); os.unlink({blocked.remote[7:]!r})"]
        )
        blocked.commit(store, 2).wait("remote", timeout=PATIENCE)
        assert remover.wait() == 0
    assert "the training waits for its remote tier" in caplog.text


def flip(pack: Path) -> None:
    damage_at(pack, 4200)


def break_trailer(pack: Path) -> None:
    damage_at(pack, pack.stat().st_size - 40)


@pytest.mark.parametrize(
    ("break_it", "on_limit"),
    [(flip, "wait"), (break_trailer, "fail"), (Path.unlink, "wait")],
    ids=["chunk", "index", "gone"],
)
def test_what_is_broken_before_it_is_pushed_holds_up_nobody(
    far: Run, break_it: Callable[[Path], None], on_limit: str, caplog: pytest.LogCaptureFixture
) -> None:
    with far.open(max_lag_steps=2, on_limit=on_limit) as store:
        for step in range(2):
            far.commit(store, step).wait("remote", timeout=PATIENCE)
        known = set(packs(far.local))
        broken = far.commit(store, 2)
        broken.wait()
        (pack,) = set(packs(far.local)) - known
        break_it(pack)
        with pytest.raises(Corruption, match=r"cannot have commit .* stores the whole state again"):
            broken.wait("remote", timeout=PATIENCE)
        after = far.commit(store, 3).wait("remote", timeout=PATIENCE)
        assert after.kind == "base"
        assert store.durable("remote") == 3
        last = far.commit(store, 4).wait()
        break_it(far.local / store._view.catalog.by_id[last.id].pack)
        truth = dict(far.truth)
        for step in range(5, 9):  # both limits are passed by the broken one and by what was built upon it

            def admitted(step: int = step) -> bool:
                try:
                    far.commit(store, step).wait()
                except Backend:  # on_limit="fail"
                    return False
                return True

            until(admitted)
            truth[step] = far.truth[step]
        store.wait(8, tier="remote", timeout=PATIENCE)
        assert store.durable("remote") == 8
    assert "cannot have commit" in caplog.text
    with deltastore.open(far.remote, "r") as alone:
        found = [commit.step for commit in alone.commits()]
        assert {0, 1, 3, 8} <= set(found)
        assert not {2, 4} & set(found)
        for step in found:
            assert torch.equal(alone.at(step)["w"][...], truth[step])


def test_what_is_asked_for_while_a_mover_starts_is_answered(far: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    started = threading.Event()
    asked = threading.Event()

    class Slow(MoverProcess):
        def __init__(self, order: Mapping[str, Any]) -> None:
            super().__init__(order)
            started.set()
            assert asked.wait(PATIENCE)

    monkeypatch.setattr(remotes, "MoverProcess", Slow)
    with far.open() as store:
        commit = far.commit(store, 0).wait()
        (pack,) = packs(far.local)
        flip(pack)
        remote = store._remotes.named("remote")
        remote.start()
        assert started.wait(PATIENCE)
        number = remote.flush()
        asked.set()
        until(lambda: remote.answered >= number)
        assert remote.broken.keys() == {commit.id}


def test_nothing_is_freed_here_that_was_pruned_there(far: Run) -> None:
    with far.open() as store:
        for step in range(4):
            store.set_restore_cost(1)
            far.commit(store, step).wait("remote", timeout=PATIENCE)
        with deltastore.open(far.remote, "a") as there:
            assert there.prune(keep_last=1, dry_run=False).commits
    with far.open(max_local_bytes=1) as store:
        store.set_restore_cost(1)
        far.commit(store, 4).wait("remote", timeout=PATIENCE)
        with deltastore.open(far.remote, "a") as there:
            assert there.prune(keep_last=1, dry_run=False).commits
        far.commit(store, 5).wait("remote", timeout=PATIENCE)
        far.check(store)


def test_a_silent_tier_does_not_let_a_run_begin_anew(tmp_path: Path) -> None:
    run = Run(tmp_path, "hdfs://127.0.0.1:9/run")  # nobody listens there
    quickly = {"patience_seconds": 0.5, "connect_seconds": 0.5}
    with run.open(storage_options=quickly) as store:
        with pytest.raises(Backend, match="whether there is a state to restore cannot be told"):
            store.restore()
        run.commit(store, 0).wait()  # to begin anew is the user's own choice
        run.check(store)
        mover = store._remotes.named("remote")._process
        assert mover is not None
    os.kill(mover.pid, signal.SIGKILL)  # it would try for a day
    with run.open(storage_options=quickly) as store:
        assert store.restore().commit.step == 0


def test_two_stores_are_not_mixed(far: Run, tmp_path: Path) -> None:
    with deltastore.open(far.remote) as other:
        other.commit(0, {"x": 1})
    with deltastore.open(far.local) as store:
        far.commit(store, 0)
    with far.open() as store:
        with pytest.raises(Conflict, match="holds store"):
            store.restore()
        with pytest.raises(Conflict, match="holds store"):
            far.commit(store, 1)


def test_retention_may_be_faster_than_the_remote(blocked: Run) -> None:
    with blocked.open(retention={"keep_last": 1}) as store:
        handle = blocked.commit(store, 0)
        handle.wait()
        for step in range(1, 4):
            store.set_restore_cost(1)
            blocked.commit(store, step).wait()
        with pytest.raises(Backend, match="deleted by retention"):
            handle.wait("remote", timeout=PATIENCE)


def test_retention_beside_the_mover(run: Run) -> None:
    with run.open(retention={"keep_last": 2}, max_lag_seconds=0.2) as store:
        store.set_restore_cost(1)  # bases only: each commit deletes one that may be on its way
        for step in range(60):
            run.commit(store, step).wait()
        assert store.wait(59, tier="remote", timeout=PATIENCE).step == 59
    with deltastore.open(run.remote, mode="r") as alone:
        assert alone.verify(deep=True).ok
        for commit in alone.commits():
            assert torch.equal(alone.at(commit.id)["w"][...], run.truth[commit.step])


def test_the_environment_may_name_tiers(far: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTASTORE_TIERS", far.remote)
    with deltastore.open(far.local) as store:
        assert store.tier_names == ("local", "remote")
        far.commit(store, 0).wait("remote", timeout=PATIENCE)
    with deltastore.open(far.remote, mode="r") as alone:
        assert alone.tier_names == ("local",)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"tiers": "file:///x"}, "expected a list"),
        ({"max_lag_steps": 3}, "limits of a store with tiers"),
        ({"tiers": ["{local}"]}, "same place"),
        ({"tiers": ["file:///a", "file:///a"]}, "same place"),
        ({"tiers": ["file:///a"], "max_lag_steps": 0}, "max_lag_steps"),
        ({"tiers": ["file:///a"], "max_local_bytes": 1.5}, "max_local_bytes"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, options: dict[str, object], problem: str) -> None:
    if options.get("tiers") == ["{local}"]:
        options["tiers"] = [str(tmp_path / "local")]
    with pytest.raises(InvalidInput, match=problem):
        deltastore.open(tmp_path / "local", **options)  # type: ignore[arg-type]


def test_a_mover_that_cannot_start_is_given_up(
    far: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("deltastore.remotes.RESTART_SECONDS", 0.0)
    monkeypatch.setenv("PYTHONHOME", "/nonexistent")
    with far.open() as store, pytest.raises(Backend, match="ends before it does anything"):
        far.commit(store, 0).wait("remote", timeout=PATIENCE)
    assert os.path.isdir(far.local)
