"""What a store meets on HDFS: servers that die, stall, start, or refuse; files that two want; disks that rot."""

from __future__ import annotations

import errno
import random
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pyhdfs
import pytest

from deltastore.errors import AlreadyExists, Backend, Corruption
from deltastore.tiers.base import Tier
from deltastore.tiers.hdfs import HdfsTier
from deltastore.urls import open_tier
from tests.hdfs.cluster import HdfsCluster

pytestmark = pytest.mark.soak  # until they are steady on slow machines: run by `make soak` and `make test-hdfs-all`

SESSION = "00112233aabbccdd"
PACK = "packs/e1-0-0-ab.zip"
OPTIONS = {"connect_seconds": 4.0, "read_seconds": 6.0, "patience_seconds": 45.0, "block_bytes": 1 << 20}


@pytest.fixture
def tier(url: str) -> HdfsTier:
    tier = open_tier(url, OPTIONS)
    assert isinstance(tier, HdfsTier)
    tier.create()
    return tier


class Trap:
    """A file in parts, which can be sent again; something happens while it is sent for the first time."""

    def __init__(self, data: bytes, happens: threading.Event) -> None:
        self._data = data
        self._happens = happens
        self.sent = 0

    def __iter__(self) -> Iterator[memoryview]:
        self.sent += 1
        view = memoryview(self._data)
        yield view[: len(view) // 2]
        if self.sent == 1:
            self._happens.set()
            time.sleep(0.5)  # what is underway reaches the servers, which fail meanwhile
        yield view[len(view) // 2 :]


def serving(cluster: HdfsCluster, tier: HdfsTier) -> str:
    """Return the DataNode that takes an upload of this thread which is underway."""
    node = tier._hdfs._hdfs._session().data_node
    assert node is not None
    return cluster.who_serves(node)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_the_serving_datanode_fails_during_an_upload(
    whole: HdfsCluster, tier: HdfsTier, how: signal.Signals, seed: int
) -> None:
    data = random.Random(seed).randbytes(12 << 20)
    half = threading.Event()

    class Killing(Trap):
        def __iter__(self) -> Iterator[memoryview]:
            for part in super().__iter__():
                if half.is_set() and self.sent == 1:
                    whole.processes[serving(whole, tier)].send_signal(how)
                yield part

    parts = Killing(data, half)
    started = time.monotonic()
    assert tier.publish_new(PACK, parts, SESSION) == len(data)
    assert time.monotonic() - started < 60
    assert parts.sent > 1
    assert tier.read(PACK) == data
    assert [info.name for info in tier.list("packs")] == [PACK]


def test_a_generator_is_not_sent_twice(whole: HdfsCluster, tier: HdfsTier) -> None:
    def parts() -> Iterator[bytes]:
        yield bytes(4 << 20)
        whole.kill(serving(whole, tier))
        yield bytes(4 << 20)
        yield bytes(4 << 20)

    with pytest.raises(Backend, match=r"DataNode 127.0.0.1:.* did not answer") as caught:
        tier.publish_new(PACK, parts(), SESSION)
    assert caught.value.transient
    assert tier.list("packs") == []


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_datanode_fails_while_it_is_read(whole: HdfsCluster, tier: HdfsTier, how: signal.Signals, seed: int) -> None:
    data = random.Random(seed).randbytes(12 << 20)
    tier.publish_new(PACK, [data], SESSION)
    for _ in range(60):  # a DataNode that was just mended takes its copy when the NameNode asks for it
        if tier.copies(PACK) == 2:
            break
        time.sleep(0.5)
    assert tier.copies(PACK) == 2
    with tier.open(PACK) as file:
        assert file.read(0, 1000) == data[:1000]
        whole.processes[serving(whole, tier)].send_signal(how)
        started = time.monotonic()
        assert file.read(0, len(data)) == data
        assert file.read(5 << 20, 100) == data[5 << 20 : (5 << 20) + 100]
        assert time.monotonic() - started < 45


def test_the_namenode_starts_again(whole: HdfsCluster, tier: HdfsTier) -> None:
    for number in range(6):  # safe mode lasts until the DataNodes have told of some blocks
        tier.publish_new(f"packs/{number}", [bytes(2000)], SESSION)
    whole.kill("nn")
    with ThreadPoolExecutor() as pool:
        reading = pool.submit(tier.read, "packs/0")
        writing = pool.submit(tier.publish_new, PACK, [b"late"], SESSION)
        listing = pool.submit(tier.list, "packs")
        whole.start_namenode()
        assert reading.result(60) == bytes(2000)
        assert writing.result(60) == 4
        assert len(listing.result(60)) >= 6
    assert tier.read(PACK) == b"late"


def test_safe_mode(whole: HdfsCluster, tier: HdfsTier) -> None:
    tier.publish_new("packs/before", [b"x"], SESSION)
    whole.admin("-safemode", "enter")
    hasty = open_tier(tier.url, {**OPTIONS, "patience_seconds": 0.5})
    with pytest.raises(Backend, match=r"[Ss]afe ?mode") as caught:
        hasty.publish_new(PACK, [b"x"], SESSION)
    assert caught.value.transient
    assert hasty.read("packs/before") == b"x"
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(tier.publish_new, PACK, [b"x"], SESSION)
        whole.admin("-safemode", "leave")
        assert waiting.result(60) == 1


def test_no_namenode(url: str) -> None:
    nobody = url.replace(urlsplit(url).netloc, "127.0.0.1:9")
    started = time.monotonic()
    with pytest.raises(Backend, match=r"NameNode 127\.0\.0\.1:9 did not answer") as caught:
        open_tier(nobody, {**OPTIONS, "patience_seconds": 1.0}).exists()
    assert caught.value.transient
    assert time.monotonic() - started < 10


def test_the_first_of_two_namenodes_is_dead(cluster: HdfsCluster, url: str) -> None:
    both = open_tier(url.replace(cluster.host, f"127.0.0.1:9,{cluster.host}"), OPTIONS)
    both.create()
    both.publish_new(PACK, [b"x"], SESSION)
    assert open_tier(url).read(PACK) == b"x"


def test_the_rpc_port_is_recognized(cluster: HdfsCluster, url: str) -> None:
    wrong = url.replace(cluster.host, f"127.0.0.1:{cluster.rpc_port}")
    started = time.monotonic()
    with pytest.raises(Backend, match="IPC port"):
        open_tier(wrong).exists()
    assert time.monotonic() - started < 5


def test_two_publishers_race(url: str, tier: HdfsTier) -> None:
    """Of many processes' worth of clients, exactly one wins a name; the files of the others are gone."""
    tiers: list[Tier] = [tier, *(open_tier(url) for _ in range(7))]

    def publish(number: int) -> int | None:
        try:
            tiers[number].publish_new(PACK, [b"%d" % number], f"session-{number}")
        except AlreadyExists:
            return None
        return number

    for _ in range(3):
        with ThreadPoolExecutor(len(tiers)) as pool:
            winners = [number for number in pool.map(publish, range(len(tiers))) if number is not None]
        assert len(winners) == 1
        assert tier.read(PACK) == b"%d" % winners[0]
        tier.delete(PACK)
    assert all("/deleted/" in info.name for info in tier.list("tmp"))


@pytest.mark.parametrize("limit", [{"storagespacequota": 1 << 20}, {"namespacequota": 7}])
def test_quota(cluster: HdfsCluster, tier: HdfsTier, limit: dict[str, int]) -> None:
    admin = pyhdfs.HdfsClient(cluster.host)

    def fill() -> None:
        for _ in range(3):
            tier.publish_new(f"packs/{secrets.token_hex(8)}", [bytes(3 << 20)], SESSION)

    admin._put(tier.root, "SETQUOTA", **limit)
    started = time.monotonic()
    with pytest.raises(Backend, match=rf"[Qq]uota.*{tier.root}|{tier.root}.*[Qq]uota") as caught:
        fill()
    assert caught.value.errno == errno.EDQUOT
    assert time.monotonic() - started < 10
    admin._put(tier.root, "SETQUOTA", **dict.fromkeys(limit, 1 << 40))
    fill()
    assert tier.list("tmp") == []


def test_free_bytes(cluster: HdfsCluster, tier: HdfsTier) -> None:
    free = tier.free_bytes()
    assert free is not None
    assert free > 1 << 30
    pyhdfs.HdfsClient(cluster.host)._put(tier.root, "SETQUOTA", storagespacequota=10 << 20)
    assert tier.free_bytes() == (10 << 20) // 2


def test_both_replicas_are_damaged(whole: HdfsCluster, tier: HdfsTier, seed: int) -> None:
    data = random.Random(seed).randbytes(3 << 20)
    tier.publish_new(PACK, [data], SESSION)
    marked = data[2_500_000:2_500_064]
    for block in whole.folder.glob("dn*/current/*/current/finalized/**/blk_*"):
        content = block.read_bytes()
        if marked in content:
            at = content.index(marked)
            with block.open("r+b") as file:
                file.seek(at)
                file.write(bytes(64))
    with tier.open(PACK) as file:
        assert file.read(0, 1 << 20) == data[: 1 << 20]
        with pytest.raises(Corruption, match="no replica") as caught:
            file.read(0, len(data))
    assert caught.value.found < 2_500_064
    assert PACK in tier.list("packs")[0].name


def test_a_client_that_dies_leaves_nothing_that_counts(url: str, tier: HdfsTier) -> None:
    program = (
        "import os, sys\n"
        "from deltastore.urls import open_tier\n"
        "def parts():\n"
        "    yield bytes(3 << 20)\n"
        "    os.kill(os.getpid(), 9)\n"
        f"open_tier({url!r}).publish_new({PACK!r}, parts(), {SESSION!r})\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    end = time.monotonic() + 10
    while not tier.list("tmp") and time.monotonic() < end:
        time.sleep(0.05)
    (left,) = tier.list("tmp")
    assert left.size < 4 << 20
    assert tier.list("packs") == []
    tier.publish_new(PACK, [b"whole"], secrets.token_hex(8))
    assert tier.read(PACK) == b"whole"
    tier.end_session(SESSION)
    assert tier.list(f"tmp/{SESSION}") == []
