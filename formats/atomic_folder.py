"""Folders that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator

from deltastore.errors import Backend, DeltaStoreError, InvalidInput, NotFound
from deltastore.formats.atomic_file import sync_folder


@contextlib.contextmanager
def atomic_folder(path: str, is_ours: Callable[[str], bool]) -> Iterator[str]:
    """Give a folder to fill; when the block ends without an error it is, synced, at the path.

    It is filled beside its place, under a hidden name. A crash may leave the hidden folder, which nobody reads; between
    two renames, while an older folder makes room, it may leave nothing at the path.

    Parameters
    ----------
    path : str
        Where the folder is going to be.
    is_ours : callable
        Whether an existing folder, that is not empty, may be replaced.

    Raises
    ------
    InvalidInput
        Something else is at the path.
    NotFound
        The folder above does not exist.
    Backend
        The file system refused; ``errno`` says why.
    """
    target = os.path.realpath(path)
    above, name = os.path.split(target)
    if os.path.lexists(target) and not (os.path.isdir(target) and (not os.listdir(target) or is_ours(target))):
        raise InvalidInput(f"{path} exists and is no checkpoint of this format: it is not replaced; name another place")
    if not os.path.isdir(above):
        raise NotFound(f"{path}: the folder {above} does not exist", path=path)
    mark = f".{os.fsdecode(os.fsencode(name)[:200])}.{secrets.token_hex(6)}"
    draft, old = os.path.join(above, f"{mark}.tmp"), os.path.join(above, f"{mark}.old")
    try:
        os.mkdir(draft)
        yield draft
        sync_tree(draft)
        if os.path.isdir(target):
            os.rename(target, old)
        os.rename(draft, target)
        sync_folder(above)
    except DeltaStoreError:
        raise
    except OSError as error:
        raise Backend(f"{path} was not written: {error.strerror or error}", errno=error.errno, path=path) from error
    finally:
        if os.path.isdir(old) and not os.path.isdir(target):
            os.rename(old, target)
        shutil.rmtree(draft, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def sync_tree(folder: str) -> int:
    """Make all files below a folder durable, and return their bytes."""
    total = 0
    for place, _folders, names in os.walk(folder):
        for name in names:
            descriptor = os.open(os.path.join(place, name), os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
                total += os.fstat(descriptor).st_size
            finally:
                os.close(descriptor)
        sync_folder(place)
    return total


def tree_bytes(folder: str) -> int:
    """Return the bytes of all files below a folder."""
    return sum(os.path.getsize(os.path.join(place, name)) for place, _, names in os.walk(folder) for name in names)


def inside(folder: str, name: str) -> str:
    """Return the path of a file that an index in a folder names.

    Raises
    ------
    InvalidInput
        The name is no plain file name, so that it may lead out of the folder.
    """
    if os.path.basename(name) != name or name in ("", ".", "..") or "\0" in name:
        raise InvalidInput(
            f"{folder}: its index names the file {name!r}, which is not in the folder: nothing of it was read",
            path=folder,
            found=name,
        )
    return os.path.join(folder, name)
