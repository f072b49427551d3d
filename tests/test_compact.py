"""Compaction: fewer files, the same commits, whatever happens meanwhile."""

from __future__ import annotations

import contextlib
import errno
import secrets
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import deltastore
from deltastore.errors import Backend, Conflict, InvalidInput
from deltastore.history.catalog import Catalog, CatalogEntry
from deltastore.history.compact import plan_compact
from deltastore.history.packs import OPEN_FILES
from deltastore.ondisk.records import CommitRef
from deltastore.store import Store
from deltastore.testing.faulty import FailAt, FaultyTier
from deltastore.tiers.local import LocalTier

STEPS = 12


def state_of(step: int) -> dict[str, torch.Tensor]:
    values = torch.arange(3000.0)
    values[: step + 1] = -step
    return {"w": values, "step": torch.tensor(step)}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two lines of history in three epochs, a tag, and a base in the middle."""
    with deltastore.open(tmp_path / "run") as store:
        for step in range(STEPS):
            if step == 7:
                store.restore(5)
            store.commit(step, state_of(step), tag="kept" if step == 3 else None).wait()
    with deltastore.open(tmp_path / "run") as store:
        store.restore()
        store.commit(STEPS, state_of(STEPS))
    return tmp_path / "run"


def packs(root: Path) -> list[Path]:
    return sorted((root / "packs").glob("*.zip"))


def require_whole(root: Path | str) -> None:
    with deltastore.open(root, "r") as store:
        assert store.verify(deep=True).ok
        assert {commit.step for commit in store.commits()} == set(range(STEPS + 1))
        for commit in store.commits():
            read = store.at(commit.id).to_state_dict()
            assert all(torch.equal(read[name], value) for name, value in state_of(commit.step).items())
        assert store.at("kept").commit.step == 3


def test_small_packs_become_one_for_each_epoch(root: Path) -> None:
    with deltastore.open(root) as store:
        before = [(commit.id, commit.step, commit.parent) for commit in store.commits()]
        planned = store.compact()
        assert (planned.packs_before, planned.packs_after, planned.dry_run) == (STEPS + 1, 3, True)
        assert len(packs(root)) == STEPS + 1
        done = store.compact(dry_run=False)
        assert (done.packs_before, done.packs_after, done.damaged) == (STEPS + 1, 3, ())
        assert [(commit.id, commit.step, commit.parent) for commit in store.commits()] == before
    assert len(packs(root)) == 3
    require_whole(root)
    with deltastore.open(root) as store:
        again = store.compact(dry_run=False)
        assert (again.packs_before, again.packs_after, again.merged) == (3, 3, 0)
        assert store.restore().commit.step == STEPS
        store.commit(STEPS + 1, state_of(STEPS + 1)).wait()
        assert torch.equal(store.at("latest")["w"][...], state_of(STEPS + 1)["w"])
    assert not list((root / "tmp").iterdir())


def test_a_writer_compacts_what_it_writes(root: Path) -> None:
    with deltastore.open(root) as store:
        store.restore()
        for step in range(STEPS + 1, STEPS + 5):
            store.commit(step, state_of(step))
        assert store.compact(dry_run=False).packs_after == 4
        store.commit(STEPS + 5, state_of(STEPS + 5)).wait()
        for step in range(STEPS + 6):
            assert torch.equal(store.at(step)["w"][...], state_of(step)["w"])


def test_a_store_that_another_writes_is_left_alone(root: Path) -> None:
    with deltastore.open(root) as writer:
        writer.restore()
        with deltastore.open(root) as other, pytest.raises(Conflict):
            other.compact(dry_run=False)
    assert len(packs(root)) == STEPS + 1


def test_readers_go_on(root: Path) -> None:
    with deltastore.open(root, "r") as reader:
        reader.commits()
        early = reader.at(4)
        with deltastore.open(root) as store:
            store.compact(dry_run=False)
        assert torch.equal(early["w"][...], state_of(4)["w"])
        for step in range(STEPS + 1):
            assert torch.equal(reader.at(step)["w"][...], state_of(step)["w"])


POINTS = [
    *("stage", "stage:part:0", "stage:part:9", "stage:after", "publish:before", "publish:after"),
    *("list", "open", "read", "delete", "sync", "lock"),
]


def test_readers_go_on_whose_files_were_closed_meanwhile(tmp_path: Path) -> None:
    steps = range(OPEN_FILES + 20)
    with deltastore.open(tmp_path / "run") as store:
        for step in steps:
            store.set_restore_cost(1)
            store.commit(step, {"w": torch.full((500,), float(step))}).wait()
    with deltastore.open(tmp_path / "run", "r") as reader:
        early = reader.at(0)
        for step in steps:  # all tails are known, the first files are closed again
            assert reader.at(step)["w"][0].item() == step
        with deltastore.open(tmp_path / "run") as store:
            store.compact(dry_run=False)
        assert early["w"][0].item() == 0
        assert all(reader.at(step).to_state_dict()["w"][1].item() == step for step in steps)


@pytest.mark.parametrize("point", POINTS)
def test_a_fault_anywhere_loses_nothing(root: Path, point: str) -> None:
    for first in (1, 2):
        copy = root.parent / f"{point}-{first}"
        shutil.copytree(root, copy)
        tier = FaultyTier(LocalTier(copy), FailAt(point, errno.EIO, first=first))
        with contextlib.suppress(Backend), Store(tier, writable=True) as store:
            store.compact(dry_run=False)
        assert tier.calls[point] >= first or point == "lock"
        require_whole(copy)
        with deltastore.open(copy) as store:
            store.compact(dry_run=False)
        assert len(packs(copy)) == 3
        require_whole(copy)


KILLED = """
import sys
from deltastore.store import Store
from deltastore.testing.faulty import FaultyTier, KillPoint
from deltastore.tiers.local import LocalTier
with Store(FaultyTier(LocalTier(sys.argv[1]), KillPoint(sys.argv[2], int(sys.argv[3]))), writable=True) as store:
    store.compact(dry_run=False)
