"""What only a real folder can do wrong: links, modes, full disks, kills at every step of a publish."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from deltastore.errors import AlreadyExists, Backend, Corruption, InvalidInput, OutcomeUnknown
from deltastore.testing.faulty import FailAt, FaultyOps
from deltastore.tiers.local import LocalTier
from deltastore.tiers.posix import PosixOps

PACK = "packs/e1-0-0-ab.zip"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def tier(tmp_path: Path) -> LocalTier:
    made = LocalTier(tmp_path / "store")
    made.create()
    return made


def leftovers(tier: LocalTier) -> list[str]:
    return [info.name for info in tier.list("tmp") if not info.name.endswith("/OWNER")]


def run_script(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=60, cwd=ROOT, check=False
    )


def test_layout_of_a_new_store(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path / "a" / "b" / "store")
    tier.create()
    assert sorted(path.name for path in (tmp_path / "a" / "b" / "store").iterdir()) == [
        "epochs",
        "packs",
        "tags",
        "tmp",
    ]
    assert tier.url == str(tmp_path / "a" / "b" / "store")


def test_a_relative_root_is_fixed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tier = LocalTier("store")
    monkeypatch.chdir("/")
    tier.create()
    assert (tmp_path / "store" / "packs").is_dir()


@pytest.mark.parametrize("root", ["", "a\0b"])
def test_roots_that_are_none(root: str) -> None:
    with pytest.raises(InvalidInput):
        LocalTier(root)


def test_modes_follow_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        tier = LocalTier(tmp_path / "x" / "store")
        tier.create()
        tier.publish_new(PACK, [b"x"], "s")
        tier.publish_new("tags/a/1.json", [b"x"], "s")
        tier.lock({}).release()
    finally:
        os.umask(old)
    paths = [tmp_path / "x", *(tmp_path / "x").rglob("*")]
    assert len(paths) == 12
    for path in paths:
        assert stat.S_IMODE(path.stat().st_mode) == (0o750 if path.is_dir() else 0o640), path


@pytest.mark.parametrize("below", ["file", "file/store", "file/a/store"])
def test_a_file_in_the_way(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_bytes(b"x")
    tier = LocalTier(tmp_path / below)
    for call in (tier.check_writable, tier.create):
        with pytest.raises(Backend) as caught:
            call()
        assert caught.value.errno == errno.ENOTDIR
    assert not tier.exists()


def test_check_writable_writes_nothing(tmp_path: Path) -> None:
    LocalTier(tmp_path / "a" / "b").check_writable()
    assert list(tmp_path.iterdir()) == []


def test_check_writable_sees_a_link_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "store").symlink_to(tmp_path / "nowhere")
    with pytest.raises(Backend) as caught:
        LocalTier(tmp_path / "store").check_writable()
    assert caught.value.errno == errno.ENOENT


def test_check_writable_sees_a_file_for_a_folder(tier: LocalTier) -> None:
    Path(tier.root, "packs").rmdir()
    Path(tier.root, "packs").write_bytes(b"")
    with pytest.raises(Backend):
        tier.check_writable()


NO_PERMISSION = """
import os, sys
from deltastore.errors import Backend
from deltastore.tiers.local import LocalTier
if os.geteuid() == 0:
    os.setgid(65534); os.setuid(65534)
for root in sys.argv[1:]:
    try:
        LocalTier(root).check_writable()
    except Backend as error:
        print(error.errno)
