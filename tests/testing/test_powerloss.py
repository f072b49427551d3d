"""The simulated disk forgets what it may, and a local tier loses nothing that it published."""

from __future__ import annotations

import inspect
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltastore.errors import DeltaStoreError
from deltastore.testing.powerloss import SimulatedDisk
from deltastore.tiers.local import LocalTier
from deltastore.tiers.posix import PosixOps

FILES = {
    "FORMAT.json": b'{"format":"deltastore"}',
    "epochs/1.json": b"claim of epoch one",
    "packs/e1-0-0-ab.zip": bytes(range(256)) * 4,
    "tags/best/1.json": b"a tag",
}
LABELS = {
    "parent of root",
    "root folder",
    "FORMAT file",
    "epoch file",
    "epochs folder",
    "pack file",
    "packs folder",
    "tag file",
    "tag folder",
    "tags folder",
}
SEEDS = range(40)


def publish_all(disk: SimulatedDisk) -> None:
    tier = LocalTier(disk.store, disk)
    tier.create()
    with tier.lock({"session": "s"}):
        for name, data in FILES.items():
            tier.publish_new(name, [data], "s")


def lost(disk: SimulatedDisk, seed: int) -> list[str]:
    """Return which files are not what they were after a power loss."""
    after = disk.crash(random.Random(seed))
    tier = LocalTier(after.store, after)
    missing = []
    for name, data in FILES.items():
        try:
            found = tier.read(name)
        except DeltaStoreError:
            found = None
        if found != data:
            missing.append(name)
    return missing


def test_what_was_published_survives_every_crash() -> None:
    disk = SimulatedDisk()
    publish_all(disk)
    assert set(disk.labels) == LABELS
    for seed in SEEDS:
        assert lost(disk, seed) == []


@pytest.mark.parametrize("label", sorted(LABELS))
def test_no_sync_can_be_left_out(label: str) -> None:
    disk = SimulatedDisk()
    disk.skip_fsync = label.__eq__
    publish_all(disk)
    assert any(lost(disk, seed) for seed in SEEDS)


def test_each_single_sync_of_a_publish_is_needed() -> None:
    first = SimulatedDisk()
    publish_all(first)
    after_create = first.labels.index("FORMAT file")
    for number in range(after_create, len(first.labels)):
        disk = SimulatedDisk()
        disk.skip_fsync = number
        publish_all(disk)
        assert any(lost(disk, seed) for seed in SEEDS), (number, disk.labels[number])


def test_a_created_store_survives() -> None:
    disk = SimulatedDisk("/disk/deeper/still/store")
    LocalTier(disk.store, disk).create()
    for seed in SEEDS:
        after = disk.crash(random.Random(seed))
        assert {entry.name for entry in after.scandir(after.store)} == {"packs", "epochs", "tags", "tmp"}


def test_folders_of_a_killed_writer_are_made_durable() -> None:
    """What an earlier process made and did not sync, the next one syncs before it builds on it."""
    disk = SimulatedDisk()
    for path in (disk.store, f"{disk.store}/packs", f"{disk.store}/tags", f"{disk.store}/tags/best"):
        disk.mkdir(path)
    publish_all(disk)
    assert all(lost(disk, seed) == [] for seed in SEEDS)


def test_sync_makes_a_killed_publish_durable() -> None:
    disk = SimulatedDisk()
    tier = LocalTier(disk.store, disk)
    tier.create()
    staged = tier.stage("packs/x", [b"x"], "s")
    disk.link(f"{disk.store}/{staged.token}", f"{disk.store}/packs/x")  # and killed
    seen = {bool(LocalTier(disk.store, after).list("packs")) for after in map(disk.crash, map(random.Random, SEEDS))}
    assert len(seen) == 1 or seen == {True, False}
    tier.sync("packs")
    for seed in SEEDS:
        after = disk.crash(random.Random(seed))
        assert LocalTier(after.store, after).read("packs/x") == b"x"


