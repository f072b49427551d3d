"""Which commit a reference means, and which commits lie on one line of history (spec 11.3, 11.4). Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from deltastore.config import as_integer
from deltastore.errors import Corruption, InvalidInput, NotFound
from deltastore.history.catalog import Catalog, CatalogEntry
from deltastore.ondisk.names import is_commit_prefix, parse_pack_name
from deltastore.ondisk.records import BASE

LATEST = "latest"
_BACK = re.compile(r"latest~([0-9]{1,9})")

Segments = tuple[tuple[int, int], ...]
"""(epoch, last sequence) of each part of a line of history, newest first."""


def newest(catalog: Catalog) -> CatalogEntry | None:
    """Return the newest commit: the highest (epoch, sequence)."""
    return max(catalog.by_id.values(), key=lambda entry: entry.order, default=None)


def newest_complete(catalog: Catalog) -> CatalogEntry | None:
    """Return the newest commit whose chain lies in packs that open; chunks are not looked at."""
    for entry in reversed(catalog.ordered()):
        try:
            chain_entries(catalog, entry)
        except Corruption:
            continue
        return entry
    return None


def whole_ids(catalog: Catalog) -> frozenset[str]:
    """Return the commits whose chains lie in packs that open; chunks are not looked at."""
    whole: set[str] = set()
    for entry in catalog.ordered():  # parents come first
        if entry.kind == BASE or (entry.parent is not None and entry.parent.id in whole):
            whole.add(entry.id)
    return frozenset(whole)


def chain_entries(catalog: Catalog, entry: CatalogEntry) -> list[CatalogEntry]:
    """Return the commits from the base of `entry` to `entry`.

    Raises
    ------
    Corruption
        A parent is missing, or is not the commit that its child names.
    """
    chain = [entry]
    while chain[-1].kind == "delta":
        child = chain[-1]
        parent = child.parent
        known = catalog.by_id.get(parent.id) if parent is not None else None
        if parent is None or known is None:
            raise Corruption(
                f"step {entry.step} (commit {entry.id[:12]}) needs commit {parent.id[:12] if parent else '?'} of step "
                f"{parent.step if parent else '?'}, which is in no readable pack",
                step=entry.step,
                commit=entry.id,
                missing=parent.id if parent else None,
            )
        if known.ref != parent or known.order >= child.order:
            raise Corruption(
                f"step {child.step} (commit {child.id[:12]}) names parent {parent.id[:12]} with digest "
                f"{parent.digest[:12]}, the store has {known.ref.digest[:12]}",
                expected=parent.digest,
                found=known.ref.digest,
            )
        chain.append(known)
    return chain[::-1]


def segments_of(catalog: Catalog, entry: CatalogEntry) -> Segments:
    """Return the line of history that ends with `entry`.

    Within an epoch each commit follows the one before it; where the line came from an earlier epoch stands in
    the base of the chain, so that it is known even when commits in between were pruned.
    """
    current = entry
    result = [(entry.ref.epoch, entry.ref.sequence)]
    while current.kind == "delta":
        parent = current.parent
        known = catalog.by_id.get(parent.id) if parent is not None else None
        if parent is not None and parent.epoch != result[-1][0]:
            result.append((parent.epoch, parent.sequence))
        if known is None or known.order >= current.order:
            return tuple(result)
        current = known
    return (*result, *current.lineage)


def on_line(segments: Segments, entry: CatalogEntry) -> bool:
    """Return whether a commit lies on a line of history."""
    return any(entry.ref.epoch == epoch and entry.ref.sequence <= last for epoch, last in segments)


def line(catalog: Catalog, entry: CatalogEntry) -> list[CatalogEntry]:
    """Return the commits of the line of history that ends with `entry`, oldest first."""
    last = dict(reversed(segments_of(catalog, entry)))
    found = [other for other in catalog.by_id.values() if other.ref.sequence <= last.get(other.ref.epoch, -1)]
    return sorted(found, key=lambda other: other.order)


def resolve(catalog: Catalog, tags: Mapping[str, str], ref: int | str) -> CatalogEntry:
    """Return the commit that a reference means.

    Raises
    ------
    InvalidInput
        Not a step, "latest", "latest~n", a tag or the beginning of a commit id.
    NotFound
        Nothing has that name; the nearest is named.
    """
    if not isinstance(ref, str):
        try:
            ref = as_integer(ref, "ref")
        except InvalidInput:
            raise InvalidInput(
                f"{ref!r} names no commit: use a step, 'latest', 'latest~3', a tag or a commit id"
            ) from None
    top = newest(catalog)
    if top is None:
        _refuse_if_all_damaged(catalog, ref)
        raise NotFound(f"{ref!r}: the store holds no commits", ref=ref)
    if isinstance(ref, int):
        return _at_step(catalog, top, ref)
    if ref.isdecimal() and ref.isascii() and len(ref) < 8:  # longer ones may begin a commit id
        return _at_step(catalog, top, int(ref))
    if ref == LATEST:
        return top
    back = _BACK.fullmatch(ref)
    if back:
        commits = line(catalog, top)
        if int(back[1]) >= len(commits):
            raise NotFound(
                f"{ref!r}: only {len(commits)} commits lead to the latest; the oldest is step {commits[0].step}",
                ref=ref,
            )
        return commits[-1 - int(back[1])]
    if ref in tags:
        found = catalog.by_id.get(tags[ref])
        if found is None:
            raise NotFound(f"tag {ref!r} names commit {tags[ref]}, which is in no readable pack", ref=ref)
        return found
    return _by_id(catalog, tags, ref)


def needs_tags(ref: int | str) -> bool:
    """Return whether a reference may be a tag: a damaged tag does not hinder all others."""
    return isinstance(ref, str) and ref != LATEST and not _BACK.fullmatch(ref) and not is_commit_prefix(ref)


def _at_step(catalog: Catalog, top: CatalogEntry, step: int) -> CatalogEntry:
    matching = [entry for entry in catalog.by_id.values() if entry.step == step]
    segments = segments_of(catalog, top)
    best = max((e for e in matching if on_line(segments, e)), key=lambda e: e.order, default=None)
    best = best or max(matching, key=lambda entry: entry.order, default=None)
    _refuse_if_damaged(catalog, step, best)
    if best is not None:
        return best
    nearest = min(catalog.by_id.values(), key=lambda entry: (abs(entry.step - step), entry.step))
    raise NotFound(
        f"step {step} is not in the store; the nearest is step {nearest.step}", ref=step, nearest=nearest.step
    )


def _refuse_if_damaged(catalog: Catalog, step: int, best: CatalogEntry | None) -> None:
    """Raise the error of an unreadable pack with a newer commit of this step: an older one is not what was asked."""
    for name, error in catalog.damaged.items():
        about = parse_pack_name(name)
        if about is None or not about.first_step <= step <= about.last_step:
            continue
        if best is None or about.epoch >= best.ref.epoch:
            usable = newest_complete(catalog)
            advice = "no other commit can be read"
            if usable is not None:
                advice = f"the newest commit that does not need this is step {usable.step} ({usable.id[:12]})"
            instead = None if usable is None else usable.step
            # The same kind of error: a newer format is not damage, nor is a file that may not be read.
            fields = {"where": name, **error.fields, "step": step, "newest_intact": instead}
            raise type(error)(f"step {step} cannot be read: {error}; {advice}", **fields) from error


def _refuse_if_all_damaged(catalog: Catalog, ref: int | str) -> None:
    """Raise the error of the newest pack if none can be read: such a store is not empty."""
    for name in sorted(catalog.damaged, key=_age)[-1:]:
        error = catalog.damaged[name]
        fields = {"where": name, **error.fields, "newest_intact": None}
        raise type(error)(f"{ref!r}: no pack of the store can be read: {error}", **fields) from error


def _age(name: str) -> tuple[int, int]:
    about = parse_pack_name(name)
    return (-1, -1) if about is None else (about.epoch, about.last_step)


def _by_id(catalog: Catalog, tags: Mapping[str, str], ref: str) -> CatalogEntry:
    if is_commit_prefix(ref):
        matching = [entry for commit, entry in catalog.by_id.items() if commit.startswith(ref)]
        if len(matching) == 1:
            return matching[0]
        if matching:
            raise InvalidInput(f"{ref!r} begins {len(matching)} commit ids; give more digits", ref=ref)
    known = ", ".join(sorted(tags)[:8]) or "none"
    raise NotFound(f"{ref!r} is neither a tag nor a commit id of 8 or more characters; tags: {known}", ref=ref)