"""


def test_check_writable_without_permission() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        made = LocalTier(f"{folder}/store")
        made.create()
        for path in (made.root, f"{made.root}/tmp"):
            os.chmod(path, 0o777)
        os.chmod(f"{made.root}/packs", 0o555)
        os.mkdir(f"{folder}/closed", 0o555)
        result = run_script(NO_PERMISSION, f"{folder}/closed/store", made.root)
    assert result.stdout.split() == [str(errno.EACCES)] * 2, result.stderr


def test_a_read_only_file_system_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(tmp_path)

    class Result:
        f_flag = real.f_flag | os.ST_RDONLY

    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    monkeypatch.setattr(os, "statvfs", lambda _: Result)
    with pytest.raises(Backend) as caught:
        LocalTier(tmp_path).check_writable()
    assert caught.value.errno == errno.EROFS


def test_a_pack_that_is_a_link_is_refused(tier: LocalTier, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    link = Path(tier.root, PACK)
    link.symlink_to(tmp_path / "secret")
    for call in (tier.open, tier.read):
        with pytest.raises(Corruption, match="symbolic link"):
            call(PACK)
    assert [info.name for info in tier.list("packs")] == [PACK]
    with pytest.raises(AlreadyExists):
        tier.publish_new(PACK, [b"x"], "s")
    tier.delete(PACK)
    assert not link.is_symlink()
    assert (tmp_path / "secret").read_bytes() == b"secret"


@pytest.mark.parametrize("folder", ["packs", "epochs", "tags", "tmp"])
def test_a_folder_that_is_a_link_is_refused(tier: LocalTier, tmp_path: Path, folder: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "x").write_bytes(b"secret")
    Path(tier.root, folder).rmdir()
    Path(tier.root, folder).symlink_to(outside)
    for call in (tier.list, tier.sync):
        with pytest.raises(Corruption, match="symbolic link"):
            call(folder)
    if folder == "tmp":
        with pytest.raises(Corruption):
            tier.stage(PACK, [b"x"], "s")
        with pytest.raises(Corruption):
            tier.end_session("s")
    else:
        for name_call in (tier.read, tier.delete):
            with pytest.raises(Corruption):
                name_call(f"{folder}/x")
        with pytest.raises(Corruption):
            tier.publish_new(f"{folder}/y", [b"x"], "s")
        with pytest.raises(Backend):
            tier.create()
    assert [path.name for path in outside.iterdir()] == ["x"]
    assert (outside / "x").read_bytes() == b"secret"


def test_a_lock_that_is_a_link_is_refused(tier: LocalTier, tmp_path: Path) -> None:
    Path(tier.root, "LOCK").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Corruption, match="symbolic link"):
        tier.lock({})
    assert not (tmp_path / "elsewhere").exists()


def test_the_root_may_be_a_link(tier: LocalTier, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tier.root)
    other = LocalTier(tmp_path / "link")
    other.check_writable()
    other.create()
    other.publish_new(PACK, [b"x"], "s")
    assert tier.read(PACK) == b"x"


def test_neither_pipes_nor_folders_are_files(tier: LocalTier) -> None:
    os.mkfifo(f"{tier.root}/{PACK}")
    os.mkdir(f"{tier.root}/packs/folder")
    for name in (PACK, "packs/folder"):
        with pytest.raises(Corruption, match="regular file"):
            tier.open(name)
    with pytest.raises(Backend):
        tier.delete("packs/folder")


def test_foreign_names_are_not_listed(tier: LocalTier) -> None:
    for name in ("with space", "ünï", "~backup", "good.zip"):
        Path(tier.root, "packs", name).write_bytes(b"x")
    assert [info.name for info in tier.list("packs")] == ["packs/good.zip"]


def test_a_store_that_is_moved_away_and_back(tier: LocalTier) -> None:
    root, away = Path(tier.root), Path(tier.root + "-away")
    tier.publish_new(PACK, [b"1"], "s")
    staged = tier.stage("packs/staged", [b"x"], "s")
    root.rename(away)
    with pytest.raises(Backend):
        tier.publish_new("packs/x", [b"2"], "s")
    with pytest.raises(Backend):
        tier.publish(staged)
    assert not root.exists()
    root.write_text("in the way")
    with pytest.raises(Backend) as caught:
        tier.publish_new("packs/x", [b"2"], "s")
    assert caught.value.errno == errno.ENOTDIR
    root.unlink()
    away.rename(root)
    tier.publish_new("packs/x", [b"2"], "s")
    tier.publish(staged)
    assert [info.name for info in tier.list("packs")] == [PACK, "packs/staged", "packs/x"]


def test_empty_folders_that_a_copy_left_out_are_made_again(tier: LocalTier) -> None:
    for name in ("packs", "tmp"):
        Path(tier.root, name).rmdir()
    tier.publish_new(PACK, [b"x"], "s")
    assert tier.read(PACK) == b"x"


TOO_LARGE = """
import resource, sys
from deltastore.errors import Backend
from deltastore.tiers.local import LocalTier
tier = LocalTier(sys.argv[1])
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
try:
    tier.publish_new("packs/x", [bytes(70_000)] * 2, "s")
