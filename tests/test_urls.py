"""Which tier a URL names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from deltastore.errors import InvalidInput, MissingDependency
from deltastore.tiers.fsspec_tier import FsspecTier
from deltastore.tiers.hdfs import HdfsTier
from deltastore.tiers.local import LocalTier
from deltastore.tiers.memory import MemoryTier
from deltastore.urls import open_tier


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    expected = str(tmp_path / "run")
    for url in ("run", "./run", "sub/../run", tmp_path / "run", str(tmp_path / "run"), (tmp_path / "run").as_uri()):
        tier = open_tier(url)
        assert isinstance(tier, LocalTier)
        assert os.path.normpath(tier.url) == expected
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["a b", "ä", "100%", "a#b", "a?b", "memory:", "~"])
def test_names_with_odd_characters(tmp_path: Path, name: str) -> None:
    for url in (tmp_path / name, (tmp_path / name).as_uri()):
        assert open_tier(url).url == str(tmp_path / name)


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("memory://a", "memory://a"),
        ("memory://a/b", "memory://a/b"),
        ("memory://", "memory://default"),
        ("MEMORY://A", "memory://A"),
    ],
)
def test_places_in_memory(url: str, found: str) -> None:
    tier = open_tier(url)
    assert isinstance(tier, MemoryTier)
    assert tier.url == found


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("hdfs://nn/run", "hdfs://nn:9870/run"),
        ("hdfs://nn:50070/a/b/", "hdfs://nn:50070/a/b"),
        ("hdfs://nn1,nn2:9999/run", "hdfs://nn1:9870,nn2:9999/run"),
        ("hdfs://me@nn/run", "hdfs://nn:9870/run"),
        ("swebhdfs://nn/run", "swebhdfs://nn:9871/run"),
    ],
)
def test_hdfs(url: str, found: str) -> None:
    tier = open_tier(url)
    assert isinstance(tier, HdfsTier)
    assert tier.url == found
    assert open_tier(tier.url).url == found


@pytest.mark.parametrize(
    "url",
    ["hdfs://nn", "hdfs://nn/", "hdfs:///run", "hdfs://a b/run", "hdfs://nn,/run", "hdfs://nn/a/../b", "hdfs://nn/é"],
)
def test_hdfs_urls_that_say_too_little(url: str) -> None:
    with pytest.raises(InvalidInput, match=r"hdfs://|HDFS"):
        open_tier(url)


def test_storage_options() -> None:
    open_tier("hdfs://nn/run", {"user_name": "me", "replication": 2})
    with pytest.raises(InvalidInput, match=r"unknown storage_options.*'usr'.*user_name"):
        open_tier("hdfs://nn/run", {"usr": "me"})
    for url in ("run", "memory://a"):
        with pytest.raises(InvalidInput, match="takes none"):
            open_tier(url, {"user_name": "me"})


def test_fsspec_opens_the_rest() -> None:
    tier = open_tier("local:///tmp/a/run/")
    assert isinstance(tier, FsspecTier)
    assert (tier.url, tier.root) == ("local:///tmp/a/run", "/tmp/a/run")


def test_webhdfs_of_fsspec_is_refused() -> None:
    with pytest.raises(InvalidInput, match="write hdfs://namenode:9870/folder instead"):
        open_tier("webhdfs://nn/run")


def test_a_file_system_that_is_not_installed() -> None:
    with pytest.raises(MissingDependency, match=r"(?i)oss"):
        open_tier("oss://bucket/run")


@pytest.mark.parametrize("url", ["c://x", "://x", "file+x:///a"])
def test_schemes_that_nobody_knows(url: str) -> None:
    with pytest.raises(InvalidInput, match="folder, file://, memory:// or hdfs://, nor") as caught:
        open_tier(url)
    assert caught.value.url == url


def test_an_empty_url() -> None:
    with pytest.raises(InvalidInput, match="empty"):
        open_tier("")


@pytest.mark.parametrize("url", ["file://data/run", "file://server/share/run"])
def test_a_file_url_with_a_host_is_refused(url: str) -> None:
    with pytest.raises(InvalidInput):
        open_tier(url)


@pytest.mark.parametrize("url", ["file:///tmp/a#b", "file:///tmp/a?b=1"])
def test_no_part_of_a_file_url_is_dropped(url: str) -> None:
    try:
        tier = open_tier(url)
    except InvalidInput:
        return
    assert tier.url == url.removeprefix("file://")


@pytest.mark.parametrize("url", [b"/tmp/run", 5, None])
def test_what_is_no_url_is_refused(url: Any) -> None:
    with pytest.raises(InvalidInput):
        open_tier(url)
