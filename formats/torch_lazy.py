"""Torch files whose tensors stay in the file: the pickle is read with storages that have a place instead of memory.

Of the ZIP form torch itself tells the place of each storage, where tensors are asked for on the device "meta". The
older form, which is pickles with the storages one after the other behind them, is walked here.
"""

from __future__ import annotations

import os
import struct
import sys
import warnings
import zipfile
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import _weights_only_unpickler as weights_only

from deltastore.errors import DeltaStoreError
from deltastore.formats.contents import Contents
from deltastore.formats.leaves import FileTensor, LeafBridge
from deltastore.formats.numpy_globals import numpy_allowed
from deltastore.formats.open_file import OpenFile
from deltastore.formats.torch_stream import storage_places
from deltastore.torch_bridge import TORCH
from deltastore.tree import Encoded, TensorLeaf, flatten

_BYTE_ORDER = "byteorder"
_COUNT = struct.Struct("<q")
# torch does not say what they take.
_untyped: Any = torch.UntypedStorage
_typed: Any = torch.storage.TypedStorage


_Sizes = dict[int, int]
"""Bytes of the storages by their places in the file."""


class _Elsewhere(Exception):
    """Why the tensors cannot stay in the file."""


def open_lazily(path: str) -> Contents | None:
    """Return the contents of a file; None where its tensors must be read to know what it holds, or it cannot be read.

    Loading the whole file then says what is wrong with it. The elements are not checked.
    """
    try:
        with open(path, "rb") as file, warnings.catch_warnings(), numpy_allowed():
            warnings.simplefilter("ignore")
            is_zip = zipfile.is_zipfile(file)
            file.seek(0)
            state, sizes = _load_zip(file) if is_zip else _load_legacy(file)
            flat = flatten(state, _PlacedBridge(OpenFile(path), sizes))
    except DeltaStoreError:
        return None
    except Exception:  # whatever a parser trips over; quantized and sparse tensors have no form on "meta"
        return None
    return Contents(flat.document, dict(flat.tensors))


def _load_zip(file: BinaryIO) -> tuple[Any, _Sizes]:
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        orders = [archive.read(entry) for entry in entries if entry.filename.rpartition("/")[2] == _BYTE_ORDER]
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise _Elsewhere("compressed")
    if any(order.decode() != sys.byteorder for order in orders):
        raise _Elsewhere("the bytes of the elements have another order")
    sizes = dict(storage_places(file).values())
    file.seek(0)
    return torch.load(file, map_location="meta", weights_only=True), sizes


def _load_legacy(file: BinaryIO) -> tuple[Any, _Sizes]:
    for expected in (torch.serialization.MAGIC_NUMBER, torch.serialization.PROTOCOL_VERSION):
        if _unpickler(file).load() != expected:
            raise _Elsewhere("no torch file")
    _unpickler(file).load()  # what the system was that wrote it
    storages: dict[str, Any] = {}

    def stored(saved: Any) -> Any:
        _kind, storage_type, key, _location, count, view = saved
        if view is not None:
            raise _Elsewhere("a storage that is part of another")
        dtype: torch.dtype = storage_type.dtype
        if key not in storages:
            storages[key] = _untyped(count * dtype.itemsize, device="meta")
        return _typed(wrap_storage=storages[key], dtype=dtype, _internal=True)

    unpickler = _unpickler(file)
    unpickler.persistent_load = stored
    state = unpickler.load()
    keys = _unpickler(file).load()
    place, end = file.tell(), os.fstat(file.fileno()).st_size
    sizes = {}
    for key in keys:
        place += _COUNT.size  # of its elements, whatever they are
        storages[key]._checkpoint_offset = place
        sizes[place] = storages[key].nbytes()
        place += sizes[place]
    if place != end or len(keys) != len(storages):
        raise _Elsewhere("the storages are not those of the pickle")
    return state, sizes


def _unpickler(file: BinaryIO) -> Any:
    return weights_only.Unpickler(file, encoding="utf-8")


class _PlacedBridge(LeafBridge):
    """Takes tensors without elements for what is at their place in a file."""

    def __init__(self, file: OpenFile, sizes: _Sizes) -> None:
        super().__init__()
        self._file = file
        self._sizes = sizes

    def encode(self, value: Any) -> Encoded | None:
        """Return what to store for an object of torch, None for anything else."""
        if isinstance(value, torch.Tensor):
            storage: Any = value.untyped_storage()
            place = storage._checkpoint_offset
            if storage.nbytes() > self._sizes.get(place, -1):
                raise _Elsewhere("the pickle promises more than the file has")
            return TensorLeaf(_placed(self._file, place, value.detach()))
        return super().encode(value)


def _placed(file: OpenFile, place: int, tensor: torch.Tensor) -> FileTensor:
    about = TORCH.describe(tensor)
    itemsize, offset = tensor.itemsize, int(tensor.storage_offset())
    is_plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()

    def read(index: Any) -> np.ndarray:
        part = tensor if index is Ellipsis else tensor[index]
        run = sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True)) + 1
        held = TORCH.empty(about.dtype, (run if part.numel() else 0,))
        file.read_into(place + int(part.storage_offset()) * itemsize, TORCH.as_array(held).view(np.uint8).data)
        found = held.as_strided(part.shape, part.stride()) if part.numel() else held.reshape(part.shape)
        found = found.conj() if part.is_conj() else found
        found = torch._neg_view(found) if part.is_neg() else found
        out = TORCH.empty(about.dtype, tuple(part.shape))
        TORCH.copy_to(out, found)
        return TORCH.as_array(out).reshape(tuple(part.shape))

    def fill(start: int, out: memoryview) -> None:
        file.read_into(place + offset * itemsize + start, out)

    identity = file.path, place, *about, offset, tensor.stride(), tensor.is_conj(), tensor.is_neg()
    return FileTensor(
        about.dtype, about.shape, read, identity, fill=fill if is_plain else None, reads_whole=not is_plain
    )
