"""O01, O09, O15: a writer dies or is refused in the middle of a commit, and what readers find then."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import time
from pathlib import Path

import pytest
import torch

from deltastore.errors import Backend, NotFound
from tests.cases.kit import Store, biggest, files, raises, same, used
from tests.cases.warm import child


def small(value: float, size: int = 1000) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {"w": torch.full((size,), value)}}


# ---------------------------------------------------------------- O01: killed in the middle of a save


@pytest.mark.parametrize("delay", [0.0, 0.005, 0.02, 0.05, 0.1, 0.3])
def test_a_writer_that_is_killed_leaves_whole_steps_only(tmp_path: Path, delay: float) -> None:
    root = tmp_path / "store"
    with Store(root) as store:
        store.save(1, {"model": {"w": torch.arange(1000.0)}})
    writer = child(f"""
        store = Store({str(root)!r})
        state = {{"model": {{"w": torch.arange(1000.) + 1, "big": torch.randn(4_000_000)}}}}
        print("go", flush=True)
        store.save(2, state)
        store.wait()
    """)
    assert writer.line() == "go"
    time.sleep(delay)  # the moment of the kill is what is swept here
    writer.kill()
    with Store(root) as store:  # opening again is the recovery
        assert 1 in store.steps()
        assert set(store.steps()) <= {1, 2}
        same({"model": {"w": torch.arange(1000.0)}}, store.read(1))
        for step in store.steps():
            store.read(step)  # whatever is listed is whole
        assert not store.verify()
    assert not files(root / "tmp"), "leftovers were not removed"


def test_kills_one_after_the_other_never_lose_an_acknowledged_step(tmp_path: Path) -> None:
    root = tmp_path / "store"
    acknowledged = -1
    for delay in (0.0, 0.01, 0.03, 0.06, 0.1):
        writer = child(f"""
            store = Store({str(root)!r})
            step = (store.steps() or [-1])[-1]
            print("open", step, flush=True)
            while True:
                step += 1
                store.save(step, {{"model": {{"w": torch.full((300_000,), float(step))}}, "user": {{"step": step}}}})
                store.wait()
                print(step, flush=True)
        """)
        word, _, found = writer.line().partition(" ")
        assert word == "open"
        assert int(found) >= acknowledged
        time.sleep(delay)
        os.kill(writer.pid, 9)
        lines = [int(line) for line in writer.output.read().split()]
        acknowledged = max([acknowledged, *lines])
        writer.wait()
    with Store(root, owner=False) as reader:
        assert set(range(acknowledged + 1)) <= set(reader.steps())
        for step in reader.steps():
            same({"model": {"w": torch.full((300_000,), float(step))}, "user": {"step": step}}, reader.read(step))
        assert not reader.verify()


def test_a_writer_that_dies_before_its_first_commit_leaves_a_store_that_opens(tmp_path: Path) -> None:
    root = tmp_path / "store"
    writer = child(f"""
        store = Store({str(root)!r})
        print("claimed", flush=True)
        time.sleep(60)
    """)
    assert writer.line() == "claimed"
    writer.kill()
    with Store(root, owner=False) as reader:
        assert reader.steps() == []
        raises(lambda: reader.read(0), NotFound)
        assert not reader.verify()
    with Store(root) as store:
        store.save(0, small(1))
        store.wait()
        same(small(1), store.read(0))


# ---------------------------------------------------------------- O09: the write is refused

LIMITS = """import resource
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        limit = lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))"""


def test_a_save_that_does_not_fit_fails_alone(tmp_path: Path) -> None:
    root = tmp_path / "store"
    writer = child(f"""
        {LIMITS}
        store = Store({str(root)!r})
        store.save(1, {{"model": {{"w": torch.zeros(10)}}}})
        store.wait()
        limit(100_000)  # EFBIG stands in for ENOSPC, it needs no mount
        error = raises(lambda: (store.save(2, {{"model": {{"w": torch.randn(1_000_000)}}}}), store.wait()), OSError)
        assert error.errno, error
        assert "2" in str(error), error
        limit(hard)
        store.save(3, {{"model": {{"w": torch.ones(10)}}}})
        store.wait()
        store.close()
    """)
    assert writer.wait(60) == 0
    with Store(root, owner=False) as reader:
        assert reader.steps() == [1, 3]
        same({"model": {"w": torch.ones(10)}}, reader.read(3))
        assert not reader.verify()
    assert used(root) < 50_000, "the failed save left something behind"


def test_the_saves_behind_one_that_fails_are_reported_and_the_next_works(tmp_path: Path) -> None:
    root = tmp_path / "store"
    writer = child(f"""
        {LIMITS}
        store = Store({str(root)!r}, max_pending=4)
        store.save(1, {{"model": {{"w": torch.zeros(10)}}}})
        store.wait()
        limit(100_000)
        told = 0
        for step in (2, 3, 4):  # the failure shows at the next save, or where it is waited for
            try:
                store.save(step, {{"model": {{"w": torch.randn(400_000)}}}})
            except OSError:
                told += 1
        try:
            store.wait()
        except OSError:
            told += 1
        assert told
        limit(hard)
        store.save(5, {{"model": {{"w": torch.ones(10)}}}})
        store.close()
    """)
    assert writer.wait(60) == 0
    with Store(root, owner=False) as reader:
        assert reader.steps() == [1, 5]
        assert not reader.verify()


def test_a_place_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"in the way")
    error = raises(lambda: Store(file / "below-a-file"), OSError)
    assert isinstance(error, Backend)
    assert error.errno in (errno.ENOTDIR, errno.EEXIST)
    raises(lambda: Store(file), OSError)
    assert file.read_bytes() == b"in the way"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_refused_at_once_and_left_alone(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    error = raises(lambda: Store(closed / "store"), OSError)
    assert isinstance(error, Backend)
    assert error.errno == errno.EACCES
    assert list(closed.iterdir()) == []


@pytest.mark.parametrize(
    ("mask", "folder", "file"), [(0o027, 0o750, 0o640), (0o077, 0o700, 0o600), (0o002, 0o775, 0o664)]
)
def test_new_files_follow_the_umask(tmp_path: Path, mask: int, folder: int, file: int) -> None:
    root = tmp_path / "store"
    old = os.umask(mask)
    try:
        with Store(root) as store:
            for step in range(3):
                store.save(step, small(step))
            store.wait()
            store.product.tag("best")
    finally:
        os.umask(old)
    assert stat.S_IMODE(root.stat().st_mode) == folder
    for path in root.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (folder if path.is_dir() else file), path


# ---------------------------------------------------------------- O15: 'latest' points to something that is not there


def lose_newest(root: Path) -> None:
    """Save steps 1 to 3 and remove all that the third one brought."""
    with Store(root) as store:
        for step in (1, 2):
            store.save(step, small(step))
        store.wait()
        before = files(root)
        store.save(3, small(3))
    for path in set(files(root)) - set(before):
        path.unlink()


def test_a_newest_step_that_is_lost_leaves_the_one_before(tmp_path: Path) -> None:
    root = tmp_path / "store"
    lose_newest(root)
    with Store(root, owner=False) as reader:
        assert reader.steps() == [1, 2]
        assert reader.latest() == 2
        same(small(2), reader.read(2))
        raises(lambda: reader.read(3), NotFound)
    moved = tmp_path / "moved"
    shutil.copytree(root, moved)
    shutil.rmtree(root)
    with Store(moved, owner=False) as reader:
        same(small(1), reader.read(1))


def test_a_store_that_lost_its_newest_step_goes_on(tmp_path: Path) -> None:
    root = tmp_path / "store"
    lose_newest(root)
    with Store(root) as store:
        store.save(3, small(33))
        store.wait()
        assert store.latest() == 3
        same(small(33), store.read(3))
        assert not store.verify()


@pytest.mark.parametrize("damage", ["cut", "empty", "flipped"])
def test_a_newest_step_that_is_damaged_is_reported_and_left_out(tmp_path: Path, damage: str) -> None:
    root = tmp_path / "store"
    with Store(root) as store:
        for step in (1, 2, 3):
            store.save(step, {"model": {"w": torch.randn(1000 * step)}})  # another shape: each a base
            store.wait()
    pack = biggest(root)
    good = pack.read_bytes()
    middle = len(good) // 2
    bad = {"cut": good[:middle], "empty": b"", "flipped": good[:-8] + bytes([good[-8] ^ 1]) + good[-7:]}[damage]
    pack.write_bytes(bad)
    with Store(root, owner=False) as reader:
        readable = [step for step in reader.steps() if step not in reader.verify()]
        assert max(readable) == 2
        raises(lambda: reader.read(3))
        assert any(pack.name in str(where) or pack.name in text for where, text in reader.verify().items())
    with Store(root) as store:
        assert store.product.restore().commit.step == 2
        store.save(3, small(3))
        store.wait()
        same(small(3), store.read(3))
        pack.write_bytes(good)
