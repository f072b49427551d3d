"""Taking the state out of training objects: nested values with their roles, keyed by parameter name."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import nn

from deltastore.adapters._random import capture_rng
from deltastore.adapters._rules import OptimizerWatch
from deltastore.adapters._selection import Selection
from deltastore.buffers import Hints
from deltastore.errors import InvalidInput
from deltastore.layers.rules import Rule
from deltastore.loading.objects import (
    EXTRA_STATE,
    GENERATOR,
    MODULE,
    OPTIMIZER,
    ModuleView,
    generator_state,
    kind_of,
    label_parameters,
    parameter_names,
    parameters_of,
    view_module,
)
from deltastore.loading.plan import keys_at
from deltastore.reader import State
from deltastore.tree import NamedOptimizerState
from deltastore.types import Path

RNG = "rng"
EXTRA = "extra"
RESERVED = frozenset({RNG, EXTRA})
"""Names of the state that no object may have."""
OTHER = "other"
"""The role of tensors that are neither parameters nor their optimizer's."""

T = TypeVar("T")


class Nearest(Mapping[Path, T], Generic[T]):
    """A mapping in which a path without a value of its own has that of the nearest prefix."""

    def __init__(self) -> None:
        self._values: dict[Path, T] = {}

    def __setitem__(self, path: Path, value: T) -> None:
        self._values[path] = value

    def __getitem__(self, path: Path) -> T:
        for length in range(len(path), 0, -1):
            prefix = path[:length]
            if prefix in self._values:
                return self._values[prefix]
        raise KeyError(path)

    def __iter__(self) -> Iterator[Path]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class Capture:
    """Takes the state of a fixed set of objects, as often as it is asked.

    Parameters
    ----------
    objects : mapping
        Living objects by name.
    selection : Selection
        What of them is stored.

    Raises
    ------
    InvalidInput
        An object has no state, or a name that the state needs itself.
    """

    def __init__(self, objects: Mapping[str, Any], selection: Selection) -> None:
        if not objects:
            raise InvalidInput("a Checkpointer needs objects, such as model=model, optimizer=optimizer")
        reserved = sorted(RESERVED & set(objects))
        if reserved:
            raise InvalidInput(f"objects cannot be called {' or '.join(reserved)}: these names are the adapter's own")
        self._kinds = {name: _storable_kind(name, value) for name, value in objects.items()}
        self.objects = {name: value for name, value in objects.items() if selection.keeps_object(name)}
        self.selection = selection
        self._all = dict(objects)
        self._watches = {
            name: OptimizerWatch(value) for name, value in self.objects.items() if self._kinds[name] == OPTIMIZER
        }
        self._is_checked = selection.is_all

    @property
    def modules(self) -> list[nn.Module]:
        """The models."""
        return [value for name, value in self.objects.items() if self._kinds[name] == MODULE]

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """The optimizers by name."""
        return {name: value for name, value in self.objects.items() if self._kinds[name] == OPTIMIZER}

    def unpredicted(self) -> list[str]:
        """Return the optimizers whose steps nobody can predict, by name and class."""
        return [
            f"{name} ({type(self.objects[name]).__name__})"
            for name, watch in self._watches.items()
            if not watch.is_known
        ]

    def keep_gradients(self) -> None:
        """Take the gradients of the optimizers too, from their next step on."""
        for watch in self._watches.values():
            watch.keeps_gradients = True

    def mark(self, *, taken: bool) -> None:
        """Say that the present state is the one that the next commit follows.

        Parameters
        ----------
        taken : bool
            It is the one of the last :meth:`take`.
        """
        for watch in self._watches.values():
            watch.mark(taken=taken)

    def close(self) -> None:
        """Watch the optimizers no more."""
        for watch in self._watches.values():
            watch.close()

    def check_selection(self, state: State | None = None) -> None:
        """Raise InvalidInput, before the first capture or load, if a pattern of the selection matches nothing.

        Parameters
        ----------
        state : State, optional
            The commit that is restored: a pattern may leave out what only this one has.
        """
        if self._is_checked:
            return
        views = self._views(self._all)
        names = parameter_names(views)
        tensors = [f"{name}/{stored}" for name, view in views.items() for stored in view.names.values()]
        for name, value in self._all.items():
            if self._kinds[name] == OPTIMIZER:
                tensors += [f"{name}/{label.text}" for label in label_parameters(parameters_of(value), names)]
        others = [*self._all, RNG, EXTRA]
        if state is not None:
            for name in keys_at(state, ()):
                others.append(str(name))
                tensors += [f"{name}/{key}" for path in ((name,), (name, "state")) for key in keys_at(state, path)]
        self.selection.check(tensors, others)
        self._is_checked = True

    def left_out(self) -> list[str]:
        """Return what of the objects the selection leaves out, for people: "3 tensors of model", "scheduler"."""
        found = []
        for name, value in self._all.items():
            if name not in self.objects:
                found.append(f"all of {name}")
            elif self._kinds[name] == MODULE:
                names = view_module(name, value).names.values()
                count = sum(not self.selection.keeps(f"{name}/{stored}") for stored in names)
                if count:
                    found.append(f"{count} of {len(names)} tensors of {name}")
        return found

    def _views(self, objects: Mapping[str, Any]) -> dict[str, ModuleView]:
        return {name: view_module(name, value) for name, value in objects.items() if self._kinds[name] == MODULE}

    def take(self, extra: Mapping[str, Any]) -> tuple[dict[str, Any], Hints]:
        """Return the present state, which shares its tensors with the objects, and what a store cannot see of it."""
        roles: Nearest[str] = Nearest()
        owners: Nearest[Hashable] = Nearest()
        rules: dict[Path, Rule] = {}
        gradients: dict[Path, np.ndarray] = {}
        views = self._views(self.objects)
        names = parameter_names(views)
        state: dict[str, Any] = {}
        for name, value in self.objects.items():
            kind = self._kinds[name]
            if kind == MODULE:
                state[name] = self._module(name, views[name], roles)
            elif kind == OPTIMIZER:
                state[name] = self._optimizer(name, value, names, roles, owners, rules, gradients)
            else:
                roles[name,] = OTHER
                state[name] = generator_state(value) if kind == GENERATOR else value.state_dict()
        if self.selection.keeps_object(RNG):
            roles[RNG,] = OTHER
            state[RNG] = capture_rng()
        if self.selection.keeps_object(EXTRA):
            roles[EXTRA,] = OTHER
            state[EXTRA] = extra
        return state, Hints(roles, owners, rules, gradients)

    def _module(self, name: str, view: ModuleView, roles: Nearest[str]) -> OrderedDict[str, Any]:
        parameters = {key for key, _ in view.module.named_parameters(remove_duplicate=False)}
        state: OrderedDict[str, Any] = OrderedDict()
        for key, value in view.entries.items():
            stored = view.names[key]
            if not self.selection.keeps(f"{name}/{stored}"):
                continue
            state[stored] = value
            if key in parameters or isinstance(value, nn.Parameter):
                roles[name, stored] = "param"
            elif isinstance(value, torch.Tensor) and key.rpartition(".")[2] != EXTRA_STATE:
                roles[name, stored] = "buffer"
            else:
                roles[name, stored] = OTHER
        return state

    def _optimizer(
        self,
        name: str,
        optimizer: torch.optim.Optimizer,
        names: Mapping[int, tuple[str, str]],
        roles: Nearest[str],
        owners: Nearest[Hashable],
        rules: dict[Path, Rule],
        gradients: dict[Path, np.ndarray],
    ) -> dict[str, Any]:
        saved = optimizer.state_dict()
        roles[name,] = OTHER
        parameters = parameters_of(optimizer)
        labels = label_parameters(parameters, names)
        ruled, seen = self._watches[name].rules(), self._watches[name].gradients()
        if not _is_numbered(saved, len(labels)):
            return saved  # a wrapper with a state of its own shape
        state: dict[Any, Any] = {}
        for number, slots in saved["state"].items():
            if type(number) is not int:
                state[number] = slots
                continue
            label = labels[number]
            parameter = None if label.object is None else f"{label.object}/{label.name}"
            if not self.selection.keeps(f"{name}/{label.text}", *([] if parameter is None else [parameter])):
                continue
            state[label.text] = slots
            # The path of the parameter itself: weights and moments then lie beside each other, element by element.
            owners[name, "state", label.text] = (label.object or name, label.name)
            rule = ruled.get(id(parameters[number]))
            if rule is not None:
                rules[name, "state", label.text] = rule
                gradient = seen.get(id(parameters[number]))
                if gradient is not None:
                    gradients[name, "state", label.text] = gradient
            for slot in slots if isinstance(slots, Mapping) else ():
                roles[name, "state", label.text, slot] = str(slot)
        groups = [
            {**group, "params": [labels[number].text for number in group["params"]]} for group in saved["param_groups"]
        ]
        return NamedOptimizerState({**saved, "state": state, "param_groups": groups})


def _storable_kind(name: str, value: Any) -> str:
    kind = kind_of(name, value)
    if not callable(getattr(value, "state_dict", None)) and kind != GENERATOR:
        raise InvalidInput(f"{name} is a {type(value).__qualname__}, which has no state_dict", object=name)
    return kind


def _is_numbered(saved: Any, count: int) -> bool:
    """Return whether a state has the shape that torch gives it, with a number for each parameter."""
    if not isinstance(saved, Mapping) or not {"state", "param_groups"} <= set(saved):
        return False
    numbers = [number for group in saved["param_groups"] for number in group.get("params", ())]
    return numbers == list(range(count)) and all(
        number in range(count) for number in saved["state"] if type(number) is int
    )
