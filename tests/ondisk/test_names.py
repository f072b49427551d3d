"""Names of the store tree: made, parsed, and nothing else taken for one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltastore.errors import InvalidInput
from deltastore.ondisk.names import (
    PackName,
    are_content_digests,
    catalog_name,
    check_tag,
    epoch_name,
    is_commit_id,
    is_commit_prefix,
    is_digest,
    is_write_id,
    new_commit_id,
    new_write_id,
    pack_name,
    parse_catalog_name,
    parse_content_digest,
    parse_epoch_name,
    parse_pack_name,
    parse_tag_name,
    tag_name,
)

numbers = st.integers(0, 2**62 - 1)
WRITE = "0123456789abcdef"
tags = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}", fullmatch=True)


@given(numbers, numbers, numbers, tags)
def test_names_come_back(first: int, second: int, third: int, tag: str) -> None:
    assert parse_pack_name(pack_name(first, second, third, WRITE)) == PackName(first, second, third, WRITE)
    assert parse_epoch_name(epoch_name(first)) == first
    assert parse_catalog_name(catalog_name(first)) == first
    assert parse_tag_name(tag_name(tag, first)) == (tag, first)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "packs/",
        f"e1-0-0-{WRITE}.zip",
        f"packs/1-0-0-{WRITE}.zip",
        f"packs/e01-0-0-{WRITE}.zip",
        f"packs/e1-00-0-{WRITE}.zip",
        f"packs/e-1-0-0-{WRITE}.zip",
        f"packs/e1-0-{WRITE}.zip",
        f"packs/e1-0-0-{WRITE.upper()}.zip",
        f"packs/e1-0-0-{WRITE}0.zip",
        f"packs/e1-0-0-{WRITE}.zip\n",
        f"packs/e1-0-0-{WRITE}.zip.tmp",
        f"packs/x/e1-0-0-{WRITE}.zip",
        f"packs/e{10**19}-0-0-{WRITE}.zip",
        f"packs/e\u0661-0-0-{WRITE}.zip",
    ],
)
def test_what_is_no_pack(name: str) -> None:
    assert parse_pack_name(name) is None


@pytest.mark.parametrize("text", ["", "01", "-1", "1.0", "\u0661", "1 ", "x", "1" * 20, "0x1", "1\n"])
def test_what_is_no_number(text: str) -> None:
    assert parse_epoch_name(f"epochs/{text}.json") is None
    assert parse_catalog_name(f"cache/catalog-{text}.json.zst") is None
    assert parse_tag_name(f"tags/best/{text}.json") is None


@pytest.mark.parametrize(
    "name", ["tags/0.json", "tags/a/b/0.json", "tags/.a/0.json", "tags/-a/0.json", "tags/a b/0.json"]
)
def test_what_is_no_entry_of_a_tag(name: str) -> None:
    assert parse_tag_name(name) is None


@pytest.mark.parametrize("tag", ["best", "v1.0", "a", "_", "0x", "1e5", "a" * 100, "1234567g", "ABCDEF12", "Latest"])
def test_tags(tag: str) -> None:
    check_tag(tag)


@pytest.mark.parametrize(
    "tag",
    ["", ".", "..", "-a", ".hidden", "a/b", "a b", "é", "a\n", "a" * 101, "0", "123", "latest", "latest~1", "deadbeef",
     "12345678", "a" * 32, None, 5, b"best"],
)  # fmt: skip
def test_what_is_no_tag(tag: Any) -> None:
    with pytest.raises(InvalidInput, match="tag"):
        check_tag(tag)


@given(tags)
def test_a_tag_is_never_taken_for_a_step_or_a_commit(tag: str) -> None:
    try:
        check_tag(tag)
    except InvalidInput:
        return
    assert not tag.isdigit()
    assert not is_commit_prefix(tag)
    assert parse_tag_name(tag_name(tag, 0)) == (tag, 0)


def test_ids_are_what_they_are_taken_for() -> None:
    assert is_commit_id(new_commit_id())
    assert is_write_id(new_write_id())
    assert new_commit_id() != new_commit_id()
    assert new_write_id() != new_write_id()


@pytest.mark.parametrize(("check", "length"), [(is_commit_id, 32), (is_digest, 64), (is_write_id, 16)])
def test_ids_have_one_length_and_small_digits(check: Callable[[object], bool], length: int) -> None:
    assert check("0a" * (length // 2))
    for wrong in (
        "0" * (length - 1),
        "0" * (length + 1),
        "A" * length,
        "g" * length,
        "0" * length + "\n",
        None,
        5,
        b"0",
    ):
        assert not check(wrong)


@pytest.mark.parametrize(("text", "expected"), [("0" * 7, False), ("0" * 8, True), ("0" * 32, True), ("0" * 33, False)])
def test_beginnings_of_commit_ids(text: str, expected: bool) -> None:
    assert is_commit_prefix(text) is expected


def test_content_digests() -> None:
    digest = "f" * 64
    good = f"12:{digest}"
    assert parse_content_digest(good) == 12
    assert are_content_digests([])
    assert are_content_digests([good, f"1:{digest}"])
    assert not are_content_digests([f"{good}\n{good}"])
    assert not are_content_digests([good + good])
    for wrong in (
        digest,
        "",
        f":{digest}",
        f"{good}\n",
        f"0:{digest}",
        f"-1:{digest}",
        f"01:{digest}",
        f"1:{digest}0",
        f"1:{'F' * 64}",
        7,
        None,
    ):
        assert parse_content_digest(wrong) is None
        assert not are_content_digests([wrong])
        assert not are_content_digests([good, wrong, good])
