"""Which formats there are, and which of them a path has: known by what is in a file, then by its extension."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import struct
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import entry_points
from typing import Any, Protocol, cast

from deltastore.errors import Backend, InvalidInput, MissingDependency, NotFound

log = logging.getLogger("deltastore")

GROUP = "deltastore.formats"
"""The group of entry points through which other packages register formats: each names a :class:`Format`."""

_MAGIC_BYTES = 64
_LONGEST_HEADER = 100_000_000
_LEGACY_TORCH = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."


class Progress(Protocol):
    """Is told how far a conversion is."""

    def __call__(self, done_bytes: int, total_bytes: int, /) -> object:
        """Take note."""


@dataclass(frozen=True, slots=True)
class Options:
    """How a file is written."""

    shard_bytes: int | None = None
    """Split into several files of at most so many bytes, where the format can."""
    progress: Progress = lambda _done, _total: None


class Converter(Protocol):
    """Converts the files of one format."""

    def load(self, path: str) -> Any:
        """Return the nested state that a file holds."""

    def open(self, path: str) -> Any:
        """Return the :class:`~deltastore.formats.contents.Contents` of a file; its tensors are read when needed."""

    def held_bytes(self, path: str) -> int:
        """Return about how many bytes :meth:`open` holds in memory; 0 where the tensors stay in the file."""

    def losses(self, state: Any) -> Sequence[Any]:
        """Return what a file would not hold of a state, each a :class:`~deltastore.formats.loss.Loss`."""

    def save(self, state: Any, path: str, options: Options) -> int:
        """Write a state or contents as a file, atomically, and return its size in bytes."""

    def needed_bytes(self, state: Any, options: Options) -> int:
        """Return about how much memory writing a state takes beside the state itself."""


class Probe:
    """What a path looks like; nothing is read that was not asked for."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.is_folder = os.path.isdir(path)

    @cached_property
    def begin(self) -> bytes:
        """How the file begins."""
        if self.is_folder:
            return b""
        try:
            with open(self.path, "rb") as file:
                return file.read(_MAGIC_BYTES)
        except FileNotFoundError:
            raise NotFound(f"{self.path}: there is no such file", path=self.path) from None
        except OSError as error:
            raise Backend(f"{self.path}: {error.strerror}", errno=error.errno, path=self.path) from error

    @cached_property
    def names(self) -> frozenset[str]:
        """What is in the folder, or in the ZIP file without its top folder."""
        if self.is_folder:
            return frozenset(os.listdir(self.path))
        if self.begin.startswith(b"PK\x03\x04"):
            # Whatever is wrong with it, the converter tells.
            with contextlib.suppress(Exception), zipfile.ZipFile(self.path) as archive:
                return frozenset(name.rpartition("/")[2] for name in archive.namelist())
        return frozenset()

    def has(self, *names: str) -> bool:
        """Return whether one of the names is there."""
        return not self.names.isdisjoint(names)


@dataclass(frozen=True, slots=True)
class Format:
    """How the files of a format are known, and who converts them."""

    name: str
    module: str
    """The module whose ``CONVERTER`` is a :class:`Converter`; imported when it is first needed."""
    suffixes: tuple[str, ...]
    matches: Callable[[Probe], bool]
    """Whether what is at a path is of this format, by its content."""
    extra: str = ""
    """The extra that installs what the module needs."""

    @property
    def converter(self) -> Converter:
        """The converter.

        Raises
        ------
        MissingDependency
            A package that it needs is not installed.
        """
        try:
            return cast(Converter, importlib.import_module(self.module).CONVERTER)
        except ModuleNotFoundError as error:
            command = (
                f"pip install 'deltastore-checkpoint[{self.extra}]'" if self.extra else f"pip install {error.name}"
            )
            raise MissingDependency(
                f"format {self.name!r} needs the package {error.name!r}, which is not installed; {command}",
                package=error.name,
            ) from None


_ADAPTER = ("adapter_model.safetensors", "adapter_model.bin")
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


