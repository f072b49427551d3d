"""Folders of Hugging Face models, both ways: what ``from_pretrained`` loads and ``Trainer`` leaves as ``checkpoint-N``.

A folder is the state ``{"model": weights by name, "files": {"config.json": bytes, ...}}``, with ``optimizer``,
``scheduler``, ``scaler`` and ``rng_state`` where they are, and the weights of an adapter (PEFT) as ``adapter``; a
folder of an adapter alone has no ``model``. Configuration, tokenizer and generation files are carried along as they
are; code and pickles are not. Whatever else a state holds goes to ``training_state.safetensors``, which only
deltastore reads.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from deltastore.errors import InvalidInput
from deltastore.formats import safetensors, torch_file
from deltastore.formats.atomic_folder import atomic_folder, inside, tree_bytes
from deltastore.formats.contents import Contents, take_apart
from deltastore.formats.loss import Loss
from deltastore.formats.plan import make_plan
from deltastore.formats.record import KEY
from deltastore.formats.registry import Converter, Options
from deltastore.formats.shards import find_index
from deltastore.formats.tensor_format import needed_bytes
from deltastore.formats.torch_write import losses_of

MODEL, FILES = "model", "files"
REST = "training_state.safetensors"
SHARD_BYTES = 5_000_000_000
"""Bytes of a file of weights, if nobody says otherwise."""
MOST_FILE_BYTES = 256 << 20
_CARRIED = (".json", ".txt", ".model", ".jinja", ".md", ".vocab", ".bpe", ".spm")
ADAPTER, ADAPTER_STEM = "adapter", "adapter_model"
_CONFIGS = {MODEL: "config.json", ADAPTER: "adapter_config.json"}
_TORCH_FILE = re.compile(r"(optimizer|scheduler|scaler)\.pt|(rng_state(?:_[0-9]+)?)\.pth")
"""Objects that `Trainer` keeps in torch files of their own; each is a part of the state by this name."""


class HuggingFaceFolder:
    """The :class:`~deltastore.formats.registry.Converter` of model folders."""

    def open(self, path: str) -> Contents:
        """Return the contents of a folder; weights are read when needed."""
        state = {
            name: converter.open(place).state(lazy=True, optimizer_names=True)
            for name, (converter, place) in _weights(path).items()
        }
        for name, place in _torch_files(path).items():
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
        files = sum(map(torch_file.CONVERTER.held_bytes, _torch_files(path).values()))
        return files + sum(converter.held_bytes(place) for converter, place in _weights(path).values())

    def losses(self, state: Any) -> tuple[Loss, ...]:
        """Return what a folder would not hold of a state."""
        parts = _parts(take_apart(state), "the folder")
        files = parts.files
        # The library ties weights by the configuration, and expects one name of each in the file.
        losses = [
            loss
            for weights in parts.weights.values()
            for loss in make_plan(weights, safetensors.ABILITY).losses
            if loss.kind != "alias"
        ]
        for needed in (_CONFIGS[name] for name in parts.weights if _CONFIGS[name] not in files):
            text = f"no {needed}, which from_pretrained needs: add it to the files of the state"
            losses.append(Loss("file", (), text, is_restored=False))
        return tuple(losses)

    def save(self, state: Any, path: str, options: Options) -> int:
        """Write a folder and return the bytes of all its files."""
        parts = _parts(take_apart(state), path)
        rest = dict(parts.rest)
        with atomic_folder(path, _is_ours) as folder:
            for name, content in parts.files.items():
                with open(inside(folder, name), "wb") as file:
                    file.write(content)
            for name, weights in parts.weights.items():
                _write_weights(folder, name, weights, options)
            for name in [name for name in rest if isinstance(name, str)]:
                suffix = next((end for end in (".pt", ".pth") if _TORCH_FILE.fullmatch(name + end)), None)
                part = None if suffix is None else take_apart(rest[name])
                if part is not None and all(loss.is_restored for loss in losses_of(part)):
                    torch_file.CONVERTER.save(part, os.path.join(folder, f"{name}{suffix}"), Options())
                    del rest[name]
            if rest:
                safetensors.CONVERTER.save(rest, os.path.join(folder, REST), Options())
            return tree_bytes(folder)

    def needed_bytes(self, state: Any, options: Options) -> int:
        """Return about how much memory writing takes: everything goes tensor by tensor."""
        del options
        return needed_bytes(take_apart(state))


def _write_weights(folder: str, name: str, weights: Contents, options: Options) -> None:
    plan = make_plan(weights, safetensors.ABILITY)
    metadata = {**plan.aliases, "format": "pt"} | ({} if plan.record is None else {KEY: plan.record})
    if name == ADAPTER:  # the library looks for one file
        sized = replace(options, shard_bytes=None)
        safetensors.write_shards(folder, metadata, plan, weights, sized, stem=ADAPTER_STEM)
    else:
        sized = replace(options, shard_bytes=options.shard_bytes or SHARD_BYTES)
        safetensors.write_shards(folder, metadata, plan, weights, sized)


def _is_ours(folder: str) -> bool:
    return any(os.path.exists(os.path.join(folder, name)) for name in _CONFIGS.values())


def _weights(path: str) -> dict[str, tuple[Converter, str]]:
    """Return who reads the weights of a folder from where: those of safetensors where it has both kinds."""
    found: dict[str, tuple[Converter, str]] = {}
    for name, stem, torch_stem in ((MODEL, safetensors.STEM, torch_file.STEM), (ADAPTER, ADAPTER_STEM, ADAPTER_STEM)):
        for converter, kind, suffix in (
            (safetensors.CONVERTER, stem, safetensors.SUFFIX),
            (torch_file.CONVERTER, torch_stem, torch_file.SUFFIX),
        ):
            place = os.path.join(path, f"{kind}{suffix}")
            index = find_index(path, kind, suffix)
            if name not in found and (index is not None or os.path.exists(place)):
                found[name] = converter, place if index is None else index
    return found


def _torch_files(path: str) -> dict[str, str]:
    """Return the torch files of a folder that hold parts of the state, by the names of these."""
    matches = ((_TORCH_FILE.fullmatch(name), name) for name in sorted(os.listdir(path)))
    return {match[1] or match[2]: os.path.join(path, name) for match, name in matches if match}


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


@dataclass(frozen=True)
class _Parts:
    """What a state is in a folder."""

    weights: Mapping[str, Contents]
    """Of the model, of the adapter."""
    files: Mapping[str, bytes]
    rest: Mapping[Any, Any]


def _parts(contents: Contents, path: str) -> _Parts:
    """Return the weights, the files and everything else of a state.

    Raises
    ------
    InvalidInput
        There are no weights by name.
    """
    state = contents.state(lazy=True, optimizer_names=True)
    if not isinstance(state, dict):
        raise InvalidInput(f"{path}: a model folder holds weights by name, and the state is a {type(state).__name__}")
    named = {name: state[name] for name in (MODEL, ADAPTER) if isinstance(state.get(name), dict)}
    rest = {key: value for key, value in state.items() if key not in (*named, FILES)} if named else {}
    files = state.get(FILES, {}) if named else {}
    weights = {name: take_apart(value) for name, value in (named or {MODEL: state}).items()}
    for part in weights.values():
        if not part.leaves or any(len(leaf) != 1 or type(leaf[0]) is not str for leaf in part.leaves):
            raise InvalidInput(
                f"{path}: a model folder needs weights by name at the top of the state or under {MODEL!r}; "
                "choose the part that has them",
                path=path,
            )
    if not isinstance(files, dict) or not all(type(content) is bytes for content in files.values()):
        raise InvalidInput(f"{path}: {FILES!r} of a model folder is a dict of bytes by file name", path=path)
    bounds = contents.bounds.items()
    bounded = {
        name: replace(
            part, bounds={leaf[1:]: bound for leaf, bound in bounds if leaf[0] == name} if named else dict(bounds)
        )
        for name, part in weights.items()
    }
    return _Parts(bounded, files, rest)


CONVERTER = HuggingFaceFolder()
