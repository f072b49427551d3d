"""Loading into optimizers: own dtypes, by name or by position, and the run goes on bit for bit."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from deltastore.errors import InvalidInput
from deltastore.reader import State
from deltastore.testing.compare import assert_same

Save = Callable[..., State]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "foreach AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.01),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
    "tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
}


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        given = torch.randn(5, 6, generator=torch.Generator().manual_seed(step))

        def closure(given: torch.Tensor = given) -> Any:
            optimizer.zero_grad()
            loss = (model(given) ** 2).mean()
            loss.backward()
            return loss.item()

        losses.append(float(optimizer.step(closure)))
    return losses


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_goes_on_bit_for_bit(saved: Save, captured: Save, name: str, by_name: bool) -> None:
    make = OPTIMIZERS[name]
    model = mlp()
    optimizer = make(model.parameters())
    train(model, optimizer, range(4))
    if by_name:
        state = captured(model=model, optimizer=optimizer)
    else:
        state = saved(model=model.state_dict(), optimizer=optimizer.state_dict())
    other = mlp(seed=1)
    resumed = make(other.parameters())
    losses: list[float] = []
    for _ in range(2):  # into nothing, then in place over what the run has left
        assert state.load_into(model=other, optimizer=resumed).ok
        assert_same(state.to_state_dict()["optimizer"], resumed.state_dict())
        losses = train(other, resumed, range(4, 8))
    assert losses == train(model, optimizer, range(4, 8))
    assert_same(optimizer.state_dict(), resumed.state_dict())


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.01, **options)


def test_a_second_load_uses_the_tensors_that_are_there(captured: Save) -> None:
    model = mlp()
    optimizer = adamw(model)
    train(model, optimizer, range(2))
    state = captured(model=model, optimizer=optimizer)
    train(model, optimizer, range(2, 3))
    before = [slot for slots in optimizer.state.values() for slot in slots.values()]
    groups = list(optimizer.param_groups)
    state.load_into(model=model, optimizer=optimizer)
    after = [slot for slots in optimizer.state.values() for slot in slots.values()]
    assert all(one is other for one, other in zip(before, after, strict=True))
    assert all(one is other for one, other in zip(groups, optimizer.param_groups, strict=True))


def test_every_state_keeps_its_own_dtype(saved: Save) -> None:
    weight = nn.Parameter(torch.randn(64).to(torch.bfloat16))
    optimizer = torch.optim.AdamW([("w", weight)])
    weight.grad = torch.randn(64).to(torch.bfloat16)
    optimizer.step()
    slots = optimizer.state[weight]
    slots["exp_avg"] = torch.randn(64)
    slots["exp_avg_sq"] = torch.rand(64) * 1e-12
    slots["step"] = torch.tensor(16_777_217.0, dtype=torch.float64)  # 2**24 + 1: not a float32
    state = saved(model={"w": weight}, optim=optimizer.state_dict())
    copy = nn.Parameter(weight.detach().clone())
    other = torch.optim.AdamW([("w", copy)])
    state.load_into(optim=other)
    assert_same(dict(slots), dict(other.state[copy]))


def test_a_counter_that_is_a_python_integer_becomes_what_torch_steps(saved: Save) -> None:
    weight = nn.Parameter(torch.zeros(2))
    content = torch.optim.Adam([weight]).state_dict()
    content["state"] = {140178894849224: {"step": 1564501, "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}}
    content["param_groups"][0]["params"] = [140178894849224]  # old torch numbered by address
    optimizer = torch.optim.Adam([weight])
    saved(optimizer=content).load_into(optimizer=optimizer)
    assert optimizer.state[weight]["step"].item() == 1564501
    weight.grad = torch.ones(2)
    optimizer.step()


def test_a_commit_without_state_empties_the_optimizer(captured: Save) -> None:
    model = mlp()
    optimizer = adamw(model)
    state = captured(model=model, optimizer=optimizer)
    train(model, optimizer, range(2))
    state.load_into(model=model, optimizer=optimizer)
    assert not optimizer.state


def test_states_follow_names_not_positions(captured: Save) -> None:
    model = mlp()
    optimizer = adamw(model)
    train(model, optimizer, range(2))
    state = captured(model=model, optimizer=optimizer)
    other = mlp(1)
    backwards = torch.optim.AdamW(list(other.parameters())[::-1], lr=0.01)
    state.load_into(model=other, optimizer=backwards)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert_same(dict(optimizer.state[mine]), dict(backwards.state[theirs]))


def test_without_modules_positions_count(captured: Save) -> None:
    model = mlp()
    optimizer = adamw(model)
    train(model, optimizer, range(2))
    state = captured(model=model, optimizer=optimizer)
    other = adamw(mlp(1))
    assert state.load_into(optimizer=other).ok
    assert_same(optimizer.state_dict(), other.state_dict())
    with pytest.raises(InvalidInput, match="groups of 4 parameters in the commit, 2 in the object"):
        state.load_into(optimizer=torch.optim.AdamW(mlp()[0].parameters()))


def test_two_modules_with_equal_names(captured: Save) -> None:
    one, two = mlp(0), mlp(1)
    optimizer = torch.optim.AdamW([*one.parameters(), *two.parameters()], lr=0.01)
    train(nn.ModuleList([one, two])[0], optimizer, range(1))
    train(nn.ModuleList([one, two])[1], optimizer, range(1))
    state = captured(one=one, two=two, optimizer=optimizer)
    assert ("optimizer", "state", "two.0.weight", "exp_avg") in state
    one_again, two_again = mlp(2), mlp(3)
    swapped = torch.optim.AdamW([*two_again.parameters(), *one_again.parameters()], lr=0.01)
    state.load_into(one=one_again, two=two_again, optimizer=swapped)
    weight, again = next(two.parameters()), next(two_again.parameters())
    assert_same(optimizer.state[weight]["exp_avg"], swapped.state[again]["exp_avg"])


def test_optimizers_of_their_own_modules_have_plain_names(captured: Save) -> None:
    one, two = mlp(0), mlp(1)
    first, second = adamw(one), adamw(two)
    train(one, first, range(2))
    train(two, second, range(1))
    state = captured(one=one, two=two, first=first, second=second)
    assert ("second", "state", "0.weight", "exp_avg") in state
    again = (mlp(2), mlp(3))
    optimizers = (adamw(again[0]), adamw(again[1]))
    state.load_into(one=again[0], two=again[1], first=optimizers[0], second=optimizers[1])
    assert_same(first.state_dict(), optimizers[0].state_dict())
    assert_same(second.state_dict(), optimizers[1].state_dict())


def test_a_parameter_that_no_module_has(captured: Save) -> None:
    model, loose = mlp(), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([*model.parameters(), loose], lr=0.1, momentum=0.9)
    loose.grad = torch.ones(3)
    optimizer.step()
    state = captured(model=model, optimizer=optimizer)
    assert ("optimizer", "state", "#4", "momentum_buffer") in state
    other = torch.optim.SGD([*mlp(1).parameters(), nn.Parameter(torch.zeros(3))], lr=0.1, momentum=0.9)
    state.load_into(optimizer=other)
    assert_same(optimizer.state_dict(), other.state_dict())


def test_groups_that_differ_are_refused(captured: Save) -> None:
    model = mlp()
    groups: list[dict[str, Any]] = [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[2].parameters()}]
    optimizer = torch.optim.AdamW(groups)
    train(model, optimizer, range(1))
    state = captured(model=model, optimizer=optimizer)
    with pytest.raises(InvalidInput, match="2 groups in the commit, 1 in the object"):
        state.load_into(model=model, optimizer=adamw(model))
    other = mlp(1)
    crossed = torch.optim.AdamW([{"params": other[2].parameters()}, {"params": other[0].parameters()}])
    with pytest.raises(InvalidInput, match="in other groups"):
        state.load_into(model=other, optimizer=crossed)
    report = state.load_into(strict=False, model=other, optimizer=adamw(other))
    assert report.mismatched == ["optimizer/param_groups"]


def test_a_parameter_of_another_shape_is_named_with_both_shapes(captured: Save) -> None:
    model = mlp()
    optimizer = adamw(model)
    train(model, optimizer, range(1))
    state = captured(model=model, optimizer=optimizer)
    grown = mlp()
    grown[2] = nn.Linear(8, 5)
    other = adamw(grown)
    text = r"optimizer/2\.weight/exp_avg: float32 \(3, 8\) in the commit, the parameter is float32 \(5, 8\)"
    with pytest.raises(InvalidInput, match=text):
        state.load_into(model=grown, optimizer=other)
    assert not other.state
    report = state.load_into(strict=False, model=grown, optimizer=other)
    assert {"model/2.weight", "optimizer/2.weight/exp_avg"} <= set(report.mismatched)
    assert set(other.state) == {grown[0].weight, grown[0].bias}


def test_added_and_removed_parameters_are_listed(captured: Save) -> None:
    model = mlp()
    optimizer = adamw(model)
    train(model, optimizer, range(1))
    state = captured(model=model, optimizer=optimizer)
    fewer = torch.optim.AdamW(model[0].parameters())
    report = state.load_into(strict=False, model=model, optimizer=fewer)
    assert report.unexpected == ["optimizer/2.weight", "optimizer/2.bias"]
    model.append(nn.Linear(3, 1))
    more = adamw(model)
    report = state.load_into(strict=False, model=model, optimizer=more)
    assert report.missing == ["model/3.weight", "model/3.bias", "optimizer/3.weight", "optimizer/3.bias"]


def test_what_is_no_optimizer_state_is_refused(saved: Save) -> None:
    model = mlp()
    with pytest.raises(InvalidInput, match="does not hold the state of an optimizer"):
        saved(optimizer=model.state_dict()).load_into(optimizer=adamw(model))


def test_options_come_from_the_commit(captured: Save) -> None:
    model = mlp()
    optimizer = adamw(model, betas=(0.5, 0.6))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    train(model, optimizer, range(1))
    scheduler.step()
    state = captured(model=model, optimizer=optimizer, scheduler=scheduler)
    other = adamw(mlp(1))
    following = torch.optim.lr_scheduler.StepLR(other, 1)
    state.load_into(optimizer=other, scheduler=following)
    assert other.param_groups[0]["lr"] == 0.001
    assert other.param_groups[0]["betas"] == (0.5, 0.6)
    assert following.state_dict() == scheduler.state_dict()
    for one, opt in ((following, other), (scheduler, optimizer)):
        opt.step()
        one.step()
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_a_learning_rate_that_is_a_tensor_is_set_in_place(captured: Save) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), foreach=False)
    state = captured(model=model, optimizer=optimizer)
    rate = optimizer.param_groups[0]["lr"]
    rate.fill_(5)
    state.load_into(model=model, optimizer=optimizer)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate == torch.tensor(0.01)


def test_capturable_is_dropped_where_there_is_no_accelerator(saved: Save) -> None:
    model = mlp()
    optimizer = adamw(model)
    train(model, optimizer, range(1))
    content = optimizer.state_dict()
    content["param_groups"][0]["capturable"] = True
    other = adamw(model)
    saved(optimizer=content).load_into(optimizer=other)
    train(model, other, range(1, 2))


ALIKE = ({"SGD", "momentum"}, {"Adam", "fused AdamW", "foreach AdamW", "tensor lr"})


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_another_class_is_refused(captured: Save, name: str) -> None:
    model = mlp()
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, range(1))
    state = captured(model=model, optimizer=optimizer)
    for other, make in OPTIMIZERS.items():
        living = make(model.parameters())
        if other == name or any({other, name} <= alike for alike in ALIKE):
            assert state.load_into(model=model, optimizer=living).ok
            continue
        before = copy.deepcopy(living.state_dict())
        pattern = f"optimizer: the commit has the state of .*, the object is {type(living).__name__} "
        with pytest.raises(InvalidInput, match=pattern):
            state.load_into(model=model, optimizer=living)
        assert state.load_into(strict=False, model=model, optimizer=living).mismatched == ["optimizer"]
        with pytest.raises(InvalidInput, match="nothing was loaded"):
            state.load_into(strict=False, optimizer=living)
        assert_same(before, living.state_dict())


def test_a_state_that_lacks_a_slot_is_refused(saved: Save) -> None:
    model = mlp()
    optimizer = adamw(model)
    train(model, optimizer, range(1))
    content = optimizer.state_dict()
    del content["state"][2]["exp_avg_sq"]
    with pytest.raises(InvalidInput, match="slots exp_avg, exp_avg_sq, step"):
        saved(optimizer=content).load_into(optimizer=optimizer)


class Lion(torch.optim.Optimizer):
    def __init__(self, params: Any, **more: Any) -> None:
        super().__init__(params, {"lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.0, **more})

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["exp_avg"] = parameter.detach().clone()
        return closure()


class Renamed(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {"step": torch.tensor(1.0), "mine": parameter.detach().clone()}
        return closure()


def test_classes_of_the_users_own_are_told_apart_by_their_options(captured: Save) -> None:
    model = mlp()
    lion = Lion(model.parameters())
    torch.optim.lr_scheduler.OneCycleLR(lion, 0.2, total_steps=4, cycle_momentum=False)  # adds options to the groups
    train(model, lion, range(1))
    state = captured(model=model, optimizer=lion)
    newer = Lion(model.parameters(), cautious=True)  # an option that the commit does not know yet
    assert state.load_into(model=model, optimizer=newer).ok
    assert newer.param_groups[0]["cautious"] is True
    for other in (adamw(model), torch.optim.SGD(model.parameters())):
        with pytest.raises(InvalidInput, match=r"another optimizer \(options betas, weight_decay; slots exp_avg\)"):
            state.load_into(model=model, optimizer=other)
    renamed = Renamed(model.parameters())
    train(model, renamed, range(1))
    assert captured(model=model, optimizer=renamed).load_into(model=model, optimizer=Renamed(model.parameters())).ok
    with pytest.raises(InvalidInput, match=r"slots mine, step\)"):
        captured(model=model, optimizer=renamed).load_into(model=model, optimizer=adamw(model))


class Own(torch.optim.SGD):
    def load_state_dict(self, state_dict: Any) -> None:
        self.seen = sorted(state_dict["state"])
        super().load_state_dict(state_dict)


def test_an_optimizer_with_a_load_of_its_own_gets_torch_numbers(captured: Save) -> None:
    model = mlp()
    optimizer = Own(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, range(1))
    state = captured(model=model, optimizer=optimizer)
    other = Own(model.parameters(), lr=0.1, momentum=0.9)
    state.load_into(model=model, optimizer=other)
    assert other.seen == [0, 1, 2, 3]
    assert_same(optimizer.state_dict(), other.state_dict())


def test_load_hooks_are_run(captured: Save) -> None:
    model = mlp()
    optimizer = adamw(model)
    state = captured(model=model, optimizer=optimizer)
    seen: list[str] = []
    optimizer.register_load_state_dict_post_hook(lambda _: seen.append("post"))
    state.load_into(model=model, optimizer=optimizer)
    assert seen == ["post"]


def test_state_that_belongs_to_no_parameter(captured: Save) -> None:
    model = mlp()
    optimizer = adamw(model)
    optimizer.state["shared"] = {"count": 3}  # type: ignore[index]
    state = captured(model=model, optimizer=optimizer)
    other = adamw(model)
    state.load_into(model=model, optimizer=other)
    assert other.state["shared"] == {"count": 3}  # type: ignore[index]


def draws(generators: dict[str, Any]) -> list[Any]:
    return [
        torch.rand(3, generator=generators["torch"]).tolist(),
        generators["pcg"].normal(),
        generators["mt"].normal(),
        generators["legacy"].randn(),
        generators["python"].gauss(0, 1),
    ]


def test_generators_go_on_with_their_streams(captured: Save) -> None:
    def make(seed: int) -> dict[str, Any]:
        return {
            "torch": torch.Generator().manual_seed(seed),
            "pcg": np.random.default_rng(seed),
            "mt": np.random.Generator(np.random.MT19937(seed)),
            "legacy": np.random.RandomState(seed),
            "python": random.Random(seed),
        }

    generators = make(1)
    draws(generators)  # leaves a cached gaussian behind
    generators["pcg"].integers(9, dtype=np.uint32)
    state = captured(**generators)
    expected = draws(generators)
    others = make(2)
    state.load_into(**others)
    assert draws(others) == expected


class Loader:
    def __init__(self, at: int) -> None:
        self.at = at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "order": [3, 1, 2], "buffer": torch.ones(2)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert_same(Loader(state["at"]).state_dict(), state)
        self.at = state["at"]


def test_anything_with_a_state_dict(captured: Save) -> None:
    state = captured(loader=Loader(5), scaler=torch.amp.GradScaler("cpu", init_scale=8.0))
    loader, scaler = Loader(0), torch.amp.GradScaler("cpu")
    state.load_into(loader=loader, scaler=scaler)
    assert (loader.at, scaler.get_scale()) == (5, 8.0)
    with pytest.raises(InvalidInput, match=r"missing.*other"):
        state.load_into(loader=loader, other=Loader(0))
    absent = nn.Linear(2, 2)
    assert state.load_into(strict=False, loader=loader, other=Loader(0), ema=absent).missing == ["ema", "other"]
    with pytest.raises(InvalidInput, match="no key"):
        state.load_into(strict=False, other=Loader(0))
