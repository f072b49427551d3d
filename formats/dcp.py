"""Folders of ``torch.distributed.checkpoint``, both ways, in one process and without a process group.

The folder's ``.metadata`` is a pickle. It is read by an unpickler that knows the few classes that belong there and no
others. A tensor that many ranks wrote is put together from its shards when it is read.
"""

from __future__ import annotations

import io
import os
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint
from torch.distributed.checkpoint.storage import WriteResult

from deltastore.document import leaves as document_leaves
from deltastore.dtypes import LOGICAL
from deltastore.errors import Backend, Corruption, InvalidInput, NotFound
from deltastore.formats.atomic_folder import atomic_folder, inside, tree_bytes
from deltastore.formats.contents import Contents, take_apart
from deltastore.formats.leaves import FileTensor, whole
from deltastore.formats.names import flat_names
from deltastore.formats.plan import Ability, Plan
from deltastore.formats.record import KEY, Found, parse_record
from deltastore.formats.registry import Options
from deltastore.formats.tensor_format import TensorFormat
from deltastore.torch_bridge import TORCH
from deltastore.types import Path

METADATA = ".metadata"
RECORD = f"__{KEY}__"
FILE_BYTES = 64 << 20
"""A file is complete with so many bytes."""
_PLAIN = (bool, int, float, str, type(None))
ABILITY = Ability("dcp", frozenset(name for name in LOGICAL if hasattr(torch, name)), flat_names, is_nested=False)

_ALLOWED: Mapping[tuple[str, str], Any] = {
    (kind.__module__, kind.__qualname__): kind
    for kind in (
        metadata.Metadata,
        metadata.TensorStorageMetadata,
        metadata.BytesStorageMetadata,
        metadata.ChunkStorageMetadata,
        metadata.TensorProperties,
        metadata.MetadataIndex,
        metadata.StorageMeta,
        metadata._MEM_FORMAT_ENCODING,
        filesystem._StorageInfo,
        torch.Size,
    )
} | {
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    # A path in it is only for people: text will do.
    ("pathlib", "PosixPath"): lambda *parts: "/".join(parts),
    ("pathlib", "WindowsPath"): lambda *parts: "/".join(parts),
    ("pathlib._local", "PosixPath"): lambda *parts: "/".join(parts),
}


