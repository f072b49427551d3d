"""A real HDFS keeps the contract of tiers."""

from __future__ import annotations

import pytest

from deltastore.testing.tier_contract import TierContract
from deltastore.tiers.base import Tier
from deltastore.urls import open_tier


class TestHdfsTier(TierContract):
    @pytest.fixture
    def tier(self, url: str) -> Tier:
        return open_tier(url)

    def again(self, tier: Tier) -> Tier:
        return open_tier(tier.url)