except Backend as error:
    print(error.errno, [info.name for info in tier.list("")])
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
print(tier.publish_new("packs/x", [bytes(70_000)] * 2, "s"))
"""


def test_a_file_that_is_too_large_leaves_nothing(tier: LocalTier) -> None:
    result = run_script(TOO_LARGE, tier.root)
    assert result.stdout.splitlines() == [f"{errno.EFBIG} ['tmp/s/OWNER']", "140000"], result.stderr


class ShortWrites(PosixOps):
    """A system that takes and gives few bytes at a time."""

    IOV_MAX = 7

    def writev(self, fd: int, buffers: Sequence[memoryview]) -> int:
        assert 0 < len(buffers) <= self.IOV_MAX
        return os.write(fd, buffers[0][:3])

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        assert 0 < len(buffers) <= self.IOV_MAX
        return os.preadv(fd, [buffers[0][:5]], offset)


def test_short_writes_and_reads(tier: LocalTier) -> None:
    short = LocalTier(tier.root, ShortWrites())
    parts = [os.urandom(length) for length in (1, 10, 0, 3, 100, 2, 2, 2, 2, 2, 2, 2, 2)]
    data = b"".join(parts)
    assert short.publish_new(PACK, parts, "s") == len(data)
    assert tier.read(PACK) == short.read(PACK) == data
    with short.open(PACK) as file:
        buffers = [bytearray(4) for _ in range(20)]
        file.readinto(7, [memoryview(buffer) for buffer in buffers])
    assert b"".join(buffers) == data[7:87]


def test_a_write_of_nothing_is_an_error_not_a_loop(tier: LocalTier) -> None:
    class Stuck(PosixOps):
        def writev(self, fd: int, buffers: Sequence[memoryview]) -> int:
            return 0

    with pytest.raises(Backend) as caught:
        LocalTier(tier.root, Stuck()).stage(PACK, [b"x"], "s")
    assert caught.value.errno == errno.EIO


def test_a_file_that_is_cut_while_it_is_read(tier: LocalTier) -> None:
    tier.publish_new(PACK, [bytes(100)], "s")
    with tier.open(PACK) as file:
        os.truncate(f"{tier.root}/{PACK}", 40)
        with pytest.raises(Corruption) as caught:
            file.read(10, 90)
    assert (caught.value.offset, caught.value.expected, caught.value.found) == (10, 90, 30)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("point", ["open_write_new", "writev", "fsync", "link"])
@pytest.mark.parametrize("first", [1, 2])
def test_refused_by_the_system(tier: LocalTier, point: str, number: int, first: int) -> None:
    """Nothing becomes visible, nothing is left, and the next publish works. The first file written is OWNER."""
    faulty = LocalTier(tier.root, FaultyOps(FailAt(point, number, first, times=1)))
    for _ in range(2 if point in ("fsync", "link") else 1):
        try:
            faulty.publish_new(PACK, [b"x"], "s")
        except Backend as error:
            caught = error
            break
        tier.delete(PACK)
    else:
        pytest.fail("nothing failed")
    assert type(caught) is Backend
    assert caught.errno == number
    assert caught.transient == (number != errno.EIO)
    assert tier.list("packs") == []
    assert leftovers(tier) == []
    faulty.publish_new(PACK, [b"again"], "s")
    assert tier.read(PACK) == b"again"


def test_a_failed_fsync_is_not_repeated(tier: LocalTier) -> None:
    ops = FaultyOps(FailAt("fsync", errno.EIO, times=1))
    with pytest.raises(Backend):
        LocalTier(tier.root, ops).publish_new(PACK, [b"x"], "s")
    assert ops.gate.counts["fsync"] == 1
    assert ops.gate.counts["link"] == 0


def test_after_the_link_the_outcome_is_unknown(tier: LocalTier) -> None:
    faulty = LocalTier(tier.root, FaultyOps(FailAt("fsync_folder", errno.EIO, times=1)))
    with pytest.raises(OutcomeUnknown) as caught:
        faulty.publish_new(PACK, [b"x"], "s")
    assert caught.value.errno == errno.EIO
    assert faulty.read(PACK) == b"x"
    faulty.sync("packs")
    assert leftovers(tier) == []


def test_a_leftover_second_name_is_no_failure(tier: LocalTier) -> None:
    faulty = LocalTier(tier.root, FaultyOps(FailAt("unlink", errno.EIO)))
    assert faulty.publish_new(PACK, [b"x"], "s") == 1
    assert len(leftovers(tier)) == 1
    tier.end_session("s")
    assert tier.read(PACK) == b"x"


class LostAnswer(PosixOps):
    """A network file system that made the link and then lost its answer."""

    def __init__(self, number: int) -> None:
        self.number = number

    def link(self, source: str, target: str) -> None:
        super().link(source, target)
        raise OSError(self.number, os.strerror(self.number), target)


@pytest.mark.parametrize("number", [errno.EEXIST, errno.EIO, errno.ETIMEDOUT])
def test_a_link_whose_answer_was_lost(tier: LocalTier, number: int) -> None:
    LocalTier(tier.root, LostAnswer(number)).publish_new(PACK, [b"mine"], "s")
    assert tier.read(PACK) == b"mine"
    assert leftovers(tier) == []


def test_a_link_that_cannot_be_looked_at(tier: LocalTier) -> None:
    class Gone(LostAnswer):
        def stat(self, path: str, *, follow: bool = False) -> object:  # type: ignore[override]
            if path.endswith(PACK):
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
            return super().stat(path, follow=follow)

    with pytest.raises(OutcomeUnknown):
        LocalTier(tier.root, Gone(errno.EIO)).publish_new(PACK, [b"mine"], "s")
    assert tier.read(PACK) == b"mine"


class NoLinks(PosixOps):
    """A file system without hard links."""

    def link(self, source: str, target: str) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), target)


def test_without_links_it_renames(tier: LocalTier) -> None:
    other = LocalTier(tier.root, NoLinks())
    other.publish_new(PACK, [b"1"], "s")
    with pytest.raises(AlreadyExists):
        other.publish_new(PACK, [b"2"], "s")
    assert tier.read(PACK) == b"1"
    assert leftovers(tier) == []


def test_without_links_and_renames_it_explains(tier: LocalTier) -> None:
    class Neither(NoLinks):
        def rename_new(self, source: str, target: str) -> None:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), target)

    with pytest.raises(Backend, match="neither hard links nor renameat2"):
        LocalTier(tier.root, Neither()).publish_new(PACK, [b"1"], "s")
    assert tier.list("packs") == []


KILLED = """
import sys
from deltastore.testing.faulty import FaultyOps, KillPoint
from deltastore.tiers.local import LocalTier
tier = LocalTier(sys.argv[1], FaultyOps(KillPoint(sys.argv[2], int(sys.argv[3]))))
tier.publish_new("packs/old", [b"old"], "dead")
print("old", flush=True)
tier.publish_new("packs/new", [b"n" * 1000, b"e" * 1000], "dead")
print("new", flush=True)
"""
# Where the second publish is killed, and whether its file is visible then.
KILLS = [
    ("open_write_new", 3, False),
    ("writev", 3, False),
    ("writev:after", 3, False),
    ("fsync", 2, False),
    ("fsync:after", 2, False),
    ("link", 2, False),
    ("link:after", 2, True),
    ("fsync_folder", 2, True),
    ("fsync_folder:after", 2, True),
    ("unlink", 2, True),
    ("unlink:after", 2, True),
]


@pytest.mark.parametrize(("point", "count", "visible"), KILLS)
def test_killed_at_every_step(tier: LocalTier, point: str, count: int, visible: bool) -> None:
    result = run_script(KILLED, tier.root, point, str(count))
    assert (result.returncode, result.stdout.split()) == (-9, ["old"]), result.stderr
    names = ["packs/new"] * visible + ["packs/old"]
    assert [info.name for info in tier.list("packs")] == names
    assert tier.read("packs/old") == b"old"
    if visible:
        assert tier.read("packs/new") == b"n" * 1000 + b"e" * 1000
    assert tier.clean("s") == ["dead"]
    assert not Path(tier.root, "tmp", "dead").exists()
    assert [info.name for info in tier.list("packs")] == names


def record(**changes: object) -> dict[str, object]:
    ops = PosixOps()
    mine = {"host": ops.host(), "boot": ops.boot(), "pid": os.getpid(), "start": ops.process_start(os.getpid())}
    return {**mine, "session": "other", **changes}


def ended_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(60)
    return process.pid


def dead_or_alive() -> Iterator[tuple[str, dict[str, object] | bytes | None, float, bool]]:
    day = 86400.0
    yield "alive", record(), 10 * day, False
    yield "ended", record(pid=ended_pid()), 0, True
    yield "pid in use again", record(start="1"), 0, True
    yield "another boot", record(boot="f00"), 0, True
    yield "no start known", record(start=""), 10 * day, False
    yield "another host, young", record(host="elsewhere"), 0.9 * day, False
    yield "another host, old", record(host="elsewhere"), 1.1 * day, True
    yield "no owner yet", None, 10, False
    yield "no owner for long", None, 100, True
    yield "damaged owner, young", b"\0" * 200, 0.9 * day, False
    yield "damaged owner", b"\0" * 200, 1.1 * day, True
    yield "a pid that is none", record(pid=True), 1.1 * day, True
    yield "a huge pid", record(pid=1 << 40), 1.1 * day, True


@pytest.mark.parametrize(
    ("owner", "age_seconds", "dead"), [pytest.param(*case[1:], id=case[0]) for case in dead_or_alive()]
)
def test_clean(tier: LocalTier, owner: dict[str, object] | bytes | None, age_seconds: float, dead: bool) -> None:
    folder = Path(tier.root, "tmp", "other")
    (folder / "deeper").mkdir(parents=True)
    (folder / "0-packs.x").write_bytes(b"x")
    (folder / "link").symlink_to(tier.root)
    if owner is not None:
        (folder / "OWNER").write_bytes(owner if isinstance(owner, bytes) else json.dumps(owner).encode())
    old = time.time() - age_seconds
    os.utime(folder, (old, old))
    Path(tier.root, "tmp", "stray").write_bytes(b"")
    assert tier.clean("other") == []
    assert tier.clean("mine") == ["other"] * dead
    assert folder.exists() != dead
    assert Path(tier.root, "packs").exists()


def test_clean_of_a_store_without_tmp(tier: LocalTier) -> None:
    Path(tier.root, "tmp").rmdir()
    assert tier.clean("s") == []


def test_two_tiers_of_one_session(tier: LocalTier) -> None:
    other = LocalTier(tier.root)
    first, second = tier.stage("packs/a", [b"a"], "s"), other.stage("packs/a", [b"b"], "s")
    assert first.token != second.token
    other.publish(second)
    tier.discard(first)
    assert tier.read("packs/a") == b"b"


def test_ten_thousand_files_are_one_listing(tier: LocalTier) -> None:
    for number in range(10_000):
        os.close(os.open(f"{tier.root}/packs/{number}", os.O_CREAT | os.O_WRONLY))
    calls = []

    class Counting(PosixOps):
        def scandir(self, path: str) -> list:  # type: ignore[type-arg]
            calls.append(path)
            return super().scandir(path)

        def open_read(self, path: str) -> int:
            raise AssertionError(path)

    found = LocalTier(tier.root, Counting()).list("packs")
    assert len(found) == 10_000
    assert found[:2] == sorted(found, key=lambda info: info.name)[:2]
    assert calls == [f"{tier.root}/packs"]


def test_no_descriptor_is_left_open(tier: LocalTier) -> None:
    def opened() -> set[str]:
        return set(os.listdir("/proc/self/fd"))

    tier.publish_new(PACK, [b"x"], "s")
    before = opened()
    with pytest.raises(AlreadyExists):
        tier.publish_new(PACK, [b"x"], "s")
    tier.read(PACK)
    tier.open(PACK)  # dropped without close
    os.mkfifo(f"{tier.root}/packs/pipe")
    with pytest.raises(Corruption):
        tier.open("packs/pipe")
    for point in ("writev", "fsync", "fsync_folder"):
        with pytest.raises(Backend):
            LocalTier(tier.root, FaultyOps(FailAt(point, errno.EIO))).publish_new("packs/y", [b"x"], "s")
        tier.delete("packs/y")
    assert opened() == before
