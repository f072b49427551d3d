"""How near a commit is to the training state, as users ask for it (spec 6.6)."""

from __future__ import annotations

import math
from functools import cached_property

from deltastore.errors import NotFound
from deltastore.layout import Layout, TensorEntry
from deltastore.ondisk.fidelity import CommitFidelity, TensorFidelity
from deltastore.types import Key, Path, show_path


class Fidelity:
    """Exact, or a bound for every tensor."""

    def __init__(self, recorded: CommitFidelity, layout: Layout, prefix: Path = ()) -> None:
        self._recorded = recorded
        self._layout = layout
        self._prefix = prefix

    def below(self, prefix: Path) -> Fidelity:
        """Return the same for a part of the state, with paths relative to it."""
        return Fidelity(self._recorded, self._layout, prefix)

    @property
    def exact(self) -> bool:
        """Whether every element of every tensor equals the training state bit for bit."""
        return self._recorded.exact

    @property
    def budget(self) -> int:
        """Bytes that the commit was meant to take; 0 if it is exact."""
        return self._recorded.budget

    @property
    def floor(self) -> int:
        """Bytes that it needs in any case: exact tensors, plain values, record, container; 0 if it is exact."""
        return self._recorded.floor

    @cached_property
    def _by_index(self) -> dict[int, TensorFidelity]:
        return {tensor.tensor: tensor for tensor in self._recorded.tensors}

    @cached_property
    def _indices(self) -> dict[Path, int]:
        tensors = self._layout.tensors
        depth = len(self._prefix)
        return {
            entry.path[depth:]: index if entry.alias is None else entry.alias
            for index, entry in enumerate(tensors)
            if entry.path[:depth] == self._prefix
        }

    def of(self, *path: Key) -> TensorFidelity | None:
        """Return all that is recorded of a tensor; None where it is exact.

        Raises
        ------
        NotFound
            There is no such tensor.
        """
        if path not in self._indices:
            raise NotFound(f"{show_path(path)}: no such tensor", path=path)
        return self._by_index.get(self._indices[path])

    def bound(self, *path: Key) -> float:
        """Return the largest deviation of any element of a tensor; 0.0 where it is exact."""
        found = self.of(*path)
        return 0.0 if found is None else found.bound

    def residual(self, role: str) -> float:
        """Return the 2-norm of what a role lacks; 0.0 where it is exact.

        Raises
        ------
        NotFound
            No tensor has the role.
        """
        members = [index for index, entry in enumerate(self._layout.tensors) if self._role(entry) == role]
        if not members:
            raise NotFound(f"role {role!r}: no tensor has it", role=role)
        found = [self._by_index[index].missing for index in members if index in self._by_index]
        return math.sqrt(sum(math.inf if missing is None else missing**2 for missing in found))

    def _role(self, entry: TensorEntry) -> str | None:
        return self._layout.by_id[entry.pieces[0].partition].role if entry.pieces else None

    def inexact(self) -> list[tuple[TensorEntry, str, TensorFidelity]]:
        """Return the tensors that are not exact, each with its role and what is recorded of it."""
        found = []
        here = set(self._indices.values())
        for tensor in (tensor for tensor in self._recorded.tensors if tensor.tensor in here):
            entry = self._layout.tensors[tensor.tensor]
            found.append((entry, self._role(entry) or "", tensor))
        return found
