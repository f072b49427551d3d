"""``deltastore export``: commits as files of other tools."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deltastore import formats
from deltastore.cli.arguments import (
    ForceOption,
    JsonOption,
    UrlArgument,
    open_to_read,
    require_absent,
    state_at,
)
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
from deltastore.cli.leaf_paths import PATH_HELP, find
from deltastore.cli.output import Bar, commit_json, console, print_json, say, size
from deltastore.errors import InvalidInput, NotFound
from deltastore.handle import Commit
from deltastore.reader import State
from deltastore.store import Store

if TYPE_CHECKING:
    from deltastore.formats.loss import Loss
    from deltastore.formats.rewrite import Rewrite

HELP = """Write a commit, or a part of it, in the format of another tool.

The extension names the format: .pt, .safetensors, .h5, .npz, .zarr, .dcp; --format huggingface writes a folder that
from_pretrained loads. What the format cannot hold is listed first, and recorded in the file, so that `import` gives the
commit back as it was; --strict refuses instead. A file appears whole or not at all.

\b
Examples:
  deltastore export runs/gpt2 latest checkpoint.pt
  deltastore export runs/gpt2 best model.safetensors --part model --cast bfloat16
  deltastore export runs/gpt2 best out/ --format huggingface --files-from gpt2/
  deltastore export runs/gpt2 --steps 100:1000:100 'out/checkpoint-{step}' --format huggingface --files-from gpt2/
"""

STEP = "{step}"
_Made = dict[str, Any]


def export(
    url: UrlArgument,
    places: Annotated[
        list[str], typer.Argument(metavar="[REF] OUT", help="Step, latest, latest~N, tag or commit id; then the file.")
    ],
    part: Annotated[str | None, typer.Option("--part", "-p", metavar="PATH", help=PATH_HELP)] = None,
    format_name: FormatOption = "auto",
    steps: Annotated[
        str | None,
        typer.Option("--steps", metavar="FIRST:LAST:EVERY", help="Many steps instead of REF; OUT then holds {step}."),
    ] = None,
    only: OnlyOption = None,
    unwrap: UnwrapOption = False,
    strip: StripOption = None,
    rename: RenameOption = None,
    add: AddOption = "",
    cast: Annotated[
        str | None, typer.Option("--cast", metavar="DTYPE", help="Round floats to bfloat16, float16, ...")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse what the format cannot hold by itself.")] = False,
    shard: Annotated[
        str | None, typer.Option("--shard", metavar="SIZE", help="Split weights into files of at most 2G, say.")
    ] = None,
    files_from: Annotated[
        str | None, typer.Option("--files-from", metavar="FOLDER", help="huggingface: where config and tokenizer are.")
    ] = None,
    memory: MemoryOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write files."""
    *refs, out = places
    if len(refs) != (steps is None):
        raise InvalidInput("name one commit and one file, or one file with {step} in its name and --steps")
    if steps is not None and STEP not in out:
        raise InvalidInput(f"{out}: with --steps the name must hold {STEP}, such as step-{STEP}.safetensors")
    require_format(out, format_name)
    rewrite = make_rewrite(only=only, unwrap=unwrap, strip=strip, rename=rename, add=add, cast=cast)
    files = None if files_from is None else _files(files_from)
    made: list[_Made] = []
    with open_to_read(url) as store:
        wanted = refs if steps is None else [str(step) for step in chosen_steps(steps, store)]
        outs = [out.replace(STEP, str(state_at(store, ref).commit.step)) if steps else out for ref in wanted]
        for place in outs:
            require_absent(place, force=force)
        for ref, place in zip(wanted, outs, strict=True):
            state = state_at(store, ref)
            keys, value = ((), state) if part is None else find(state, part)
            contents = _changed(value, rewrite, files)
            losses = formats.losses(contents, place, format_name)
            if not as_json and ref is wanted[0]:
                _tell(losses)
            written = _write(contents, place, format_name, strict=strict, shard=shard, memory=memory)
            made.append({"commit": state.commit, "part": list(keys), "file": place, "bytes": written, "losses": losses})
        _answer(store.url, made, many=steps is not None, as_json=as_json)


def chosen_steps(text: str, store: Store) -> list[int]:
    """Return the steps of a store that ``FIRST:LAST:EVERY`` means; each may be left out, LAST is one of them."""
    parts = text.split(":")
    if not 1 < len(parts) <= 3 or not all(part.isdigit() or not part for part in parts) or parts[2:] == ["0"]:
        raise InvalidInput(f"--steps {text}: expected FIRST:LAST or FIRST:LAST:EVERY, such as 100:1000:100")
    known = sorted({commit.step for commit in store.lineage()})
    first = int(parts[0] or 0)
    last = int(parts[1]) if parts[1] else max(known, default=0)
    every = int(parts[2]) if parts[2:] and parts[2] else 1
    found = [step for step in known if first <= step <= last and (step - first) % every == 0]
    if not found:
        raise NotFound(f"--steps {text}: the store has none of these steps; it has {len(known)} from {known[:1]} on")
    return found


def require_format(path: str, name: str) -> None:
    """Raise InvalidInput unless there is a format of this name, or for "auto" one of the file's extension."""
    try:
        formats.target_format(path, name)
    except InvalidInput as error:
        raise InvalidInput(error.message.replace("give one as format=", "give one with --format")) from None


def _files(folder: str) -> dict[str, bytes]:
    if not os.path.isdir(folder):
        raise NotFound(f"--files-from {folder}: there is no such folder")
    found: dict[str, bytes] = importlib.import_module("deltastore.formats.huggingface").read_files(folder)
    return found


def _changed(value: Any, rewrite: Rewrite, files: dict[str, bytes] | None) -> Any:
    # Converters need torch; the command line as a whole does not.
    take_apart = importlib.import_module("deltastore.formats.contents").take_apart
    contents = rewrite.apply(take_apart(value if isinstance(value, State) else value[...]))
    if files is None:
        return contents
    state = contents.state(lazy=True, optimizer_names=True)
    if "model" not in state:
        state = {"model": state}
    return take_apart({**state, "files": {**state.get("files", {}), **files}})


def _write(contents: Any, out: str, format_name: str, *, strict: bool, shard: str | None, memory: str | None) -> int:
    with Bar(f"writing {os.path.basename(out)}") as bar:
        return formats.save(
            contents,
            out,
            format_name,
            strict=strict,
            shard_bytes=None if shard is None else parse_size(shard, "--shard"),
            memory_bytes=None if memory is None else parse_size(memory, "--memory"),
            progress=lambda done, total: bar.show(done >> 20, total >> 20),
        )


def _tell(losses: tuple[Loss, ...]) -> None:
    """Print, before anything is written, what the format cannot hold."""
    for line in importlib.import_module("deltastore.formats.loss").summary(losses):
        console(stderr=True).print(f"not held as it is: {line}", markup=False, soft_wrap=True)


def _answer(place: str, made: list[_Made], *, many: bool, as_json: bool) -> None:
    if not as_json:
        for one in made:
            say(f"wrote {one['file']}: step {one['commit'].step}, {size(one['bytes'])}")
        return
    files = [
        {
            "commit": commit_json(_commit(one)),
            "part": one["part"],
            "file": one["file"],
            "bytes": one["bytes"],
            "losses": [
                {"kind": loss.kind, "path": list(loss.path), "text": loss.text, "restored": loss.is_restored}
                for loss in one["losses"]
            ],
        }
        for one in made
    ]
    print_json({"store": place, "files": files} if many else {"store": place, **files[0]})


def _commit(one: _Made) -> Commit:
    commit: Commit = one["commit"]
    return commit
