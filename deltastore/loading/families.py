"""Whether a stored optimizer state is of the kind that an optimizer uses.

A state of another kind would be taken without a word and missed in the first step: torch keeps no name of the class in
it. What tells them apart are the options of the groups and the slots of the parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch


class Family(NamedTuple):
    """What an optimizer of torch works with."""

    options: frozenset[str]
    """Options of its groups, without the learning rate and without switches that came and come with new versions."""
    slots: frozenset[str]
    """What its step expects in the state of a parameter that has one; others (amsgrad, momentum) may be there, too."""


FAMILIES: Mapping[str, Family] = {
    name: Family(frozenset(options.split()), frozenset(slots.split()))
    for name, options, slots in [
        ("SGD", "momentum dampening weight_decay nesterov", ""),
        ("Adam", "betas eps weight_decay amsgrad", "step exp_avg exp_avg_sq"),
        ("AdamW", "betas eps weight_decay amsgrad", "step exp_avg exp_avg_sq"),
        ("Adamax", "betas eps weight_decay", "step exp_avg exp_inf"),
        ("NAdam", "betas eps weight_decay momentum_decay", "step mu_product exp_avg exp_avg_sq"),
        ("RAdam", "betas eps weight_decay", "step exp_avg exp_avg_sq"),
        ("Adagrad", "lr_decay weight_decay initial_accumulator_value eps", "step sum"),
        ("Adadelta", "rho eps weight_decay", "step square_avg acc_delta"),
        ("RMSprop", "momentum alpha eps centered weight_decay", "step square_avg"),
        ("Rprop", "etas step_sizes", "step prev step_size"),
        ("ASGD", "lambd alpha t0 weight_decay", "step eta mu ax"),
        ("Adafactor", "eps beta2_decay d weight_decay", "step"),
        ("LBFGS", "max_iter max_eval tolerance_grad tolerance_change history_size line_search_fn", ""),
        ("SparseAdam", "betas eps", "step exp_avg exp_avg_sq"),
        ("Muon", "weight_decay momentum nesterov ns_coefficients eps ns_steps adjust_lr_fn", "momentum_buffer"),
    ]
}
"""The optimizers of torch.optim by name."""

_TELLING = frozenset[str]().union(*(family.options for family in FAMILIES.values()))
"""Options that tell kinds apart; whatever else a group holds comes from schedulers, users and new versions."""


def misfit(
    optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]], states: Iterable[Set[Any]]
) -> str | None:
    """Return why a stored state is of another kind than an optimizer; None where nothing says so.

    Parameters
    ----------
    groups
        The stored groups.
    states
        The slots of each parameter that has any.
    """
    stored = _TELLING.intersection(*[set().union(*groups)])
    living = _TELLING.intersection(*[set().union(*optimizer.param_groups)])
    slots = [{str(slot) for slot in state} for state in states if state]
    expected = _expected_slots(optimizer)
    differs = stored != living
    if not differs and all(expected <= state for state in slots):
        return None
    held = set[str]().union(*slots)
    likely = [
        name for name, family in FAMILIES.items() if family.options == stored and (not held or family.slots <= held)
    ]
    kind = " or ".join(likely) or "another optimizer"
    return (
        f"the commit has the state of {kind} ({_about(stored, held)}), the object is {type(optimizer).__qualname__} "
        f"({_about(living, expected)})"
    )


def _expected_slots(optimizer: torch.optim.Optimizer) -> frozenset[str]:
    """Return the slots that an optimizer relies on; of one with a step of its own, those that torch's load needs."""
    for base in type(optimizer).__mro__:
        family = FAMILIES.get(base.__name__)
        if family is not None and base is getattr(torch.optim, base.__name__, None):
            # torch puts wrappers around steps, each class at its own time.
            is_torchs = inspect.unwrap(type(optimizer).step) is inspect.unwrap(base.step)
            loads_as_torch = type(optimizer).__setstate__ is base.__setstate__
            return family.slots if is_torchs else family.slots & {"step"} if loads_as_torch else frozenset()
    return frozenset()


def _about(options: Iterable[str], slots: Iterable[str]) -> str:
    parts = {"options": sorted(options), "slots": sorted(slots)}
    return "; ".join(f"{kind} {', '.join(names) or 'none'}" for kind, names in parts.items())