def test_a_staged_file_is_never_half_visible() -> None:
    disk = SimulatedDisk()
    tier = LocalTier(disk.store, disk)
    tier.create()
    staged = tier.stage("packs/x", [b"x" * 100], "s")
    disk.link(f"{disk.store}/{staged.token}", f"{disk.store}/packs/x")
    outcomes = set()
    for seed in SEEDS:
        after = disk.crash(random.Random(seed))
        found = LocalTier(after.store, after)
        outcomes.add(found.read("packs/x") if found.list("packs") else None)
    assert outcomes == {None, b"x" * 100}


def test_after_a_crash_the_next_writer_comes_in() -> None:
    disk = SimulatedDisk()
    tier = LocalTier(disk.store, disk)
    tier.create()
    tier.lock({"session": "s"})
    tier.publish_new("packs/x", [b"x"], "s")
    for seed in SEEDS:
        after = disk.crash(random.Random(seed))
        again = LocalTier(after.store, after)
        again.create()
        with again.lock({"session": "t"}):
            assert set(again.clean("t")) <= {"s"}
            again.publish_new("packs/y", [b"y"], "t")
        assert [info.name for info in again.list("packs")] == ["packs/x", "packs/y"]


def test_unsynced_content_takes_every_shape() -> None:
    disk = SimulatedDisk("/store")
    data = bytes(range(1, 101))
    fd = disk.open_write_new("/file")
    disk.writev(fd, [memoryview(data)])
    disk.fsync_folder("/")
    shapes = set()
    for seed in range(200):
        after = disk.crash(random.Random(seed))
        found = bytearray(200)
        size = after.preadv(after.open_read("/file"), [memoryview(found)], 0)
        assert size <= 100
        start = found[:size]
        if start == data[:size]:
            shapes.add("whole" if size == 100 else "prefix" if size else "empty")
        else:
            shapes.add("zeros" if start.rstrip(b"\0") == data[: len(start.rstrip(b"\0"))] else "garbage")
    assert shapes == {"whole", "prefix", "empty", "zeros", "garbage"}


@given(st.data())
def test_names_are_some_subset_of_the_changes(data: st.DataObject) -> None:
    """Synced names and no others may be relied on; nothing appears that never was."""
    disk = SimulatedDisk("/store")
    names = st.sampled_from("abcd")
    synced: set[str] = set()
    present: set[str] = set()
    touched: set[str] = set()
    for _ in range(data.draw(st.integers(0, 12))):
        name = data.draw(names)
        if data.draw(st.booleans()):
            disk.fsync_folder("/")
            synced, touched = set(present), set()
        elif name in present:
            disk.unlink(f"/{name}")
            present.discard(name)
            touched.add(name)
        else:
            disk.close(disk.open_write_new(f"/{name}"))
            present.add(name)
            touched.add(name)
    found = {entry.name for entry in disk.crash(random.Random(data.draw(st.integers(0, 99)))).scandir("/")}
    assert found - touched == synced - touched


def test_two_names_stay_one_file() -> None:
    disk = SimulatedDisk("/store")
    disk.close(disk.open_write_new("/a"))
    disk.link("/a", "/b")
    disk.fsync_folder("/")
    after = disk.crash(random.Random(0))
    assert after.stat("/a").identity == after.stat("/b").identity


def test_the_same_seed_gives_the_same_crash() -> None:
    disk = SimulatedDisk()
    disk.skip_fsync = lambda label: "folder" in label
    publish_all(disk)
    assert [lost(disk, seed) for seed in SEEDS] == [lost(disk, seed) for seed in SEEDS]


def test_no_call_reaches_the_real_disk() -> None:
    real = {name for name, _ in inspect.getmembers(PosixOps, inspect.isfunction)}
    assert real <= vars(SimulatedDisk).keys()


def test_a_simulated_descriptor_is_none_of_the_real_system(tmp_path: Path) -> None:
    disk = SimulatedDisk()
    LocalTier(disk.store, disk).create()
    fd = disk.open_write_new(f"{disk.store}/packs/x")
    with pytest.raises(OSError, match="Bad file descriptor"):
        PosixOps().fstat(fd)
    assert not Path(disk.store).exists()
