"""``deltastore ls``: the leaves of a commit."""

from __future__ import annotations

from typing import Annotated

import typer

from deltastore.cli.arguments import JsonOption, RefArgument, UrlArgument, open_to_read, state_at
from deltastore.cli.leaf_paths import PATH_HELP, parse_path, path_text
from deltastore.cli.leaf_rows import Row, collapse, rows
from deltastore.cli.output import commit_json, print_json, print_table, size
from deltastore.reader import State
from deltastore.types import Path

HELP = """List tensors and plain values of a commit, all or those below PREFIX. No tensor is read.

\b
Examples:
  deltastore ls runs/gpt2 latest
  deltastore ls runs/gpt2 1200 model
  deltastore ls runs/gpt2 1200 optimizer/state/wte.weight --json
"""


def ls(
    url: UrlArgument,
    ref: RefArgument = "latest",
    prefix: Annotated[str | None, typer.Argument(metavar="[PREFIX]", help=PATH_HELP)] = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Also each of a long list of plain values.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List leaves."""
    with open_to_read(url) as store:
        state = state_at(store, ref)
        path = () if prefix is None else parse_path(state, prefix)
        found = list(rows_below(state, path))
        place = store.url
    if as_json:
        leaves = [row.json() for row in found]
        print_json({"store": place, "commit": commit_json(state.commit), "prefix": list(path), "leaves": leaves})
        return
    columns = ("path", "dtype", "shape", ("bytes", "right"), "")
    print_table(columns, (_cells(row) for row in (found if everything else collapse(found))))


def rows_below(state: State, path: Path) -> list[Row]:
    """Return the rows at a path: those below a prefix, or the one of a leaf."""
    if path in state:
        return [row for row in rows(state) if row.path == path]
    return list(rows(state[path], path) if path else rows(state))


def _cells(row: Row) -> list[object]:
    if row.kind == "plain":
        return [path_text(row.path), "", "", "", row.about()]
    return [path_text(row.path), row.dtype, str(list(row.shape)), size(row.bytes), row.about()]
