"""Files of torch.save, both ways: ``.pt``, ``.pth``, ``.bin``, ``.ckpt``.

Only what ``torch.load(weights_only=True)`` accepts is loaded, and only that is written. There is no way to full
unpickling: a pickle can run any code. Classes that the caller has named with
``torch.serialization.add_safe_globals`` are accepted, as torch does.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import mmap
import os
import pickle
import re
import warnings
import zipfile
import zlib
from collections import Counter, OrderedDict
from collections.abc import Hashable
from typing import Any, BinaryIO

import numpy as np
import torch

from deltastore.errors import Backend, Corruption, DeltaStoreError, InvalidInput, NotFound
from deltastore.formats.atomic_file import atomic_file
from deltastore.types import Key, Path, show_path

_ZIP = b"PK\x03\x04"
_PIECE_BYTES = 1 << 20
_REFUSED = re.compile(r"GLOBAL (\S+) (?:was not an allowed|whose module)|(\S+) must be imported")
_PLAIN = frozenset(
    {
        *(type(None), bool, int, float, complex, str, bytes, bytearray, set, Counter, dict, OrderedDict, list, tuple),
        *(torch.Size, torch.dtype, torch.device, torch.layout, torch.Tensor, torch.nn.Parameter),
    }
)
"""Types that ``weights_only`` loads; others are named in the refusal."""
_TORCH_DTYPES = frozenset(map(np.dtype, "? b h i q B H I Q e f d F D".split()))
"""Dtypes of numpy that torch has, in the byte order of the machine."""


def load(path: str) -> Any:
    """Return what a file of torch.save holds, on the CPU.

    Tensors of the ZIP form stay in the file until they are used (mapped privately: changing one does not change the
    file). Every entry is read once, against the checksum that the file has for it: torch itself would not notice a
    flipped bit.

    Raises
    ------
    NotFound
        There is no such file.
    InvalidInput
        The file holds more than tensors and plain values. Nothing of it was run.
    Corruption
        The file is damaged, or not a torch file.
    """
    try:
        with open(path, "rb") as file:
            is_zip = file.read(len(_ZIP)) == _ZIP
            can_map = is_zip and _check_archive(file, path)
    except FileNotFoundError:
        raise NotFound(f"{path}: there is no such file", path=path) from None
    except IsADirectoryError:
        raise InvalidInput(f"{path} is a folder, not a torch file", path=path) from None
    except DeltaStoreError:
        raise
    except OSError as error:
        raise Backend(f"{path}: {error.strerror}", errno=error.errno, path=path) from error
    # The warnings of torch.load are about things that become errors below.
    with warnings.catch_warnings(), torch.serialization.set_default_mmap_options(mmap.MAP_PRIVATE):
        warnings.simplefilter("ignore")
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=can_map)
        except pickle.UnpicklingError as error:
            raise _explain(path, str(error), is_zip) from None
        except (MemoryError, OSError) as error:
            number = error.errno if isinstance(error, OSError) else errno.ENOMEM
            raise Backend(f"{path} was not loaded: {error}", errno=number, path=path) from error
        except Exception as error:  # whatever the parser trips over
            raise _damaged(path, f"{type(error).__name__}: {_first_line(error)}") from error


def _check_archive(file: BinaryIO, path: str) -> bool:
    """Check the ZIP form of a torch file; return whether it can be mapped."""
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            names = {entry.filename.partition("/")[2] for entry in entries}
            if "constants.pkl" in names:
                raise InvalidInput(
                    f"{path} is a TorchScript archive, which holds code; if you trust it, use torch.jit.load and save "
                    "the state_dict() of the module",
                    path=path,
                )
            if "data.pkl" not in names:
                raise _damaged(path, "a ZIP file without the entry data.pkl, so torch.save did not write it whole")
            for entry in entries:
                # A torch that was told not to compute checksums writes 0.
                if entry.CRC and not entry.is_dir():
                    with archive.open(entry) as stored:
                        while stored.read(_PIECE_BYTES):
                            pass
            # Mapped, a compressed entry would be taken for the tensor itself.
            return all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
    except DeltaStoreError:
        raise
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError) as error:
        raise _damaged(path, _first_line(error)) from error


def _explain(path: str, reason: str, is_zip: bool) -> DeltaStoreError:
    """Return the error for a pickle that was not loaded."""
    found = _REFUSED.search(reason)
    if found is None:
        # The checksums of a ZIP were right: it was written like this.
        last = reason.rpartition("WeightsUnpickler error: ")[2].strip().partition("\n")[0]
        if not is_zip:
            return _damaged(path, last)
        return InvalidInput(
            f"{path}: its pickle does what weights_only does not allow ({last}); save it again with torch.save, as "
            "tensors and plain values",
            path=path,
        )
    refused = [found[1] or found[2]]
    if is_zip:
        # All of them at once; where that fails, the one that is known will do.
        with contextlib.suppress(pickle.UnpicklingError, EOFError, ValueError, RuntimeError):
            refused = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path)) or refused
    names = ", ".join(map(repr, refused))
    return InvalidInput(
        f"{path} asks for code beyond tensors and plain values: {names}. Nothing was run. If you trust its writer, "
        "allow these with torch.serialization.add_safe_globals([...]) before the call, or load the file yourself with "
        "torch.load(weights_only=False) and save its tensors again",
        path=path,
        refused=refused,
    )


def _damaged(path: str, reason: str) -> Corruption:
    return Corruption(f"{path} is damaged or no torch file: {reason}", path=path, where=path)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).partition("\n")[0][:300]


def save(state: Any, path: str) -> int:
    """Write a state as a torch file, atomically, and return its size in bytes.

    Tied tensors stay tied. A view is written without the rest of the storage that it looks at, unless the views of a
    storage together are as large as the storage. Tensors are written as ``state_dict()`` gives them: without autograd.
    Numpy arrays and numbers become tensors of the same bits, for ``weights_only`` loads no others.

    Raises
    ------
    InvalidInput
        A value that :func:`load` would refuse; nothing was written.
    Backend
        The file system refused; a file that was there before is as it was.
    """
    walk = _Walk()
    try:
        walk.visit(state, ())
        compact = walk.compact(state)
    except RecursionError:
        raise InvalidInput(f"{path}: the state contains itself, or is nested too deep", path=path) from None
    with atomic_file(path) as file:
        try:
            torch.save(compact, file)
        except RuntimeError as error:
            # The ZIP writer of torch hides what the file system said.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise InvalidInput(f"{path}: torch.save refuses the state: {_first_line(error)}", path=path) from error
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise InvalidInput(
                f"{path}: a value cannot be pickled: {_first_line(error)}{walk.suspects()}", path=path
            ) from error
        file.flush()
        _require_loadable(file, path, walk)
        return file.seek(0, os.SEEK_END)


def _require_loadable(file: BinaryIO, path: str, walk: _Walk) -> None:
    """Raise InvalidInput if `load` would refuse what was just written."""
    file.seek(0)
    try:
        refused = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    except pickle.UnpicklingError as error:
        refused = [str(error)]
    if refused:
        names = ", ".join(map(repr, refused))
        raise InvalidInput(
            f"{path}: torch.load(weights_only=True) would refuse {names}{walk.suspects()}. Save a part of the state, "
            "or convert these values to tensors, numbers, strings, lists and dicts",
            path=path,
            refused=refused,
        )


class _Walk:
    """One pass over a state: what views look at, and which values may be refused."""

    def __init__(self) -> None:
        self._views: dict[int, dict[Hashable, int]] = {}
        self._clones: dict[Hashable, torch.Tensor] = {}
        self._odd: list[str] = []

    def visit(self, value: Any, path: Path) -> None:
        """Note every tensor and every value of an unusual type."""
        if type(value) not in _PLAIN and not _is_numpy(value):
            self._odd.append(f"{type(value).__module__}.{type(value).__qualname__} at {show_path(path)}")
        if isinstance(value, torch.Tensor):
            if value.is_meta:
                raise InvalidInput(f"{show_path(path)}: a tensor on the meta device has no values", path=path)
            if _is_plain(value):
                view = _view(value)
                bytes_seen = value.numel() * value.element_size()
                self._views.setdefault(value.untyped_storage()._cdata, {})[view] = bytes_seen
        elif isinstance(value, dict):
            for key, item in value.items():
                self.visit(item, (*path, _shown(key)))
        elif isinstance(value, list | tuple):
            for index, item in enumerate(value):
                self.visit(item, (*path, index))

    def suspects(self) -> str:
        """Return where values of unusual types are, for an error text."""
        return f" ({'; '.join(self._odd[:3])}{'; ...' if len(self._odd) > 3 else ''})" if self._odd else ""

    def compact(self, value: Any) -> Any:
        """Return the state with detached tensors whose storages hold nothing else; containers are copied if needed."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value) if _is_plain(value) else value
        if _is_numpy(value):
            return torch.from_numpy(np.array(value, value.dtype.newbyteorder("="), order="C"))
        if isinstance(value, dict):
            items = {key: self.compact(item) for key, item in value.items()}
            if all(items[key] is item for key, item in value.items()):
                return value
            changed = copy.copy(value)  # keeps the type, and the _metadata of a module's state_dict
            for key, item in items.items():
                changed[key] = item
            return changed
        if isinstance(value, list | tuple):
            values = [self.compact(item) for item in value]
            if all(new is old for new, old in zip(values, value, strict=True)):
                return value
            if isinstance(value, list):
                return values
            return tuple(values) if type(value) is tuple else type(value)(*values)
        return value

    def _tensor(self, value: torch.Tensor) -> torch.Tensor:
        storage = value.untyped_storage()
        if sum(self._views[storage._cdata].values()) >= storage.nbytes():
            return value.detach() if value.requires_grad or type(value) is not torch.Tensor else value
        view = storage._cdata, _view(value)
        if view not in self._clones:
            self._clones[view] = value.detach().clone(memory_format=torch.preserve_format)
        return self._clones[view]


def _is_plain(value: torch.Tensor) -> bool:
    return type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided and not value.is_nested


def _is_numpy(value: Any) -> bool:
    is_numpy = type(value) is np.ndarray or isinstance(value, np.generic)
    return is_numpy and value.dtype.newbyteorder("=") in _TORCH_DTYPES


def _view(value: torch.Tensor) -> Hashable:
    lazy = value.is_conj(), value.is_neg()
    return value.storage_offset(), value.shape, value.stride(), value.dtype, lazy


def _shown(key: Any) -> Key:
    return key if isinstance(key, str | int) else repr(key)
