"""What was done, but never answered: it is read back, and neither repeated nor taken for a refusal."""

from __future__ import annotations

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
    tier = open_tier(url.replace(cluster.host, proxy.host), {"patience_seconds": 10.0})
    assert isinstance(tier, HdfsTier)
    tier.create()
    return tier


@pytest.mark.parametrize("operation", [b"op=RENAME", b"op=CREATE", b"op=MKDIRS", b"op=GETFILESTATUS", b"op=OPEN"])
def test_an_operation_is_done_once(proxy: Proxy, tier: HdfsTier, operation: bytes) -> None:
    proxy.drop(operation, 2)
    tier.publish_new("tags/a/1.json", [b"one"], SESSION)
    assert tier.read("tags/a/1.json") == b"one"
    assert proxy.dropped == 2
    assert [info.name for info in tier.list("")] == ["tags/a/1.json"]


def test_deleting(proxy: Proxy, tier: HdfsTier) -> None:
    staged = tier.stage(PACK, [b"x"], SESSION)
    tier.publish_new(PACK, [b"kept"], SESSION)
    proxy.drop(b"op=DELETE", 2)
    tier.discard(staged)
    assert proxy.dropped
    proxy.drop(b"op=RENAME", 2)
    tier.delete(PACK)
    assert tier.list("packs") == []


def test_a_name_of_another_is_not_taken_for_ours(proxy: Proxy, tier: HdfsTier, url: str) -> None:
    open_tier(url).publish_new(PACK, [b"theirs"], "another")
    staged = tier.stage(PACK, [b"ours"], SESSION)
    proxy.drop(b"op=RENAME", 2)
    with pytest.raises(AlreadyExists):
        tier.publish(staged)
    assert proxy.dropped
    assert tier.read(PACK) == b"theirs"


def test_no_answer_at_all_is_an_unknown_outcome(proxy: Proxy, tier: HdfsTier, url: str) -> None:
    staged = tier.stage(PACK, [b"ours"], SESSION)
    proxy.drop(b"op=RENAME", 1000)
    with pytest.raises(OutcomeUnknown, match="read it back"):
        tier.publish(staged)
    assert open_tier(url).read(PACK) == b"ours"
    proxy.drop(b"", 0)
    with pytest.raises(AlreadyExists):
        tier.publish(staged)
