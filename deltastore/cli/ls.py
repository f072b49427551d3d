"""``deltastore ls``: the leaves of a commit."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from deltastore.cli.arguments import JsonOption, RefArgument, UrlArgument, open_to_read, state_at
from deltastore.cli.inside import chain_of
from deltastore.cli.leaf_paths import PATH_HELP, holds, is_below_dots, not_there, parse_path, path_text
from deltastore.cli.leaf_places import PiecePlace, places
from deltastore.cli.leaf_rows import Row, collapse, layout_of, rows
from deltastore.cli.output import commit_json, print_json, print_table, say, size
from deltastore.errors import DeltaStoreError, NotFound
from deltastore.reader import State
from deltastore.store import Store
from deltastore.types import Path

HELP = """List tensors and plain values of a commit, all or those below PREFIX. No tensor is read.

PREFIX ends at a slash or at a dot: model/h.0 lists model/h.0.weight.

\b
Examples:
  deltastore ls runs/gpt2 latest
  deltastore ls runs/gpt2 1200 model
  deltastore ls runs/gpt2 1200 optimizer/state/wte.weight --json
  deltastore ls runs/gpt2 1200 model/wte.weight --layout      where it lies, for plain zarr
"""

_HOW_TO_READ = (
    "zarr reads them: zarr.open_array(zarr.storage.ZipStore(STORE/PACK, mode='r'), path=ARRAY, mode='r')[FROM:TO]",
    "full: the elements by their bits; xor: what to xor onto them; overlay: elements that replace them (spec 9)",
)
_PLACE_COLUMNS = (
    *("path", "dtype", "shape", "layer", ("step", "right")),
    *("array", ("from", "right"), ("to", "right"), "pack"),
)


def ls(
    url: UrlArgument,
    ref: RefArgument = "latest",
    prefix: Annotated[str | None, typer.Argument(metavar="[PREFIX]", help=PATH_HELP)] = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Also each of a long list of plain values.")] = False,
    layout: Annotated[bool, typer.Option("--layout", help="Where each tensor lies: packs, Zarr arrays.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List leaves."""
    with open_to_read(url) as store:
        try:
            state = state_at(store, ref)
        except NotFound as error:
            if prefix is None and _is_prefix_in_latest(store, ref):
                meant = shlex.join(["deltastore", "ls", url, "latest", ref])
                raise NotFound(f"{error.message}; did you mean `{meant}`?", **error.fields) from error
            raise
        path = () if prefix is None else parse_path(state, prefix)
        found = rows_below(state, path)
        lie = _places(store, state, found) if layout else {}
        place = store.url
    if as_json:
        leaves = [{**row.json(), **_places_json(lie.get(row.path))} for row in found]
        print_json({"store": place, "commit": commit_json(state.commit), "prefix": list(path), "leaves": leaves})
        return
    if layout:
        print_table(_PLACE_COLUMNS, _place_cells([row for row in found if row.path in lie], lie))
        for line in _HOW_TO_READ:
            say(line)
        return
    columns = ("path", "dtype", "shape", ("bytes", "right"), "")
    print_table(columns, (_cells(row) for row in (found if everything else collapse(found))))


def rows_below(state: State, path: Path) -> list[Row]:
    """Return the rows at a path: those below a prefix, which may end at a dot, or the one of a leaf.

    Raises
    ------
    NotFound
        There are none; what is near is named.
    """
    if not path:
        return list(rows(state))
    if path in state:
        return [row for row in rows(state) if row.path == path]
    if holds(state, path):
        return list(rows(state[path], path))
    found = [row for row in rows(state) if is_below_dots(row.path, path)]
    if not found:
        raise not_there(state, path)
    return found


def _is_prefix_in_latest(store: Store, text: str) -> bool:
    try:
        state = store.at("latest")
        return bool(rows_below(state, parse_path(state, text)))
    except DeltaStoreError:
        return False  # only a hint


def _places(store: Store, state: State, found: list[Row]) -> dict[Path, list[PiecePlace]]:
    chain = chain_of(store, state.commit)
    return {row.path: list(places(chain, layout_of(state), row.path)) for row in found if row.kind != "plain"}


def _places_json(pieces: list[PiecePlace] | None) -> dict[str, Any]:
    return {} if pieces is None else {"places": [piece.json() for piece in pieces]}


def _place_cells(found: list[Row], lie: dict[Path, list[PiecePlace]]) -> Iterator[list[object]]:
    for row in found:
        head = [path_text(row.path), row.dtype, str(list(row.shape))]
        lines = [(layer, array) for piece in lie[row.path] for layer in piece.layers for array in layer.arrays]
        if not lines:
            yield [*head, "no elements", "", "", "", "", ""]
        for layer, array in lines:
            begin, end = ("by indptr", "") if array.start is None else (array.start, array.stop)
            yield [*head, layer.kind, layer.step, array.path, begin, end, layer.pack]
            head = ["", "", ""]


def _cells(row: Row) -> list[object]:
    if row.kind == "plain":
        return [path_text(row.path), "", "", "", row.about()]
    return [path_text(row.path), row.dtype, str(list(row.shape)), size(row.bytes), row.about()]
