"""How each kind of fsspec file system keeps the first of two files of one name.

fsspec itself promises no such thing: its ``mv`` replaces on most systems, and ``mode="create"`` is a look and then a
write on many. What is not named here can be read, not written.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

Publisher: TypeAlias = Callable[[Any, str, str, str], None]
"""Puts a local file at a path, whole, or raises FileExistsError; may use a folder for what is not yet whole."""

_memory_guard = threading.Lock()


def _put_if_absent(system: Any, local: str, path: str, _scratch: str) -> None:
    """Upload with a condition that the object store itself checks."""
    system.put_file(local, path, mode="create")


def _put_in_memory(system: Any, local: str, path: str, _scratch: str) -> None:
    with _memory_guard:
        system.put_file(local, path, mode="create")


def _link(_system: Any, local: str, path: str, scratch: str) -> None:
    """Copy, sync and link, for fsspec's own ``mv`` replaces."""
    temporary = f"{scratch}/{secrets.token_hex(8)}"
    for folder in (scratch, os.path.dirname(path)):
        os.makedirs(folder, exist_ok=True)
    try:
        shutil.copyfile(local, temporary)
        _sync(temporary)
        os.link(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
    _sync(os.path.dirname(path))


def _sync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


PUBLISHERS: Mapping[str, Publisher] = {
    "s3": _put_if_absent,
    "gs": _put_if_absent,
    "memory": _put_in_memory,
    "file": _link,
}
"""By the name that fsspec gives to a kind of place."""
