"""Loading into modules: in place, names matched, nothing touched when it does not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from deltastore.errors import InvalidInput
from deltastore.reader import State
from deltastore.testing.compare import assert_same

Save = Callable[..., State]


def mlp(width: int = 16) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 4))


def copied(module: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in module.state_dict().items()}


def addresses(module: nn.Module) -> dict[str, int]:
    return {key: value.data_ptr() for key, value in module.state_dict().items()}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.embedding.weight


def test_a_load_fills_the_tensors_that_are_there(saved: Save) -> None:
    source, target = mlp(), mlp()
    source(torch.randn(4, 8))
    before = addresses(target)
    report = saved(model=source.state_dict()).load_into(model=target)
    assert report.ok
    assert addresses(target) == before
    assert_same(copied(source), copied(target))
    assert all(parameter.requires_grad for parameter in target.parameters())


def test_a_load_is_seen_by_autograd(saved: Save) -> None:
    module = nn.Linear(2, 2)
    state = saved(model=module.state_dict())
    loss: Any = (module.weight**2).sum()
    state.load_into(model=module)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_memory_formats_and_dtypes_stay(saved: Save) -> None:
    source = nn.Conv2d(3, 4, 3).to(torch.bfloat16)
    target = nn.Conv2d(3, 4, 3).to(torch.bfloat16, memory_format=torch.channels_last)  # type: ignore[call-overload]
    saved(model=source.state_dict()).load_into(model=target)
    assert_same(copied(source), copied(target))
    assert target.weight.is_contiguous(memory_format=torch.channels_last)


def test_both_shapes_are_named_and_nothing_is_touched(saved: Save) -> None:
    state = saved(model=mlp(16).state_dict())
    target = mlp(24)
    before = copied(target)
    with pytest.raises(
        InvalidInput, match=r"model/0\.weight: float32 \(16, 8\) in the commit, float32 \(24, 8\)"
    ) as found:
        state.load_into(model=target)
    assert "model/0.weight" in found.value.mismatched
    assert_same(before, copied(target))


def test_not_strict_loads_what_fits(saved: Save) -> None:
    source, target = mlp(16), mlp(24)
    before = copied(target)
    report = saved(model=source.state_dict()).load_into(strict=False, model=target)
    assert "model/0.weight" in report.mismatched
    assert not report.missing
    assert_same(source[3].bias, target[3].bias)
    assert_same(before["0.weight"], target[0].weight)


def test_another_dtype_does_not_fit(saved: Save) -> None:
    state = saved(model=mlp().state_dict())
    with pytest.raises(InvalidInput, match=r"float32 \(16, 8\) in the commit, bfloat16 \(16, 8\)"):
        state.load_into(model=mlp().to(torch.bfloat16))


def test_missing_and_unexpected_keys_are_listed(saved: Save) -> None:
    content = copied(mlp())
    content["9.weight"] = content.pop("3.bias")
    state = saved(model=content)
    with pytest.raises(InvalidInput, match=r"missing .*model/3\.bias.*unexpected .*model/9\.weight") as found:
        state.load_into(model=mlp())
    assert (found.value.missing, found.value.unexpected) == (["model/3.bias"], ["model/9.weight"])
    report = state.load_into(strict=False, model=mlp())
    assert (report.missing, report.unexpected) == (["model/3.bias"], ["model/9.weight"])


@pytest.mark.parametrize("strict", [True, False])
def test_a_load_that_matches_no_key_is_an_error(saved: Save, strict: bool) -> None:
    state = saved(model={f"layer.{key}": value for key, value in mlp().state_dict().items()})
    with pytest.raises(InvalidInput, match="model"):
        state.load_into(strict=strict, model=mlp())


@pytest.mark.parametrize("strict", [True, False])
def test_an_object_that_the_commit_lacks_is_an_error(saved: Save, strict: bool) -> None:
    state = saved(model=mlp().state_dict())
    with pytest.raises(InvalidInput, match="ema"):
        state.load_into(strict=strict, ema=mlp())


def test_objects_are_needed(saved: Save) -> None:
    state = saved(model=mlp().state_dict())
    with pytest.raises(InvalidInput, match="needs objects"):
        state.load_into()
    with pytest.raises(InvalidInput, match="model is a int"):
        state.load_into(model=3)


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.module = inner


def test_wrappers_come_and_go(saved: Save) -> None:
    def compiled(module: Any) -> Any:
        return torch.compile(module, backend="eager")

    source = mlp()
    plain = saved(model=source.state_dict())
    wrapped = saved(model=Wrapper(compiled(source)).state_dict())
    wraps: list[Callable[[nn.Module], nn.Module]] = [lambda m: m, Wrapper, compiled, lambda m: Wrapper(compiled(m))]
    for state in (plain, wrapped):
        for wrap in wraps:
            target = mlp()
            state.load_into(model=wrap(target))
            assert_same(copied(source), copied(target))


def test_tied_weights_stay_tied(saved: Save) -> None:
    source, target = Tied(), Tied()
    saved(model=source.state_dict()).load_into(model=target)
    assert target.head.weight is target.embedding.weight
    assert_same(source.head.weight, target.head.weight)


def test_a_key_that_is_tied_to_a_loaded_one_is_not_missing(saved: Save) -> None:
    source, target = Tied(), Tied()
    content = dict(source.state_dict())
    del content["head.weight"]
    assert saved(model=content).load_into(model=target).ok
    assert_same(source.head.weight, target.head.weight)


def test_an_untied_commit_does_not_fit_a_tied_model(saved: Save) -> None:
    content = copied(Tied())
    assert saved(model=content).load_into(model=Tied()).ok  # two tensors, but equal ones
    content["head.weight"][3, 3] += 1
    target = Tied()
    before = copied(target)
    with pytest.raises(InvalidInput, match=r"model/head\.weight: one tensor with model/embedding\.weight"):
        saved(model=content).load_into(model=target)
    assert_same(before, copied(target))


def test_a_tied_commit_fills_an_untied_model(saved: Save) -> None:
    source, target = Tied(), Tied()
    target.head.weight = nn.Parameter(torch.zeros(50, 8))
    saved(model=source.state_dict()).load_into(model=target)
    assert target.head.weight is not target.embedding.weight
    assert_same(copied(source), copied(target))


def test_meta_parameters_get_memory(saved: Save) -> None:
    source = mlp()
    source[0].weight.requires_grad_(False)
    with torch.device("meta"):
        target = mlp()
    target[0].weight.requires_grad_(False)
    saved(model=source.state_dict()).load_into(model=target)
    assert_same(copied(source), copied(target))
    assert [p.requires_grad for p in target.parameters()] == [p.requires_grad for p in source.parameters()]
    target(torch.randn(2, 8))


def test_tied_meta_parameters_stay_tied(saved: Save) -> None:
    source = Tied()
    with torch.device("meta"):
        target = Tied()
    saved(model=source.state_dict()).load_into(model=target)
    assert target.head.weight is target.embedding.weight
    assert_same(copied(source), copied(target))


def test_a_recurrent_module_on_meta_works_afterwards(saved: Save) -> None:
    source = nn.LSTM(4, 4, bidirectional=True)
    with torch.device("meta"):
        target = nn.LSTM(4, 4, bidirectional=True)
    saved(model=source.state_dict()).load_into(model=target)
    given = torch.randn(3, 2, 4)
    assert torch.equal(source(given)[0], target(given)[0])


@pytest.mark.parametrize("strict", [True, False])
def test_a_parameter_left_on_meta_is_an_error(saved: Save, strict: bool) -> None:
    content = copied(mlp())
    del content["3.bias"]
    with torch.device("meta"):
        target = mlp()
    with pytest.raises(InvalidInput, match=r"model/3\.bias"):
        saved(model=content).load_into(strict=strict, model=target)
    assert all(parameter.is_meta for parameter in target.parameters())


def test_an_optimizer_follows_parameters_that_get_memory(captured: Save) -> None:
    source = mlp()
    optimizer = torch.optim.AdamW(source.parameters())
    source(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    state = captured(model=source, optimizer=optimizer)
    with torch.device("meta"):
        target = mlp()
    other = torch.optim.AdamW(target.parameters())
    state.load_into(optimizer=other, model=target)
    assert other.param_groups[0]["params"][0] is target[0].weight
    for model, opt in ((source, optimizer), (target, other)):
        opt.zero_grad()
        model(torch.ones(4, 8)).sum().backward()
        opt.step()
    assert_same(copied(source), copied(target))
    assert_same(optimizer.state_dict(), other.state_dict())


def test_buffers_that_no_state_holds_are_warned_about(saved: Save, caplog: pytest.LogCaptureFixture) -> None:
    module = nn.Linear(2, 2)
    with torch.device("meta"):
        target = nn.Linear(2, 2)
        target.register_buffer("table", torch.empty(3), persistent=False)
    saved(model=module.state_dict()).load_into(model=target)
    assert "table" in caplog.text


def test_an_expanded_buffer_is_replaced(saved: Save) -> None:
    module = nn.Module()
    module.register_buffer("mask", torch.arange(3.0).expand(4, 3))
    content = {"mask": torch.randn(4, 3)}
    saved(model=content).load_into(model=module)
    assert_same(content["mask"], module.mask)


class Extra(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.value = value

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state


@pytest.mark.parametrize("value", [{"a": [1, (2.0, None)]}, {}, 7, torch.arange(3), {"t": torch.ones(2)}])
def test_extra_state_comes_back(saved: Save, value: Any) -> None:
    source, target = Extra(value), Extra(None)
    saved(model=nn.Sequential(source).state_dict()).load_into(model=nn.Sequential(target))
    assert_same(value, target.value)
    assert_same(source.inner.weight, target.inner.weight)


def test_extra_state_that_the_commit_lacks_is_missing(saved: Save) -> None:
    content = dict(Extra(1).state_dict())
    del content["_extra_state"]
    assert saved(model=content).load_into(strict=False, model=Extra(2)).missing == ["model/_extra_state"]


class Packed(nn.Module):
    """Gives out what is no parameter, and wants all of it back in one call."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Linear(2, 2)
        self.extra = Extra("old")
        self.packed = (torch.zeros(3), "none")

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "values"] = self.packed[0] * 1
        destination[prefix + "scheme"] = self.packed[1]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.packed = (state_dict.pop(prefix + "values"), state_dict.pop(prefix + "scheme"))
        super()._load_from_state_dict(state_dict, prefix, *args)


