"""Commits on their way to another tier: all of them, merged, whatever fails meanwhile."""

from __future__ import annotations

import contextlib
import errno
import secrets
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import deltastore
from deltastore.errors import Backend, Conflict, InvalidInput, NotFound, OutcomeUnknown
from deltastore.history.push import push
from deltastore.store import Store
from deltastore.testing.compare import assert_same
from deltastore.testing.faulty import FailAt, FaultyTier, Plan, no_faults
from deltastore.tiers.base import Tier
from deltastore.tiers.local import LocalTier
from deltastore.tiers.memory import MemoryTier

STEPS = 12
SMALL_PACK = 60_000
SESSION = "00112233aabbccdd"


def state_of(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(200, 64, generator=generator)
    weights[step % 7] += step
    return {"w": weights, "half": weights.bfloat16(), "count": torch.tensor(step), "list": [step, "text"]}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a store with two epochs and a tag."""
    for begin in (0, STEPS // 2):
        with deltastore.open(tmp_path / "run") as store:
            if begin:
                store.restore()
            for step in range(begin, begin + STEPS // 2):
                store.commit(step, state_of(step), tag="third" if step == 3 else None)
    return tmp_path / "run"


@pytest.fixture
def target() -> Tier:
    return MemoryTier(f"push-{secrets.token_hex(8)}")


def require_same(root: Path, target: Tier, steps: int = STEPS) -> None:
    with Store(LocalTier(root), writable=False) as here, Store(target, writable=False) as there:
        there._view.reread()  # not what a cache says
        assert [commit.id for commit in there.commits()] == [commit.id for commit in here.commits()]
        assert [commit.tags for commit in there.commits()] == [commit.tags for commit in here.commits()]
        for step in range(steps):
            assert_same(state_of(step), there.at(step).to_state_dict())
        report = there.verify(deep=True)
        assert report.ok, report.findings
    assert target.list("tmp") == []


def test_everything_arrives_in_few_files(root: Path, target: Tier) -> None:
    told: list[tuple[int, int]] = []
    report = push(LocalTier(root), target, SESSION, progress=lambda *done: told.append(done))
    assert (report.commits, report.packs, report.held_back, report.newest) == (STEPS, 2, (), STEPS - 1)
    assert report.bytes == sum(info.size for info in target.list("packs"))
    assert told == [(STEPS // 2, STEPS), (STEPS, STEPS)]
    require_same(root, target)


def test_the_arrays_of_a_commit_lie_as_they_did(root: Path, target: Tier) -> None:
    model = {f"w{number}": torch.randn(64, number + 1) for number in range(12)}
    with Store(LocalTier(root), writable=True) as store:
        store.restore()
        store.commit(STEPS, {"model": model, **{f"f16 {n}": value.half() for n, value in model.items()}})
    push(LocalTier(root), target, SESSION)
    with Store(LocalTier(root), writable=False) as here, Store(target, writable=False) as there:
        for commit in here.commits():
            orders = []
            for view in (here._view, there._view):
                arrays = view.packs.tail(view.catalog.by_id[commit.id].pack).index.arrays
                mine = [path for path in arrays if path.startswith(commit.id)]
                orders.append(sorted(mine, key=lambda path: arrays[path].chunks[0].offset))
            assert orders[0] == orders[1]


def test_again_moves_only_what_is_new(root: Path, target: Tier) -> None:
    push(LocalTier(root), target, SESSION, pack_bytes=SMALL_PACK)
    files = target.list("packs")
    assert 2 < len(files) < STEPS
    assert push(LocalTier(root), target, SESSION).packs == 0
    assert target.list("packs") == files
    with deltastore.open(root) as store:
        store.restore()
        store.commit(STEPS, state_of(STEPS))
        store.tag("third", "latest", move=True)
    assert push(LocalTier(root), target, SESSION).commits == 1
    require_same(root, target, STEPS + 1)


def test_back_to_a_folder(root: Path, target: Tier, tmp_path: Path) -> None:
    push(LocalTier(root), target, SESSION, pack_bytes=SMALL_PACK)
    push(target, LocalTier(tmp_path / "back"), SESSION)
    require_same(root, LocalTier(tmp_path / "back"))
    with deltastore.open(tmp_path / "back") as store:  # the run goes on from there
        assert_same(state_of(STEPS - 1), store.restore().to_state_dict())
        store.commit(STEPS, state_of(STEPS)).wait()


def test_while_it_is_written(tmp_path: Path, target: Tier) -> None:
    done = threading.Event()
    with deltastore.open(tmp_path / "run") as store, ThreadPoolExecutor(1) as pool:
        store.commit(0, state_of(0)).wait()

        def keep_pushing() -> int:
            pushed = 0
            while not done.is_set():
                pushed += push(LocalTier(tmp_path / "run"), target, SESSION).commits
            return pushed

        pushing = pool.submit(keep_pushing)
        for step in range(1, STEPS):
            store.commit(step, state_of(step)).wait()
        done.set()
        assert 1 <= pushing.result() <= STEPS
    push(LocalTier(tmp_path / "run"), target, SESSION)
    require_same(tmp_path / "run", target)


def test_two_at_once_do_no_harm(root: Path, target: Tier) -> None:
    with ThreadPoolExecutor(2) as pool:
        pushes = [pool.submit(push, LocalTier(root), target, f"session-{n}", pack_bytes=SMALL_PACK) for n in range(2)]
        for pushing in pushes:
            pushing.result()
    require_same(root, target)


POINTS = ["create", "stage", "stage:part:3", "stage:after", "publish:before", "open", "list", "read"]


@pytest.mark.parametrize("first", [1, 3])
@pytest.mark.parametrize("point", POINTS)
def test_what_fails_is_made_up_for_by_the_next(root: Path, target: Tier, point: str, first: int) -> None:
    faulty = FaultyTier(target, FailAt(point, errno.EIO, first=first, times=1))
    with contextlib.suppress(Backend):  # a point that is not reached so often does not fail
        push(LocalTier(root), faulty, SESSION, pack_bytes=SMALL_PACK)
    if target.list("packs"):
        with Store(target, writable=False) as store:
            for commit in store.commits():  # whatever arrived is whole
                assert_same(state_of(commit.step), store.at(commit.id).to_state_dict())
    faulty.plan = no_faults
    push(LocalTier(root), faulty, SESSION)
    require_same(root, target)


def test_an_answer_that_was_lost(root: Path, target: Tier) -> None:
    def lose() -> Plan:
        def plan(point: str, name: str, count: int) -> Exception | None:
            lost = point == "publish:after" and name.startswith("packs/")
            return OutcomeUnknown("lost", errno=errno.EIO) if lost else None

        return plan

    report = push(LocalTier(root), FaultyTier(target, lose()), SESSION)
    assert report.commits == STEPS
    require_same(root, target)


def test_damage_is_not_copied_and_the_rest_is(root: Path, target: Tier) -> None:
    with deltastore.open(root) as store:
        store.restore()
        store.commit(STEPS, state_of(STEPS), tag="base")
        victim = next(commit for commit in store.commits() if commit.step == 8)
        name = store._view.catalog.by_id[victim.id].pack
        tail = store._view.packs.tail(name)
    extent = next(iter(tail.index.arrays.values())).chunks[0]
    data = bytearray((root / name).read_bytes())
    data[extent.offset] ^= 1
    (root / name).write_bytes(data)
    report = push(LocalTier(root), target, SESSION)
    assert report.held_back[0] == 8
    assert STEPS not in report.held_back
    with Store(target, writable=False) as store:
        assert {commit.step for commit in store.commits()} == set(range(STEPS + 1)) - set(report.held_back)
        assert store.verify(deep=True).ok
        assert_same(state_of(STEPS), store.at("latest").to_state_dict())


def test_another_store_is_not_mixed_with_it(root: Path, tmp_path: Path) -> None:
    with deltastore.open(tmp_path / "other") as store:
        store.commit(0, {"x": 1})
    with pytest.raises(Conflict, match="push to an empty folder"):
        deltastore.push(root, tmp_path / "other")


def test_arguments(root: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        deltastore.push(tmp_path / "nothing", f"memory://push-{secrets.token_hex(4)}")
    with pytest.raises(InvalidInput, match="same place"):
        deltastore.push(root, root)
    with pytest.raises(InvalidInput, match="pack_bytes"):
        deltastore.push(root, tmp_path / "x", pack_bytes=0)
