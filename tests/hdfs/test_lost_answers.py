"""What was done, but never answered: it is read back, and neither repeated nor taken for a refusal."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from deltastore.errors import AlreadyExists, OutcomeUnknown
from deltastore.tiers.hdfs import HdfsTier
from deltastore.urls import open_tier
from tests.hdfs.cluster import HdfsCluster
from tests.hdfs.proxy import Proxy

SESSION = "00112233aabbccdd"
PACK = "packs/e1-0-0-ab.zip"


@pytest.fixture
def proxy(cluster: HdfsCluster) -> Iterator[Proxy]:
    with Proxy(cluster.host) as running:
        yield running


@pytest.fixture
def tier(cluster: HdfsCluster, proxy: Proxy, url: str) -> HdfsTier:
    tier = open_tier(url.replace(cluster.host, proxy.host), {"patience_seconds": 5.0})
    assert isinstance(tier, HdfsTier)
    tier.create()
    return tier


def answers_again_after(proxy: Proxy, seconds: float) -> None:
    def restore() -> None:
        time.sleep(seconds)
        proxy.drops = b""

    threading.Thread(target=restore, daemon=True).start()


@pytest.mark.parametrize("operation", [b"op=RENAME", b"op=CREATE", b"op=MKDIRS", b"op=GETFILESTATUS", b"op=OPEN"])
def test_an_operation_is_done_once(proxy: Proxy, tier: HdfsTier, operation: bytes) -> None:
    proxy.drops = operation
    answers_again_after(proxy, 0.5)
    tier.publish_new("tags/a/1.json", [b"one"], SESSION)
    assert tier.read("tags/a/1.json") == b"one"
    assert proxy.dropped > 0 or operation == b"op=OPEN"
    proxy.drops = b""
    assert [info.name for info in tier.list("")] == ["tags/a/1.json"]


def test_deleting(proxy: Proxy, tier: HdfsTier) -> None:
    staged = tier.stage(PACK, [b"x"], SESSION)
    tier.publish_new(PACK, [b"kept"], SESSION)
    proxy.drops = b"op=DELETE"
    answers_again_after(proxy, 0.5)
    tier.discard(staged)
    assert proxy.dropped > 0
    proxy.drops = b"op=RENAME"
    answers_again_after(proxy, 0.5)
    tier.delete(PACK)
    assert tier.list("packs") == []


def test_a_name_of_another_is_not_taken_for_ours(proxy: Proxy, tier: HdfsTier, url: str) -> None:
    open_tier(url).publish_new(PACK, [b"theirs"], "another")
    staged = tier.stage(PACK, [b"ours"], SESSION)
    proxy.drops = b"op=RENAME"
    answers_again_after(proxy, 0.5)
    with pytest.raises(AlreadyExists):
        tier.publish(staged)
    assert proxy.dropped > 0
    assert tier.read(PACK) == b"theirs"


def test_no_answer_at_all_is_an_unknown_outcome(proxy: Proxy, tier: HdfsTier, url: str) -> None:
    staged = tier.stage(PACK, [b"ours"], SESSION)
    proxy.drops = b"op=RENAME"
    with pytest.raises(OutcomeUnknown, match="read it back"):
        tier.publish(staged)
    assert open_tier(url).read(PACK) == b"ours"
    proxy.drops = b""
    with pytest.raises(AlreadyExists):
        tier.publish(staged)
