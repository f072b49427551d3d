"""The few calls whose answers need care."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deltastore.tiers import posix
from deltastore.tiers.posix import PosixOps


def test_struct_flock_has_the_size_of_c() -> None:
    assert posix._FLOCK.size == (32 if sys.maxsize > 2**32 else 24)


def test_process_start_tells_processes_apart() -> None:
    ops = PosixOps()
    mine = ops.process_start(os.getpid())
    assert mine == ops.process_start(os.getpid())
    assert int(mine or "0") > 0
    assert ops.process_start(1) not in (None, mine)


def test_an_ended_process() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.PIPE)
    assert PosixOps().process_start(process.pid) is not None
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert PosixOps().process_start(process.pid) is None  # a zombie has ended too
    process.communicate()
    assert PosixOps().process_start(process.pid) is None


def test_a_command_with_spaces_and_parentheses(tmp_path: Path) -> None:
    link = tmp_path / "a ) 1 2 3 ("
    link.symlink_to("/bin/sleep")
    process = subprocess.Popen([link, "60"])
    try:
        assert int(PosixOps().process_start(process.pid) or "0") >= int(PosixOps().process_start(os.getpid()) or "0")
    finally:
        process.kill()
        process.wait(60)


def test_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *_: object, **__: object) -> bytes:
        raise FileNotFoundError(errno.ENOENT, "no /proc here", str(self))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    monkeypatch.setattr(Path, "read_text", refuse)
    ops = PosixOps()
    assert ops.boot() == ""
    assert ops.process_start(os.getpid()) == ""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(60)
    assert ops.process_start(process.pid) is None


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EBADF, errno.ENOTSUP])
def test_folders_that_cannot_be_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(fd: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    PosixOps().fsync_folder(str(tmp_path))


def test_folders_whose_sync_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="Input/output") as caught:
        PosixOps().fsync_folder(str(tmp_path))
    assert caught.value.errno == errno.EIO


def test_rename_new(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    (tmp_path / "b").write_bytes(b"b")
    with pytest.raises(FileExistsError):
        PosixOps().rename_new(str(tmp_path / "a"), str(tmp_path / "b"))
    PosixOps().rename_new(str(tmp_path / "a"), str(tmp_path / "c"))
    assert sorted(path.read_bytes() for path in tmp_path.iterdir()) == [b"a", b"b"]
