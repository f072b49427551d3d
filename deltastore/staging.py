"""Taking a state: its tensors are copied into partitions, its plain values into a document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deltastore.buffers import BufferPool, Hints, StagedState
from deltastore.layout import Layout, LayoutInput, Partition, plan, revise
from deltastore.parallel import run_all
from deltastore.torch_bridge import TORCH
from deltastore.tree import Flat, flatten
from deltastore.types import Path


class Stager:
    """Takes states one after the other; lays each out as the one before where that is possible."""

    def __init__(self, *, pickle_trusted: bool) -> None:
        self.pool = BufferPool()
        self._pickle_trusted = pickle_trusted
        self._layout: Layout | None = None

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
        inputs = [_input(path, value, hints) for path, value in flat.tensors]
        layout = None if self._layout is None else revise(self._layout, inputs)
        if layout is not None and replan and _patched(layout):
            layout = None
        fresh = layout is None
        if layout is None:
            layout = plan(inputs)
        self._layout = layout
        buffers = self.pool.take(layout)
        values = dict(flat.tensors)
        by_partition: dict[int, list[tuple[Any, int, int, int]]] = {p.id: [] for p in layout.partitions}
        for entry in layout.tensors:
            start = 0
            for piece in entry.pieces:
                by_partition[piece.partition].append((values[entry.path], start, piece.offset, piece.count))
                start += piece.count

        def copy(partition: Partition) -> None:
            target = buffers[partition.id]
            for value, start, offset, count in by_partition[partition.id]:
                TORCH.copy_into(value, target[offset : offset + count], start, count)

        run_all(copy, layout.partitions)
        return StagedState(flat.document, layout, fresh, buffers)

    def adopt(self, layout: Layout) -> None:
        """Go on from a layout that was read: the next state is laid out like it where that is possible."""
        self._layout = layout

    def reset(self) -> None:
        """Forget the layout: the next state is planned anew."""
        self._layout = None


def _patched(layout: Layout) -> bool:
    covered = sum(piece.count for entry in layout.tensors for piece in entry.pieces)
    ids = [partition.id for partition in layout.partitions]
    return ids != list(range(len(ids))) or covered < 0.9 * sum(partition.length for partition in layout.partitions)


def _input(path: Path, value: Any, hints: Hints) -> LayoutInput:
    about = TORCH.describe(value)
    slot = len(path) >= 3 and path[-3] == "state" and isinstance(path[-1], str)
    role = hints.roles.get(path) or (str(path[-1]) if slot else "param")
    owner = hints.owners.get(path, path[:-1] if slot else path)
    return LayoutInput(path, about.dtype, about.shape, TORCH.identity(value), role, owner)