def test_a_module_with_a_state_of_its_own_loads_it_itself(saved: Save) -> None:
    source, target = Packed(), Packed()
    source.packed, source.extra.value = (torch.arange(3.0), "int8"), "new"
    saved(model=source.state_dict()).load_into(model=target)
    assert_same(source.packed, target.packed)
    assert_same(source.state_dict(), target.state_dict())


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_a_lazy_module_takes_the_stored_shape(saved: Save) -> None:
    source, target = nn.Linear(5, 3), nn.LazyLinear(3)
    saved(model=source.state_dict()).load_into(model=target)
    assert_same(copied(source), copied(target))


class Old(nn.Linear):
    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return {"weight": self.weight.detach(), "bias": self.bias.detach()}


def test_a_module_whose_state_dict_takes_no_arguments(saved: Save) -> None:
    source, target = Old(2, 3), Old(2, 3)
    saved(model=source.state_dict()).load_into(model=target)
    assert_same(source.weight, target.weight)


def test_targets_of_every_form_are_filled_together(saved: Save) -> None:
    source, target = nn.Module(), nn.Module()
    for name, grown in {"plain": (6, 8), "turned": (8, 6), "twice": (6, 8), "step": (6, 16)}.items():
        source.register_buffer(name, torch.randn(6, 8))
        target.register_buffer(name, torch.zeros(grown))
    target.turned = target.turned.T
    target.step = target.step[:, ::2]  # type: ignore[index]
    source.twice = source.plain
    saved(model=source.state_dict()).load_into(model=target)
    assert_same(copied(source), copied(target))


class Subclass(torch.Tensor):
    pass


def test_a_tensor_subclass_is_filled_by_its_own_copy(saved: Save) -> None:
    source, target = nn.Linear(2, 3), nn.Linear(2, 3)
    target.weight = nn.Parameter(torch.zeros(3, 2).as_subclass(Subclass))
    saved(model=source.state_dict()).load_into(model=target)
    assert_same(source.weight.detach(), target.weight.detach().as_subclass(torch.Tensor))


def test_inference_tensors_are_filled(saved: Save) -> None:
    source = nn.Linear(2, 2)
    with torch.inference_mode():
        target = nn.Linear(2, 2)
    saved(model=source.state_dict()).load_into(model=target)
    assert_same(source.weight, target.weight)


def test_a_prefix_of_a_state_can_be_loaded(saved: Save) -> None:
    source, target = mlp(), mlp()
    saved(trainer={"model": source.state_dict()})["trainer"].load_into(model=target)
    assert_same(copied(source), copied(target))
