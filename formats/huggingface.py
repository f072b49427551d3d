"""Folders of Hugging Face models, both ways: what ``from_pretrained`` loads and ``Trainer`` leaves as ``checkpoint-N``.

A folder is the state ``{"model": weights by name, "files": {"config.json": bytes, ...}}``, with ``optimizer`` and
``scheduler`` where they are. Configuration, tokenizer and generation files are carried along as they are; code and
pickles are not. Whatever else a state holds goes to ``training_state.safetensors``, which only deltastore reads.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from deltastore.errors import InvalidInput
from deltastore.formats import safetensors, torch_file
from deltastore.formats.atomic_folder import atomic_folder, inside, tree_bytes
from deltastore.formats.contents import Contents, take_apart
from deltastore.formats.loss import Loss
from deltastore.formats.plan import make_plan
from deltastore.formats.record import KEY
from deltastore.formats.registry import Options
from deltastore.formats.shards import find_index
from deltastore.formats.tensor_format import needed_bytes
from deltastore.formats.torch_write import losses_of, save_file

MODEL, FILES = "model", "files"
REST = "training_state.safetensors"
SHARD_BYTES = 5_000_000_000
"""Bytes of a file of weights, if nobody says otherwise."""
MOST_FILE_BYTES = 256 << 20
_CARRIED = (".json", ".txt", ".model", ".jinja", ".md", ".vocab", ".bpe", ".spm")
_TORCH_PARTS = ("optimizer", "scheduler")
"""Objects that `Trainer` keeps in torch files of their own."""


class HuggingFaceFolder:
    """The :class:`~deltastore.formats.registry.Converter` of model folders."""

    def open(self, path: str) -> Contents:
        """Return the contents of a folder; weights are read when needed."""
        state: dict[str, Any] = {MODEL: _weights(path).state(lazy=True, optimizer_names=True)}
        for name in _TORCH_PARTS:
            place = os.path.join(path, f"{name}.pt")
            if os.path.exists(place):
                state[name] = torch_file.open_file(place).state(lazy=True, optimizer_names=True)
        rest = os.path.join(path, REST)
        if os.path.exists(rest):
            state |= safetensors.CONVERTER.open(rest).state(lazy=True, optimizer_names=True)
        return take_apart({**state, FILES: read_files(path)})

    def load(self, path: str) -> Any:
        """Return the nested state that a folder holds."""
        return self.open(path).state()

    def held_bytes(self, path: str) -> int:
        """Return about how many bytes :meth:`open` holds in memory: torch files whose tensors cannot stay there."""
        places = [os.path.join(path, f"{name}.pt") for name in _TORCH_PARTS]
        parts = sum(torch_file.CONVERTER.held_bytes(place) for place in places if os.path.exists(place))
        return parts if _has_safetensors(path) else parts + torch_file.CONVERTER.held_bytes(path)

    def losses(self, state: Any) -> tuple[Loss, ...]:
        """Return what a folder would not hold of a state."""
        weights, files, _rest = _parts(take_apart(state), "the folder")
        # The library ties weights by the configuration, and expects one name of each in the file.
        losses = [loss for loss in make_plan(weights, safetensors.ABILITY).losses if loss.kind != "alias"]
        if "config.json" not in files:
            text = "no config.json, which from_pretrained needs: add it to the files of the state"
            losses.append(Loss("file", (), text, is_restored=False))
        return tuple(losses)

    def save(self, state: Any, path: str, options: Options) -> int:
        """Write a folder and return the bytes of all its files."""
        weights, files, rest = _parts(take_apart(state), path)
        plan = make_plan(weights, safetensors.ABILITY)
        metadata = {**plan.aliases, "format": "pt"} | ({} if plan.record is None else {KEY: plan.record})
        with atomic_folder(path, lambda folder: os.path.exists(os.path.join(folder, "config.json"))) as folder:
            for name, content in files.items():
                with open(inside(folder, name), "wb") as file:
                    file.write(content)
            sized = replace(options, shard_bytes=options.shard_bytes or SHARD_BYTES)
            safetensors.write_shards(folder, metadata, plan, weights, sized)
            for name in _TORCH_PARTS:
                if name in rest and not losses_of(part := take_apart(rest[name])):
                    save_file(part.state(), os.path.join(folder, f"{name}.pt"))
                    del rest[name]
            if rest:
                safetensors.CONVERTER.save(rest, os.path.join(folder, REST), Options())
            return tree_bytes(folder)

    def needed_bytes(self, state: Any, options: Options) -> int:
        """Return about how much memory writing takes: weights go tensor by tensor, an optimizer as a whole."""
        del options
        contents = take_apart(state)
        parts = [take_apart(part).nbytes for name, part in _parts(contents, "")[2].items() if name in _TORCH_PARTS]
        return needed_bytes(contents) + sum(parts)


def _weights(path: str) -> Contents:
    """Return the weights of a folder, those of safetensors where it has both kinds."""
    return (safetensors.CONVERTER if _has_safetensors(path) else torch_file.CONVERTER).open(path)


def _has_safetensors(path: str) -> bool:
    has_index = find_index(path, safetensors.STEM, safetensors.SUFFIX) is not None
    return has_index or os.path.exists(os.path.join(path, f"{safetensors.STEM}{safetensors.SUFFIX}"))


def read_files(path: str) -> dict[str, bytes]:
    """Return the files of a folder that are carried along: configuration, tokenizer, generation, the model card."""
    found = {}
    with os.scandir(path) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            is_index = entry.name.endswith(".index.json")
            if entry.is_file() and entry.name.endswith(_CARRIED) and not is_index:
                if entry.stat().st_size > MOST_FILE_BYTES:
                    raise InvalidInput(f"{entry.path} has {entry.stat().st_size:,} bytes: too many for such a file")
                with open(entry.path, "rb") as file:
                    found[entry.name] = file.read()
    return found


def _parts(contents: Contents, path: str) -> tuple[Contents, Mapping[str, bytes], dict[str, Any]]:
    """Return the weights, the files and everything else of a state.

    Raises
    ------
    InvalidInput
        There are no weights by name.
    """
    state = contents.state(lazy=True, optimizer_names=True)
    if not isinstance(state, dict):
        raise InvalidInput(f"{path}: a model folder holds weights by name, and the state is a {type(state).__name__}")
    if MODEL in state and isinstance(state[MODEL], dict):
        rest = {key: value for key, value in state.items() if key not in (MODEL, FILES)}
        model, files = state[MODEL], state.get(FILES, {})
    else:
        model, files, rest = state, {}, {}
    weights = take_apart(model)
    if not weights.leaves or any(len(leaf) != 1 or type(leaf[0]) is not str for leaf in weights.leaves):
        raise InvalidInput(
            f"{path}: a model folder needs weights by name at the top of the state or under {MODEL!r}; "
            "choose the part that has them",
            path=path,
        )
    if not isinstance(files, dict) or not all(type(content) is bytes for content in files.values()):
        raise InvalidInput(f"{path}: {FILES!r} of a model folder is a dict of bytes by file name", path=path)
    bounds = {leaf[1:]: bound for leaf, bound in contents.bounds.items() if model is not state and leaf[0] == MODEL}
    return replace(weights, bounds=bounds or (contents.bounds if model is state else {})), files, rest


CONVERTER = HuggingFaceFolder()
