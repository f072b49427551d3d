"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from typing import BinaryIO

from deltastore.errors import Backend, InvalidInput, NotFound


@contextlib.contextmanager
def atomic_file(path: str) -> Iterator[BinaryIO]:
    """Give a file to write; when the block ends without an error it is, synced, at the path.

    It is written beside its place, under a hidden name. After an error or a crash what was at the path is as it was; a
    crash may leave the hidden file, which nobody reads. The mode follows the umask; a symbolic link stays and the file
    that it points to is replaced.

    Raises
    ------
    NotFound
        The folder does not exist.
    InvalidInput
        The path is a folder.
    Backend
        The file system refused; ``errno`` says why.
    """
    target = os.path.realpath(path)
    folder, name = os.path.split(target)
    if os.path.isdir(target):
        raise InvalidInput(f"{path} is a folder; name the file in it", path=path)
    # Names have at most 255 bytes: what is added must fit.
    draft = os.path.join(folder, f".{os.fsdecode(os.fsencode(name)[:200])}.{secrets.token_hex(6)}.tmp")
    try:
        descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except FileNotFoundError:
        raise NotFound(f"{path}: the folder {folder} does not exist", path=path) from None
    except OSError as error:
        raise _refused(path, error) from error
    try:
        with os.fdopen(descriptor, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, target)
        sync_folder(folder)
    except OSError as error:
        raise _refused(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            os.unlink(draft)


def write_at(file: BinaryIO, offset: int, content: bytes | memoryview) -> None:
    """Write at a place of a file, all of it: a single call may write less than it was given."""
    left = memoryview(content)
    while left:
        count = os.pwrite(file.fileno(), left, offset)
        left, offset = left[count:], offset + count


def sync_folder(folder: str) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _refused(path: str, error: OSError) -> Exception:
    if isinstance(error, Backend):  # an error of ours, which is an OSError too
        return error
    return Backend(f"{path} was not written: {error.strerror or error}", errno=error.errno, path=path)
