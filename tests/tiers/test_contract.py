"""The tiers keep the contract, also on a simulated disk and below fsspec; HDFS has tests of its own."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest

from deltastore.testing.faulty import FaultyTier, no_faults
from deltastore.testing.powerloss import SimulatedDisk
from deltastore.testing.tier_contract import TierContract
from deltastore.tiers.base import Tier
from deltastore.tiers.fsspec_tier import FsspecTier
from deltastore.tiers.local import LocalTier
from deltastore.tiers.memory import MemoryTier

_numbers = count()


class TestMemoryTier(TierContract):
    @pytest.fixture
    def tier(self) -> Tier:
        return MemoryTier(f"contract-{next(_numbers)}")

    def again(self, tier: Tier) -> Tier:
        return MemoryTier(tier.url.removeprefix("memory://"))


class TestLocalTier(TierContract):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> Tier:
        return LocalTier(tmp_path / "new" / "store")

    def again(self, tier: Tier) -> Tier:
        return LocalTier(tier.url)


class TestFsspecMemory(TierContract):
    @pytest.fixture
    def tier(self) -> Tier:
        return FsspecTier(f"memory://contract-{next(_numbers)}/store")

    def again(self, tier: Tier) -> Tier:
        return FsspecTier(tier.url)


class TestFsspecFile(TierContract):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> Tier:
        return FsspecTier(f"file://{tmp_path}/new/store")

    def again(self, tier: Tier) -> Tier:
        return FsspecTier(tier.url)


class TestFaultyTier(TestLocalTier):
    """Without faults it is the tier that it wraps."""

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Tier:
        return FaultyTier(LocalTier(tmp_path / "store"), no_faults)


class TestLocalTierOnASimulatedDisk(TierContract):
    @pytest.fixture
    def tier(self) -> Tier:
        disk = SimulatedDisk()
        return LocalTier(disk.store, disk)

    def again(self, tier: Tier) -> Tier:
        assert isinstance(tier, LocalTier)
        return LocalTier(tier.root, tier.ops)
