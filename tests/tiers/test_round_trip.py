"""Any bytes in any parts come back whole and in any range, from every tier."""

from __future__ import annotations

import tempfile
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltastore.errors import Corruption
from deltastore.testing.powerloss import SimulatedDisk
from deltastore.tiers.base import Tier
from deltastore.tiers.local import LocalTier
from deltastore.tiers.memory import MemoryTier

_numbers = count()


def check(tier: Tier, parts: list[bytes], ranges: list[tuple[int, list[int]]]) -> None:
    tier.create()
    data = b"".join(parts)
    assert tier.publish_new("packs/x", iter(parts), "s") == len(data)
    assert tier.read("packs/x") == data
    with tier.open("packs/x") as file:
        for offset, lengths in ranges:
            buffers = [bytearray(length) for length in lengths]
            end = offset + sum(lengths)
            if end > len(data):
                with pytest.raises(Corruption):
                    file.readinto(offset, [memoryview(buffer) for buffer in buffers])
                with pytest.raises(Corruption):
                    file.read(offset, end - offset)
            else:
                file.readinto(offset, [memoryview(buffer) for buffer in buffers])
                assert b"".join(buffers) == file.read(offset, end - offset) == data[offset:end]


@given(
    parts=st.lists(st.binary(max_size=50), max_size=20),
    ranges=st.lists(st.tuples(st.integers(0, 300), st.lists(st.integers(0, 40), max_size=8)), max_size=5),
)
def test_round_trip(parts: list[bytes], ranges: list[tuple[int, list[int]]]) -> None:
    disk = SimulatedDisk()
    check(MemoryTier(f"round-trip-{next(_numbers)}"), parts, ranges)
    check(LocalTier(disk.store, disk), parts, ranges)
    with tempfile.TemporaryDirectory() as folder:
        check(LocalTier(folder), parts, ranges)
