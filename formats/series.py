"""Full checkpoints of a training, one after the other, as the commits of one store."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import deltastore.formats as converters
from deltastore.deferred import Deferred
from deltastore.errors import InvalidInput
from deltastore.formats.contents import Contents
from deltastore.formats.rewrite import Rewrite
from deltastore.handle import Commit
from deltastore.store import Store
from deltastore.streaming import needed_bytes
from deltastore.types import Path

MODEL = "model"
"""Where weights that a file holds by name alone go in a state."""
_NUMBER = re.compile(r"[0-9]+")
_COPY = re.compile(r"\.[A-Za-z][A-Za-z0-9]*$")


@dataclass(frozen=True)
class Checkpoint:
    """One file or folder, and the step that it becomes."""

    path: str
    step: int


@dataclass(frozen=True)
class Imported:
    """One checkpoint that became a commit."""

    checkpoint: Checkpoint
    commit: Commit
    state_bytes: int
    """Bytes of its tensors."""


def find_series(paths: Iterable[str], *, steps_from_name: bool, first_step: int = 0) -> list[Checkpoint]:
    """Return checkpoints with their steps, the first step first.

    Parameters
    ----------
    paths : iterable of str
        Files and folders.
    steps_from_name : bool
        The last number in a name is the step: ``checkpoint-300``, ``step_0300.pt``. Otherwise they are counted from
        `first_step` on, in their order.

    Raises
    ------
    InvalidInput
        A name has no number, or two have the same.
    """
    if not steps_from_name:
        return [Checkpoint(path, first_step + number) for number, path in enumerate(paths)]
    found: dict[int, Checkpoint] = {}
    for path in paths:
        step = _step_of(path)
        if step in found:
            raise InvalidInput(f"{path} and {found[step].path} both name step {step}: import one of them", path=path)
        found[step] = Checkpoint(path, step)
    return [found[step] for step in sorted(found)]


def _step_of(path: str) -> int:
    name = os.path.basename(os.path.abspath(path))
    while _COPY.search(name) and _NUMBER.search(_COPY.sub("", name)):
        name = _COPY.sub("", name)  # the digits of .h5 are no step
    numbers = _NUMBER.findall(name)
    if not numbers:
        raise InvalidInput(
            f"{path}: its name has no number that could be the step; leave --steps-from-name out", path=path
        )
    return int(numbers[-1])


def open_checkpoint(path: str, format: str, rewrite: Rewrite) -> Contents:
    """Return the contents of a checkpoint as they will be committed: weights that are all it holds go to ``model``."""
    contents = rewrite.apply(converters.open_contents(path, format))
    if isinstance(contents.document, dict) and contents.document.get("$") in ("dict", "odict"):
        is_flat = all(len(leaf) == 1 for leaf in contents.leaves)
        holds_model = any(leaf[:1] == (MODEL,) for leaf in contents.leaves)
        if not (is_flat and contents.leaves and not holds_model):
            return contents
    document = {"$": "dict", "k": [MODEL], "v": [contents.document]}
    leaves: dict[Path, Any] = {(MODEL, *path): leaf for path, leaf in contents.leaves.items()}
    return Contents(document, leaves, {(MODEL, *path): bound for path, bound in contents.bounds.items()})


def import_series(
    store: Store,
    series: Sequence[Checkpoint],
    *,
    format: str = "auto",
    rewrite: Rewrite = Rewrite(),  # noqa: B008 - a frozen value
    strict: bool = False,
    memory_bytes: int | None = None,
    told: Callable[[Imported], object] = lambda _imported: None,
) -> list[Imported]:
    """Commit checkpoints to a store, in order, each as a delta where that is smaller; steps that it has are left out.

    Raises
    ------
    InvalidInput
        `strict`, and a checkpoint says of itself that it is inexact; or more memory would be needed than is allowed.
        What was committed before stays.
    """
    known = {commit.step for commit in store.commits()}
    todo = [checkpoint for checkpoint in series if checkpoint.step not in known]
    done = []
    for checkpoint in todo:
        if memory_bytes is not None:
            _require_memory(checkpoint.path, converters.held_bytes(checkpoint.path, format), memory_bytes)
        contents = open_checkpoint(checkpoint.path, format, rewrite)
        if strict and contents.bounds:
            raise InvalidInput(
                f"{checkpoint.path}: strict, and it was exported from a commit that was not exact; "
                "without strict it is imported as it is",
                path=checkpoint.path,
            )
        if memory_bytes is not None:
            _require_memory(checkpoint.path, needed_import_bytes(contents), memory_bytes)
        state = contents.state(lazy=True, optimizer_names=True)
        metrics: dict[str, Any] = {"imported_from": os.path.basename(os.path.abspath(checkpoint.path))}
        if contents.bounds:
            metrics["inexact_within"] = max(contents.bounds.values())
        commit = store.commit_streamed(checkpoint.step, state, metrics=metrics)
        done.append(Imported(checkpoint, commit, contents.nbytes))
        told(done[-1])
    return done


def _require_memory(path: str, needed: int, memory_bytes: int) -> None:
    if needed > memory_bytes:
        raise InvalidInput(
            f"{path}: reading it takes about {needed:,} bytes of memory, {memory_bytes:,} are allowed; allow more, or "
            "convert it to safetensors first, of which any piece can be read alone",
            expected=memory_bytes,
            found=needed,
            path=path,
        )


def needed_import_bytes(contents: Contents) -> int:
    """Return about how much memory the commit of a checkpoint takes."""
    whole = [leaf.nbytes for leaf in contents.distinct.values() if isinstance(leaf, Deferred) and leaf.is_read_whole]
    return needed_bytes(contents.nbytes) + 2 * max(whole, default=0)