class _Unpickler(pickle.Unpickler):
    """Makes what belongs into ``.metadata`` and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        dtype = vars(torch).get(name) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise _Refused(f"{module}.{name}")


class _Refused(Exception):
    """A name that does not belong into ``.metadata``."""


def _read_metadata(path: str) -> metadata.Metadata:
    place = os.path.join(path, METADATA)
    try:
        with open(place, "rb") as file:
            found = _Unpickler(file).load()
    except FileNotFoundError:
        raise NotFound(f"{path}: there is no {METADATA}: not a checkpoint, or one that was not finished") from None
    except _Refused as error:
        raise InvalidInput(
            f"{place} asks for {error}, which does not belong into it; nothing was run. "
            "If you trust its writer, load it with torch.distributed.checkpoint",
            path=path,
            refused=[str(error)],
        ) from None
    except OSError as error:
        raise Backend(f"{place}: {error.strerror}", errno=error.errno, path=path) from error
    except Exception as error:  # whatever a damaged pickle trips over
        raise Corruption(f"{place} is damaged: {type(error).__name__}: {error}", path=path, where=place) from error
    try:
        return _check_metadata(found)
    except (AttributeError, TypeError, ValueError) as error:
        raise Corruption(f"{place} is damaged: {error}", path=path, where=place) from error


def _check_metadata(found: Any) -> metadata.Metadata:
    """Return what is loaded, or raise unless each member that is going to be read is there: a pickle may lack any."""
    if type(found) is not metadata.Metadata:
        raise TypeError(f"it holds a {type(found).__name__}")
    for name, about in found.state_dict_metadata.items():
        if isinstance(about, metadata.TensorStorageMetadata):
            _check_shards(name, about)
        elif type(name) is not str or not isinstance(about, metadata.BytesStorageMetadata):
            raise TypeError(f"{name!r:.200} is a {type(about).__name__}")
    for index, info in (found.storage_data or {}).items():
        if type(index) is not metadata.MetadataIndex or type(info) is not filesystem._StorageInfo:
            raise TypeError(f"{index!r:.200} is said to be in a {type(info).__name__}")
        if type(info.relative_path) is not str:
            raise TypeError(f"{index!r:.200} is said to be in the file {info.relative_path!r:.200}")
        _numbers((info.offset, info.length))
    _ = found.planner_data
    return found


def _check_shards(name: Any, about: metadata.TensorStorageMetadata) -> None:
    rank = len(_numbers(about.size))
    ranks = {len(_numbers(given)) for chunk in about.chunks for given in (chunk.offsets, chunk.sizes)}
    if type(name) is not str or type(about.properties.dtype) is not torch.dtype or ranks - {rank}:
        raise ValueError(f"{name!r:.200} is no tensor with a dtype and shards of as many axes as it has, {rank}")


def _numbers(given: Any) -> tuple[int, ...]:
    numbers = tuple(given)
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"expected integers of 0 or more, found {numbers!r:.200}")
    return numbers


def find(path: str) -> Found:
    """Return what is in a folder, without the plain values."""
    found = _read_metadata(path)
    tensors = {}
    for name, about in found.state_dict_metadata.items():
        if isinstance(about, metadata.TensorStorageMetadata):
            logical = str(about.properties.dtype).removeprefix("torch.")
            if logical not in LOGICAL:
                raise InvalidInput(
                    f"{path}: {name!r} has the dtype {logical}, which deltastore does not know", path=path
                )
            tensors[name] = FileTensor(
                logical,
                tuple(about.size),
                _reader(path, name, found, about, logical),
                (path, name),
                reads_whole=True,
            )
    record = _load(path, RECORD, found, metadata.MetadataIndex(RECORD)) if RECORD in found.state_dict_metadata else None
    if not isinstance(record, str | None):
        raise _damaged(path, f"{RECORD!r} is a {type(record).__name__}, expected text")
    return Found(path, tensors, record)


class DcpFolder(TensorFormat):
    """The :class:`~deltastore.formats.registry.Converter` of such folders."""

    def needed_bytes(self, state: Any, options: Options) -> int:
        """Return about how much memory writing takes: what is in one file is written at once."""
        return super().needed_bytes(state, options) + FILE_BYTES

    def open(self, path: str) -> Contents:
        """Return the contents of a folder: as the record says, else nested as its planner noted."""
        found = self.find(path)
        if found.record is not None:
            return parse_record(found)
        about = _read_metadata(path)
        flat: dict[str, Any] = dict(found.tensors)
        for name, kind in about.state_dict_metadata.items():
            if isinstance(kind, metadata.BytesStorageMetadata):
                flat[name] = _load(path, name, about, metadata.MetadataIndex(name))
        return take_apart(_nested(path, flat, about.planner_data))


def _nested(path: str, flat: Mapping[str, Any], noted: Any) -> Any:
    """Return values by their paths; integers count the elements of lists, as torch's planner has it."""
    paths = noted if isinstance(noted, dict) else {}
    for name in flat:
        keys = paths.get(name, (name,))
        counts = isinstance(keys, tuple) and all(type(key) is str or key in range(len(flat)) for key in keys)
        if not counts or not keys or type(keys[0]) is not str:
            raise _damaged(path, f"the path of {name!r} is {keys!r:.200}")
    try:
        return unflatten_state_dict(dict(flat), {name: paths.get(name, (name,)) for name in flat})
    except Exception as error:  # paths that contradict each other
        raise _damaged(path, f"its paths make no nested state: {error}") from error


def _reader(
    path: str, name: str, found: metadata.Metadata, about: metadata.TensorStorageMetadata, logical: str
) -> Callable[[Any], np.ndarray]:
    def read(index: Any) -> np.ndarray:
        target = TORCH.empty(logical, tuple(about.size))
        left = target.numel()
        for chunk in about.chunks:
            piece = _load(path, name, found, metadata.MetadataIndex(name, chunk.offsets))
            spans = tuple(slice(low, low + size) for low, size in zip(chunk.offsets, chunk.sizes, strict=True))
            if not isinstance(piece, torch.Tensor) or piece.shape != chunk.sizes or piece.dtype != target.dtype:
                raise _damaged(path, f"a shard of {name!r} is not what {METADATA} says")
            if target[spans].shape != piece.shape:
                raise _damaged(path, f"a shard of {name!r} at {tuple(chunk.offsets)} does not fit {tuple(about.size)}")
            TORCH.copy_to(target[spans], piece)
            left -= piece.numel()
        if left:
            raise _damaged(path, f"{name!r} lacks {left:,} elements: a shard is missing")
        array: np.ndarray = TORCH.as_array(target).reshape(tuple(about.size))[index]
        return array

    return read


