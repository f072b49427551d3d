"""HDF5, both ways, with h5py: dicts are groups, tensors are datasets, aliases are hard links.

HDF5 has no bfloat16, float8 or half-precision complex: their bits are stored as unsigned integers, and the attribute
``logical_dtype`` names what they are. Links and storage outside of the file are refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import h5py
import numpy as np

from deltastore.dtypes import LOGICAL, NATIVE, from_numpy, storage_dtype
from deltastore.errors import Backend, Corruption, DeltaStoreError, InvalidInput, NotFound
from deltastore.formats.atomic_file import atomic_file
from deltastore.formats.contents import Contents
from deltastore.formats.leaves import FileTensor
from deltastore.formats.names import folder_names
from deltastore.formats.plan import Ability, Plan
from deltastore.formats.record import KEY, Found
from deltastore.formats.registry import Options
from deltastore.formats.tensor_format import TensorFormat

MARK = "logical_dtype"
MOST_DEPTH = 200
# A dataset, for an attribute has 64 KiB at most; no key of a state has this name, which begins with two underscores.
_RECORD = f"__{KEY}__"
ABILITY = Ability("hdf5", frozenset(NATIVE), folder_names, is_nested=True, has_aliases=True)


def find(path: str) -> Found:
    """Return what is in a file: the datasets of all groups."""
    try:
        with h5py.File(path, "r") as file:
            tensors = dict(_tensors(file, path, "", frozenset()))
            record = bytes(file[_RECORD][...]) if _RECORD in file else None
    except FileNotFoundError:
        raise NotFound(f"{path}: there is no such file", path=path) from None
    except DeltaStoreError:
        raise
    except (OSError, RuntimeError, KeyError, ValueError, TypeError) as error:
        raise _damaged(path, error) from error
    return Found(path, tensors, record)


def _tensors(group: h5py.Group, path: str, place: str, above: frozenset[Any]) -> Iterator[tuple[str, FileTensor]]:
    address = h5py.h5o.get_info(group.id).addr
    if address in above or len(above) > MOST_DEPTH:
        raise InvalidInput(f"{path}: the group {place or '/'} contains itself, or is nested too deep", path=path)
    for name in _in_order(group):
        if not place and name == _RECORD:
            continue
        inner = f"{place}/{name}" if place else name
        link = group.get(name, getlink=True)
        if not isinstance(link, h5py.HardLink):
            kind = type(link).__name__
            raise InvalidInput(
                f"{path}: {inner} is a link ({kind}) that may lead out of the file; it was not followed", path=path
            )
        found = group[name]
        if isinstance(found, h5py.Group):
            yield from _tensors(found, path, inner, above | {address})
        elif isinstance(found, h5py.Dataset):
            yield inner, _tensor(found, path, inner)


def _in_order(group: h5py.Group) -> list[str]:
    """Return the names in the order in which they were made, where the file knows it."""
    if group.id.get_create_plist().get_link_creation_order() & h5py.h5p.CRT_ORDER_INDEXED:
        names: list[bytes] = []
        group.id.links.iterate(names.append, idx_type=h5py.h5.INDEX_CRT_ORDER)
        return [name.decode() for name in names]
    return list(group)


def _tensor(dataset: h5py.Dataset, path: str, name: str) -> FileTensor:
    if dataset.external or dataset.is_virtual:
        raise InvalidInput(f"{path}: the elements of {name} are in other files; they were not read", path=path)
    if dataset.shape is None:
        raise InvalidInput(f"{path}: {name} is empty and has no shape: it is no tensor", path=path)
    try:
        logical = from_numpy(dataset.dtype)
    except InvalidInput:
        raise InvalidInput(
            f"{path}: {name} has the dtype {dataset.dtype}, which is no tensor; choose a part of the file with only=",
            path=path,
        ) from None
    mark = dataset.attrs.get(MARK)
    if mark is not None:
        if not isinstance(mark, str) or mark not in LOGICAL:
            raise Corruption(f"{path}: {name} has the unknown {MARK} {mark!r:.60}", path=path, where=path)
        if storage_dtype(mark).itemsize != dataset.dtype.itemsize and dataset.shape[-1:] != (2,):
            raise Corruption(f"{path}: {name} is {dataset.dtype}, which is not {mark}", path=path, where=path)
        is_pair = storage_dtype(mark).itemsize != dataset.dtype.itemsize
        logical, shape = mark, dataset.shape[:-1] if is_pair else dataset.shape
    else:
        shape = dataset.shape

    def read(index: Any) -> np.ndarray:
        try:
            with h5py.File(path, "r") as file:
                array = np.asarray(file[name][index])
        except (OSError, RuntimeError, KeyError) as error:
            raise _damaged(path, error) from error
        return array.astype(array.dtype.newbyteorder("="), copy=False)

    return FileTensor(logical, tuple(shape), read, (path, h5py.h5o.get_info(dataset.id).addr))


def write(plan: Plan, contents: Contents, path: str, options: Options) -> int:
    """Write a file, dataset by dataset."""
    done = 0
    with atomic_file(path) as target:
        with h5py.File(target, "w", libver=("v108", "latest"), track_order=True) as file:
            # All of them first: their order is that of the state, and not the one in which they are read.
            for item in plan.items:
                dtype = NATIVE.get(item.stored, storage_dtype(item.stored))
                group, name = _group_of(file, item.name)
                dataset = group.create_dataset(name, item.stored_shape, dtype, track_order=True)
                if item.stored != item.dtype:
                    dataset.attrs[MARK] = item.dtype
            for name, owner in plan.aliases.items():
                group, last = _group_of(file, name)
                group[last] = file[owner]
            if plan.record is not None:
                file.create_dataset(_RECORD, data=np.frombuffer(plan.record.encode(), np.uint8))
            for item, array in plan.arrays(contents):
                if array.size:
                    file[item.name].write_direct(array) if array.ndim else file[item.name].__setitem__((), array)
                done += item.nbytes
                options.progress(done, plan.nbytes)
        return target.seek(0, os.SEEK_END)


def _group_of(file: h5py.File, name: str) -> tuple[h5py.Group, str]:
    """Return the group of a dataset, made to remember the order of its members, and the name in it."""
    *groups, last = name.split("/")
    group = file
    for part in groups:
        group = group[part] if part in group else group.create_group(part, track_order=True)
    return group, last


def _damaged(path: str, error: BaseException) -> DeltaStoreError:
    number = getattr(error, "errno", None)
    if number:
        return Backend(f"{path}: {error}", errno=number, path=path)
    return Corruption(f"{path} is damaged or no HDF5 file: {error}", path=path, where=path)


CONVERTER = TensorFormat(ABILITY, find, write)
