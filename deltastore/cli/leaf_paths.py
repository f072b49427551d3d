"""Leaf paths as they are written on a command line."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable
from typing import Any

from deltastore.document import subtree
from deltastore.errors import InvalidInput, NotFound
from deltastore.reader import State
from deltastore.types import Key, Path, show_path

_INTEGER = re.compile(r"\[(-?[0-9]{1,40})\]|(-?[0-9]{1,40})")
_MISSING = object()
_MOST_NAMED = 8

PATH_HELP = (
    "Path of a leaf: model/wte.weight; integers as digits or [0]. A key that holds a slash: give the path as a JSON "
    'list, \'["model", "a/b"]\'.'
)


def parse_path(state: State, text: str) -> Path:
    """Return the path that a text means in a state.

    A JSON list is taken as it is. A text that is one key as a whole comes next. Otherwise it is split at its slashes:
    digits are a string key where the state has that key, else an integer; digits in brackets the other way round.
    """
    listed = _json_path(text)
    if listed is not None:
        return listed
    document = state.document
    if _has(document, (text,)):
        return (text,)
    path: Path = ()
    for part in text.strip("/").split("/"):
        path = (*path, _key(document, path, part))
    return path


def find(state: State, text: str) -> tuple[Path, Any]:
    """Return the path that a text means in a state and what is there: a leaf, or the state below it.

    Raises
    ------
    NotFound
        Nothing is there; what is near is named.
    """
    path = parse_path(state, text)
    if not _has(state.document, path):
        raise not_there(state, path)
    return path, state[path]


def holds(state: State, path: Path) -> bool:
    """Return whether a leaf is at a path or below it."""
    return _has(state.document, path)


def is_below_dots(path: Path, prefix: Path) -> bool:
    """Return whether a path goes on after a prefix with a dot, as ``model/h.0.weight`` does after ``model/h.0``."""
    stem = str(prefix[-1]).rstrip(".") if prefix else ""
    if not stem or len(path) < len(prefix) or path[: len(prefix) - 1] != prefix[:-1]:
        return False
    key = path[len(prefix) - 1]
    return isinstance(key, str) and key.startswith(f"{stem}.")


def not_there(state: State, path: Path) -> NotFound:
    """Return the error for a path that is not in a state: it names what is below it, near it, or beside it."""
    parent = path[:-1]
    while parent and not _has(state.document, parent):
        parent = parent[:-1]
    depth = len(parent) + 1
    leaves = list(state)
    below = (leaf for leaf in leaves if len(leaf) >= depth and leaf[: depth - 1] == parent)
    beside = {str(leaf[depth - 1]): leaf[:depth] for leaf in below}
    if dotted := [leaf for leaf in leaves if is_below_dots(leaf, path)]:
        hint = f"below it: {_listed(dotted)}"
    elif near := difflib.get_close_matches(str(path[depth - 1]), beside, n=3):
        hint = f"near it: {_listed(beside[key] for key in near)}"
    elif longer := [leaf for leaf in leaves if leaf[-len(path) :] == path]:
        hint = f"near it: {_listed(longer)}"
    else:
        hint = f"{f'in {path_text(parent)}' if parent else 'its parts'}: {_listed(beside.values()) or 'nothing'}"
    return NotFound(f"{path_text(path)}: step {state.commit.step} has no such leaf; {hint}", path=path)


def _listed(paths: Iterable[Path]) -> str:
    texts = [path_text(path) for path in paths]
    return ", ".join(texts[:_MOST_NAMED]) + (", ..." if len(texts) > _MOST_NAMED else "")


def path_text(path: Path) -> str:
    """Return a path as :func:`parse_path` reads it back."""
    names = [key for key in path if isinstance(key, str)]
    if any(not name or "/" in name or name.startswith("[") for name in names):
        return json.dumps(list(path), ensure_ascii=False)
    return show_path(path)


def _json_path(text: str) -> Path | None:
    if not text.startswith("["):
        return None
    try:
        keys = json.loads(text)
    except (ValueError, RecursionError):
        return None  # a key may begin with a bracket
    if not isinstance(keys, list) or not keys or not all(type(key) in (str, int) for key in keys):
        raise InvalidInput(f'{text}: a path as JSON is a list of strings and integers, such as ["model", 0]')
    return tuple(keys)


def _key(document: Any, path: Path, part: str) -> Key:
    match = _INTEGER.fullmatch(part)
    if match is None:
        return part
    integer = int(match[1] or match[2])
    first, second = (integer, part) if match[1] else (part, integer)
    if _has(document, (*path, first)):
        return first
    return second if _has(document, (*path, second)) else integer


def _has(document: Any, path: Path) -> bool:
    return subtree(document, path, _MISSING) is not _MISSING
