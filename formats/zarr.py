"""Plain Zarr v3, both ways: a group for each dict, one N-dimensional array for each tensor, without compression.

Any Zarr tool opens it. Zarr has no bfloat16, float8 or half-precision complex: their bits are stored as unsigned
integers, and the attribute ``logical_dtype`` names what they are.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import zarr

from deltastore.dtypes import LOGICAL, NATIVE, from_numpy, storage_dtype
from deltastore.errors import Corruption, InvalidInput, NotFound
from deltastore.formats.atomic_folder import atomic_folder, tree_bytes
from deltastore.formats.contents import Contents
from deltastore.formats.leaves import FileTensor
from deltastore.formats.names import folder_names
from deltastore.formats.plan import Ability, Item, Plan
from deltastore.formats.record import KEY, Found
from deltastore.formats.registry import Options
from deltastore.formats.tensor_format import TensorFormat

MARK = "logical_dtype"
CHUNK_BYTES = 16 << 20
MOST_DEPTH = 200
# A folder lists its names in no order: what a plain read gives is sorted.
ABILITY = Ability("zarr", frozenset(NATIVE), folder_names, is_nested=True, keeps_order=False)


def find(path: str) -> Found:
    """Return what is in a folder: the arrays of all groups."""
    top = _metadata(path, path)
    if top.get("node_type") != "group":
        raise InvalidInput(f"{path} is a single Zarr array, not a group of them", path=path)
    attributes = top.get("attributes")
    record = attributes.get(KEY) if isinstance(attributes, dict) else None
    return Found(path, dict(sorted(_tensors(path, path, ""))), record if isinstance(record, str) else None)


def _metadata(folder: str, path: str) -> dict[str, Any]:
    try:
        with open(os.path.join(folder, "zarr.json"), "rb") as file:
            document = json.load(file)
    except FileNotFoundError:
        raise NotFound(f"{path}: there is no zarr.json in {folder}", path=path) from None
    except (ValueError, RecursionError) as error:
        raise Corruption(f"{folder}/zarr.json is no JSON: {str(error)[:200]}", path=path, where=folder) from None
    if not isinstance(document, dict) or document.get("zarr_format") != 3:
        raise Corruption(f"{folder}/zarr.json is not of Zarr version 3", path=path, where=folder)
    return document


def _tensors(folder: str, path: str, place: str) -> Iterator[tuple[str, FileTensor]]:
    if place.count("/") > MOST_DEPTH:
        raise InvalidInput(f"{path}: {place[:200]} is nested too deep", path=path)
    with os.scandir(folder) as entries:
        children = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    for name in children:
        inner, child = f"{place}/{name}" if place else name, os.path.join(folder, name)
        if not os.path.lexists(os.path.join(child, "zarr.json")):
            continue
        document = _metadata(child, path)
        if document.get("node_type") == "array":
            yield inner, _tensor(child, path, inner)
        else:
            yield from _tensors(child, path, inner)


def _tensor(folder: str, path: str, name: str) -> FileTensor:
    try:
        array = zarr.open_array(folder, mode="r", zarr_format=3)
        logical, shape = from_numpy(array.dtype), array.shape
        mark = array.attrs.get(MARK)
    except InvalidInput as error:
        raise InvalidInput(f"{path}: {name}: {error.message}", path=path) from None
    except Exception as error:  # whatever zarr trips over: its metadata are untrusted
        raise Corruption(f"{path}: {name} is no array that zarr can open: {error}", path=path, where=folder) from error
    if mark is not None:
        if not isinstance(mark, str) or mark not in LOGICAL:
            raise Corruption(f"{path}: {name} has the unknown {MARK} {mark!r:.60}", path=path, where=folder)
        if storage_dtype(mark).itemsize != array.dtype.itemsize:
            if shape[-1:] != (2,):
                raise Corruption(f"{path}: {name} is {array.dtype}, which is not {mark}", path=path, where=folder)
            shape = shape[:-1]
        logical = mark

    def read(index: Any) -> np.ndarray:
        try:
            elements = np.asarray(zarr.open_array(folder, mode="r", zarr_format=3)[index])
        except Exception as error:  # whatever zarr and its codecs trip over
            raise Corruption(f"{path}: {name} is damaged: {error}", path=path, where=folder) from error
        return elements.astype(elements.dtype.newbyteorder("="), copy=False)

    return FileTensor(logical, tuple(shape), read, (path, name))


def write(plan: Plan, contents: Contents, path: str, options: Options) -> int:
    """Write a folder, array by array."""
    done = 0
    with atomic_folder(path, _is_ours) as folder:
        attributes: dict[str, Any] = {} if plan.record is None else {KEY: plan.record}
        top = zarr.open_group(folder, mode="w", zarr_format=3, attributes=attributes)
        for item, elements in plan.arrays(contents):
            array = top.create_array(
                item.name,
                shape=item.stored_shape,
                dtype=NATIVE.get(item.stored, storage_dtype(item.stored)),
                chunks=_chunks(item),
                compressors=None,
                attributes={} if item.stored == item.dtype else {MARK: item.dtype},
                # A chunk of -0.0 equals the fill value and is not the same bits.
                config={"write_empty_chunks": True},
            )
            if elements.size:
                array[...] = elements
            done += item.nbytes
            options.progress(done, plan.nbytes)
        return tree_bytes(folder)


def _chunks(item: Item) -> tuple[int, ...]:
    """Return chunks of whole rows, of about CHUNK_BYTES."""
    shape = item.stored_shape
    if not shape:
        return ()
    row = max(1, math.prod(shape[1:]) * storage_dtype(item.stored).itemsize)
    return (max(1, min(shape[0], CHUNK_BYTES // row)), *(max(1, size) for size in shape[1:]))


def _is_ours(folder: str) -> bool:
    return os.path.exists(os.path.join(folder, "zarr.json"))


CONVERTER = TensorFormat(ABILITY, find, write)
