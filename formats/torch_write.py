"""Writing torch files: only what ``torch.load(weights_only=True)`` accepts, without what a view does not show."""

from __future__ import annotations

import copy
import os
import pickle
from collections import Counter, OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import torch

from deltastore.document import leaves as document_leaves
from deltastore.errors import InvalidInput
from deltastore.formats.atomic_file import atomic_file
from deltastore.formats.atomic_folder import atomic_folder, tree_bytes
from deltastore.formats.contents import Contents
from deltastore.formats.leaves import CastTensor, nbytes, whole
from deltastore.formats.loss import Loss, cast_loss
from deltastore.formats.registry import Options
from deltastore.formats.shards import Index, shard_names, split, write_index
from deltastore.formats.torch_plain import add_record, simplify
from deltastore.types import Key, Path, show_path

_PLAIN = frozenset(
    {
        *(type(None), bool, int, float, complex, str, bytes, bytearray, set, Counter, dict, OrderedDict, list, tuple),
        *(torch.Size, torch.dtype, torch.device, torch.layout, torch.Tensor, torch.nn.Parameter),
    }
)
"""Types that ``weights_only`` loads; others are named in the refusal."""
_TORCH_DTYPES = frozenset(map(np.dtype, "? b h i q B H I Q e f d F D".split()))
"""Dtypes of numpy that torch has, in the byte order of the machine."""


def save_file(state: Any, path: str, record: Contents | None = None) -> int:
    """Write a state as a torch file, atomically, and return its size in bytes.

    Tied tensors stay tied. A view is written without the rest of the storage that it looks at, unless the views of a
    storage together are as large as the storage. Tensors are written as ``state_dict()`` gives them: without autograd.
    Numpy arrays and numbers become tensors of the same bits, for ``weights_only`` loads no others.

    Parameters
    ----------
    record : Contents, optional
        What loading the file shall give, where that is more than the state: kept beside it.

    Raises
    ------
    InvalidInput
        A value that :func:`deltastore.formats.load` would refuse; nothing was written.
    Backend
        The file system refused; a file that was there before is as it was.
    """
    with atomic_file(path) as file:
        write_torch(state, file, path)
        if record is not None:
            add_record(file, record)
        return file.seek(0, os.SEEK_END)


def write_torch(state: Any, file: BinaryIO, path: str) -> None:
    """Write a state to a file, after a look at all of it, and look at what was written."""
    walk = _Walk()
    try:
        walk.visit(state, ())
        compact = walk.compact(state)
    except RecursionError:
        raise InvalidInput(f"{path}: the state contains itself, or is nested too deep", path=path) from None
    try:
        torch.save(compact, file)
    except RuntimeError as error:
        # The ZIP writer of torch hides what the file system said.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise InvalidInput(f"{path}: torch.save refuses the state: {first_line(error)}", path=path) from error
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise InvalidInput(
            f"{path}: a value cannot be pickled: {first_line(error)}{walk.suspects()}", path=path
        ) from error
    file.flush()
    _require_loadable(file, path, walk)


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


@dataclass(frozen=True)
class _Part:
    """A tensor that goes into one of the shards, under all its names."""

    paths: tuple[Path, ...]
    nbytes: int


def save_shards(contents: Contents, path: str, stem: str, suffix: str, options: Options) -> int:
    """Write a flat state as a folder of files with an index, one file in memory at a time; return all bytes.

    Raises
    ------
    InvalidInput
        The state is not a dict of tensors by name: an index can say no more.
    """
    paths: dict[Path, list[Path]] = {}
    for leaf, owner in contents.owners.items():
        paths.setdefault(owner, []).append(leaf)
    is_flat = all(len(leaf) == 1 and type(leaf[0]) is str for leaf in contents.leaves)
    if not is_flat or any(leaf.kind == "plain" for _, leaf in document_leaves(contents.document)):
        raise InvalidInput(
            f"{path}: shards of torch files hold tensors by name, and this state holds more; "
            "choose the part with the weights, or write it as one file",
            path=path,
        )
    parts = [_Part(tuple(names), nbytes(contents.leaves[owner])) for owner, names in paths.items()]
    shards = split(parts, options.shard_bytes)
    names = shard_names(stem, suffix, len(shards))
    where: dict[str, str] = {}
    done = 0
    with atomic_folder(path, lambda folder: all(name.startswith(stem) for name in os.listdir(folder))) as folder:
        for name, shard in zip(names, shards, strict=True):
            state: dict[str, torch.Tensor] = {}
            for part in shard:
                tensor = whole(contents.leaves[part.paths[0]])
                state |= {str(leaf[0]): tensor for leaf in part.paths}
                done += part.nbytes
            save_file(state, os.path.join(folder, name))
            where |= dict.fromkeys(state, name)
            options.progress(done, contents.nbytes)
        if len(shards) > 1:
            ordered = {str(leaf[0]): where[str(leaf[0])] for leaf in contents.leaves}
            write_index(folder, stem, suffix, Index(ordered, {}, contents.nbytes))
        return tree_bytes(folder)


def losses_of(contents: Contents) -> tuple[Loss, ...]:
    """Return what a torch file would not hold of some contents."""
    losses = list(simplify(contents)[1])
    for path, tensor in contents.leaves.items():
        if isinstance(tensor, CastTensor):
            losses.append(cast_loss(path, tensor.inner.dtype, tensor.dtype))
    for path, bound in contents.bounds.items():
        losses.append(Loss("fidelity", path, f"within {bound:.3g} of the training state", is_restored=False))
    return tuple(losses)


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says, or its name."""
    return (str(error).strip() or type(error).__name__).partition("\n")[0][:300]
