"""What training objects are to a store: their kind, the names of their tensors, the state of their generators."""

from __future__ import annotations

import inspect
import random
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import nn

from deltastore.errors import InvalidInput
from deltastore.loading.names import canonical_names

MODULE = "module"
OPTIMIZER = "optimizer"
GENERATOR = "generator"
STATEFUL = "stateful"

EXTRA_STATE = "_extra_state"
"""Last segment of the key under which torch keeps `get_extra_state`."""

_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def kind_of(name: str, value: Any) -> str:
    """Return how a value is loaded.

    Raises
    ------
    InvalidInput
        It has no state that could be loaded.
    """
    if isinstance(value, nn.Module):
        return MODULE
    if isinstance(value, torch.optim.Optimizer):
        return OPTIMIZER
    if isinstance(value, _GENERATORS):
        return GENERATOR
    if not isinstance(value, type) and callable(getattr(value, "load_state_dict", None)):
        return STATEFUL
    raise InvalidInput(
        f"{name} is a {type(value).__qualname__}: expected a module, an optimizer, a random generator, or an object "
        f"with state_dict and load_state_dict",
        object=name,
    )


def generator_state(generator: Any) -> Any:
    """Return the state of a random generator as plain values and tensors."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return python_state(generator.getstate())


def python_state(state: Any) -> Any:
    """Return the state of a generator of Python with its 625 words as one array, not as so many values."""
    if type(state) is not tuple or len(state) != 3 or type(state[1]) is not tuple:
        return state  # a generator of the user's own
    version, words, gauss = state
    return version, np.frombuffer(array("I", words), dtype=np.uint32), gauss


def as_python_state(state: Any) -> Any:
    """Return what ``setstate`` takes; older commits have the words as a tuple of integers."""
    if type(state) is not tuple or len(state) != 3 or not isinstance(state[1], np.ndarray):
        return state
    version, words, gauss = state
    return version, tuple(words.tolist()), gauss


def set_generator_state(generator: Any, state: Any) -> None:
    """Let a random generator go on from a state."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, torch.Generator | np.random.RandomState):
        generator.set_state(state)
    else:
        generator.setstate(as_python_state(state))


@dataclass(frozen=True)
class ModuleView:
    """The state of a module as it lives, not a copy."""

    module: nn.Module
    entries: dict[str, Any]
    """Key of the state_dict -> parameter, buffer, or whatever the module gives out."""
    names: dict[str, str]
    """Key of the state_dict -> canonical name."""
    metadata: Any
    """The versions that torch keeps beside a state_dict; None where the module gives out none."""


def view_module(name: str, module: nn.Module) -> ModuleView:
    """Return the state of a module."""
    live = _keeps_vars(getattr(module.state_dict, "__func__", module.state_dict))
    entries = module.state_dict(keep_vars=True) if live else module.state_dict()
    if not isinstance(entries, Mapping) or not all(type(key) is str for key in entries):
        raise InvalidInput(f"{name}: state_dict() of {type(module).__qualname__} is not a dict with names as keys")
    keys = list(entries)
    names = dict(zip(keys, canonical_names(keys), strict=True))
    return ModuleView(module, dict(entries), names, getattr(entries, "_metadata", None))


@lru_cache(maxsize=64)
def _keeps_vars(function: Callable[..., Any]) -> bool:
    """Return whether a state_dict method can give out the living tensors; some classes have one without arguments."""
    parameters = inspect.signature(function).parameters
    return "keep_vars" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


@dataclass(frozen=True, slots=True)
class Label:
    """The names of one parameter of an optimizer."""

    text: str
    """Unique in the optimizer: the parameter's name, "object.name" where two have one name, "#3" without a module."""
    object: str | None
    """The module that has it, under the name that the caller gave."""
    name: str
    """Its canonical name in there."""

    @property
    def names(self) -> tuple[str, str]:
        """What else may stand for it: its plain name, and the one with the object in front."""
        return self.name, f"{self.object}.{self.name}"


def parameter_names(views: Mapping[str, ModuleView]) -> dict[int, tuple[str, str]]:
    """Return object and canonical name for the ``id`` of each parameter; the first one of a tied parameter."""
    names: dict[int, tuple[str, str]] = {}
    for name, view in views.items():
        for key, parameter in view.module.named_parameters():
            names.setdefault(id(parameter), (name, view.names.get(key, key)))
    return names


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters in the order in which torch numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def label_parameters(parameters: Sequence[torch.Tensor], names: Mapping[int, tuple[str, str]]) -> list[Label]:
    """Return a unique label for each parameter of one optimizer."""
    known = [names.get(id(parameter)) for parameter in parameters]
    plain = Counter(found[1] for found in known if found is not None)
    labels: list[Label] = []
    taken: set[str] = set()
    for position, found in enumerate(known):
        owner, name = (None, f"#{position}") if found is None else found
        text = name if plain[name] <= 1 else f"{owner}.{name}"
        if text in taken:
            text = f"#{position}"
        taken.add(text)
        labels.append(Label(text, owner, name))
    return labels
