"""Leaf paths as they are written on a command line."""

from __future__ import annotations

import json
import re
from typing import Any

from deltastore.document import subtree
from deltastore.errors import InvalidInput
from deltastore.reader import State
from deltastore.types import Key, Path

_BRACKETS = re.compile(r"\[(-?\d+)\]")
_DIGITS = re.compile(r"-?\d+")
_MISSING = object()

PATH_HELP = (
    "Path of a leaf: model/wte.weight; integers as digits or [0]. A key that holds a slash: give the path as a JSON "
    'list, \'["model", "a/b"]\'.'
)


def parse_path(state: State, text: str) -> Path:
    """Return the path that a text means in a state.

    A JSON list is taken as it is. Otherwise the text is split at its slashes; what looks like an integer is a string
    key where the state has that key, else an integer. A text that is one key as a whole wins.
    """
    listed = _json_path(text)
    if listed is not None:
        return listed
    document = state.document
    if _has(document, (text,)):
        return (text,)
    path: Path = ()
    for part in text.strip("/").split("/"):
        integer = _integer(part)
        is_number = integer is not None and not _has(document, (*path, part))
        path = (*path, integer if is_number and integer is not None else part)
    return path


def _json_path(text: str) -> Path | None:
    if not text.startswith("["):
        return None
    try:
        keys = json.loads(text)
    except ValueError:
        return None  # a key may begin with a bracket
    if not isinstance(keys, list) or not keys or not all(type(key) in (str, int) for key in keys):
        raise InvalidInput(f"{text}: a path as JSON is a list of strings and integers, such as [\"model\", 0]")
    return tuple(keys)


def _integer(part: str) -> int | None:
    match = _BRACKETS.fullmatch(part)
    if match is not None:
        return int(match[1])
    return int(part) if _DIGITS.fullmatch(part) else None


def _has(document: Any, path: tuple[Key, ...]) -> bool:
    return subtree(document, path, _MISSING) is not _MISSING
