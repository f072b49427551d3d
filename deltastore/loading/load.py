"""Loading: plan for every object, refuse what does not fit, then copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from deltastore.loading.modules import plan_module
from deltastore.loading.objects import (
    GENERATOR,
    MODULE,
    OPTIMIZER,
    kind_of,
    parameter_names,
    set_generator_state,
    view_module,
)
from deltastore.loading.optimizers import is_of_this_kind, loads_plainly, plan_optimizer, takes_state_as_it_is
from deltastore.loading.plan import LOAD_THE_REST, Expected, LoadPlan, everything, keys_at, refuse, value_at
from deltastore.reader import Report, State


def load_into(state: State, strict: bool, objects: Mapping[str, Any]) -> Report:
    """Copy a state into living objects; see :meth:`deltastore.reader.State.load_into`.

    Modules and optimizers are filled tensor by tensor, straight into the memory that they have; parameters on the meta
    device get memory on the CPU. Step counters and random states keep their own device, every optimizer state its own
    dtype. Others get their state through ``load_state_dict``, after the tensors.

    Raises
    ------
    InvalidInput
        Strict, and commit and objects differ (all differences are listed, with both shapes); an object that the
        commit holds, but of which no key is found; nothing to load at all; a parameter that would stay on the meta
        device. No tensor was touched.
    Corruption
        A tensor is damaged; others, and parts of this one, may have been copied by then. No tensor got an element
        that does not fit its checksum.
    """
    return load_objects(state, objects, strict=strict)


def load_objects(
    state: State,
    objects: Mapping[str, Any],
    *,
    strict: bool = True,
    expected: Expected = everything,
    advice: str = LOAD_THE_REST,
) -> Report:
    """Load as :func:`load_into` does, without what is left out on purpose.

    Parameters
    ----------
    expected : callable
        Whether something is to be loaded at all, asked with its names: "model/wte.weight"; for the state of a parameter
        "optimizer/wte.weight" and the name of the parameter itself.
    advice : str
        What to do where commit and objects differ, for the error of a strict load.
    """
    plan = plan_load(state, objects, expected)
    refuse(plan, strict=strict, advice=advice)
    apply(plan)
    return plan.report()


def plan_load(state: State, objects: Mapping[str, Any], expected: Expected = everything) -> LoadPlan:
    """Return what a load would do; nothing is touched."""
    plan = LoadPlan(state, expected)
    kinds = {name: kind_of(name, value) for name, value in objects.items()}
    views = {name: view_module(name, value) for name, value in objects.items() if kinds[name] == MODULE}
    names = parameter_names(views)
    held = set(keys_at(state, ()))
    # Modules first: optimizers follow the parameters that get memory. Random states last: loading may draw numbers.
    for name in sorted(objects, key=lambda name: (kinds[name] == GENERATOR, kinds[name] != MODULE)):
        value = objects[name]
        if name not in held:
            plan.missing.append(name)
        elif kinds[name] == MODULE:
            plan_module(plan, name, views[name])
        elif kinds[name] == OPTIMIZER and takes_state_as_it_is(value) and not is_of_this_kind(plan, name, value):
            continue
        elif kinds[name] == OPTIMIZER and loads_plainly(value):
            plan_optimizer(plan, name, value, names)
        else:
            _plan_other(plan, name, value, kinds[name])
    return plan


def _plan_other(plan: LoadPlan, name: str, value: Any, kind: str) -> None:
    if kind == GENERATOR:
        state = value_at(plan.state, (name,))
        plan.after.append(lambda: set_generator_state(value, state))
    else:
        found = plan.state[name]
        content = found.to_state_dict() if isinstance(found, State) else value_at(plan.state, (name,))
        plan.after.append(lambda: value.load_state_dict(content))
    plan.loaded += 1


def apply(plan: LoadPlan) -> None:
    """Do what a plan says."""
    with torch.no_grad():
        plan.materialise()
        for action in plan.before:
            action()
        targets = {path: [plan.current(tensor) for tensor in tensors] for path, tensors in plan.targets.items()}
        plan.state.fill(targets, plan.sinks)
        for action in plan.after:
            action()
