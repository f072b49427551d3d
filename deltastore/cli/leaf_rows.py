"""The leaves of a state as rows to print, without torch and without reading a tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from deltastore.cli.leaf_paths import path_text
from deltastore.cli.output import shorten, size
from deltastore.document import leaves, plain_value
from deltastore.errors import DeltaStoreError
from deltastore.layout import Layout
from deltastore.reader import LazyTensor, State
from deltastore.types import Json, Path

_RUN = 8
"""Longer runs of plain values under consecutive integers are one row for people (the 625 words of a random state)."""
_VALUE_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class Row:
    """One leaf, or a run of leaves."""

    path: Path
    kind: str
    """"tensor", "ndarray" or "plain"."""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    bytes: int = 0
    role: str = ""
    tied_to: Path | None = None
    node: Json = None
    run: int = 1
    """How many leaves the row stands for."""

    def json(self) -> dict[str, Any]:
        """Return the row as programs get it."""
        if self.kind == "plain":
            return {"path": list(self.path), "kind": "plain", "value": self.node}
        document = {
            "path": list(self.path),
            "kind": self.kind,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "bytes": self.bytes,
            "role": self.role,
        }
        return document if self.tied_to is None else {**document, "tied_to": list(self.tied_to)}

    def about(self) -> str:
        """Return what people want to know of the leaf."""
        if self.run > 1:
            return f"{self.run} values"
        if self.kind == "plain":
            return value_text(self.node)
        return f"tied to {path_text(self.tied_to)}" if self.tied_to is not None else self.role


def layout_of(state: State) -> Layout:
    """Return where the tensors of a state lie."""
    return state.layout


def rows(state: State, prefix: Path = ()) -> Iterator[Row]:
    """Yield the rows of all leaves of a state that stands at `prefix`."""
    layout = layout_of(state)
    owners = {
        tensor.path: tensor if tensor.alias is None else layout.tensors[tensor.alias] for tensor in layout.tensors
    }
    for path, leaf in leaves(state.document):
        whole = prefix + path
        if leaf.kind == "plain":
            yield Row(whole, "plain", node=leaf.node)
            continue
        lazy: LazyTensor = state[path]  # raises where the layout does not list it
        owner = owners[whole]
        role = layout.by_id[owner.pieces[0].partition].role if owner.pieces else ""
        tied_to = None if owner.path == whole else owner.path
        yield Row(whole, leaf.kind, owner.dtype, owner.shape, lazy.nbytes, role, tied_to)


@dataclass
class _Run:
    rows: list[Row] = field(default_factory=list)

    def takes(self, row: Row) -> bool:
        """Return whether a row goes on with the run."""
        if row.kind != "plain" or not row.path or type(row.path[-1]) is not int:
            return False
        return not self.rows or (
            row.path[:-1] == self.rows[-1].path[:-1] and row.path[-1] == self.rows[-1].path[-1] + 1  # type: ignore[operator]
        )

    def end(self) -> Iterator[Row]:
        """Yield the rows of the run, as one if they are many, and begin a new one."""
        if len(self.rows) > _RUN:
            yield Row(self.rows[0].path[:-1], "plain", run=len(self.rows))
        else:
            yield from self.rows
        self.rows = []


def collapse(found: Iterable[Row]) -> Iterator[Row]:
    """Yield the rows with each long run of numbered plain values as one row."""
    run = _Run()
    for row in found:
        if run.takes(row):
            run.rows.append(row)
            continue
        yield from run.end()
        if run.takes(row):
            run.rows.append(row)
        else:
            yield row
    yield from run.end()


def value_text(node: Json) -> str:
    """Return a plain value for people; values of frameworks and pickles are named, not made."""
    if isinstance(node, dict):
        tag = str(node.get("$"))
        if tag == "pickle":
            return "a pickle (not loaded)"
        if tag in ("bytes", "bytearray"):
            return f"{tag}, {size(len(str(node.get('b'))) * 3 // 4)}"
        if tag.startswith("torch."):
            return f"{tag} {node.get('v')}"
    try:
        return shorten(repr(plain_value(node, None)), _VALUE_CHARACTERS)
    except DeltaStoreError as error:
        return shorten(error.message, _VALUE_CHARACTERS)
