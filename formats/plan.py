"""What will be written, decided before anything is: names, stored dtypes, what is recorded beside, what is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from deltastore.document import leaves as document_leaves
from deltastore.dtypes import NATIVE, storage_dtype
from deltastore.formats.contents import Contents
from deltastore.formats.leaves import CastTensor, stream
from deltastore.formats.loss import Loss, cast_loss
from deltastore.formats.record import encode_record
from deltastore.torch_bridge import TORCH
from deltastore.types import Json, Path, show_path

_PAIRS = {"complex128": "float64", "complex64": "float32", "complex32": "float16"}


@dataclass(frozen=True)
class Ability:
    """What a format can hold by itself."""

    name: str
    dtypes: frozenset[str]
    names: Callable[[Iterable[Path]], dict[Path, str]]
    is_nested: bool
    """It has groups, one for each dict."""
    has_aliases: bool = False
    keeps_order: bool = True


@dataclass(frozen=True)
class Item:
    """One tensor of the file."""

    name: str
    path: Path
    dtype: str
    """Logical dtype."""
    shape: tuple[int, ...]
    stored: str
    """The dtype that the format has; the same where it has the logical one."""

    @property
    def is_pair(self) -> bool:
        """Whether a complex tensor is stored with a last axis of real and imaginary parts."""
        return self.stored != self.dtype and self.dtype in _PAIRS and self.stored == _PAIRS[self.dtype]

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape that the file gives it."""
        return (*self.shape, 2) if self.is_pair else self.shape

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return int(np.prod(self.shape, dtype=np.int64)) * storage_dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Plan:
    """What will be written."""

    items: tuple[Item, ...]
    """The tensors, without aliases, in document order."""
    aliases: Mapping[str, str]
    """Name of an alias -> name of the tensor that it is."""
    record: str | None
    """JSON that restores what the format cannot hold; None where a plain read gives the state as it was."""
    losses: tuple[Loss, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(item.nbytes for item in self.items)

    def arrays(self, contents: Contents, items: Iterable[Item] | None = None) -> Iterator[tuple[Item, np.ndarray]]:
        """Yield the elements of the items, in whatever order they are read fastest, each in its stored shape."""
        by_path = {item.path: item for item in (self.items if items is None else items)}
        for path, tensor in stream({path: contents.leaves[path] for path in by_path}):
            yield by_path[path], stored_array(by_path[path], tensor)


def make_plan(contents: Contents, ability: Ability) -> Plan:
    """Return what a format will hold of some contents."""
    names = ability.names(contents.leaves)
    items = []
    for path, leaf in contents.distinct.items():
        about = TORCH.describe(leaf)
        items.append(Item(names[path], path, about.dtype, about.shape, _stored(about.dtype, ability.dtypes)))
    aliases = {names[path]: names[owner] for path, owner in contents.owners.items() if path != owner}
    # A nested format marks its tensors with their logical dtypes, a flat one has no place for that.
    changed = {item.name: item.dtype for item in items if item.dtype != item.stored}
    losses = tuple(_losses(contents, ability, items))
    found = names.values() if ability.keeps_order else sorted(names.values())
    is_bare = bare_document(found, nested=ability.is_nested) == contents.document
    is_whole = is_bare and not (changed or (aliases and not ability.has_aliases) or contents.bounds)
    owners = [names[contents.owners[path]] for path in contents.leaves]
    record = None if is_whole else encode_record(contents, owners, changed)
    return Plan(tuple(items), aliases, record, losses)


def bare_document(names: Iterable[str], *, nested: bool) -> Json:
    """Return the document of tensors that are known by nothing but their names."""
    top: dict[str, Json] = {"$": "dict", "k": [], "v": []}
    groups = {"": top}
    for name in names:
        parts = name.split("/") if nested else [name]
        group, place = top, ""
        for part in parts[:-1]:
            place += f"/{part}"
            if place not in groups:
                groups[place] = {"$": "dict", "k": [], "v": []}
                group["k"].append(part)
                group["v"].append(groups[place])
            group = groups[place]
        group["k"].append(parts[-1])
        group["v"].append({"$": "tensor"})
    return top


def stored_array(item: Item, tensor: torch.Tensor) -> np.ndarray:
    """Return the elements of a contiguous CPU tensor as the format stores them, on the same memory."""
    array = TORCH.as_array(tensor).view(NATIVE.get(item.stored, storage_dtype(item.stored)))
    return array.reshape(item.stored_shape)


def _stored(dtype: str, known: frozenset[str]) -> str:
    if dtype in known:
        return dtype
    if _PAIRS.get(dtype) in known:
        return _PAIRS[dtype]
    return f"uint{8 * min(8, storage_dtype(dtype).itemsize)}"


def _losses(contents: Contents, ability: Ability, items: list[Item]) -> Iterator[Loss]:
    what = ability.name
    for item in items:
        if item.dtype != item.stored:
            shape = ", real and imaginary parts along a last axis" if item.is_pair else ""
            yield Loss("dtype", item.path, f"{what} has no {item.dtype}: its bits are stored as {item.stored}{shape}")
    if not ability.has_aliases:
        for path, owner in contents.owners.items():
            if path != owner:
                yield Loss("alias", path, f"is {show_path(owner)} and stored once, under that name")
    for path, leaf in document_leaves(contents.document):
        if leaf.kind == "plain":
            yield Loss("plain", path, f"a plain value, which {what} does not hold: recorded beside the tensors")
        elif leaf.kind == "ndarray":
            yield Loss("array", path, "a numpy array, which is a tensor in the file")
        if any(isinstance(key, int) for key in path):
            yield Loss("key", path, "integer keys, which are text in the file")
        if len(path) > 1 and not ability.is_nested and leaf.kind != "plain":
            yield Loss("nesting", path, f"{what} is flat: its name is joined with dots")
    for path, leaf in contents.leaves.items():
        if isinstance(leaf, CastTensor):
            yield cast_loss(path, leaf.inner.dtype, leaf.dtype)
    for path, bound in contents.bounds.items():
        yield Loss("fidelity", path, f"within {bound:.3g} of the training state", is_restored=False)