def _load(path: str, name: str, found: metadata.Metadata, index: metadata.MetadataIndex) -> Any:
    """Return one tensor or plain value of a file of the folder."""
    info = (found.storage_data or {}).get(index)
    if info is None:
        raise _damaged(path, f"{METADATA} does not say where {name!r} is")
    if info.transform_descriptors:
        raise InvalidInput(
            f"{path}: {name!r} is stored with {info.transform_descriptors}; load it with torch", path=path
        )
    place = inside(path, info.relative_path)
    try:
        with open(place, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if not 0 <= info.offset <= info.offset + info.length <= size:
                raise _damaged(path, f"{info.relative_path} has {size:,} bytes and lacks {name!r} at {info.offset:,}")
            file.seek(info.offset)
            content = io.BytesIO(file.read(info.length))
    except OSError as error:
        raise Backend(f"{place}: {error.strerror}", errno=error.errno, path=path) from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return torch.load(content, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            reason = str(error).partition("\n")[0]
            raise InvalidInput(
                f"{path}: {name!r} is more than tensors and plain values; nothing was run ({reason})", path=path
            ) from None
        except Exception as error:  # whatever the parser trips over
            raise _damaged(path, f"{name!r}: {type(error).__name__}: {str(error)[:200]}") from error


class _Planner(DefaultSavePlanner):
    """Gives the writer one tensor at a time: what it plans with has no elements."""

    def __init__(self, contents: Contents, plan: Plan, options: Options) -> None:
        super().__init__()
        self._leaves = {item.name: contents.leaves[item.path] for item in plan.items}
        self._paths: dict[str, Path] = {item.name: item.path for item in plan.items}
        self._plan = plan
        self._options = options
        self._done = 0

    def add_path(self, name: str, path: Path) -> None:
        """Note the path of a plain value."""
        self._paths[name] = path

    def create_local_plan(self) -> SavePlan:
        """Return the plan, with the paths of the nested state for those who load it without one."""
        self.mappings = self._paths
        plan: SavePlan = super().create_local_plan()
        return plan

    def lookup_object(self, index: metadata.MetadataIndex) -> Any:
        """Return a tensor with its elements, or a plain value."""
        leaf = self._leaves.get(index.fqn)
        if leaf is None:
            return super().lookup_object(index)
        tensor = whole(leaf)
        self._done += tensor.nbytes
        self._options.progress(self._done, self._plan.nbytes)
        return tensor


class _Writer(filesystem.FileSystemWriter):
    """Writes several files: torch's own keeps the tensors of a file in memory until all of it is written."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Write the data of a plan."""
        results: list[WriteResult] = []
        for number, items in enumerate(_buckets(plan.items)):
            prefix = filesystem._StoragePrefix(f"{plan.storage_data.prefix}{number}_")
            results += super().write_data(replace(plan, items=items, storage_data=prefix), planner).wait()
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result(results)
        return done


def _buckets(items: Iterable[WriteItem]) -> Iterator[list[WriteItem]]:
    """Yield items that fit into one file."""
    bucket: list[WriteItem] = []
    size = 0
    for item in items:
        about = item.tensor_data
        size += 0 if about is None else about.size.numel() * about.properties.dtype.itemsize
        bucket.append(item)
        if size >= FILE_BYTES:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


def write(plan: Plan, contents: Contents, path: str, options: Options) -> int:
    """Write a folder as one rank would, tensor by tensor."""
    state: dict[str, Any] = {item.name: TORCH.empty(item.dtype, item.shape, device="meta") for item in plan.items}
    planner = _Planner(contents, plan, options)
    plain = _plain_values(contents)
    for leaf_path, name in flat_names([*contents.leaves, *plain]).items():
        if leaf_path in plain and name not in state:
            state[name] = plain[leaf_path]
            planner.add_path(name, leaf_path)
    if plan.record is not None:
        state[RECORD] = plan.record
        planner.add_path(RECORD, (RECORD,))
    with atomic_folder(path, lambda folder: os.path.exists(os.path.join(folder, METADATA))) as folder:
        writer = _Writer(folder, thread_count=1, single_file_per_rank=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no process group is meant
            save_checkpoint(state, storage_writer=writer, planner=planner, no_dist=True)
        return tree_bytes(folder)


def _plain_values(contents: Contents) -> dict[Path, Any]:
    """Return the plain values that any reader of such a folder can load."""
    found = {}
    for path, leaf in document_leaves(contents.document):
        if leaf.kind == "plain" and isinstance(leaf.node, _PLAIN):
            found[path] = leaf.node
    return found


def _damaged(path: str, reason: str) -> Corruption:
    return Corruption(f"{path} is damaged: {reason}", path=path, where=path)


CONVERTER = DcpFolder(ABILITY, find, write)
