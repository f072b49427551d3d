"""Leaf paths as they are written on a command line."""

from __future__ import annotations

import json
import re
from typing import Any

from deltastore.document import subtree
from deltastore.errors import InvalidInput
from deltastore.reader import State
from deltastore.types import Key, Path, show_path

_INTEGER = re.compile(r"\[(-?[0-9]{1,40})\]|(-?[0-9]{1,40})")
_MISSING = object()

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
