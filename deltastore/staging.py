"""Taking a state: its tensors are copied into partitions, its plain values into a document."""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from deltastore.buffers import BufferPool, Buffers, Hints, StagedState, StreamedState
from deltastore.deferred import Deferred, HeldWhole
from deltastore.errors import InvalidInput
from deltastore.layout import Layout, LayoutInput, Partition, plan, revise
from deltastore.parallel import run_all
from deltastore.torch_bridge import TORCH
from deltastore.tree import Flat, flatten
from deltastore.types import Path
from deltastore.window import Part, Window
from deltastore.witness import Witness

MAX_CHANGED = 64
"""When more tensors than this are new or elsewhere, the whole layout is compared."""
SMALL_BYTES = 64 << 10
"""Copies below this keep the interpreter lock: to give it away and wait for it takes longer."""

INLINE_BYTES = 1 << 20
"""States below this are copied in the caller's thread: to hand a part to another takes longer."""

_move = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ("memmove", ctypes.CDLL(None))
)

_NOT_TRAINED = frozenset(
    {"rng", "random", "random_state", "generators", "user", "extra", "scheduler", "scaler", "meta"}
)
"""Top keys of what no device is meant for: `map_location` leaves it on the CPU."""

_Key = tuple[int, Hashable, Hashable, Hashable]
"""Address, dtype, shape and device (None: CPU) of a tensor that is one plain run of memory."""
_Place = tuple[int, int, int, int]
"""A piece of a tensor in a partition: index of the tensor, first element, offset in the partition, elements."""
_Places = dict[int, list[_Place]]
"""Pieces by partition."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """The tensors of the state before, by what tells that they came again. No tensor is kept alive."""

    paths: list[Path]
    keys: list[_Key | None]


class Stager:
    """Takes states one after the other; lays each out as the one before where that is possible."""

    def __init__(self, *, pickle_trusted: bool) -> None:
        self.pool = BufferPool()
        self._pickle_trusted = pickle_trusted
        self._layout: Layout | None = None
        self._seen: _Seen | None = None
        self._placed: tuple[Layout, _Places] | None = None
        self._phase = 0

    @property
    def layout(self) -> Layout | None:
        """How the state before was laid out."""
        return self._layout

    def flatten(self, state: Mapping[str, Any]) -> Flat:
        """Return document and tensors of a state; nothing is copied yet.

        Raises
        ------
        InvalidInput
            The state holds something that the format cannot; its path is named.
        """
        return flatten(state, TORCH, pickle_trusted=self._pickle_trusted)

    def take(self, flat: Flat, hints: Hints, *, replan: bool) -> StagedState:
        """Return a private copy of a flattened state.

        Parameters
        ----------
        replan : bool
            A base is due: lay everything out anew if the present layout was patched.
        """
        paths, values = [path for path, _ in flat.tensors], [value for _, value in flat.tensors]
        seen = _Seen(paths, [_memory_key(value) for value in values])
        layout = self._layout
        if layout is not None and not (self._seen and _came_again(layout, self._seen, seen, values)):
            layout = revise(layout, _inputs(flat, hints))
        layout, fresh = _planned(layout, flat, hints, replan=replan)
        buffers = self.pool.take(layout)
        now, later = self._divide(layout, seen.keys, hints)

        def copy(partition: Partition) -> None:
            _copy_pieces(values, seen.keys, now[partition.id], buffers[partition.id])

        window = self._window(layout, values, seen.keys, later, buffers, hints) if later else None
        if sum(place[3] * buffers[number].itemsize for number in now for place in now[number]) < INLINE_BYTES:
            for partition in layout.partitions:
                copy(partition)
        else:
            run_all(copy, layout.partitions)
        self._layout, self._seen = layout, seen  # only now: an interrupted copy leaves no trace
        return StagedState(flat.document, layout, fresh, buffers, window)

    def place(self, flat: Flat, *, replan: bool) -> StreamedState:
        """Return a flattened state as it will be laid out; nothing is copied, its partitions are read on demand.

        Parameters
        ----------
        replan : bool
            As for :meth:`take`.
        """
        layout = None if self._layout is None else revise(self._layout, _inputs(flat, Hints()))
        layout, fresh = _planned(layout, flat, Hints(), replan=replan)
        places = self._places(layout)
        cut = {index for found in places.values() for index, start, _, _ in found if start}
        values = [
            HeldWhole(value) if index in cut and isinstance(value, Deferred) and value.is_read_whole else value
            for index, (_, value) in enumerate(flat.tensors)
        ]
        keys = [_memory_key(value) for value in values]

        def read(partition: Partition, out: np.ndarray) -> None:
            _copy_pieces(values, keys, places[partition.id], out)

        self._layout, self._seen = layout, None
        return StreamedState(flat.document, layout, fresh, read)

    def _divide(self, layout: Layout, keys: list[_Key | None], hints: Hints) -> tuple[_Places, _Places]:
        """Return what is copied at once, and what the window is for: what lasts, and is large enough to be worth it."""
        places = self._places(layout)
        if not hints.lasting:
            return places, {}
        now: _Places = {}
        later: _Places = {}
        for partition in layout.partitions:
            itemsize = partition.bytes // max(partition.length, 1)
            waits = [
                (key := keys[place[0]]) is not None
                and key[3] is None
                and key[0] in hints.lasting
                and place[3] * itemsize >= SMALL_BYTES
                for place in places[partition.id]
            ]
            now[partition.id] = [place for place, wait in zip(places[partition.id], waits, strict=True) if not wait]
            if any(waits):
                later[partition.id] = [place for place, wait in zip(places[partition.id], waits, strict=True) if wait]
        return now, later

    def _window(
        self,
        layout: Layout,
        values: list[Any],
        keys: list[_Key | None],
        later: _Places,
        buffers: Buffers,
        hints: Hints,
    ) -> Window:
        self._phase += 1
        witness = Witness(
            self._phase,
            [
                (values[index], buffers[number][offset : offset + count], start)
                for number, places in later.items()
                for index, start, offset, count in places
            ],
        )
        parts = [
            Part(layout.by_id[number], partial(_copy_pieces, values, keys, places, buffers[number]))
            for number, places in later.items()
        ]
        return Window(parts, witness.is_unchanged, hints.patience_seconds)

    def _places(self, layout: Layout) -> _Places:
        """Return what lies in each partition; worked out once for a layout."""
        if self._placed is None or self._placed[0] is not layout:
            places: _Places = {partition.id: [] for partition in layout.partitions}
            for index, entry in enumerate(layout.tensors):
                start = 0
                for piece in entry.pieces:
                    places[piece.partition].append((index, start, piece.offset, piece.count))
                    start += piece.count
            self._placed = layout, places
        return self._placed[1]

    def adopt(self, layout: Layout) -> None:
        """Go on from a layout that was read: the next state is laid out like it where that is possible."""
        self._layout, self._seen = layout, None


def _memory_key(value: Any) -> _Key | None:
    """Return where a tensor lies that is one plain run of memory; None for any other value.

    Two of one state have equal keys exactly if they are one tensor in memory.
    """
    if isinstance(value, np.ndarray | Deferred) or not value.is_contiguous() or value.is_conj() or value.is_neg():
        return None
    address = value.data_ptr()
    end = (value.storage_offset() + value.numel()) * value.itemsize
    if end > value.untyped_storage().nbytes():
        raise InvalidInput(f"a tensor of shape {tuple(value.shape)} whose storage was resized or freed cannot be read")
    return (address, value.dtype, value.shape, None if value.is_cpu else value.device) if address else None


def _came_again(layout: Layout, before: _Seen, now: _Seen, values: list[Any]) -> bool:
    """Return whether the layout surely fits; False only says that it has to be compared in full.

    A few tensors are made anew for each state (random states): they fit if dtype and shape are the same, and none of
    them was or is one with another tensor.
    """
    if before.paths != now.paths:
        return False
    changed = [i for i, key in enumerate(now.keys) if key is None or key != before.keys[i]]
    if len(changed) > MAX_CHANGED:
        return False
    if not changed:
        return True
    moved = set(changed)
    own = {key[0] for i, key in enumerate(now.keys) if key is not None and i not in moved}
    identities = [TORCH.identity(values[i]) for i in changed]
    addresses = [key[0] for key in map(now.keys.__getitem__, changed) if key is not None]
    shared = [identity for identity in identities if identity is not None]
    if len(set(shared)) != len(shared) or not own.isdisjoint(addresses):
        return False
    if any(entry.alias is not None and (entry.alias in moved or i in moved) for i, entry in enumerate(layout.tensors)):
        return False
    return all((layout.tensors[i].dtype, layout.tensors[i].shape) == TORCH.describe(values[i]) for i in changed)


def _copy_pieces(values: list[Any], keys: list[_Key | None], pieces: list[_Place], target: np.ndarray) -> None:
    """Copy what lies in one partition."""
    base, size = target.ctypes.data, target.itemsize
    for index, start, offset, count in pieces:
        key = keys[index]
        if key is None or key[3] is not None:
            TORCH.copy_into(values[index], target[offset : offset + count], start, count)
        else:
            move = _move if count * size < SMALL_BYTES else ctypes.memmove
            move(base + offset * size, key[0] + start * size, count * size)


def _planned(layout: Layout | None, flat: Flat, hints: Hints, *, replan: bool) -> tuple[Layout, bool]:
    """Return a layout that fits, and whether it is a new plan."""
    if layout is None or (replan and _patched(layout)):
        return plan(_inputs(flat, hints)), True
    return layout, False


def _patched(layout: Layout) -> bool:
    covered = sum(piece.count for entry in layout.tensors for piece in entry.pieces)
    ids = [partition.id for partition in layout.partitions]
    return ids != list(range(len(ids))) or covered < 0.9 * sum(partition.length for partition in layout.partitions)


def _inputs(flat: Flat, hints: Hints) -> list[LayoutInput]:
    return [_input(path, value, hints) for path, value in flat.tensors]


def _input(path: Path, value: Any, hints: Hints) -> LayoutInput:
    about = TORCH.describe(value)
    slot = len(path) >= 3 and path[-3] == "state" and isinstance(path[-1], str)
    role = hints.roles.get(path) or (str(path[-1]) if slot else "other" if path[0] in _NOT_TRAINED else "param")
    owner = hints.owners.get(path, path[:-1] if slot else path)
    return LayoutInput(path, about.dtype, about.shape, TORCH.identity(value), role, owner)
