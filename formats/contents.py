"""What a converter is given and gives: a document of containers and plain values, and tensors by their paths."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from deltastore.document import build
from deltastore.formats.leaves import LeafBridge, identity, nbytes, whole
from deltastore.reader import LazyTensor, State
from deltastore.torch_bridge import TORCH
from deltastore.tree import flatten
from deltastore.types import Json, Path

_BRIDGE = LeafBridge()


@dataclass(frozen=True)
class Contents:
    """A nested state taken apart; its tensors may still be in a store or a file."""

    document: Json
    """Containers and plain values (spec 8)."""
    leaves: Mapping[Path, Any]
    """The tensor or numpy array of every path, in document order."""
    bounds: Mapping[Path, float] = field(default_factory=dict)
    """How far tensors of an inexact commit may be off."""

    @cached_property
    def owners(self) -> dict[Path, Path]:
        """The first path of the same tensor, for every path."""
        first: dict[Hashable, Path] = {}
        owners = {}
        for path, leaf in self.leaves.items():
            key = identity(leaf)
            owners[path] = path if key is None else first.setdefault(key, path)
        return owners

    @property
    def distinct(self) -> dict[Path, Any]:
        """The tensors without their aliases."""
        return {path: leaf for path, leaf in self.leaves.items() if self.owners[path] == path}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(map(nbytes, self.distinct.values()))

    @property
    def largest_bytes(self) -> int:
        """Bytes of the largest tensor."""
        return max(map(nbytes, self.distinct.values()), default=0)

    def state(self, *, lazy: bool = False, optimizer_names: bool = False) -> Any:
        """Return the nested state.

        Parameters
        ----------
        lazy : bool
            Leave tensors where they are; otherwise all are read, and aliases are one tensor.
        optimizer_names : bool
            Keep parameter names in optimizer states instead of torch's integers.
        """
        read: dict[Path, Any] = {}

        def tensor(path: Path, kind: str) -> Any:
            leaf = self.leaves[path]
            owner = self.owners[path]
            if kind == "ndarray":
                if not isinstance(leaf, np.ndarray):
                    leaf = TORCH.to_numpy(whole(leaf), TORCH.describe(leaf).dtype)
                return read.setdefault(owner, leaf)
            if lazy:
                return leaf
            if owner not in read:
                read[owner] = whole(leaf)
            return read[owner]

        return build(self.document, tensor, TORCH, optimizer_names=optimizer_names)


def take_apart(state: Any) -> Contents:
    """Return the contents of a nested state, of a :class:`deltastore.State`, or of a single tensor; nothing is read.

    Contents are returned as they are.

    Raises
    ------
    InvalidInput
        A value that no store could hold either; its path is named.
    """
    if isinstance(state, Contents):
        return state
    bounds: dict[Path, float] = {}
    if isinstance(state, State):
        if not state.fidelity.exact:
            tensors = (path for path in state if isinstance(state[path], LazyTensor))
            bounds = {path: bound for path in tensors if (bound := state.fidelity.bound(*path))}
        state = state.to_lazy_state()
    flat = flatten(state, _BRIDGE)
    return Contents(flat.document, dict(flat.tensors), bounds)
