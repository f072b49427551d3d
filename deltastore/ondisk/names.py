"""The names of the store tree, made and parsed (spec 2)."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from deltastore.errors import InvalidInput
from deltastore.ondisk.limits import MAX_NUMBER

FORMAT_FILE = "FORMAT.json"
PACKS = "packs"
EPOCHS = "epochs"
TAGS = "tags"
CACHE = "cache"

_PACK = re.compile(r"packs/e(0|[1-9][0-9]{0,18})-(0|[1-9][0-9]{0,18})-(0|[1-9][0-9]{0,18})-([0-9a-f]{16})\.zip")
_EPOCH = re.compile(r"epochs/(0|[1-9][0-9]{0,18})\.json")
_TAG_ENTRY = re.compile(r"tags/([A-Za-z0-9_][A-Za-z0-9._-]{0,99})/(0|[1-9][0-9]{0,18})\.json")
_CATALOG = re.compile(r"cache/catalog-(0|[1-9][0-9]{0,18})\.json\.zst")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_COMMIT = re.compile(r"[0-9a-f]{32}")
_COMMIT_PREFIX = re.compile(r"[0-9a-f]{8,32}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_CONTENT = re.compile(r"([1-9][0-9]{0,18}):[0-9a-f]{64}")
_CONTENT_HEAD = re.compile(r"[1-9][0-9]{0,18}:")
_WRITE = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class PackName:
    """What the name of a pack says; only a hint, the records decide."""

    epoch: int
    first_step: int
    last_step: int
    write: str


def new_commit_id() -> str:
    """Return a random commit id, 32 hexadecimal digits."""
    return secrets.token_hex(16)


def new_write_id() -> str:
    """Return a random write id, 16 hexadecimal digits; a new one for every attempt."""
    return secrets.token_hex(8)


def pack_name(epoch: int, first_step: int, last_step: int, write: str) -> str:
    """Return the name of a pack below the root."""
    return f"{PACKS}/e{epoch}-{first_step}-{last_step}-{write}.zip"


def parse_pack_name(name: str) -> PackName | None:
    """Return what a pack's name says, or None if it is not the name of a pack."""
    match = _PACK.fullmatch(name)
    if match is None or max(int(match[1]), int(match[2]), int(match[3])) > MAX_NUMBER:
        return None
    return PackName(int(match[1]), int(match[2]), int(match[3]), match[4])


def epoch_name(number: int) -> str:
    """Return the name of an epoch's claim."""
    return f"{EPOCHS}/{number}.json"


def parse_epoch_name(name: str) -> int | None:
    """Return the number of an epoch's claim, or None for any other name."""
    match = _EPOCH.fullmatch(name)
    return int(match[1]) if match and int(match[1]) <= MAX_NUMBER else None


def tag_name(tag: str, sequence: int) -> str:
    """Return the name of one entry of a tag."""
    return f"{TAGS}/{tag}/{sequence}.json"


def parse_tag_name(name: str) -> tuple[str, int] | None:
    """Return tag and sequence of a tag's entry, or None for any other name."""
    match = _TAG_ENTRY.fullmatch(name)
    return (match[1], int(match[2])) if match else None


def catalog_name(number: int) -> str:
    """Return the name of one version of the catalog cache; the highest number wins."""
    return f"{CACHE}/catalog-{number}.json.zst"


def parse_catalog_name(name: str) -> int | None:
    """Return the number of a catalog cache, or None for any other name."""
    match = _CATALOG.fullmatch(name)
    return int(match[1]) if match else None


def check_tag(tag: str) -> None:
    """Raise InvalidInput unless `tag` may name a commit."""
    if not isinstance(tag, str) or not _TAG.fullmatch(tag):
        raise InvalidInput(
            f"tag {tag!r}: use letters, digits, '.', '_' and '-', at most 100, not starting with '.' or '-'"
        )
    if tag.isdigit() or tag == "latest" or is_commit_prefix(tag):
        raise InvalidInput(f"tag {tag!r}: a tag may not be a number, 'latest', or look like a commit id")


def is_commit_id(text: object) -> bool:
    """Return whether `text` is a whole commit id."""
    return isinstance(text, str) and _COMMIT.fullmatch(text) is not None


def is_commit_prefix(text: str) -> bool:
    """Return whether `text` may be the beginning (8 digits or more) of a commit id."""
    return _COMMIT_PREFIX.fullmatch(text) is not None


def is_digest(text: object) -> bool:
    """Return whether `text` is a SHA-256 in hexadecimal."""
    return isinstance(text, str) and _DIGEST.fullmatch(text) is not None


def parse_content_digest(text: object) -> int | None:
    """Return the elements of a piece from a content digest, or None if `text` is none."""
    match = _CONTENT.fullmatch(text) if isinstance(text, str) else None
    return int(match[1]) if match else None


def are_content_digests(texts: Sequence[object]) -> bool:
    """Return whether all of `texts` are content digests, faster than one match for each."""
    strings = [text for text in texts if isinstance(text, str)]
    digits = "".join([text[-64:] for text in strings]).encode("ascii", "replace")
    return (
        len(strings) == len(texts)
        and not digits.translate(None, b"0123456789abcdef")
        and all(_CONTENT_HEAD.fullmatch(head) for head in {text[:-64] for text in strings})
    )


def is_write_id(text: object) -> bool:
    """Return whether `text` is a write or session id."""
    return isinstance(text, str) and _WRITE.fullmatch(text) is not None
