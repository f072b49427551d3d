"""Claims: FORMAT.json, epochs, fences."""

from __future__ import annotations

import json
import secrets
from typing import Any

import pytest

from deltastore.errors import Backend, Conflict, Corruption, NotFound, UnsupportedFormat
from deltastore.history.session import Session, claimed_epochs, highest_epoch, read_claim, read_format
from deltastore.ondisk.names import FORMAT_FILE, epoch_name, pack_name
from deltastore.tiers.memory import MemoryTier
from tests.forge import sealed

FIRST, SECOND = "1" * 16, "2" * 16


@pytest.fixture
def tier() -> MemoryTier:
    return MemoryTier(f"session-{secrets.token_hex(8)}")


def claim(tier: MemoryTier, session: str = FIRST) -> Session:
    made = Session(tier, session)
    made.claim()
    return made


def test_a_claim_makes_a_store_and_each_takes_the_next_epoch(tier: MemoryTier) -> None:
    first = claim(tier)
    assert read_format(tier).store == first.store
    assert (first.epoch, read_claim(tier, 1)) == (1, FIRST)
    first.next_epoch()
    first.check_fence()
    first.close()
    first.close()
    second = claim(tier, SECOND)
    assert (second.epoch, second.store) == (3, first.store)
    assert claimed_epochs(tier) == {1, 2, 3}
    assert read_claim(tier, 3) == SECOND


def test_a_second_writer_is_refused_while_the_first_lives(tier: MemoryTier) -> None:
    first = claim(tier)
    with pytest.raises(Conflict):
        claim(tier, SECOND)
    assert highest_epoch(tier) == 1
    first.close()
    assert claim(tier, SECOND).epoch == 2


def test_a_newer_epoch_fences(tier: MemoryTier) -> None:
    first = claim(tier)
    tier.publish_new(epoch_name(2), [b"damaged, but a claim"], SECOND)
    with pytest.raises(Conflict, match="epoch 2 was claimed") as caught:
        first.check_fence()
    assert (caught.value.expected, caught.value.found) == (1, 2)


def test_a_store_that_was_replaced_fences(tier: MemoryTier) -> None:
    first = claim(tier)
    tier.delete(epoch_name(1))
    with pytest.raises(Conflict, match="claim of epoch 1 is gone"):
        first.check_fence()


def test_the_next_epoch_is_above_claims_and_packs(tier: MemoryTier) -> None:
    claim(tier).close()
    tier.publish_new(pack_name(6, 0, 0, "a" * 16), [b"x"], FIRST)
    tier.publish_new("packs/e99-0-0.tmp", [b"x"], FIRST)
    tier.publish_new("epochs/77.json.bak", [b"x"], FIRST)
    assert highest_epoch(tier) == 6
    assert claim(tier).epoch == 7


def test_the_loser_of_a_race_takes_the_next_number(tier: MemoryTier, monkeypatch: pytest.MonkeyPatch) -> None:
    first = claim(tier)
    seen = iter([1, 2])
    tier.publish_new(epoch_name(2), [b"somebody was faster"], SECOND)
    monkeypatch.setattr("deltastore.history.session.highest_epoch", lambda _tier: next(seen))
    first.next_epoch()
    assert first.epoch == 3


def test_a_claim_that_fails_gives_the_lock_back(tier: MemoryTier, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Session, "next_epoch", lambda self: (_ for _ in ()).throw(Backend("full")))
        with pytest.raises(Backend):
            claim(tier)
    assert claim(tier, SECOND).epoch == 1


def test_packs_without_a_format_file_are_not_written_to(tier: MemoryTier) -> None:
    tier.create()
    tier.publish_new(pack_name(1, 0, 0, "a" * 16), [b"x"], FIRST)
    with pytest.raises(Corruption, match=r"no FORMAT\.json"):
        claim(tier)
    assert claimed_epochs(tier) == set()


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", [f"packs/e{10**19 - 1}-0-0-{'a' * 16}.zip", f"epochs/{10**19 - 1}.json"])
def test_an_epoch_beyond_all_numbers_does_not_hang(
    tier: MemoryTier, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    claim(tier).close()
    tier.publish_new(name, [b"x"], FIRST)
    real, calls = tier.publish_new, iter(range(5))

    def bounded(*arguments: Any) -> int:
        assert next(calls, None) is not None, "goes round for ever"
        return real(*arguments)

    monkeypatch.setattr(tier, "publish_new", bounded)
    for number in (2, 3):  # what can be no epoch is not counted
        session = claim(tier)
        assert session.epoch == number
        session.close()


# ---------------------------------------------------------------- FORMAT.json


def format_of(tier: MemoryTier, **change: Any) -> None:
    claim(tier).close()
    value = {**json.loads(tier.read(FORMAT_FILE)), **change}
    tier.delete(FORMAT_FILE)
    tier.publish_new(FORMAT_FILE, [sealed({name: member for name, member in value.items() if member != "gone"})], FIRST)


@pytest.mark.parametrize("change", [{"minor": 7}, {"new": [1]}, {"min_reader": [1, 0]}, {"min_reader": [0, 9]}])
def test_a_newer_minor_version_is_read(tier: MemoryTier, change: dict[str, Any]) -> None:
    format_of(tier, **change)
    assert read_format(tier).major == 1


@pytest.mark.parametrize("change", [{"min_reader": [1, 1]}, {"min_reader": [2, 0]}, {"major": 2}, {"major": 0}])
def test_a_format_that_this_version_cannot_read_is_refused(tier: MemoryTier, change: dict[str, Any]) -> None:
    format_of(tier, **change)
    with pytest.raises(UnsupportedFormat, match="newer deltastore"):
        read_format(tier)
    with pytest.raises(UnsupportedFormat):
        claim(tier)


@pytest.mark.parametrize(
    "change",
    [{"format": "zarr"}, {"store": "x"}, {"min_reader": [1]}, {"min_reader": "1.0"}, {"major": "1"}, {"minor": "gone"},
     {"min_reader": "gone"}],
)  # fmt: skip
def test_a_damaged_format_file_is_refused(tier: MemoryTier, change: dict[str, Any]) -> None:
    format_of(tier, **change)
    with pytest.raises(Corruption, match=FORMAT_FILE):
        read_format(tier)
    with pytest.raises(Corruption):
        claim(tier)


def test_without_a_format_file_there_is_no_store(tier: MemoryTier) -> None:
    tier.create()
    with pytest.raises(NotFound):
        read_format(tier)


# ---------------------------------------------------------------- claims that are read


def test_a_claim_that_is_missing_or_damaged_is_told_apart(tier: MemoryTier) -> None:
    claim(tier)
    with pytest.raises(NotFound, match="no claim"):
        read_claim(tier, 5)
    tier.publish_new(epoch_name(5), [b"x"], FIRST)
    with pytest.raises(Corruption):
        read_claim(tier, 5)
    tier.publish_new(epoch_name(6), [sealed({"epoch": 7, "session": FIRST})], FIRST)
    with pytest.raises(Corruption, match="epoch"):
        read_claim(tier, 6)
