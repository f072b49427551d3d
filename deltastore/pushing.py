"""`deltastore.push`: the commits of one place, given to another."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from typing import Any

from deltastore.errors import InvalidInput
from deltastore.history.flush import PACK_BYTES
from deltastore.history.push import Progress, PushReport
from deltastore.history.push import push as push_tier
from deltastore.urls import is_remote, open_tier


def push(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    pack_bytes: int = PACK_BYTES,
    progress: Progress | None = None,
) -> PushReport:
    """Give ``target`` all commits and tags of ``source`` that it lacks; each becomes a store that opens by itself.

    Many small commits become one file there. The source may be written meanwhile, from another process too. What
    arrived stays, whatever happens: call it again to go on, from anywhere, as often as you like.

    Parameters
    ----------
    source, target : str or path
        Places as :func:`deltastore.open` takes them: a folder to HDFS, or back.
    storage_options : dict, optional
        For those of the two that are remote.
    pack_bytes : int
        How large a file of several commits may become.
    progress : callable, optional
        Called with (commits done, commits in all).

    Returns
    -------
    PushReport

    Raises
    ------
    NotFound
        There is no store at ``source``.
    Conflict
        ``target`` holds another store.
    Backend
        A place cannot be reached, or it is full.
    """
    if type(pack_bytes) is not int or pack_bytes < 1:
        raise InvalidInput(f"pack_bytes is {pack_bytes!r}, expected an integer of 1 or more")
    here, there = (open_tier(url, storage_options if is_remote(url) else None) for url in (source, target))
    if here.url == there.url:
        raise InvalidInput(f"{here.url}: source and target are the same place")
    return push_tier(here, there, secrets.token_hex(8), pack_bytes=pack_bytes, progress=progress)
