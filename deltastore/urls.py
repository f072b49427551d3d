"""Which tier a URL names."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

from deltastore.errors import InvalidInput
from deltastore.tiers.base import Tier
from deltastore.tiers.local import LocalTier
from deltastore.tiers.memory import MemoryTier


def open_tier(url: str | os.PathLike[str]) -> Tier:
    """Return the tier that a folder or URL names.

    Raises
    ------
    InvalidInput
        A scheme that this version does not know.
    """
    if not isinstance(url, str | os.PathLike):
        raise InvalidInput(f"{url!r} is no URL: give a folder, or memory://name", url=repr(url))
    text = os.fspath(url)
    if not text:
        raise InvalidInput("an empty URL: give a folder, or memory://name", url=text)
    if "://" not in text:
        return LocalTier(Path(text).expanduser().absolute())
    parts = urlsplit(text)
    if parts.query or parts.fragment:
        raise InvalidInput(f"{text}: write ? and # in a URL as %3F and %23", url=text)
    if parts.scheme == "memory":
        return MemoryTier((parts.netloc + parts.path) or "default")
    if parts.scheme == "file" and parts.netloc not in ("", "localhost"):
        raise InvalidInput(
            f"{text}: {parts.netloc!r} would be a host; a file URL has three slashes: file:///folder", url=text
        )
    if parts.scheme == "file":
        return LocalTier(Path(unquote(parts.path)))
    raise InvalidInput(
        f"{text}: this version stores in a folder, file:// or memory://; remote tiers are not part of it",
        url=text,
    )
