"""States of the past, read lazily: nothing is loaded before it is asked for."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeAlias

from deltastore.document import Leaf, build, leaves, plain_value, subtree
from deltastore.errors import Corruption, InvalidInput, NotFound
from deltastore.fidelity import Fidelity
from deltastore.handle import Commit
from deltastore.layout import Layout, TensorEntry
from deltastore.sources import PartitionSource, batches, read_elements, read_into
from deltastore.types import Json, Key, Path, show_path

if TYPE_CHECKING:
    import numpy as np
    import torch

    from deltastore.torch_bridge import TorchBridge

_STAYS = frozenset({"step", "other"})
"""Roles that `map_location` leaves on the CPU: step counters, random states, what users added."""


Sink: TypeAlias = "Callable[[torch.Tensor], object]"
"""Takes a tensor that is only valid during the call."""


def _bridge() -> TorchBridge:
    # The only import of torch on the reading side, made when a tensor is first asked for: log, show and verify
    # work on a machine without torch.
    bridge: TorchBridge = importlib.import_module("deltastore.torch_bridge").TORCH
    return bridge


@dataclass(frozen=True)
class Report:
    """What a load found different, as (object/key) paths.

    Attributes
    ----------
    missing : list of str
        The object has it, the commit does not; left as it was.
    unexpected : list of str
        The commit has it, the object does not; not used.
    mismatched : list of str
        Both have it, with other shapes or dtypes; left as it was.
    inexact : list of str
        Loaded within a recorded bound, not bit for bit.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    inexact: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether commit and objects fitted each other."""
        return not (self.missing or self.unexpected or self.mismatched)


class LazyTensor:
    """A tensor of a commit that is read when it is indexed.

    ``lazy[...]`` reads all of it; ``lazy[10:20]`` only the chunks that these rows need.
    """

    def __init__(self, source: PartitionSource, layout: Layout, entry: TensorEntry) -> None:
        self._source = source
        self._layout = layout
        self._entry = entry

    @property
    def path(self) -> Path:
        """The leaf path."""
        return self._entry.path

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, without reading anything."""
        return self._entry.shape

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype, without reading anything."""
        return _bridge().torch_dtype(self._entry.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return sum(
            piece.count * self._layout.by_id[piece.partition].bytes // self._layout.by_id[piece.partition].length
            for piece in self._entry.pieces
        )

    def is_same_memory(self, other: LazyTensor) -> bool:
        """Return whether two tensors of one commit are stored once, as tied weights are."""
        return bool(self._entry.pieces) and self._entry.pieces == other._entry.pieces

    @property
    def identity(self) -> Hashable | None:
        """A key that is equal for two tensors that are stored once; None for an empty one, which never is."""
        return (id(self._layout), self._entry.pieces) if self._entry.pieces else None

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a tensor without dimensions has no length")
        return self.shape[0]

    def __getitem__(self, index: Any) -> torch.Tensor:
        low, high, rest = _rows(self.shape, index)
        row = 1
        for size in self.shape[1:]:
            row *= size
        shape = (high - low, *self.shape[1:]) if self.shape else ()
        tensor = _bridge().empty(self._entry.dtype, shape)
        read_elements(self._source, self._layout, self._entry, low * row, _bridge().as_array(tensor))
        return tensor if rest is None else tensor[rest[0]] if len(rest) == 1 else tensor[rest]

    def __repr__(self) -> str:
        return f"LazyTensor({show_path(self.path)}, shape={self.shape}, dtype={self._entry.dtype})"


def stream_tensors(lazy: Iterable[LazyTensor]) -> Iterator[tuple[LazyTensor, torch.Tensor]]:
    """Yield tensors of commits with all their elements, a few partitions at a time: memory stays flat.

    They come in the order in which they are stored. A tensor is only valid until the next one is asked for.
    """
    bridge = _bridge()
    by_commit: dict[tuple[int, int], list[LazyTensor]] = {}
    for member in lazy:
        by_commit.setdefault((id(member._source), id(member._layout)), []).append(member)
    for members in by_commit.values():
        source, layout = members[0]._source, members[0]._layout
        by_entry = {id(member._entry): member for member in members}
        for group in batches(layout, [member._entry for member in members]):
            tensors = [bridge.empty(entry.dtype, entry.shape) for entry in group]
            read_into(source, layout, [(e, bridge.as_array(t)) for e, t in zip(group, tensors, strict=True)])
            for entry, tensor in zip(group, tensors, strict=True):
                yield by_entry[id(entry)], tensor


def _rows(shape: tuple[int, ...], index: Any) -> tuple[int, int, Any]:
    """Return the rows that an index needs, and the index into those rows (None: all of them)."""
    count = shape[0] if shape else 1
    if index is Ellipsis or (isinstance(index, tuple) and not index):
        return 0, count, None
    if not shape:
        return 0, count, (index,)
    first, *others = index if isinstance(index, tuple) else (index,)
    if type(first) is int:
        if not -count <= first < count:
            raise IndexError(f"row {first} of a tensor with {count} rows")
        return first % count, first % count + 1, (0, *others)
    if isinstance(first, slice):
        low, high, stride = first.indices(count)
        if stride == 1:
            high = max(low, high)
            return low, high, (slice(None), *others) if others else None
    return 0, count, (index,)


class State(Mapping[Path, Any]):
    """A mapping from leaf paths to :class:`LazyTensor` or plain values.

    ``state["model", "wte.weight"]`` is one leaf, ``state["model"]`` the state below a prefix, with keys relative to it.

    Attributes
    ----------
    commit : Commit
        The commit that is read.
    """

    def __init__(
        self,
        source: PartitionSource,
        document: Json,
        layout: Layout,
        commit: Commit,
        fidelity: Fidelity,
        *,
        prefix: Path = (),
        pickle_trusted: bool = False,
    ) -> None:
        self.commit = commit
        self._source = source
        self._document = document
        self._layout = layout
        self._fidelity = fidelity
        self._prefix = prefix
        self._pickle_trusted = pickle_trusted

    @cached_property
    def _leaves(self) -> dict[Path, Leaf]:
        return dict(leaves(self._document))

    def __iter__(self) -> Iterator[Path]:
        return iter(self._leaves)

    def __len__(self) -> int:
        return len(self._leaves)

    def __contains__(self, path: object) -> bool:
        return _as_path(path) in self._leaves

    def __getitem__(self, path: Path | Key) -> Any:
        keys = _as_path(path)
        leaf = self._leaves.get(keys)
        if leaf is None:
            return self._below(keys)
        if leaf.kind == "plain":
            bridge = _bridge() if isinstance(leaf.node, dict) and str(leaf.node.get("$")).startswith("torch.") else None
            return plain_value(leaf.node, bridge, self._pickle_trusted)
        return LazyTensor(self._source, self._layout, self._entry(keys))

    def get(self, path: Path | Key, default: Any = None) -> Any:
        """Return a leaf or sub-state, `default` where there is none."""
        try:
            return self[path]
        except NotFound:
            return default

    def _below(self, keys: Path) -> State:
        missing = object()
        node = subtree(self._document, keys, missing)
        if node is missing or not keys:
            names = [show_path(path) for path in self._leaves]
            near = difflib.get_close_matches(show_path(keys), names, n=3, cutoff=0.5)
            hint = f"; near it: {', '.join(near)}" if near else ""
            raise NotFound(
                f"{show_path(self._prefix + keys)}: step {self.commit.step} has no such leaf{hint}",
                path=self._prefix + keys,
            )
        return State(
            self._source,
            node,
            self._layout,
            self.commit,
            self._fidelity,
            prefix=self._prefix + keys,
            pickle_trusted=self._pickle_trusted,
        )

    def _entry(self, keys: Path) -> TensorEntry:
        entry = self._layout.by_path.get(self._prefix + keys)
        if entry is None:
            raise Corruption(f"{show_path(self._prefix + keys)}: the layout of step {self.commit.step} lacks it")
        return entry

    @property
    def fidelity(self) -> Fidelity:
        """How near the commit is to the training state."""
        return self._fidelity.below(self._prefix)

    @property
    def layout(self) -> Layout:
        """Which tensor of the whole commit lies where (spec 7)."""
        return self._layout

    @property
    def document(self) -> Json:
        """The state's document: containers and plain values as the format holds them (spec 8)."""
        return self._document

    def to_state_dict(self, map_location: Any = "cpu") -> Any:
        """Return the nested state as standard objects.

        Optimizer states that an adapter wrote by parameter name come back with torch's integers.

        Parameters
        ----------
        map_location : torch device, optional
            Where model and optimizer tensors go ("meta" reads none of them). Random states, users' own data and step
            counters stay on the CPU.
        """
        return self._build(map_location, optimizer_names=False)

    def to_named_state(self, map_location: Any = "cpu") -> Any:
        """Return the nested state with optimizer states keyed by parameter name, as they are stored."""
        return self._build(map_location, optimizer_names=True)

    def to_lazy_state(self) -> Any:
        """Return the nested state with a :class:`LazyTensor` for each tensor; numpy arrays are read.

        Optimizer states are keyed by parameter name, as they are stored.
        """
        bridge = _bridge()

        def tensor(path: Path, kind: str) -> Any:
            lazy = LazyTensor(self._source, self._layout, self._entry(path))
            return bridge.to_numpy(lazy[...], self._entry(path).dtype) if kind == "ndarray" else lazy

        return build(self._document, tensor, bridge, pickle_trusted=self._pickle_trusted, optimizer_names=True)

    def _build(self, map_location: Any, *, optimizer_names: bool) -> Any:
        bridge = _bridge()
        device = bridge.device(map_location)
        owners: dict[Path, TensorEntry] = {}
        for keys, leaf in self._leaves.items():
            if leaf.kind != "plain":
                owners.setdefault(self._owner(keys).path, self._owner(keys))
        arrays = {self._owner(keys).path for keys, leaf in self._leaves.items() if leaf.kind == "ndarray"}
        moved = {path for path, entry in owners.items() if path not in arrays and self._moves(entry)}
        on_meta = device.type == "meta"
        tensors = {
            path: bridge.empty(entry.dtype, entry.shape, device="meta" if on_meta and path in moved else "cpu")
            for path, entry in owners.items()
        }
        read = [
            (entry, bridge.as_array(tensors[path])) for path, entry in owners.items() if not (on_meta and path in moved)
        ]
        read_into(self._source, self._layout, read)
        if device.type not in ("cpu", "meta"):
            tensors = {path: tensor.to(device) if path in moved else tensor for path, tensor in tensors.items()}

        def tensor(path: Path, kind: str) -> Any:
            found = tensors[self._owner(path).path]
            return bridge.to_numpy(found, self._entry(path).dtype) if kind == "ndarray" else found

        return build(
            self._document, tensor, bridge, pickle_trusted=self._pickle_trusted, optimizer_names=optimizer_names
        )

    def _owner(self, keys: Path) -> TensorEntry:
        """Return the entry that has the bytes of a tensor, under its own path."""
        self._entry(keys)
        return self._owners[self._prefix + keys]

    @cached_property
    def _owners(self) -> dict[Path, TensorEntry]:
        tensors = self._layout.tensors
        return {entry.path: entry if entry.alias is None else tensors[entry.alias] for entry in tensors}

    def _moves(self, entry: TensorEntry) -> bool:
        return not entry.pieces or self._layout.by_id[entry.pieces[0].partition].role not in _STAYS

    def stream(self, paths: Iterable[Path]) -> Iterator[tuple[Path, torch.Tensor]]:
        """Yield CPU tensors of the given leaves, a few partitions at a time: memory stays flat.

        A tensor is only valid until the next one is asked for.
        """
        wanted: dict[Path, list[Path]] = {}
        for keys in paths:
            wanted.setdefault(self._owner(keys).path, []).append(keys)
        owners = [LazyTensor(self._source, self._layout, self._owners[path]) for path in wanted]
        for lazy, tensor in stream_tensors(owners):
            for keys in wanted[lazy.path]:
                yield keys, tensor

    def fill(
        self, targets: Mapping[Path, Sequence[torch.Tensor]], sinks: Mapping[Path, Sequence[Sink]] | None = None
    ) -> None:
        """Copy leaves into living tensors of their dtypes and shapes, and hand others out; memory stays flat.

        Plain memory is filled by the threads that read it. A tensor only ever gets elements whose checksums are right:
        after an error some of its own, or all of them, may be as they were.

        Parameters
        ----------
        targets : mapping
            Leaf -> the tensors to fill.
        sinks : mapping, optional
            Leaf -> what to call with a tensor, which is only valid during the call.
        """
        bridge = _bridge()
        calls = {path: list(found) for path, found in (sinks or {}).items()}
        plain: dict[Path, Sequence[torch.Tensor]] = {}
        for path, tensors in targets.items():
            if path not in calls and all(map(bridge.is_plain, tensors)):
                plain[path] = tensors
            else:
                calls.setdefault(path, []).extend(partial(bridge.copy_to, tensor) for tensor in tensors)
        # What shares a partition with others goes with them: no partition is read twice.
        shared = {piece.partition for path in calls for piece in self._owner(path).pieces}
        straight: list[tuple[TensorEntry, np.ndarray]] = []
        for path, tensors in plain.items():
            owner = self._owner(path)
            if shared.isdisjoint(piece.partition for piece in owner.pieces):
                straight += [(owner, bridge.writable_array(tensor)) for tensor in tensors]
            else:
                calls[path] = [partial(bridge.copy_to, tensor) for tensor in tensors]
        read_into(self._source, self._layout, straight, living=True)
        for path, tensor in self.stream(calls):
            for call in calls[path]:
                call(tensor)

    def load_into(self, strict: bool = True, **objects: Any) -> Report:
        """Copy the state into living objects, straight into their existing tensors.

        Parameters
        ----------
        strict : bool
            Raise InvalidInput, before any tensor is touched, if commit and objects do not fit each other.
        **objects
            By the names under which they were committed: modules, optimizers, anything with ``load_state_dict``.

        Returns
        -------
        Report
            What did not fit.
        """
        if not objects:
            raise InvalidInput("load_into needs objects, such as model=model")
        load: Callable[..., Report] = importlib.import_module("deltastore.loading").load_into
        return load(self, strict, objects)

    def __repr__(self) -> str:
        where = f", below {show_path(self._prefix)}" if self._prefix else ""
        return f"State(step={self.commit.step}, {len(self)} leaves{where})"


def _as_path(path: object) -> Path:
    return path if isinstance(path, tuple) else (path,)
