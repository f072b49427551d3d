"""Options of the verbs that convert: names, parts, dtypes, sizes."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deltastore.errors import InvalidInput

if TYPE_CHECKING:
    from deltastore.formats.rewrite import Rewrite

FormatOption = Annotated[
    str,
    typer.Option("--format", metavar="NAME", help="torch, safetensors, hdf5, numpy, zarr, dcp or huggingface."),
]
OnlyOption = Annotated[
    list[str] | None, typer.Option("--only", metavar="PATH", help="Keep this part: model, or model/h.0. Repeatable.")
]
UnwrapOption = Annotated[
    bool,
    typer.Option("--unwrap", help="Take what DDP, torch.compile and FSDP put into names away: module., _orig_mod."),
]
StripOption = Annotated[
    list[str] | None, typer.Option("--strip", metavar="PREFIX", help="Take this prefix of names away. Repeatable.")
]
RenameOption = Annotated[
    list[str] | None,
    typer.Option("--rename", metavar="REGEX=TEXT", help="Rename weights by a regular expression. Repeatable."),
]
AddOption = Annotated[str, typer.Option("--add-prefix", metavar="PREFIX", help="Put this in front of names.")]
MemoryOption = Annotated[
    str | None,
    typer.Option("--memory", metavar="SIZE", help="Refuse beforehand what would take more memory: 512M, 2G."),
]

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(i?B)?", re.IGNORECASE)
_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_size(text: str, option: str) -> int:
    """Return a size in bytes: 512M, 2G, 1.5 GiB, 1000."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise InvalidInput(f"{option} {text}: expected a size such as 512M or 2G")
    return int(float(match[1]) * 1024 ** _UNITS[match[2].upper()])


def make_rewrite(
    *,
    only: Sequence[str] | None = None,
    unwrap: bool = False,
    strip: Sequence[str] | None = None,
    rename: Sequence[str] | None = None,
    add: str = "",
    cast: str | None = None,
) -> Rewrite:
    """Return what the options ask for."""
    # Converters need torch; the command line as a whole does not.
    module: Any = importlib.import_module("deltastore.formats.rewrite")
    renames = tuple(map(module.parse_rename, rename or ()))
    made: Rewrite = module.Rewrite(tuple(only or ()), unwrap, tuple(strip or ()), renames, add, cast)
    return made
