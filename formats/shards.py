"""Checkpoints in several files, with an index that says which tensor is in which (``model.safetensors.index.json``)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from deltastore.errors import Backend, Corruption, NotFound
from deltastore.formats.atomic_file import atomic_file
from deltastore.formats.atomic_folder import inside

LONGEST = 200_000_000
"""Bytes that an index may have."""


class Sized(Protocol):
    """Something that goes into one of the files."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""


S = TypeVar("S", bound=Sized)


@dataclass(frozen=True)
class Index:
    """Which tensor is in which file."""

    names: Mapping[str, str]
    """Name of a tensor -> name of the file."""
    metadata: Mapping[str, str]
    total_bytes: int = 0
    files: Mapping[str, str] = field(default_factory=dict)
    """Name of a file -> its path, checked to be in the folder of the index."""


def find_index(path: str, stem: str, suffix: str) -> str | None:
    """Return the path of the index that a path is, or that is in a folder, None where there is none."""
    if not os.path.isdir(path):
        return path if path.endswith(f"{suffix}.index.json") else None
    inner = os.path.join(path, f"{stem}{suffix}.index.json")
    return inner if os.path.exists(inner) else None


def read_index(path: str) -> Index:
    """Return an index; the files that it names are in its folder.

    Raises
    ------
    Corruption
        It is no index.
    InvalidInput
        It names a file outside of its folder.
    """
    try:
        with open(path, "rb") as file:
            text = file.read(LONGEST + 1)
    except FileNotFoundError:
        raise NotFound(f"{path}: there is no such file", path=path) from None
    except OSError as error:
        raise Backend(f"{path}: {error.strerror}", errno=error.errno, path=path) from error
    try:
        document = json.loads(text) if len(text) <= LONGEST else None
    except (ValueError, RecursionError):
        document = None
    document = document if isinstance(document, dict) else {}
    names = document.get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise Corruption(f"{path} is damaged or no index: expected JSON with a weight_map of file names", where=path)
    metadata = document.get("metadata")
    folder = os.path.dirname(path) or "."
    files = {name: inside(folder, name) for name in dict.fromkeys(names.values())}
    missing = [name for name, place in files.items() if not os.path.exists(place)]
    if missing:
        raise NotFound(f"{path}: the file {missing[0]} that it names is not there ({len(missing)} missing)", path=path)
    texts = metadata if isinstance(metadata, dict) else {}
    return Index(names, {key: value for key, value in texts.items() if isinstance(value, str)}, files=files)


def write_index(folder: str, stem: str, suffix: str, index: Index) -> None:
    """Write the index of a folder."""
    metadata = {"total_size": index.total_bytes, **index.metadata}
    document = {"metadata": metadata, "weight_map": index.names}
    with atomic_file(os.path.join(folder, f"{stem}{suffix}.index.json")) as file:
        file.write(json.dumps(document, indent=2).encode() + b"\n")


def split(items: Iterable[S], most_bytes: int | None) -> list[list[S]]:
    """Return items in groups of at most so many bytes, in order; one that is larger has a group of its own."""
    groups: list[list[S]] = [[]]
    room = most_bytes
    for item in items:
        if most_bytes is not None and room is not None:
            if groups[-1] and item.nbytes > room:
                groups.append([])
                room = most_bytes
            room -= item.nbytes
        groups[-1].append(item)
    return groups


def shard_names(stem: str, suffix: str, count: int) -> Sequence[str]:
    """Return the names of so many files, as the Hugging Face Hub has them."""
    if count == 1:
        return [f"{stem}{suffix}"]
    return [f"{stem}-{number:05d}-of-{count:05d}{suffix}" for number in range(1, count + 1)]
