"""Other names, a part of a state, another dtype: on the way in or out, before anything is read."""

from __future__ import annotations

import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from deltastore.document import NamedOptimizerState
from deltastore.errors import InvalidInput, NotFound
from deltastore.formats.contents import Contents, take_apart
from deltastore.formats.leaves import CastTensor, FileTensor, cast
from deltastore.loading.names import canonical_names
from deltastore.reader import LazyTensor
from deltastore.torch_bridge import TORCH

_TENSORS = (torch.Tensor, np.ndarray, LazyTensor, FileTensor, CastTensor)
_DICTS = (dict, OrderedDict, Counter, defaultdict, NamedOptimizerState)

Rename = Callable[[Sequence[str]], Sequence[str]]
"""Gives the new names of all weights of one dict."""


@dataclass(frozen=True)
class Rewrite:
    """What to change; nothing by default.

    Names are those of weights: the text keys of a dict of tensors, and the parameter names of an optimizer.
    Integer keys, and the keys inside an optimizer, stay.
    """

    only: tuple[str, ...] = ()
    """Keep these parts: ``model``, ``model/h.0`` (with everything below ``h.0.``)."""
    unwrap: bool = False
    """Leave out what wrappers put into names: ``_orig_mod.``, ``_fsdp_wrapped_module.``, ``module.`` before all."""
    strip: tuple[str, ...] = ()
    """Prefixes to take away, in this order."""
    renames: tuple[tuple[str, str], ...] = ()
    """Regular expressions and replacements, as for :func:`re.sub`, one after the other."""
    add: str = ""
    """A prefix to put in front."""
    cast: str | None = None
    """Dtype for every floating-point tensor."""

    def apply(self, contents: Contents) -> Contents:
        """Return the contents with the changes.

        Raises
        ------
        NotFound
            A part that is wanted is not there.
        InvalidInput
            Two weights would get one name, or a rule cannot be used.
        """
        state = contents.state(lazy=True, optimizer_names=True)
        if self.only:
            state = _keep(state, [tuple(text.strip("/").split("/")) for text in self.only])
        for rename in self._rules():
            state = _renamed(state, rename)
        if self.cast is not None:
            dtype = TORCH.torch_dtype(self.cast)
            state = _mapped(state, lambda leaf: cast(leaf, dtype))
        changed = take_apart(state)
        return replace(changed, bounds=_bounds(contents, changed))

    def _rules(self) -> Iterable[Rename]:
        if self.unwrap:
            yield canonical_names
        for prefix in self.strip:
            yield _each(partial(_without, prefix))
        for pattern, replacement in self.renames:
            try:
                rule = re.compile(pattern)
                rule.sub(replacement, "")
            except (re.error, IndexError) as error:
                raise InvalidInput(f"{pattern!r} -> {replacement!r} is no regular expression: {error}") from None
            yield _each(partial(rule.sub, replacement))
        if self.add:
            yield _each(self.add.__add__)


def _each(change: Callable[[str], str]) -> Rename:
    return lambda names: list(map(change, names))


def _without(prefix: str, name: str) -> str:
    return name.removeprefix(prefix)


def parse_rename(text: str) -> tuple[str, str]:
    r"""Return a rule that is written as ``PATTERN=REPLACEMENT``; a ``\=`` stands for the sign itself."""
    parts = re.split(r"(?<!\\)=", text)
    if len(parts) != 2 or not parts[0]:
        raise InvalidInput(f"{text!r} is no PATTERN=REPLACEMENT; write \\= for an equals sign in either")
    return parts[0].replace("\\=", "="), parts[1].replace("\\=", "=")


def _bounds(before: Contents, after: Contents) -> dict[Any, float]:
    """Return the bounds by the new paths: a tensor is known by what it was."""
    known = {id(_inner(leaf)): before.bounds[path] for path, leaf in before.leaves.items() if path in before.bounds}
    found = {path: known.get(id(_inner(leaf))) for path, leaf in after.leaves.items()}
    return {path: bound for path, bound in found.items() if bound is not None}


