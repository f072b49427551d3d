"""Tags: names for commits, each an append-only list of entries (spec 11.5)."""

from __future__ import annotations

from deltastore.errors import AlreadyExists, Corruption, NotFound
from deltastore.ondisk.canonical import parse_sealed, seal
from deltastore.ondisk.fields import Fields
from deltastore.ondisk.limits import MAX_SEALED_BYTES
from deltastore.ondisk.names import TAGS, check_tag, is_commit_id, new_write_id, parse_tag_name, tag_name
from deltastore.ondisk.records import now
from deltastore.tiers.base import Tier


def tag_heads(tier: Tier) -> dict[str, int]:
    """Return the highest sequence of each tag that was ever made."""
    heads: dict[str, int] = {}
    for info in tier.list(TAGS):
        about = parse_tag_name(info.name)
        if about is not None:
            heads[about[0]] = max(about[1], heads.get(about[0], -1))
    return heads


def read_tags(tier: Tier) -> dict[str, str]:
    """Return the commit id of each tag; removed tags are left out.

    Raises
    ------
    Corruption
        An entry that decides is damaged: an older one must not silently take its place.
    """
    found: dict[str, str] = {}
    for tag, sequence in tag_heads(tier).items():
        commit = _read_entry(tier, tag, sequence)
        if commit is not None:
            found[tag] = commit
    return found


def _read_entry(tier: Tier, tag: str, sequence: int) -> str | None:
    name = tag_name(tag, sequence)
    where = f"{tier.url}/{name}"
    fields = Fields(parse_sealed(tier.read(name), where, MAX_SEALED_BYTES), where)
    commit = fields.raw("commit")
    if (
        fields.text("tag") != tag
        or fields.integer("sequence") != sequence
        or not (commit is None or is_commit_id(commit))
    ):
        raise Corruption(f"{where}: the entry does not belong to its name", where=where)
    return None if commit is None else str(commit)


def write_tag(tier: Tier, tag: str, commit: str | None, session: str, *, move: bool) -> None:
    """Publish the next entry of a tag; `commit` None removes it.

    Raises
    ------
    AlreadyExists
        The tag names another commit and `move` is false, or another process was faster.
    """
    check_tag(tag)
    sequence = tag_heads(tier).get(tag, -1)
    present = _read_entry(tier, tag, sequence) if sequence >= 0 else None
    if present == commit:
        if commit is None:
            raise NotFound(f"tag {tag!r} does not exist", tag=tag)
        # The entry may be that of a call whose outcome was unknown: only now it is sure to stay.
        tier.sync(f"{TAGS}/{tag}")
        tier.sync(TAGS)
        tier.sync("")
        return
    if present is not None and commit is not None and not move:
        raise AlreadyExists(
            f"tag {tag!r} names commit {present[:12]}; pass move=True to move it", tag=tag, found=present
        )
    body = {
        "tag": tag,
        "sequence": sequence + 1,
        "commit": commit,
        "created": now(),
        "session": session,
        "write": new_write_id(),
    }
    tier.publish_new(tag_name(tag, sequence + 1), [seal(body)], session)
