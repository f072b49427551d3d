"""Names of tensors in files: every path gets one, valid and different from all others.

A name need not say all: where it does not, what is recorded beside the tensors has the path.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from deltastore.types import Path

MAX_BYTES = 200
"""Of one part of a name: file systems take 255."""
_BAD = frozenset("/\\%:\x7f" + "".join(map(chr, range(32))))
_RESERVED = frozenset({"", ".", "..", "zarr.json"})


def flat_names(paths: Iterable[Path]) -> dict[Path, str]:
    """Return dotted names, as ``state_dict()`` writes them: ``("model", "wte.weight")`` is ``model.wte.weight``."""
    return _different({path: ".".join(_clean(str(key)) for key in path) for path in paths})


def folder_names(paths: Iterable[Path]) -> dict[Path, str]:
    """Return names with one part for each key, separated by slashes; each part can be the name of a file."""
    return _different({path: "/".join(escape(str(key)) for key in path) or "%" for path in paths})


def escape(key: str) -> str:
    """Return a key as a part of a name: percent signs stand before the codes of what a part cannot hold."""
    text = "".join(_escaped(char) if char in _BAD or _is_lone(char) else char for char in key)
    if text in _RESERVED or text.startswith("__"):
        text = "%" + "".join(f"{ord(char):02X}" for char in text[:1]) + text[1:]
    if len(text.encode()) > MAX_BYTES:
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        text = f"{text.encode()[: MAX_BYTES - 20].decode(errors='ignore')}%{digest}"
    return text


def _clean(key: str) -> str:
    # JSON and ZIP files hold any Unicode text; a lone surrogate is none, and NUL ends names in C.
    return "".join(_escaped(char) if char == "\0" or _is_lone(char) else char for char in key)


def _escaped(char: str) -> str:
    return "".join(f"%{byte:02X}" for byte in char.encode("utf-8", "surrogatepass"))


def _is_lone(char: str) -> bool:
    return "\ud800" <= char <= "\udfff"


def _different(names: dict[Path, str]) -> dict[Path, str]:
    """Return the names, with a number behind those that are taken, or that are the folder of another."""
    folders = {name[:end] for name in names.values() for end, char in enumerate(name) if char == "/"}
    taken: set[str] = set(folders)
    different = {}
    for path, name in names.items():
        wanted, number = name, 1
        while wanted in taken:
            number += 1
            wanted = f"{name}~{number}"
        taken.add(wanted)
        different[path] = wanted
    return different
