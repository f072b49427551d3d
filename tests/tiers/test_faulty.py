"""The faults that tests above the tiers rely on."""

from __future__ import annotations

import errno
import pickle
import subprocess
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from deltastore.errors import Backend, OutcomeUnknown
from deltastore.testing.faulty import FailAt, FaultyTier, no_faults
from deltastore.tiers.base import Tier
from deltastore.tiers.memory import MemoryTier

PACK = "packs/a"
ROOT = Path(__file__).parents[2]
_numbers = count()


@pytest.fixture
def inner() -> Tier:
    tier = MemoryTier(f"faulty-{next(_numbers)}")
    tier.create()
    return tier


@pytest.mark.parametrize("point", ["stage", "stage:part:0", "stage:part:2", "stage:after", "publish:before"])
def test_before_it_landed(inner: Tier, point: str) -> None:
    tier = FaultyTier(inner, FailAt(point, errno.ENOSPC, times=1))
    with pytest.raises(Backend) as caught:
        tier.publish_new(PACK, [b"a", b"b", b"c"], "s")
    assert (caught.value.errno, caught.value.transient) == (errno.ENOSPC, True)
    assert pickle.loads(pickle.dumps(caught.value)).errno == errno.ENOSPC
    assert tier.calls[point] == 1
    assert inner.list("packs") == []
    tier.publish_new(PACK, [b"a", b"b", b"c"], "s")
    assert tier.calls[point] == 2
    assert tier.read(PACK) == b"abc"


def test_after_it_landed(inner: Tier) -> None:
    def plan(point: str, name: str, count: int) -> Exception | None:
        return OutcomeUnknown("lost", errno=errno.EIO) if (point, name) == ("publish:after", PACK) else None

    tier = FaultyTier(inner, plan)
    with pytest.raises(OutcomeUnknown):
        tier.publish_new(PACK, [b"a"], "s")
    assert inner.read(PACK) == b"a"
    tier.plan = no_faults
    tier.publish_new("packs/b", [b"b"], "s")


@pytest.mark.parametrize("point", ["list", "open", "read", "delete", "sync", "lock", "clean", "create", "discard"])
def test_each_other_point(inner: Tier, point: str) -> None:
    tier = FaultyTier(inner, no_faults)
    tier.publish_new(PACK, [b"a"], "s")
    tier.plan = FailAt(point, errno.EIO)
    calls: dict[str, Callable[[], object]] = {
        "list": lambda: tier.list("packs"),
        "open": lambda: tier.open(PACK),
        "read": lambda: tier.read(PACK),
        "delete": lambda: tier.delete(PACK),
        "sync": lambda: tier.sync("packs"),
        "lock": lambda: tier.lock({}),
        "clean": lambda: tier.clean("s"),
        "create": tier.create,
        "discard": lambda: tier.discard(tier.stage("packs/b", [], "s")),
    }
    with pytest.raises(Backend) as caught:
        calls[point]()
    assert caught.value.errno == errno.EIO


def test_reading_ranges(inner: Tier) -> None:
    tier = FaultyTier(inner, FailAt("read", errno.EIO, first=2, name="packs/"))
    tier.publish_new(PACK, [b"abc"], "s")
    with tier.open(PACK) as file:
        assert file.size == 3
        assert file.read(0, 3) == b"abc"
        with pytest.raises(Backend):
            file.readinto(0, [memoryview(bytearray(1))])


def test_kill_point() -> None:
    script = (
        "from deltastore.testing.faulty import FaultyTier, KillPoint\n"
        "from deltastore.tiers.memory import MemoryTier\n"
        "tier = FaultyTier(MemoryTier('x'), KillPoint('publish:after', count=2))\n"
        "tier.create()\n"
        "for number in range(3):\n"
        "    print(tier.publish_new(f'packs/{number}', [b'x'], 's'), flush=True)\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60, cwd=ROOT, check=False)
    assert (result.returncode, result.stdout.split()) == (-9, [b"1"]), result.stderr
