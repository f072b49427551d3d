"""Converters between a stored state and the files of other tools; each module imports its own package.

Imported as ``deltastore.formats`` (``deltastore/formats`` is a link to this folder), never as ``formats``.

    deltastore.formats.save(store.at(1200)["model"], "model.safetensors")
    state = deltastore.formats.load("model.safetensors")

A converter is one module, and one line in :data:`FORMATS`; other packages add theirs through entry points of the group
``deltastore.formats``. It is imported when a file of its format is first read or written, so that nobody needs the
packages of the formats that are not used.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from deltastore.errors import InvalidInput
from deltastore.formats.registry import (
    FORMATS,
    Converter,
    Format,
    Options,
    Progress,
    by_content,
    by_suffix,
    known,
    known_formats,
    named,
)

if TYPE_CHECKING:
    from deltastore.formats.contents import Contents
    from deltastore.formats.loss import Loss

__all__ = [
    "FORMATS",
    "Converter",
    "Format",
    "Options",
    "Progress",
    "format_of",
    "held_bytes",
    "known_formats",
    "load",
    "losses",
    "open_contents",
    "save",
    "target_format",
]


def load(path: str | os.PathLike[str], format: str = "auto", *, lazy: bool = False) -> Any:
    """Return the nested state that a file or folder of another tool holds, on the CPU.

    No code that a file names is run. What deltastore wrote comes back as it was: types, order, aliases.

    Parameters
    ----------
    path : str or path
        The file or folder.
    format : str
        A name of :data:`FORMATS`; "auto" goes by the content, else by the extension.
    lazy : bool
        Leave the tensors in the file: each is read when it is indexed, as ``lazy[...]`` or ``lazy[10:20]``.

    Raises
    ------
    NotFound
        There is no such file.
    InvalidInput
        The format is unknown, or the file asks for code to be run.
    Corruption
        The file is damaged.
    MissingDependency
        The format needs a package that is not installed.
    """
    name = os.fspath(path)
    converter = format_of(name, format).converter
    return converter.open(name).state(lazy=True) if lazy else converter.load(name)


def open_contents(path: str | os.PathLike[str], format: str = "auto") -> Contents:
    """Return the contents of a file: its document, and tensors that are read when needed."""
    name = os.fspath(path)
    contents: Contents = format_of(name, format).converter.open(name)
    return contents


def held_bytes(path: str | os.PathLike[str], format: str = "auto") -> int:
    """Return about how many bytes of a file are in memory once it is open; 0 where its tensors stay where they are."""
    name = os.fspath(path)
    return format_of(name, format).converter.held_bytes(name)


def losses(state: Any, path: str | os.PathLike[str], format: str = "auto") -> tuple[Loss, ...]:
    """Return what a file at the path would not hold as the state does; nothing is read or written.

    Parameters
    ----------
    state, path, format
        As for :func:`save`.
    """
    converter = target_format(os.fspath(path), format).converter
    return tuple(converter.losses(state))


def save(
    state: Any,
    path: str | os.PathLike[str],
    format: str = "auto",
    *,
    strict: bool = False,
    shard_bytes: int | None = None,
    memory_bytes: int | None = None,
    progress: Progress | None = None,
) -> int:
    """Write a state as a file or folder of another tool, and return its size in bytes.

    It appears whole or not at all: it is written beside its place, synced, and renamed over what was there. After a
    failure what was there is as it was. What the format cannot hold (:func:`losses` lists it) is recorded in the file,
    so that :func:`load` restores it.

    Parameters
    ----------
    state
        A nested state, a :class:`deltastore.State` (read tensor by tensor), or what `load(lazy=True)` gave.
    path : str or path
        The file or folder; an existing one of the same format is replaced.
    format : str
        A name of :data:`FORMATS`; "auto" goes by the extension.
    strict : bool
        Refuse to write what the format cannot hold by itself.
    shard_bytes : int, optional
        Split into files of at most so many bytes; for safetensors, torch and huggingface.
    memory_bytes : int, optional
        Refuse, before anything is read, what would take more memory than this.
    progress : callable, optional
        Called with (bytes done, bytes in all).

    Raises
    ------
    InvalidInput
        The format is unknown, or cannot hold a value of the state, or `strict` refuses.
    Backend
        The file cannot be written.
    """
    name = os.fspath(path)
    entry = target_format(name, format)
    converter = entry.converter
    options = Options(shard_bytes) if progress is None else Options(shard_bytes, progress)
    if strict:
        importlib.import_module("deltastore.formats.loss").refuse_losses(converter.losses(state), name)
    if memory_bytes is not None and (needed := converter.needed_bytes(state, options)) > memory_bytes:
        raise InvalidInput(
            f"{name}: writing {entry.name} takes about {needed:,} bytes of memory for this state, {memory_bytes:,} are "
            "allowed; allow more, or choose a format that is written tensor by tensor, such as safetensors",
            expected=memory_bytes,
            found=needed,
            path=name,
        )
    return converter.save(state, name, options)


def format_of(path: str, format: str = "auto") -> Format:
    """Return the format of what is at a path: as it is named, else by its content, else by its extension."""
    if format != "auto":
        return named(format)
    found = by_content(path) or by_suffix(path)
    if found is None:
        what = "the folder holds no checkpoint that is known" if os.path.isdir(path) else "its content names no format"
        raise InvalidInput(f"{path}: {what}, nor does its extension; {known()}", path=path)
    return found


def target_format(path: str, format: str = "auto") -> Format:
    """Return the format of what is going to be written."""
    found = named(format) if format != "auto" else by_suffix(path)
    if found is None:
        raise InvalidInput(f"{path}: the extension names no format; {known()}", path=path)
    return found
