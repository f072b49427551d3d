"""Converters between a stored state and the files of other tools; each module imports its own package.

Imported as ``deltastore.formats`` (``deltastore/formats`` is a link to this folder), never as ``formats``.

    deltastore.formats.save(store.at(1200)["model"], "model.pt")
    state = deltastore.formats.load("model.pt")

A converter is a module with ``load(path) -> state`` and ``save(state, path) -> bytes written``, and one line in
:data:`FORMATS`. It is imported when a file of its format is first read or written, so that nobody needs the packages of
the formats that are not used.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from typing import Any, Protocol, cast

from deltastore.errors import Backend, InvalidInput, NotFound
from deltastore.reader import LazyTensor, State

_MAGIC_BYTES = 64
"""How much of a file is read to tell its format."""


@dataclass(frozen=True, slots=True)
class Format:
    """How the files of a format are known, and who converts them."""

    name: str
    module: str
    suffixes: tuple[str, ...]
    magics: tuple[bytes, ...]
    """What the files begin with."""


class Converter(Protocol):
    """What the module of a format offers."""

    def load(self, path: str) -> Any:
        """Return the nested state that a file holds."""

    def save(self, state: Any, path: str) -> int:
        """Write a file atomically and return its size in bytes."""


FORMATS = (
    Format(
        name="torch",
        module="deltastore.formats.torch_file",
        suffixes=(".pt", ".pth", ".bin", ".ckpt"),
        # A ZIP, or the pickled magic number with which torch.save began its files before version 1.6.
        magics=(b"PK\x03\x04", b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."),
    ),
)
"""Every format that this version converts."""


def load(path: str | os.PathLike[str], format: str = "auto") -> Any:
    """Return the nested state that a file of another tool holds, on the CPU.

    No code that a file names is run. Tensors of large files may stay on disk until they are used.

    Parameters
    ----------
    path : str or path
        The file.
    format : str
        A name of :data:`FORMATS`; "auto" goes by the file's extension, else by how it begins.

    Raises
    ------
    NotFound
        There is no such file.
    InvalidInput
        The format is unknown, or the file asks for code to be run.
    Corruption
        The file is damaged.
    """
    name = os.fspath(path)
    chosen = _named(format) if format != "auto" else _by_suffix(name) or _by_content(name)
    return _converter(chosen).load(name)


def save(state: Any, path: str | os.PathLike[str], format: str = "auto") -> int:
    """Write a state as a file of another tool, and return the file's size in bytes.

    The file appears whole or not at all: it is written beside its place, synced, and renamed over what was there. After
    a failure the old file is as it was.

    Parameters
    ----------
    state
        A nested state, or a :class:`deltastore.State` or :class:`deltastore.LazyTensor`, which is read as a whole.
    path : str or path
        The file; an existing one is replaced.
    format : str
        A name of :data:`FORMATS`; "auto" goes by the file's extension.

    Raises
    ------
    InvalidInput
        The format is unknown, or cannot hold a value of the state.
    Backend
        The file cannot be written.
    """
    name = os.fspath(path)
    chosen = _named(format) if format != "auto" else _by_suffix(name)
    if chosen is None:
        raise InvalidInput(f"{name}: the extension names no format; {_known()}", path=name)
    if isinstance(state, State):
        state = state.to_state_dict()
    elif isinstance(state, LazyTensor):
        state = state[...]
    return _converter(chosen).save(state, name)


def _named(name: str) -> Format:
    found = next((entry for entry in FORMATS if entry.name == name), None)
    if found is None:
        raise InvalidInput(f"format {name!r} is unknown; {_known()}", format=name)
    return found


def _by_suffix(path: str) -> Format | None:
    suffix = os.path.splitext(path)[1].lower()
    return next((entry for entry in FORMATS if suffix in entry.suffixes), None)


def _by_content(path: str) -> Format:
    try:
        with open(path, "rb") as file:
            begin = file.read(_MAGIC_BYTES)
    except FileNotFoundError:
        raise NotFound(f"{path}: there is no such file", path=path) from None
    except OSError as error:
        raise Backend(f"{path}: {error.strerror}", errno=error.errno, path=path) from error
    found = next((entry for entry in FORMATS if begin.startswith(entry.magics)), None)
    if found is None:
        raise InvalidInput(f"{path}: neither its extension nor its content names a format; {_known()}", path=path)
    return found


def _known() -> str:
    known = (f"{entry.name!r} ({' '.join(entry.suffixes)})" for entry in FORMATS)
    return f"known are {', '.join(known)}; give one as format="


def _converter(entry: Format) -> Converter:
    return cast(Converter, importlib.import_module(entry.module))
