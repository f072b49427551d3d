"""``deltastore import``: checkpoints of other tools as the commits of a store."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

import deltastore
from deltastore import formats
from deltastore.cli.arguments import JsonOption
from deltastore.cli.conversion import (
    AddOption,
    FormatOption,
    MemoryOption,
    OnlyOption,
    RenameOption,
    StripOption,
    UnwrapOption,
    make_rewrite,
    parse_size,
)
from deltastore.cli.output import Bar, commit_json, count, print_json, say, size
from deltastore.errors import InvalidInput, NotFound

if TYPE_CHECKING:
    from deltastore.formats.series import Imported

HELP = """Bring checkpoints of other tools into a store, each as one commit; a series becomes deltas.

What a file is, its content tells: torch (.pt, .pth, .bin), safetensors, HDF5, .npz, Zarr, torch.distributed.checkpoint,
Hugging Face folders. No code that a file names is run. Weights that are all a file holds go to the part "model". Steps
that the store has already are left out, so that an import that was cut off can be started again.

\b
Examples:
  deltastore import model.safetensors runs/imported
  deltastore import ckpt-*/ runs/history --steps-from-name
  deltastore import step_*.pt runs/ddp --steps-from-name --unwrap --only model
  deltastore import old.pt runs/new --rename '^h\\.=transformer.h.'
"""


def import_(
    paths: Annotated[list[str], typer.Argument(metavar="PATH... URL", help="Files or folders, then the store.")],
    steps_from_name: Annotated[
        bool, typer.Option("--steps-from-name", help="The last number in a name is its step: ckpt-300.")
    ] = False,
    step: Annotated[int, typer.Option("--step", min=0, help="The step of the first, without --steps-from-name.")] = 0,
    format_name: FormatOption = "auto",
    only: OnlyOption = None,
    unwrap: UnwrapOption = False,
    strip: StripOption = None,
    rename: RenameOption = None,
    add: AddOption = "",
    strict: Annotated[bool, typer.Option("--strict", help="Refuse a checkpoint that says that it is inexact.")] = False,
    memory: MemoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Import checkpoints."""
    *sources, url = paths
    if not sources:
        raise InvalidInput(f"{url}: name the checkpoints first and the store last")
    missing = [source for source in sources if not os.path.exists(source)]
    if missing:
        raise NotFound(f"{missing[0]}: there is no such file ({count(len(missing), 'name')} of {len(sources)})")
    if os.path.exists(url) and not os.path.isdir(url):
        raise InvalidInput(f"{url} is a file: the last name is that of the store, a folder")
    rewrite = make_rewrite(only=only, unwrap=unwrap, strip=strip, rename=rename, add=add)
    for source in sources:
        formats.format_of(source, format_name)  # one that is not known is told before anything is written
    # The library that reads checkpoints needs torch; the command line as a whole does not.
    series: Any = importlib.import_module("deltastore.formats.series")
    found = series.find_series(sources, steps_from_name=steps_from_name, first_step=step)
    with deltastore.open(url) as store, Bar("importing") as bar:
        done: list[Imported] = []

        def told(imported: Imported) -> None:
            done.append(imported)
            bar.show(len(done), len(found), f"importing {os.path.basename(imported.checkpoint.path)}")
            if not as_json:
                commit = imported.commit
                bar.say(f"step {commit.step}: {commit.kind}, {size(commit.bytes)}  {imported.checkpoint.path}")

        memory_bytes = None if memory is None else parse_size(memory, "--memory")
        series.import_series(
            store, found, format=format_name, rewrite=rewrite, strict=strict, memory_bytes=memory_bytes, told=told
        )
        place = store.url
    _answer(place, len(found), done, as_json=as_json)


def _answer(place: str, wanted: int, done: list[Imported], *, as_json: bool) -> None:
    full = sum(imported.state_bytes for imported in done)
    stored = sum(imported.commit.bytes for imported in done)
    if as_json:
        commits = [
            {**commit_json(imported.commit), "from": imported.checkpoint.path, "state_bytes": imported.state_bytes}
            for imported in done
        ]
        print_json(
            {"store": place, "commits": commits, "left_out": wanted - len(done), "state_bytes": full, "bytes": stored}
        )
        return
    if wanted > len(done):
        say(f"left out {wanted - len(done)} of {count(wanted, 'checkpoint')}: the store has these steps")
    if done:
        share = f", {1 - stored / full:.0%} less" if stored < full else ""
        say(f"imported {count(len(done), 'checkpoint')}: {size(full)} of tensors in {size(stored)}{share}")
