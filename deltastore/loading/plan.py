"""What a load is going to do, as data: nothing is touched before the whole plan is known to fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn

from deltastore.document import subtree
from deltastore.errors import InvalidInput
from deltastore.reader import LazyTensor, Report, Sink, State
from deltastore.torch_bridge import TORCH
from deltastore.types import Path

Expected: TypeAlias = Callable[..., bool]
"""Whether something is part of the state at all, asked with all the "object/key" names that it goes by."""

SHOWN = 10
"""How many names of one kind an error text lists."""


LOAD_THE_REST = "pass strict=False to State.load_into to load the rest"


def everything(*_names: str) -> bool:
    """Return True: nothing was left out on purpose."""
    return True


@dataclass
class LoadPlan:
    """Filled by the planners of modules, optimizers and others; applied by :mod:`deltastore.loading.load`."""

    state: State
    expected: Expected = everything
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: dict[str, str] = field(default_factory=dict)
    """Name -> both shapes, or what else does not fit."""
    unmatched: list[str] = field(default_factory=list)
    """Objects that the commit holds, but not a single key of them was found."""
    left_on_meta: list[str] = field(default_factory=list)
    loaded: int = 0
    targets: dict[Path, list[torch.Tensor]] = field(default_factory=dict)
    """Leaf of the commit -> living tensors that are filled with it, as they stood when the load was planned."""
    sinks: dict[Path, list[Sink]] = field(default_factory=dict)
    """Leaf of the commit -> where else its elements go."""
    on_meta: dict[int, Places] = field(default_factory=dict)
    """``id`` of a tensor without memory that the load is going to replace -> everywhere it stands."""
    before: list[Callable[[], object]] = field(default_factory=list)
    """Done when tensors without memory have been replaced, before the first copy."""
    after: list[Callable[[], object]] = field(default_factory=list)
    """Done in order when all tensors have been copied."""
    _replaced: dict[int, torch.Tensor] = field(default_factory=dict)

    def copy(self, path: Path, sink: Sink) -> None:
        """Send a tensor of the commit somewhere."""
        self.sinks.setdefault(path, []).append(sink)
        self.loaded += 1

    def fill(self, path: Path, target: torch.Tensor) -> None:
        """Copy a tensor of the commit into a living one of the same shape and dtype."""
        self.targets.setdefault(path, []).append(target)
        self.loaded += 1

    def current(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor that stands where this one stood when the load was planned."""
        return self._replaced.get(id(tensor), tensor)

    def materialise(self) -> None:
        """Put tensors with memory in the place of those that are going to be filled and have none."""
        for key, places in self.on_meta.items():
            self._replaced[key] = places.replace()

    def report(self) -> Report:
        """Return what did not fit."""
        exact = self.state.fidelity.exact
        loaded = [] if exact else dict.fromkeys([*self.targets, *self.sinks])
        inexact = [show(path) for path in loaded if self.state.fidelity.bound(*path) > 0]
        return Report(list(self.missing), list(self.unexpected), list(self.mismatched), inexact)


@dataclass
class Places:
    """Everywhere one tensor stands in a module: tied weights stay tied."""

    tensor: torch.Tensor
    places: list[tuple[nn.Module, str]] = field(default_factory=list)

    def replace(self) -> torch.Tensor:
        """Put an empty tensor of the same kind, on the CPU, in all the places."""
        old = self.tensor
        device = "cpu" if old.is_meta else old.device
        fresh = torch.empty(old.shape, dtype=old.dtype, device=device)
        if isinstance(old, nn.Parameter):
            fresh = nn.Parameter(fresh, requires_grad=old.requires_grad)
        for module, attribute in self.places:
            setattr(module, attribute, fresh)
        return fresh


def show(path: Path) -> str:
    """Return a path as a report names it."""
    return "/".join(str(key) for key in path)


def about(tensor: torch.Tensor | LazyTensor) -> str:
    """Return dtype and shape for an error text."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def keys_at(state: State, path: Path) -> list[Any]:
    """Return the keys of the dict at a path, empty containers included; [] where there is none."""
    node = subtree(state.document, path)
    keys = node.get("k") if isinstance(node, dict) else None
    return [key for key in keys if isinstance(key, str | int)] if isinstance(keys, list) else []


def value_at(state: State, path: Path) -> Any:
    """Return whatever stands at a path, loaded: a tensor, a plain value, a container of them."""
    found = state[path]
    if isinstance(found, State):
        return found.to_named_state()
    if not isinstance(found, LazyTensor):
        return found
    is_array = subtree(state.document, path)["$"] == "ndarray"
    return found[...].numpy() if is_array else found[...]


def same_bytes(state: State, path: Path, other: Path) -> bool:
    """Return whether two tensors of the commit are one (tied), or at least equal."""
    one, two = state[path], state[other]
    if one.is_same_memory(two):
        return True
    if (one.dtype, one.shape) != (two.dtype, two.shape):
        return False
    return bool((TORCH.as_array(one[...]) == TORCH.as_array(two[...])).all())


def refuse(plan: LoadPlan, *, strict: bool, advice: str = LOAD_THE_REST) -> None:
    """Raise if the plan does not fit; nothing was touched yet.

    Raises
    ------
    InvalidInput
        Strict and something differs; or, strict or not, an object that the commit holds without any of its keys,
        nothing to load at all, or a parameter that would stay without memory.
    """
    step = plan.state.commit.step
    lists = {
        "missing (the objects have it, the commit does not)": plan.missing,
        "unexpected (the commit has it, the objects do not)": plan.unexpected,
        "mismatched": [f"{name}: {text}" for name, text in plan.mismatched.items()],
    }
    facts = {"missing": plan.missing, "unexpected": plan.unexpected, "mismatched": list(plan.mismatched), "step": step}
    texts = [f"{kind}: {some(names)}" for kind, names in lists.items() if names]
    if strict and texts:
        raise InvalidInput(
            f"step {step} does not fit the objects, nothing was loaded; {'; '.join(texts)}; {advice}",
            **facts,
        )
    if plan.unmatched or not (plan.loaded or plan.after):
        names = ", ".join(plan.unmatched) or "the objects"
        raise InvalidInput(f"step {step}: no key of {names} was found, nothing was loaded; {'; '.join(texts)}", **facts)
    if plan.left_on_meta:
        raise InvalidInput(
            f"step {step}: these would stay on the meta device, without memory: {some(plan.left_on_meta)}; "
            "nothing was loaded",
            **facts,
        )


def some(names: Sequence[str]) -> str:
    """Return names for a message, not too many of them."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
