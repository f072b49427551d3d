"""Planning the load of a module: which stored tensor goes into which parameter or buffer."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from deltastore.errors import InvalidInput
from deltastore.loading.names import match_names
from deltastore.loading.objects import EXTRA_STATE, ModuleView
from deltastore.loading.plan import LoadPlan, Places, about, keys_at, same_bytes, value_at
from deltastore.reader import LazyTensor
from deltastore.types import Path

log = logging.getLogger("deltastore")


def plan_module(plan: LoadPlan, name: str, view: ModuleView) -> None:
    """Add a module to a plan.

    Parameters and buffers are filled where they are. What else a module gives out as its state (packed weights, lazy
    parameters, entries that a hook makes) goes through its own ``load_state_dict``.
    """
    keys = dict.fromkeys(key for key in view.entries if plan.expected(f"{name}/{view.names[key]}"))
    stored = [key for key in keys_at(plan.state, (name,)) if plan.expected(f"{name}/{key}")]
    # All keys of the module take part: whether "module." is a wrapper shows only in their whole.
    matched = {
        key: found
        for key, found in match_names(list(view.entries), [str(key) for key in stored]).items()
        if key in keys
    }
    places = _places(view.module)
    filled: dict[int, Path] = {}
    indirect: dict[str, Path] = {}
    extra: dict[str, Path] = {}
    for key, found in matched.items():
        path: Path = (name, found)
        value, leaf = view.entries[key], _leaf(plan, path)
        if _is_extra_state(view, key):
            extra[key] = path
        elif not isinstance(value, torch.Tensor) or _is_lazy(value) or value.is_quantized:
            indirect[key] = path
        elif leaf is None:
            plan.mismatched[f"{name}/{key}"] = f"the commit has no tensor there, the object {about(value)}"
        elif (leaf.dtype, leaf.shape) != (value.dtype, tuple(value.shape)):
            plan.mismatched[f"{name}/{key}"] = f"{about(leaf)} in the commit, {about(value)} in the object"
        elif id(value) not in places:
            indirect[key] = path
        elif id(value) not in filled:
            filled[id(value)] = path
            _plan_tensor(plan, path, places[id(value)])
        elif not same_bytes(plan.state, filled[id(value)], path):
            plan.mismatched[f"{name}/{key}"] = (
                f"one tensor with {'/'.join(map(str, filled[id(value)]))} in the object, another one in the commit"
            )
    if indirect:
        _plan_indirect(plan, view, matched, indirect | extra)
    else:
        for key, path in extra.items():
            plan.after.append(_extra_setter(view.module, key, value_at(plan.state, path)))
            plan.loaded += 1
    tied = {id(view.entries[key]) for key in matched}
    absent = [key for key in keys if key not in matched and id(view.entries[key]) not in tied]
    plan.missing += [f"{name}/{key}" for key in absent]
    plan.unexpected += [f"{name}/{key}" for key in stored if key not in matched.values()]
    if (keys or stored) and not matched:
        plan.unmatched.append(name)
    _find_left_on_meta(plan, name, view, set(filled))


def _leaf(plan: LoadPlan, path: Path) -> LazyTensor | None:
    found = plan.state[path]
    return found if isinstance(found, LazyTensor) else None


def _places(module: nn.Module) -> dict[int, Places]:
    """Return where each parameter and buffer stands, by its ``id``."""
    places: dict[int, Places] = {}
    for inner in module.modules():
        for attribute, tensor in [*inner._parameters.items(), *inner._buffers.items()]:
            if tensor is not None:
                places.setdefault(id(tensor), Places(tensor)).places.append((inner, attribute))
    return places


def _plan_tensor(plan: LoadPlan, path: Path, places: Places) -> None:
    tensor = places.tensor
    shared = any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.is_meta or shared:
        # Without memory, or with several elements in one word: nothing can be copied into it.
        plan.on_meta[id(tensor)] = places
    plan.fill(path, tensor)


def _is_extra_state(view: ModuleView, key: str) -> bool:
    return key.rpartition(".")[2] == EXTRA_STATE and not isinstance(view.entries[key], nn.Parameter)


def _extra_setter(module: nn.Module, key: str, value: Any) -> Callable[[], object]:
    owner = module.get_submodule(key.rpartition(".")[0])
    return lambda: owner.set_extra_state(value)


def _is_lazy(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer)


def _plan_indirect(plan: LoadPlan, view: ModuleView, matched: dict[str, str], indirect: dict[str, Path]) -> None:
    values = {key: value_at(plan.state, path) for key, path in indirect.items()}
    plan.loaded += len(values)

    def load() -> None:
        # What was copied already goes along as it is now, for a module may want to see all of its keys.
        state: OrderedDict[str, Any] = OrderedDict()
        for key in matched:
            present = view.entries[key]
            state[key] = values[key] if key in values else _detached(plan, present)
        if view.metadata is not None:
            state._metadata = view.metadata  # type: ignore[attr-defined] # how torch hands versions over
        try:
            view.module.load_state_dict(state, strict=False)
        except RuntimeError as error:
            raise InvalidInput(f"{type(view.module).__qualname__}.load_state_dict: {error}") from error

    plan.after.append(load)


def _detached(plan: LoadPlan, value: Any) -> Any:
    return plan.current(value).detach() if isinstance(value, torch.Tensor) else value


def _find_left_on_meta(plan: LoadPlan, name: str, view: ModuleView, filled: set[int]) -> None:
    for key, value in view.entries.items():
        if isinstance(value, torch.Tensor) and value.is_meta and id(value) not in filled:
            plan.left_on_meta.append(f"{name}/{key}")
    known = {id(value) for value in view.entries.values()}
    computed = [key for key, buffer in view.module.named_buffers() if buffer.is_meta and id(buffer) not in known]
    if computed:
        log.warning(
            "%s: buffers that no state_dict holds stay on the meta device, compute them anew: %s",
            name,
            ", ".join(computed),
        )
