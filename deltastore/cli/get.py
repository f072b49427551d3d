"""``deltastore get``: one leaf of a commit, or a slice of one."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
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
from deltastore.cli.leaf_paths import PATH_HELP, find, path_text
from deltastore.cli.output import commit_json, print_json, say, size
from deltastore.document import leaves
from deltastore.errors import InvalidInput
from deltastore.formats.atomic_file import atomic_file
from deltastore.reader import LazyTensor, State
from deltastore.types import show_path

if TYPE_CHECKING:
    import torch

HELP = """Read one leaf, or a slice of it. Only the chunks that it needs are read.

\b
Examples:
  deltastore get runs/gpt2 latest model/wte.weight --slice 0:4
  deltastore get runs/gpt2 1200 model/wte.weight --slice 0:10,5 --json
  deltastore get runs/gpt2 1200 optimizer/state/wte.weight/exp_avg -o exp_avg.npy
  deltastore get runs/gpt2 latest '["model", "a/b"]' -o tensor.pt
"""

MOST_VALUES = 1_000_000
_BOUND = re.compile(r"\s*(-?\d*)\s*(?::\s*(-?\d*)\s*(?::\s*(\d*)\s*)?)?")


def get(
    url: UrlArgument,
    ref: RefArgument,
    path: Annotated[str, typer.Argument(metavar="PATH", help=PATH_HELP)],
    part: Annotated[
        str | None, typer.Option("--slice", "-s", metavar="SLICE", help="As in numpy: 0:10, 3, :,0:5, ...,0.")
    ] = None,
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="FILE", help="Write to FILE.npy, or to FILE.pt for torch.")
    ] = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Read one leaf."""
    if output is not None:
        require_known(output)
        require_absent(output, force=force)
    with open_to_read(url) as store:
        state = state_at(store, ref)
        keys, found = find(state, path)
        if isinstance(found, State):
            raise InvalidInput(
                f"{show_path(keys)} is no leaf, {len(found)} are below it: `ls` lists them, `export --part` writes them"
            )
        leaf = dict(leaves(state.document))[keys]
        about = {"store": store.url, "commit": commit_json(state.commit), "path": list(keys), "kind": leaf.kind}
        value = read(found, part) if isinstance(found, LazyTensor) else found
    if isinstance(found, LazyTensor):
        _answer_tensor(value, {**about, "slice": part}, output, as_json=as_json)
    elif part is not None or output is not None:
        raise InvalidInput(f"{show_path(keys)} is a plain value: --slice and -o are for tensors")
    elif as_json:
        print_json({**about, "value": leaf.node})
    else:
        say(repr(value))


def _answer_tensor(value: torch.Tensor, about: dict[str, Any], output: str | None, *, as_json: bool) -> None:
    dtype, shape = str(value.dtype).removeprefix("torch."), list(value.shape)
    document = {**about, "dtype": dtype, "shape": shape}
    if output is not None:
        written = write(value, output)
        if as_json:
            print_json({**document, "file": output, "bytes": written})
        else:
            say(f"wrote {output}: {dtype} {shape}, {size(written)}")
    elif as_json:
        print_json({**document, "values": values(value)})
    else:
        say(f"{path_text(tuple(about['path']))}  {dtype} {shape}  step {about['commit']['step']}")
        typer.echo(str(value))


def require_known(path: str) -> None:
    """Raise InvalidInput unless the extension of a file for a tensor says how to write it."""
    suffix = os.path.splitext(path)[1].lower()
    torch_suffixes = next(entry.suffixes for entry in formats.FORMATS if entry.name == "torch")
    if suffix != ".npy" and suffix not in torch_suffixes:
        raise InvalidInput(f"-o {path}: the extension is none of .npy {' '.join(torch_suffixes)}")


def read(leaf: LazyTensor, part: str | None) -> torch.Tensor:
    """Return a tensor, or what a slice takes of it."""
    index = ... if part is None else parse_slice(part)
    used = [entry for entry in index if entry is not Ellipsis] if isinstance(index, tuple) else [index]
    if index is not Ellipsis and len(used) > len(leaf.shape):
        raise InvalidInput(f"--slice {part} has {len(used)} indices for a tensor of {len(leaf.shape)} dimensions")
    try:
        return leaf[index]
    except IndexError as error:
        raise InvalidInput(f"--slice {part}: {error}") from None


def parse_slice(text: str) -> Any:
    """Return the index that a text means: integers, start:stop:step with a positive step, and ``...``."""
    index: list[Any] = []
    for entry in text.strip().removeprefix("[").removesuffix("]").split(","):
        match = _BOUND.fullmatch(entry)
        if entry.strip() == "...":
            index.append(Ellipsis)
        elif match is None or match[3] == "0" or (":" not in entry and not match[1]) or "-" in (match[1], match[2]):
            raise InvalidInput(f"--slice {text}: {entry.strip()!r} is no index; write 3, 0:10, 0:10:2 or ...")
        elif ":" not in entry:
            index.append(int(match[1]))
        else:
            index.append(slice(*(int(bound) if bound else None for bound in (match[1], match[2], match[3]))))
    if index.count(Ellipsis) > 1:
        raise InvalidInput(f"--slice {text}: only one ... can stand in an index")
    return tuple(index)


def write(value: torch.Tensor, path: str) -> int:
    """Write a tensor by the extension of the path, atomically, and return the file's size in bytes."""
    if not path.lower().endswith(".npy"):
        return formats.save(value, path)
    try:
        array = value.numpy()
    except TypeError:
        raise InvalidInput(
            f"numpy has no {str(value.dtype).removeprefix('torch.')}: write a .pt file instead"
        ) from None
    with atomic_file(path) as file:
        np.save(file, array, allow_pickle=False)
        return file.tell()


def values(value: torch.Tensor) -> Any:
    """Return the elements as nested lists; complex numbers as [real, imaginary]."""
    if value.numel() > MOST_VALUES:
        raise InvalidInput(f"{value.numel()} values are too many for a JSON document: use --slice or -o")
    if value.is_complex():
        return _pairs(value.tolist())
    if value.is_floating_point() and value.itemsize < 4:
        value = value.float()
    return value.tolist()


def _pairs(value: Any) -> Any:
    return [_pairs(item) for item in value] if isinstance(value, list) else [value.real, value.imag]