"""


@pytest.mark.parametrize(("point", "count"), [("stage:after", 1), ("publish:after", 2), ("delete", 3), ("sync", 2)])
def test_killed_anywhere_it_loses_nothing(root: Path, point: str, count: int) -> None:
    command = [sys.executable, "-c", KILLED, str(root), point, str(count)]
    assert subprocess.run(command, check=False, cwd=Path(__file__).parents[1]).returncode == -signal.SIGKILL
    require_whole(root)
    with deltastore.open(root) as store:
        store.compact(dry_run=False)
    assert len(packs(root)) == 3
    require_whole(root)


def test_what_was_merged_but_not_deleted_is_deleted_by_the_next(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path / "before")
    with deltastore.open(root) as store:
        store.compact(dry_run=False)
    for pack in packs(tmp_path / "before"):
        shutil.copy(pack, root / "packs")
    shutil.rmtree(root / "cache", ignore_errors=True)
    with deltastore.open(root) as store:
        done = store.compact(dry_run=False)
        assert (done.packs_after, done.damaged) == (3, ())
    require_whole(root)


def test_damage_stays_where_it_is(root: Path) -> None:
    with deltastore.open(root, "r") as store:
        name = store._view.catalog.by_id[store.at(1).commit.id].pack
        extent = next(iter(store._view.packs.tail(name).index.arrays.values())).chunks[0]
    victims = [root / name, packs(root)[-1]]
    spoilt = bytearray(victims[0].read_bytes())
    spoilt[extent.offset] ^= 1
    victims[0].write_bytes(spoilt)
    cut = victims[1].read_bytes()[:-30]
    victims[1].write_bytes(cut)
    with deltastore.open(root) as store:
        done = store.compact(dry_run=False)
        assert done.damaged == tuple(sorted(f"packs/{victim.name}" for victim in victims))
    assert victims[0].read_bytes() == spoilt
    assert victims[1].read_bytes() == cut
    with deltastore.open(root, "r") as store:
        assert torch.equal(store.at(0)["w"][...], state_of(0)["w"])
        assert torch.equal(store.at("kept")["w"][...], state_of(3)["w"])


def test_a_copy_is_not_deleted_where_the_other_is_damaged(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path / "before")
    with deltastore.open(root) as store:
        store.compact(dry_run=False)
    for pack in packs(tmp_path / "before"):
        shutil.copy(pack, root / "packs")
    shutil.rmtree(root / "cache", ignore_errors=True)
    with deltastore.open(root, "r") as store:
        view = store._view
        for name in {entry.pack for entry in view.catalog.by_id.values()}:
            for array in view.packs.tail(name).index.arrays.values():
                with (root / name).open("r+b") as file:
                    file.seek(array.chunks[0].offset)
                    byte = file.read(1)
                    file.seek(array.chunks[0].offset)
                    file.write(bytes([byte[0] ^ 1]))
    before = len(packs(root))
    with deltastore.open(root) as store:
        done = store.compact(dry_run=False)
    assert done.damaged
    assert len(packs(root)) == before


@pytest.mark.parametrize("place", ["memory", "file"])
def test_other_places(root: Path, tmp_path: Path, place: str) -> None:
    url = f"memory://compact-{secrets.token_hex(4)}" if place == "memory" else (tmp_path / "there").as_uri()
    deltastore.push(root, url, pack_bytes=1)
    with deltastore.open(url) as store:
        done = store.compact(dry_run=False)
        assert (done.packs_before, done.packs_after) == (STEPS + 1, 3)
    require_whole(url)


def test_files_follow_the_bytes(tmp_path: Path) -> None:
    with deltastore.open(tmp_path / "run") as store:
        for step in range(300):
            store.commit(step, {"w": torch.full((500,), float(step))})
        store.flush()
        size = sum(pack.stat().st_size for pack in packs(tmp_path / "run"))
        seen: list[tuple[int, int]] = []
        done = store.compact(65_536, dry_run=False, progress=lambda *at: seen.append(at))
        assert done.packs_after == len(packs(tmp_path / "run")) <= 1.2 * size / 65_536 + 10
        assert seen[-1][0] == seen[-1][1]
        assert store.at(150)["w"][7].item() == 150


def test_arguments(root: Path) -> None:
    with deltastore.open(root) as store, pytest.raises(InvalidInput, match="pack_bytes"):
        store.compact(0)


def entry(sequence: int, pack: str, epoch: int = 1) -> CatalogEntry:
    ref = CommitRef(f"{epoch}-{sequence}", "d", epoch, sequence, sequence)
    return CatalogEntry(ref, None, "base", "", True, 1, {}, (), pack)


def test_the_plan() -> None:
    catalog = Catalog()
    for number, size in enumerate([40, 50, 30, 200, 10, 10, 10]):
        catalog.add(entry(number, f"p{number}"), size)
    catalog.add(entry(0, "q0", epoch=2), 5)
    assert plan_compact(catalog, 100).batches == (("p0", "p1"), ("p4", "p5", "p6"))
    assert plan_compact(catalog, 120, {"p5"}).batches == (("p0", "p1", "p2"),)
    catalog.add(entry(1, "p9"), 40)
    assert plan_compact(catalog, 100).duplicates == ("p1",)  # of two with as many commits the greater name stays
    assert plan_compact(catalog, 100).batches == (("p4", "p5", "p6"),)
    assert plan_compact(catalog, 100, {"p9"}).duplicates == ()
    for number in (5, 6):
        catalog.add(entry(number, "a"), 1)
    assert plan_compact(catalog, 100).duplicates == ("p1", "p5", "p6")  # and before that, the one with more of them
