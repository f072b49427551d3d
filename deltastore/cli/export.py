"""``deltastore export``: a commit as a file of another tool."""

from __future__ import annotations

from typing import Annotated

import typer

from deltastore import formats
from deltastore.cli.arguments import (
    ForceOption,
    JsonOption,
    RefArgument,
    UrlArgument,
    open_to_read,
    require_absent,
    state_at,
)
from deltastore.cli.leaf_paths import PATH_HELP, find
from deltastore.cli.output import commit_json, print_json, say, size
from deltastore.errors import InvalidInput
from deltastore.types import Path

HELP = """Write a commit, or a part of it, as a standard state_dict.

The file appears whole or not at all. torch.load(FILE, weights_only=True) reads a .pt file.

\b
Examples:
  deltastore export runs/gpt2 latest checkpoint.pt
  deltastore export runs/gpt2 best model.pt --part model
"""

_ALL: Path = ()


def export(
    url: UrlArgument,
    ref: RefArgument,
    out: Annotated[str, typer.Argument(metavar="OUT", help="The file; its extension names the format.")],
    part: Annotated[str | None, typer.Option("--part", "-p", metavar="PATH", help=PATH_HELP)] = None,
    format_name: Annotated[
        str, typer.Option("--format", metavar="NAME", help="The format, if not by extension.")
    ] = "auto",
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write a file."""
    require_format(out, format_name)
    require_absent(out, force=force)
    with open_to_read(url) as store:
        state = state_at(store, ref)
        keys, value = _ALL, state
        if part is not None:
            keys, value = find(state, part)
        written = formats.save(value, out, format_name)
        place = store.url
    if as_json:
        commit = commit_json(state.commit)
        print_json({"store": place, "commit": commit, "part": list(keys), "file": out, "bytes": written})
    else:
        say(f"wrote {out}: step {state.commit.step}, {size(written)}")


def require_format(path: str, name: str) -> None:
    """Raise InvalidInput unless there is a format of this name, or for "auto" one of the file's extension."""
    try:
        formats.target_format(path, name)
    except InvalidInput as error:
        raise InvalidInput(error.message.replace("give one as format=", "give one with --format")) from None
