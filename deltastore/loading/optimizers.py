"""Planning the load of a torch optimizer, without the casts of ``Optimizer.load_state_dict``.

torch casts every state tensor to the dtype of its parameter: moments that were kept in float32 beside a bfloat16 weight
lose their lower half, and the run goes on with other numbers. Here each tensor keeps its own dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from deltastore.loading.families import misfit
from deltastore.loading.objects import Label, label_parameters, parameters_of
from deltastore.loading.plan import LoadPlan, about, keys_at, value_at
from deltastore.reader import LazyTensor
from deltastore.torch_bridge import TORCH
from deltastore.types import Key, Path

STEP = "step"
"""The slot of step counters."""

PARAMETER_SHAPED = frozenset(
    "exp_avg exp_avg_sq max_exp_avg_sq exp_inf momentum_buffer square_avg grad_avg acc_delta sum prev ax".split()
)
"""Slots of torch's optimizers with the shape of the parameter; others (factored, 8-bit) have shapes of their own."""

_KEPT = frozenset({"params", "param_names"})
"""Group options that stay as they are in the living optimizer."""


def loads_plainly(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether nothing but torch's own ``load_state_dict`` has a say in the optimizer's state."""
    return takes_state_as_it_is(optimizer) and not optimizer._optimizer_load_state_dict_post_hooks


def takes_state_as_it_is(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether nothing changes a stored state before the optimizer has it: its kind must be the same."""
    own = type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict
    return own and "state" in vars(optimizer) and not optimizer._optimizer_load_state_dict_pre_hooks


def is_of_this_kind(plan: LoadPlan, name: str, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer can use a stored state, as far as can be seen; a misfit is noted in the plan."""
    groups = _stored_groups(plan, name)
    if groups is None:
        return True  # something else is wrong with it
    stored = {key for group in groups for key in group["params"]}
    entries = [key for key in keys_at(plan.state, (name, "state")) if key in stored]
    states = [set(keys_at(plan.state, (name, "state", key))) for key in entries]
    found = misfit(optimizer, groups, states)
    if found is not None:
        plan.mismatched[name] = found
    return found is None


def plan_optimizer(
    plan: LoadPlan, name: str, optimizer: torch.optim.Optimizer, names: Mapping[int, tuple[str, str]]
) -> None:
    """Add an optimizer to a plan.

    Parameters
    ----------
    names
        Object and name of parameters by ``id``: the state of a parameter is looked up by name, where there are names
        on both sides, else by position.
    """
    groups = _stored_groups(plan, name)
    if groups is None:
        plan.mismatched[name] = "the commit does not hold the state of an optimizer under this name"
        plan.unmatched.append(name)
        return
    parameters = parameters_of(optimizer)
    labels = label_parameters(parameters, names)
    stored = [key for group in groups for key in group["params"]]
    where = _match(stored, labels, [len(group["params"]) for group in groups], optimizer)
    if where is None:
        sizes = ", ".join(str(len(group["params"])) for group in groups)
        found = ", ".join(str(len(group["params"])) for group in optimizer.param_groups)
        plan.mismatched[f"{name}/param_groups"] = f"groups of {sizes} parameters in the commit, {found} in the object"
        plan.unmatched.append(name)
        return
    _compare_groups(plan, name, groups, optimizer, where)
    _compare_names(plan, name, stored, labels, where)
    if name in plan.unmatched:
        return
    plan.before.append(lambda: _follow_parameters(plan, optimizer))
    entries = dict.fromkeys(keys_at(plan.state, (name, "state")))
    beside_parameter = _counted_on_device(groups)
    # In the order of the stored states, then the parameters that have none.
    for key in dict.fromkeys([*(key for key in entries if key in where), *where]):
        index = where[key]
        shown = f"{name}/{labels[index].text}"
        if plan.expected(shown, *_module_names(labels[index])):
            state = _Slots(plan, optimizer, parameters[index], step_on_device=key in beside_parameter)
            state.plan((name, "state", key) if key in entries else None, shown)
            plan.loaded += 1
    others: dict[Any, Any] = {key: value_at(plan.state, (name, "state", key)) for key in entries.keys() - set(stored)}
    plan.after.append(lambda: _finish(plan, optimizer, groups, others))


def _stored_groups(plan: LoadPlan, name: str) -> list[dict[str, Any]] | None:
    if not {"state", "param_groups"} <= set(keys_at(plan.state, (name,))):
        return None
    groups = value_at(plan.state, (name, "param_groups"))
    if not isinstance(groups, list) or not all(isinstance(group, dict) and "params" in group for group in groups):
        return None
    return groups


def _match(
    stored: Sequence[Key], labels: Sequence[Label], sizes: list[int], optimizer: torch.optim.Optimizer
) -> dict[Key, int] | None:
    """Return the position of each stored parameter in the living optimizer; None if only positions count and differ."""
    named = [key for key in stored if isinstance(key, str) and not key.startswith("#")]
    if not named or all(label.object is None for label in labels):
        if sizes != [len(group["params"]) for group in optimizer.param_groups]:
            return None
        first: dict[Key, int] = {}
        for index, key in enumerate(stored):
            first.setdefault(key, index)
        return first
    by_name: dict[Key, int] = {}
    for index, label in enumerate(labels):
        for text in label.names:
            # A plain name that two parameters have stands for neither.
            by_name[text] = -1 if text in by_name else index
    by_name |= {label.text: index for index, label in enumerate(labels)}
    return {key: by_name[key] for key in stored if by_name.get(key, -1) >= 0}


def _module_names(label: Label) -> tuple[str, ...]:
    return () if label.object is None else (f"{label.object}/{label.name}",)


def _compare_groups(
    plan: LoadPlan,
    name: str,
    groups: list[dict[str, Any]],
    optimizer: torch.optim.Optimizer,
    where: Mapping[Key, int],
) -> None:
    living = [index for index, group in enumerate(optimizer.param_groups) for _ in group["params"]]
    if len(groups) != len(optimizer.param_groups):
        plan.mismatched[f"{name}/param_groups"] = (
            f"{len(groups)} groups in the commit, {len(optimizer.param_groups)} in the object"
        )
    elif any(living[where[key]] != i for i, group in enumerate(groups) for key in group["params"] if key in where):
        plan.mismatched[f"{name}/param_groups"] = "some parameters are in other groups in the commit than in the object"


def _compare_names(
    plan: LoadPlan, name: str, stored: Sequence[Key], labels: Sequence[Label], where: Mapping[Key, int]
) -> None:
    found = set(where.values())
    for index, label in enumerate(labels):
        if index not in found and plan.expected(f"{name}/{label.text}", *_module_names(label)):
            plan.missing.append(f"{name}/{label.text}")
    owners = {label.object for label in labels if label.object is not None}
    for key in stored:
        if key not in where and plan.expected(f"{name}/{key}", *(f"{owner}/{key}" for owner in owners)):
            plan.unexpected.append(f"{name}/{key}")
    if stored and labels and not where:
        plan.unmatched.append(name)


def _counted_on_device(groups: list[dict[str, Any]]) -> set[Key]:
    """Return the parameters whose step counter lies beside them; torch keeps the others' on the CPU."""
    return {key for group in groups if group.get("capturable") or group.get("fused") for key in group["params"]}


class _Slots:
    """The state of one parameter while it is loaded: in place where a tensor of the same kind is there."""

    def __init__(
        self, plan: LoadPlan, optimizer: torch.optim.Optimizer, parameter: torch.Tensor, *, step_on_device: bool
    ) -> None:
        self._plan = plan
        self._optimizer = optimizer
        self._parameter = parameter
        self._step_on_device = step_on_device
        self._values: dict[Key, Any] = {}
        self._nested: set[Key] = set()

    def plan(self, path: Path | None, shown: str) -> None:
        """Plan what the commit holds at a path; None: the parameter had no state, and has none afterwards."""
        if path is None:
            self._plan.after.append(lambda: self._optimizer.state.pop(self._plan.current(self._parameter), None))
            return
        slots = {slot: self._plan.state[(*path, slot)] for slot in keys_at(self._plan.state, path)}
        tensors = {slot: leaf for slot, leaf in slots.items() if isinstance(leaf, LazyTensor)}
        misfits = {
            f"{shown}/{slot}": f"{about(leaf)} in the commit, the parameter is {about(self._parameter)}"
            for slot, leaf in tensors.items()
            if slot in PARAMETER_SHAPED and leaf.shape != tuple(self._parameter.shape)
        }
        if misfits:
            self._plan.mismatched |= misfits
            return
        living = self._optimizer.state.get(self._parameter, {})
        for slot in slots:
            self._values[slot] = None  # keeps the order of the slots
            if slot not in tensors:
                self._values[slot] = value_at(self._plan.state, (*path, slot))
                self._nested.add(slot)
            elif _alike(living.get(slot), tensors[slot]):
                self._values[slot] = living[slot]
                self._plan.fill((*path, slot), living[slot])
            else:
                self._plan.copy((*path, slot), self._maker(slot))
        self._plan.after.append(self._set)

    def _maker(self, slot: Key) -> Callable[[torch.Tensor], None]:
        def make(tensor: torch.Tensor) -> None:
            parameter = self._plan.current(self._parameter)
            device = _memory_of(parameter) if slot != STEP or self._step_on_device else torch.device("cpu")
            if tensor.shape == parameter.shape and device == parameter.device:
                fresh = torch.empty_like(parameter, dtype=tensor.dtype, requires_grad=False)  # its memory format, too
            else:
                fresh = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            TORCH.copy_to(fresh, tensor)
            self._values[slot] = fresh

        return make

    def _set(self) -> None:
        parameter = self._plan.current(self._parameter)
        values = {
            slot: _on(_memory_of(parameter), value) if slot in self._nested else value
            for slot, value in self._values.items()
        }
        living = self._optimizer.state.get(parameter)
        if isinstance(living, dict):
            living.clear()
            living.update(values)
        else:
            self._optimizer.state[parameter] = values


def _memory_of(parameter: torch.Tensor) -> torch.device:
    return torch.device("cpu") if parameter.is_meta else parameter.device


def _alike(present: Any, leaf: LazyTensor) -> bool:
    return (
        isinstance(present, torch.Tensor)
        and not present.is_meta
        and (present.dtype, tuple(present.shape)) == (leaf.dtype, leaf.shape)
        and all(size <= 1 or stride for size, stride in zip(present.shape, present.stride(), strict=True))
    )


def _on(device: torch.device, value: Any) -> Any:
    """Return a nested value with its tensors on a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if type(value) in (list, tuple):
        return type(value)(_on(device, item) for item in value)
    if type(value) is dict:
        return {key: _on(device, item) for key, item in value.items()}
    return value


def _follow_parameters(plan: LoadPlan, optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer hold the parameters that took the place of others without memory."""
    for group in optimizer.param_groups:
        for index, parameter in enumerate(group["params"]):
            fresh = plan.current(parameter)
            if fresh is not parameter:
                group["params"][index] = fresh
                if parameter in optimizer.state:
                    optimizer.state[fresh] = optimizer.state.pop(parameter)


def _finish(
    plan: LoadPlan, optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], others: dict[Any, Any]
) -> None:
    for key in [key for key in optimizer.state if not isinstance(key, torch.Tensor)]:
        del optimizer.state[key]
    optimizer.state.update(others)
    if len(groups) == len(optimizer.param_groups):
        for group, stored in zip(optimizer.param_groups, groups, strict=True):
            _set_options(group, stored)
    # As torch does at the end of a load: defaults of options that are newer than the commit, counters as tensors.
    optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})


def _set_options(group: dict[str, Any], stored: Mapping[str, Any]) -> None:
    """Set the options of a group in place: schedulers hold the dict, CUDA graphs a learning rate that is a tensor."""
    for option, value in stored.items():
        if option in _KEPT:
            continue
        present = group.get(option)
        if isinstance(value, torch.Tensor) and isinstance(present, torch.Tensor) and value.shape == present.shape:
            present.copy_(value)
        elif option == "capturable" and value and all(parameter.device.type == "cpu" for parameter in group["params"]):
            group[option] = False  # it was trained on an accelerator; torch refuses the option on the CPU
        else:
            group[option] = value
