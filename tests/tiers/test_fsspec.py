"""What is special about file systems of fsspec: which are refused, which are only read, and what a lost answer does."""

from __future__ import annotations

import errno
import sys
from itertools import count
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from deltastore.errors import AlreadyExists, Backend, InvalidInput, MissingDependency, OutcomeUnknown
from deltastore.tiers import fsspec_tier
from deltastore.tiers.fsspec_tier import FsspecTier

PACK = "packs/a"
_numbers = count()


@pytest.fixture
def url() -> str:
    return f"memory://fsspec-{next(_numbers)}/store"


def test_webhdfs_is_refused_with_the_reason() -> None:
    with pytest.raises(InvalidInput, match="error pages as content"):
        FsspecTier("webhdfs://nn:9870/run")


def test_without_fsspec(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(MissingDependency, match=r"deltastore-checkpoint\[fsspec\]"):
        FsspecTier(url)


def test_what_cannot_keep_the_first_file_is_only_read(tmp_path: Path) -> None:
    (tmp_path / "run" / "packs").mkdir(parents=True)
    (tmp_path / "run" / "packs" / "a").write_bytes(b"there")
    tier = FsspecTier("dir://run", {"path": str(tmp_path), "fs": fsspec.filesystem("file")})
    assert tier.exists()
    assert tier.read(PACK) == b"there"
    for refused in (tier.check_writable, tier.create):
        with pytest.raises(Backend, match="keeps the second") as caught:
            refused()
        assert caught.value.errno == errno.EROFS


@pytest.fixture
def lying(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a place that ignores the condition, as some S3-compatible servers do."""

    def put(system: Any, local: str, path: str, _scratch: str) -> None:
        system.put_file(local, path)

    monkeypatch.setattr(fsspec_tier, "PUBLISHERS", {"memory": put})


@pytest.mark.usefixtures("lying")
def test_a_place_where_the_second_publisher_wins_is_refused(url: str) -> None:
    tier = FsspecTier(url)
    with pytest.raises(Backend, match="the second replaced the first"):
        tier.create()
    assert tier.list("") == []


class LosesAnswers(MemoryFileSystem):  # type: ignore[misc]
    """Does what it is asked, and breaks the connection."""

    def put_file(self, *arguments: Any, **options: Any) -> None:
        super().put_file(*arguments, **options)
        raise ConnectionResetError(errno.ECONNRESET, "the answer was lost")


def test_a_lost_answer_is_read_back(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = FsspecTier(url)
    tier.create()
    staged = tier.stage(PACK, [b"ours"], "s")
    with monkeypatch.context() as patched:
        patched.setattr(MemoryFileSystem, "put_file", LosesAnswers.put_file)
        with pytest.raises(OutcomeUnknown, match="read it back"):
            tier.publish(staged)
    tier.publish(staged)  # it had landed, and it is ours
    assert tier.read(PACK) == b"ours"
    theirs = tier.stage(PACK, [b"them"], "s")
    with pytest.raises(AlreadyExists):
        tier.publish(theirs)


def test_a_spool_goes_with_its_tier(url: str) -> None:
    tier = FsspecTier(url)
    tier.create()
    tier.stage(PACK, [b"x"], "s")
    spool = tier._spool
    assert spool is not None
    assert Path(spool).is_dir()
    del tier
    assert not Path(spool).exists()
