"""Tags: append-only entries, the highest decides."""

from __future__ import annotations

import secrets

import pytest

from deltastore.errors import AlreadyExists, Corruption, InvalidInput, NotFound
from deltastore.history.tags import read_tags, tag_heads, write_tag
from deltastore.ondisk.names import tag_name
from deltastore.tiers.memory import MemoryTier
from tests.forge import sealed

A, B, SESSION = "a" * 32, "b" * 32, "5" * 16


@pytest.fixture
def tier() -> MemoryTier:
    tier = MemoryTier(f"tags-{secrets.token_hex(8)}")
    tier.create()
    return tier


def write(tier: MemoryTier, tag: str, commit: str | None, *, move: bool = False) -> None:
    write_tag(tier, tag, commit, SESSION, move=move)


def put(tier: MemoryTier, name: str, body: dict[str, object]) -> None:
    tier.publish_new(name, [sealed(body)], SESSION)


def test_a_tag_is_made_moved_removed_and_made_again(tier: MemoryTier) -> None:
    assert read_tags(tier) == {}
    write(tier, "best", A)
    write(tier, "v1.0", A)
    assert read_tags(tier) == {"best": A, "v1.0": A}
    write(tier, "best", B, move=True)
    assert read_tags(tier)["best"] == B
    write(tier, "best", None)
    assert read_tags(tier) == {"v1.0": A}
    write(tier, "best", A)
    assert read_tags(tier)["best"] == A
    assert tag_heads(tier) == {"best": 3, "v1.0": 0}
    assert [info.name for info in tier.list("tags/best")] == [tag_name("best", number) for number in range(4)]


def test_a_tag_of_another_commit_is_not_moved_by_chance(tier: MemoryTier) -> None:
    write(tier, "best", A)
    with pytest.raises(AlreadyExists, match="move=True") as caught:
        write(tier, "best", B)
    assert (caught.value.tag, caught.value.found) == ("best", A)
    assert read_tags(tier) == {"best": A}


def test_what_is_already_so_is_not_written_again(tier: MemoryTier) -> None:
    write(tier, "best", A)
    write(tier, "best", A)
    assert tag_heads(tier) == {"best": 0}
    for tag in ("never", "best"):
        if tag == "best":
            write(tier, tag, None)
        with pytest.raises(NotFound, match=f"tag '{tag}' does not exist"):
            write(tier, tag, None)


@pytest.mark.parametrize("tag", ["latest", "5", "a/b", "", "0" * 32])
def test_what_may_not_be_a_tag(tier: MemoryTier, tag: str) -> None:
    with pytest.raises(InvalidInput):
        write(tier, tag, A)
    assert tier.list("tags") == []


def test_numbers_are_compared_as_numbers(tier: MemoryTier) -> None:
    for number in range(11):
        write(tier, "best", A if number % 2 else B, move=True)
    assert tag_heads(tier) == {"best": 10}
    assert read_tags(tier) == {"best": B}


def test_files_that_are_no_entries_do_not_count(tier: MemoryTier) -> None:
    tier.publish_new("tags/best/notes.txt", [b"x"], SESSION)
    tier.publish_new("tags/best/007.json", [b"x"], SESSION)
    assert read_tags(tier) == {}
    write(tier, "best", A)
    assert read_tags(tier) == {"best": A}


@pytest.mark.parametrize(
    "change", [{"tag": "other"}, {"sequence": 0}, {"sequence": "1"}, {"commit": "x"}, {"commit": 5}, {"tag": None}]
)
def test_an_entry_that_does_not_belong_to_its_name_is_damage(tier: MemoryTier, change: dict[str, object]) -> None:
    write(tier, "best", A)
    put(tier, tag_name("best", 1), {"tag": "best", "sequence": 1, "commit": B, **change})
    with pytest.raises(Corruption, match=r"tags/best/1\.json"):
        read_tags(tier)
    with pytest.raises(Corruption):
        write(tier, "best", B, move=True)


def test_a_damaged_entry_that_does_not_decide_is_no_damage(tier: MemoryTier) -> None:
    tier.publish_new(tag_name("best", 0), [b"{}"], SESSION)
    with pytest.raises(Corruption, match="sealed"):
        read_tags(tier)
    put(tier, tag_name("best", 1), {"tag": "best", "sequence": 1, "commit": B, "newer": "member"})
    assert read_tags(tier) == {"best": B}


def test_of_two_that_write_at_once_one_is_told(tier: MemoryTier, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tier, "best", A)
    heads = tag_heads(tier)
    write(tier, "best", B, move=True)  # somebody else, after we looked
    monkeypatch.setattr("deltastore.history.tags.tag_heads", lambda _tier: heads)
    with pytest.raises(AlreadyExists):
        write(tier, "best", "c" * 32, move=True)
    monkeypatch.undo()
    assert read_tags(tier) == {"best": B}
