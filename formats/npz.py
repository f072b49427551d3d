"""numpy's ``.npz``, both ways: a ZIP with one ``.npy`` for each tensor, stored without compression.

What numpy has no dtype for is stored as unsigned integers, bit for bit. Nothing is ever unpickled.
"""

from __future__ import annotations

import io
import math
import zipfile
import zlib
from collections.abc import Callable
from typing import IO, Any

import numpy as np

from deltastore.dtypes import NATIVE, from_numpy
from deltastore.errors import Backend, Corruption, DeltaStoreError, InvalidInput, NotFound
from deltastore.formats.atomic_file import atomic_file
from deltastore.formats.contents import Contents
from deltastore.formats.leaves import FileTensor
from deltastore.formats.names import flat_names
from deltastore.formats.plan import Ability, Plan
from deltastore.formats.record import KEY, Found
from deltastore.formats.registry import Options
from deltastore.formats.tensor_format import TensorFormat
from deltastore.formats.zip_guard import check_expansion

SUFFIX = ".npy"
PIECE_BYTES = 16 << 20
_RECORD = f"__{KEY}__"
ABILITY = Ability("numpy", frozenset(NATIVE), flat_names, is_nested=False)
_HEADERS: dict[tuple[int, int], Callable[[IO[bytes]], tuple[tuple[int, ...], bool, np.dtype]]] = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def find(path: str) -> Found:
    """Return what is in a file, from the headers of its arrays."""
    tensors = {}
    record = None
    try:
        with zipfile.ZipFile(path) as archive:
            entries = [entry for entry in archive.infolist() if entry.filename.endswith(SUFFIX)]
            check_expansion(entries, path)
            for entry in entries:
                name = entry.filename.removesuffix(SUFFIX)
                if name == _RECORD:
                    record = _read(path, entry.filename).tobytes()
                else:
                    tensors[name] = _tensor(archive, entry, path)
    except FileNotFoundError:
        raise NotFound(f"{path}: there is no such file", path=path) from None
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise _damaged(path, str(error)) from error
    except DeltaStoreError:
        raise
    except OSError as error:
        raise Backend(f"{path}: {error.strerror or error}", errno=error.errno, path=path) from error
    return Found(path, tensors, record)


def _tensor(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, path: str) -> FileTensor:
    with archive.open(entry) as file:
        shape, _is_fortran, dtype = _header(file, path, entry.filename)
        start = file.tell()
    if entry.file_size - start != math.prod(shape) * dtype.itemsize:
        found = entry.file_size - start
        raise _damaged(path, f"{entry.filename} has {found:,} bytes of elements for shape {shape} and dtype {dtype}")
    try:
        logical = from_numpy(dtype)
    except InvalidInput as error:
        raise InvalidInput(f"{path}: {entry.filename}: {error.message}", path=path) from None
    name = entry.filename
    return FileTensor(logical, shape, lambda index: _read(path, name)[index], (path, name), reads_whole=True)


def _header(file: IO[bytes], path: str, name: str) -> tuple[tuple[int, ...], bool, np.dtype]:
    try:
        version = np.lib.format.read_magic(file)
        if version not in _HEADERS:
            raise ValueError(f"version {version}")
        shape, is_fortran, dtype = _HEADERS[version](file)
    except OSError:
        raise
    except Exception as error:  # whatever numpy's parser of headers trips over
        raise _damaged(path, f"{name}: {error}") from None
    if dtype.hasobject:
        raise InvalidInput(
            f"{path}: {name} holds Python objects, which are a pickle and may run code; nothing of it was loaded. "
            "If you trust its writer, load it with numpy.load(allow_pickle=True) and save plain arrays",
            path=path,
        )
    return shape, is_fortran, dtype


def _read(path: str, name: str) -> np.ndarray:
    """Return an array in the byte order of the machine, row-major."""
    try:
        with zipfile.ZipFile(path) as archive, archive.open(name) as file:
            shape, is_fortran, dtype = _header(file, path, name)
            flat = np.empty(math.prod(shape), dtype)
            raw = flat.view(np.uint8).data
            for start in range(0, len(raw), PIECE_BYTES):
                piece = file.read(min(PIECE_BYTES, len(raw) - start))
                raw[start : start + len(piece)] = piece
                if len(piece) < min(PIECE_BYTES, len(raw) - start):
                    raise EOFError(f"{name} ends early")
            file.read(1)  # beyond the end: only now the checksum was compared
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise _damaged(path, str(error)) from error
    array = flat.reshape(shape[::-1]).T if is_fortran else flat.reshape(shape)
    native: np.ndarray = array.astype(dtype.newbyteorder("="), order="C", copy=False)
    return native


def write(plan: Plan, contents: Contents, path: str, options: Options) -> int:
    """Write a file, array by array."""
    done = 0
    # A ZIP has its entries in the order of writing, which the store decides: only a record keeps that of the state.
    with atomic_file(path) as file:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            if plan.record is not None:
                _write(archive, _RECORD, np.frombuffer(plan.record.encode(), np.uint8))
            for item, array in plan.arrays(contents):
                _write(archive, item.name, array)
                done += item.nbytes
                options.progress(done, plan.nbytes)
        return file.seek(0, io.SEEK_END)


def _write(archive: zipfile.ZipFile, name: str, array: np.ndarray) -> None:
    with archive.open(zipfile.ZipInfo(name + SUFFIX), "w", force_zip64=True) as file:
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
        raw: Any = array.reshape(-1).view(np.uint8).data if array.size else b""
        for start in range(0, len(raw), PIECE_BYTES):
            file.write(raw[start : start + PIECE_BYTES])


def _damaged(path: str, reason: str) -> Corruption:
    return Corruption(f"{path} is damaged or no .npz file: {reason}", path=path, where=path)


CONVERTER = TensorFormat(ABILITY, find, write)