def _inner(leaf: Any) -> Any:
    return leaf.inner if isinstance(leaf, CastTensor) else leaf


def _is_dict(value: Any) -> bool:
    return type(value) in _DICTS


def _like(value: Any, items: Iterable[tuple[Any, Any]]) -> Any:
    """Return a dict of the type of another."""
    if type(value) is defaultdict:
        return defaultdict(value.default_factory, items)
    return type(value)(dict(items))


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a state with every tensor changed."""
    if isinstance(value, _TENSORS):
        return change(value)
    if _is_dict(value):
        return _like(value, [(key, _mapped(item, change)) for key, item in value.items()])
    return _sequence(value, lambda item: _mapped(item, change))


def _sequence(value: Any, change: Callable[[Any], Any]) -> Any:
    if type(value) is deque:
        return deque(map(change, value), value.maxlen)
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        items = [change(item) for item in value]
        return items if isinstance(value, list) else tuple.__new__(type(value), items)
    return value


def _keep(state: Any, wanted: Sequence[tuple[str, ...]]) -> Any:
    used: set[tuple[str, ...]] = set()

    def kept(value: Any, left: Sequence[tuple[tuple[str, ...], tuple[str, ...]]]) -> Any:
        items = []
        for key, item in value.items():
            here = [(rest, whole) for rest, whole in left if _meets(str(key), rest)]
            done = [whole for rest, whole in here if len(rest) == 1]
            if done:
                used.update(done)
                items.append((key, item))
            elif here and _is_dict(item):
                inner = kept(item, [(rest[1:], whole) for rest, whole in here])
                items += [(key, inner)] if inner else []
        return _like(value, items)

    found = kept(state, [(path, path) for path in wanted]) if _is_dict(state) else {}
    missing = ["/".join(path) for path in wanted if path not in used]
    if missing:
        names = ", ".join(str(key) for key in list(state)[:8]) if _is_dict(state) else "no parts"
        raise NotFound(f"only {', '.join(missing)}: the state has no such part; at its top: {names}")
    return found


def _meets(key: str, rest: tuple[str, ...]) -> bool:
    return key == rest[0] or (len(rest) == 1 and key.startswith(f"{rest[0]}."))


def _renamed(value: Any, rename: Rename) -> Any:
    if not _is_dict(value):
        return _sequence(value, lambda item: _renamed(item, rename))
    if isinstance(value.get("state"), dict) and isinstance(value.get("param_groups"), list):
        groups = [_renamed_group(group, rename) for group in value["param_groups"]]
        state = _with_names(value["state"], rename)
        return _like(value, [*{**value, "state": state, "param_groups": groups}.items()])
    inner = _like(value, [(key, _renamed(item, rename)) for key, item in value.items()])
    return _with_names(inner, rename) if _has_weights(value) else inner


def _has_weights(value: Any) -> bool:
    """Return whether a dict names tensors, and no other dicts beside what modules keep as extra state."""
    inner = any(_is_dict(item) and not str(key).endswith("_extra_state") for key, item in value.items())
    return not inner and any(isinstance(item, _TENSORS) for item in value.values())


def _renamed_group(group: Any, rename: Rename) -> Any:
    if not _is_dict(group):
        return group
    lists = {key: group[key] for key in ("params", "param_names") if isinstance(group.get(key), list)}
    texts = {key: names for key, names in lists.items() if names and all(type(name) is str for name in names)}
    return _like(group, [*{**group, **{key: list(rename(names)) for key, names in texts.items()}}.items()])


def _with_names(value: Any, rename: Rename) -> Any:
    """Return a dict with its text keys renamed."""
    keys = [key for key in value if type(key) is str]
    new = dict(zip(keys, rename(keys), strict=True))
    items = [(new.get(key, key), item) for key, item in value.items()]
    twice = [name for name, count in Counter(name for name, _ in items).items() if count > 1]
    if twice:
        before = [str(key) for key in value if new.get(key, key) == twice[0]]
        raise InvalidInput(f"the new name {twice[0]!r} would stand for {' and for '.join(before)}; change the rule")
    return _like(value, items)
