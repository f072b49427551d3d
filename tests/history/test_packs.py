"""Opening packs: one suffix read each, a second one for a long tail, and nothing of another store."""

from __future__ import annotations

import secrets
from typing import Any

import pytest

from deltastore.errors import Corruption, NotFound
from deltastore.history import packs as packs_module
from deltastore.history.packs import Packs
from deltastore.ondisk.names import new_write_id, pack_name
from deltastore.ondisk.pack import TAIL_GUESS_BYTES, PackCommit, PackWriter
from tests.counted import CountedTier

STORE, SESSION = "5" * 32, "1" * 16


@pytest.fixture
def tier() -> CountedTier:
    tier = CountedTier(f"packs-{secrets.token_hex(8)}")
    tier.create()
    return tier


def publish(tier: CountedTier, number: int = 0, *, blob_bytes: int = 10, write: str | None = None) -> str:
    """Publish a pack with one blob; its name may claim another write id than the pack has."""
    made = new_write_id()
    writer = PackWriter(STORE, made)
    commit = PackCommit(f"{number:032x}", number, "base", secrets.token_bytes(blob_bytes), "b" * 64)
    name = pack_name(1, number, number, made if write is None else write)
    tier.publish_new(name, [part for parts in writer.finish([commit]) for part in parts], SESSION)
    return name


def test_a_pack_is_opened_with_one_read_of_its_end(tier: CountedTier) -> None:
    name = publish(tier)
    packs = Packs(tier, STORE)
    tail = packs.tail(name)
    assert packs.tail(name) is tail
    (read,) = tier.of("packs")
    size = packs.file(name).size
    assert read == (name, 0, size)


@pytest.mark.parametrize("blob_bytes", [TAIL_GUESS_BYTES, 3 * TAIL_GUESS_BYTES])
def test_a_long_tail_takes_a_second_read_of_the_rest(tier: CountedTier, blob_bytes: int) -> None:
    name = publish(tier, blob_bytes=blob_bytes)
    packs = Packs(tier, STORE)
    assert packs.tail(name).index.store == STORE
    size = packs.file(name).size
    begin = size - TAIL_GUESS_BYTES
    assert tier.of("packs") == [(name, begin, TAIL_GUESS_BYTES), (name, 0, begin)]


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_a_tail_as_long_as_the_guess(tier: CountedTier, monkeypatch: pytest.MonkeyPatch, more: int) -> None:
    name = publish(tier)
    size = tier.open(name).size
    monkeypatch.setattr(packs_module, "TAIL_GUESS_BYTES", size + more)
    assert Packs(tier, STORE).tail(name).trailer.file_size == size
    assert len(tier.of("packs")) == (2 if more < 0 else 1)


def test_a_pack_of_another_store_or_of_another_name_is_refused(tier: CountedTier) -> None:
    name = publish(tier)
    with pytest.raises(Corruption, match="belongs to store 55555555, this is store 66666666"):
        Packs(tier, "6" * 32).tail(name)
    renamed = publish(tier, 1, write="0" * 16)
    with pytest.raises(Corruption, match="its name says 0000000000000000"):
        Packs(tier, STORE).tail(renamed)


def test_a_pack_that_is_gone(tier: CountedTier) -> None:
    packs = Packs(tier, STORE)
    with pytest.raises(NotFound):
        packs.tail(pack_name(1, 0, 0, "0" * 16))
    name = publish(tier)
    packs.tail(name)
    tier.delete(name)
    assert packs.file(name).read(0, 4) == b"PK\x03\x04"  # who has it open goes on reading
    packs.forget(name)
    with pytest.raises(NotFound):
        packs.tail(name)


@pytest.mark.parametrize("length", [0, 1, 43, 65])
def test_a_file_that_is_too_short(tier: CountedTier, length: int) -> None:
    name = pack_name(1, 0, 0, "0" * 16)
    tier.publish_new(name, [bytes(length)], SESSION)
    with pytest.raises(Corruption, match="too short"):
        Packs(tier, STORE).tail(name)


def test_only_so_many_files_and_tails_are_kept(tier: CountedTier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packs_module, "OPEN_FILES", 2)
    monkeypatch.setattr(packs_module, "KEPT_TAIL_BYTES", 0)
    packs = Packs(tier, STORE)
    names = [publish(tier, number) for number in range(5)]
    files: list[Any] = [packs.file(name) for name in names]
    tails = [packs.tail(name) for name in names]
    assert all(file.size for file in files)  # a file that is not kept is not closed under its user's hands
    tier.of("packs")
    assert packs.tail(names[4]) is tails[4]
    assert tier.of("packs") == []
    assert packs.tail(names[0]) is not tails[0]


def test_closing_twice(tier: CountedTier) -> None:
    packs = Packs(tier, STORE)
    name = publish(tier)
    packs.tail(name)
    packs.close()
    packs.close()
    assert packs.tail(name).index.write in name
