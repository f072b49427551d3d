"""safetensors, both ways: one file, or several with ``model.safetensors.index.json``.

Written tensor by tensor, at the place that the header gives each; read from there, only what is asked for.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO

import numpy as np

from deltastore.dtypes import storage_dtype
from deltastore.errors import InvalidInput
from deltastore.formats.atomic_file import atomic_file, write_at
from deltastore.formats.atomic_folder import atomic_folder, tree_bytes
from deltastore.formats.contents import Contents
from deltastore.formats.leaves import FileTensor
from deltastore.formats.names import flat_names
from deltastore.formats.open_file import OpenFile
from deltastore.formats.plan import Ability, Item, Plan
from deltastore.formats.record import KEY, Found
from deltastore.formats.registry import Options, Progress
from deltastore.formats.safetensors_header import LONGEST, WRITTEN, Entry, encode_header, read_header
from deltastore.formats.shards import Index, find_index, read_index, shard_names, split, write_index
from deltastore.formats.tensor_format import TensorFormat

STEM, SUFFIX = "model", ".safetensors"
ABILITY = Ability("safetensors", WRITTEN, flat_names, is_nested=False)


def find(path: str) -> Found:
    """Return what is in a file, in a folder with an index, or in the files that an index names."""
    index_path = find_index(path, STEM, SUFFIX)
    if index_path is None:
        single = os.path.join(path, f"{STEM}{SUFFIX}") if os.path.isdir(path) else path
        tensors, metadata = _open(single)
        return Found(path, _with_aliases(tensors, metadata), metadata.get(KEY))
    index = read_index(index_path)
    by_file = {file: _open(place)[0] for file, place in index.files.items()}
    found = {}
    for name, file in index.names.items():
        if name not in by_file[file]:
            raise InvalidInput(f"{index_path}: it says that {name!r} is in {file}, which lacks it", path=index_path)
        found[name] = by_file[file][name]
    return Found(path, _with_aliases(found, index.metadata), index.metadata.get(KEY))


def _open(path: str) -> tuple[dict[str, FileTensor], Mapping[str, str]]:
    file = OpenFile(path)
    header = read_header(file)
    return {name: _tensor(file, name, entry, path) for name, entry in header.entries.items()}, header.metadata


def _tensor(file: OpenFile, name: str, entry: Entry, path: str) -> FileTensor:
    dtype = storage_dtype(entry.dtype)

    def read(index: Any) -> np.ndarray:
        low, high = (0, 1) if index is Ellipsis else index.indices(entry.shape[0])[:2]
        row = entry.end - entry.begin if index is Ellipsis else dtype.itemsize * math.prod(entry.shape[1:])
        raw = np.empty(row * max(0, high - low), np.uint8)
        file.read_into(entry.begin + low * row, raw.data)
        shape = entry.shape if index is Ellipsis else (max(0, high - low), *entry.shape[1:])
        return raw.view(dtype).reshape(shape)

    def fill(start: int, out: memoryview) -> None:
        file.read_into(entry.begin + start, out)

    return FileTensor(entry.dtype, entry.shape, read, (path, name), fill=fill)


def _with_aliases(tensors: dict[str, FileTensor], metadata: Mapping[str, str]) -> dict[str, FileTensor]:
    """Add the names that metadata give to tensors under other names, as the library's save_model does."""
    aliases = {name: kept for name, kept in metadata.items() if name not in tensors and kept in tensors}
    return tensors | {name: tensors[kept] for name, kept in aliases.items()}


def write(plan: Plan, contents: Contents, path: str, options: Options) -> int:
    """Write a file; a folder with an index where shards are asked for, or the path has no extension of a file."""
    metadata = {**plan.aliases, "format": "pt"} | ({} if plan.record is None else {KEY: plan.record})
    if options.shard_bytes is None and not os.path.isdir(path):
        done = _Counter(options.progress, plan.nbytes)
        with atomic_file(path) as file:
            return write_file(file, plan.items, metadata, plan, contents, done)
    with atomic_folder(path, _is_ours) as folder:
        write_shards(folder, metadata, plan, contents, options)
        return tree_bytes(folder)


def write_shards(
    folder: str, metadata: Mapping[str, str], plan: Plan, contents: Contents, options: Options, *, stem: str = STEM
) -> None:
    """Write the weights of a folder: one file, or several with an index."""
    done = _Counter(options.progress, plan.nbytes)
    shards = split(plan.items, options.shard_bytes)
    names = shard_names(stem, SUFFIX, len(shards))
    for name, items in zip(names, shards, strict=True):
        own = metadata if len(shards) == 1 else {"format": "pt"}
        with atomic_file(os.path.join(folder, name)) as file:
            write_file(file, items, own, plan, contents, done)
    if len(shards) > 1:
        where = {item.name: name for name, items in zip(names, shards, strict=True) for item in items}
        write_index(folder, stem, SUFFIX, Index(where, metadata, plan.nbytes))


def write_file(
    file: BinaryIO,
    items: Iterable[Item],
    metadata: Mapping[str, str],
    plan: Plan,
    contents: Contents,
    done: _Counter,
) -> int:
    """Write one file, and return its size."""
    items = list(items)
    header, offsets, size = encode_header(items, metadata)
    if len(header) > LONGEST:
        raise InvalidInput(f"the header would have {len(header):,} bytes, {LONGEST:,} are allowed: use hdf5 or zarr")
    file.truncate(size)
    write_at(file, 0, header)
    for item, array in plan.arrays(contents, items):
        write_at(file, offsets[item.name], array.reshape(-1).view(np.uint8).data)
        done.add(item.nbytes)
    return size


class _Counter:
    """Adds up what is written and tells it."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = 0

    def add(self, count: int) -> None:
        """Take note of so many more bytes."""
        self._done += count
        self._progress(self._done, self._total)


def _is_ours(folder: str) -> bool:
    return all(name.startswith(STEM) and name.endswith((SUFFIX, ".index.json")) for name in os.listdir(folder))


CONVERTER = TensorFormat(ABILITY, find, write)
