"""Errors of the library in the words of the command line: options instead of arguments, commands instead of calls."""

from __future__ import annotations

import os
from collections.abc import Iterator
from urllib.parse import unquote, urlsplit

from deltastore.errors import AlreadyExists, Conflict, DeltaStoreError, NotFound, UnsupportedFormat

_ADVICE: tuple[tuple[type[DeltaStoreError], frozenset[str], str], ...] = (
    (AlreadyExists, frozenset({"tag", "found"}), "--move lets it name another commit"),
    (Conflict, frozenset({"where", "host", "pid", "owner"}), "end it, or try again when it has ended"),
    (NotFound, frozenset({"step", "where"}), "run the command again"),
)
"""Errors by their class and fields, whose advice (what stands after the last semicolon) is for Python programs."""

MOST_NAMED = 3
_MOST_FOLDERS = 1000
"""How many folders are looked into for stores."""


def translate(error: DeltaStoreError) -> DeltaStoreError:
    """Return an error of the same class whose advice can be followed on a command line."""
    fields = error.fields.keys()
    if type(error) is UnsupportedFormat and fields == {"path"} and isinstance(error.fields["path"], tuple):
        message = error.message.partition(". If ")[0]
        advice = "who trusts its writer loads it in Python, with deltastore.open(url, pickle='trust')"
        return UnsupportedFormat(f"{message}; {advice}", **error.fields)
    for kind, names, advice in _ADVICE:
        if type(error) is kind and fields == names:
            head = error.message.rpartition("; ")[0] or error.message
            return kind(f"{head}; {advice}", **error.fields)
    return error


def no_store(url: str) -> NotFound:
    """Return the error for a place without a store; stores below it are named."""
    folder = folder_of(url)
    if folder is None:
        reason = "a store in memory lives in the process that made it" if url.startswith("memory:") else ""
    elif not os.path.lexists(folder):
        reason = "there is no such folder"
    elif not os.path.isdir(folder):
        reason = "it is a file, and a store is a folder"
    else:
        found = list(stores_below(folder, MOST_NAMED + 1))
        names = ", ".join(os.path.join(url, os.path.relpath(store, folder)) for store in found[:MOST_NAMED])
        more = ", ..." if len(found) > MOST_NAMED else ""
        reason = f"stores below it: {names}{more}" if found else "the folder holds neither a store nor folders with one"
    return NotFound(f"no store at {url}{'; ' if reason else ''}{reason}", url=url)


def folder_of(url: str) -> str | None:
    """Return the folder that a URL names, None where it names something else."""
    if "://" not in url:
        return os.path.expanduser(url)
    parts = urlsplit(url)
    return unquote(parts.path) if parts.scheme == "file" else None


def stores_below(folder: str, most: int) -> Iterator[str]:
    """Yield stores in a folder and in the folders in it, the nearest first."""
    left = _MOST_FOLDERS
    level = [folder]
    for _depth in range(2):
        inner: list[str] = []
        for parent in level:
            for child in _folders(parent):
                left -= 1
                if left < 0 or most <= 0:
                    return
                if os.path.lexists(os.path.join(child, "FORMAT.json")):
                    most -= 1
                    yield child
                else:
                    inner.append(child)
        level = inner


def _folders(parent: str) -> list[str]:
    try:
        with os.scandir(parent) as entries:
            return sorted(entry.path for entry in entries if entry.is_dir())
    except OSError:
        return []  # what may not be looked into is no place to point at
