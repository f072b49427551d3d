"""Small values shared by every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

Key: TypeAlias = str | int
"""One step of a path. ``bool`` is refused though it is an ``int``."""

Path: TypeAlias = tuple[Key, ...]
"""The name of a leaf: the keys from the top of the state down to it."""

Json: TypeAlias = Any
"""A value that :mod:`json` reads and writes: None, bool, int, float, str, list, dict."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a layout says of one tensor, wherever its bytes lie."""

    path: Path
    dtype: str
    """Logical dtype, a name of :mod:`deltastore.dtypes`."""
    shape: tuple[int, ...]


def show_path(path: Path) -> str:
    """Return a path as it stands in error texts: ``model/wte.weight``, integer keys in brackets."""
    return "/".join(f"[{key}]" if isinstance(key, int) else key for key in path) or "(top)"