def _is_safetensors(probe: Probe) -> bool:
    if probe.is_folder:
        return probe.has("model.safetensors.index.json", "model.safetensors")
    if len(probe.begin) < 10:
        return False
    (length,) = struct.unpack("<Q", probe.begin[:8])
    is_index = probe.path.endswith(".safetensors.index.json")
    return is_index or (length <= _LONGEST_HEADER and probe.begin[8:9] == b"{")


def _is_torch(probe: Probe) -> bool:
    if probe.is_folder:
        return probe.has("pytorch_model.bin.index.json", "pytorch_model.bin")
    if probe.begin.startswith(b"PK\x03\x04"):
        return probe.has("data.pkl") or not any(name.endswith(".npy") for name in probe.names)
    return probe.begin.startswith(_LEGACY_TORCH) or probe.path.endswith(".bin.index.json")


# The first that matches counts: a Hugging Face folder is one of safetensors as well.
FORMATS = (
    Format(
        "huggingface",
        "deltastore.formats.huggingface",
        (),
        lambda probe: (
            probe.is_folder
            and (
                (probe.has("config.json") and probe.has(*_WEIGHTS))
                or (probe.has("adapter_config.json") and probe.has(*_ADAPTER))
            )
        ),
    ),
    Format("torch", "deltastore.formats.torch_file", (".pt", ".pth", ".bin", ".ckpt"), _is_torch),
    Format("safetensors", "deltastore.formats.safetensors", (".safetensors",), _is_safetensors),
    Format(
        "hdf5",
        "deltastore.formats.hdf5",
        (".h5", ".hdf5"),
        lambda probe: probe.begin.startswith(b"\x89HDF\r\n\x1a\n"),
        extra="hdf5",
    ),
    Format(
        "numpy",
        "deltastore.formats.npz",
        (".npz",),
        lambda probe: not probe.is_folder and any(name.endswith(".npy") for name in probe.names),
    ),
    Format("zarr", "deltastore.formats.zarr", (".zarr",), lambda probe: probe.is_folder and probe.has("zarr.json")),
    Format("dcp", "deltastore.formats.dcp", (".dcp",), lambda probe: probe.is_folder and probe.has(".metadata")),
)
"""Every format that this version brings."""


@cache
def known_formats() -> tuple[Format, ...]:
    """Return every format: those of this version, and those that other packages registered."""
    found = list(FORMATS)
    for point in entry_points(group=GROUP):
        try:
            entry = point.load()
        except Exception as error:  # a broken package must not take the other formats with it
            log.warning("format %r of another package cannot be used: %s", point.name, error)
            continue
        if isinstance(entry, Format) and all(entry.name != known.name for known in found):
            found.append(entry)
        else:
            log.warning("the entry point %r names no format of a new name: left out", point.name)
    return tuple(found)


def named(name: str) -> Format:
    """Return the format of a name."""
    found = next((entry for entry in known_formats() if entry.name == name), None)
    if found is None:
        raise InvalidInput(f"format {name!r} is unknown; {known()}", format=name)
    return found


def by_suffix(path: str) -> Format | None:
    """Return the format whose extension a path has; the longest extension decides."""
    text = os.path.basename(path.rstrip("/")).lower()
    fitting = [(len(suffix), entry) for entry in known_formats() for suffix in entry.suffixes if text.endswith(suffix)]
    return max(fitting, key=lambda pair: pair[0])[1] if fitting else None


def by_content(path: str) -> Format | None:
    """Return the format of what is at a path.

    Raises
    ------
    NotFound
        There is nothing.
    """
    if not os.path.exists(path):
        raise NotFound(f"{path}: there is no such file", path=path)
    probe = Probe(path)
    return next((entry for entry in known_formats() if entry.matches(probe)), None)


def known() -> str:
    """Return the names and extensions of the formats, for an error text."""
    names = (f"{entry.name!r} ({' '.join(entry.suffixes) or 'a folder'})" for entry in known_formats())
    return f"known are {', '.join(names)}; give one as format="
