"""include and exclude: what is stored, what a restore expects, and what it never touches."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from deltastore.adapters._selection import Selection
from deltastore.adapters.pytorch import Checkpointer
from deltastore.errors import InvalidInput
from deltastore.testing.compare import assert_same
from tests.adapters.training import losses_of, make_run

_numbers = itertools.count()


@pytest.fixture
def root() -> str:
    return f"memory://selection-{next(_numbers)}"


class LoraLinear(nn.Module):
    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(2, inner.in_features))
        self.lora_b = nn.Parameter(torch.zeros(inner.out_features, 2))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.inner(given) + given @ self.lora_a.T @ self.lora_b.T  # type: ignore[no-any-return]


def adapted(seed: int, backbone: dict[str, torch.Tensor] | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    plain = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    if backbone is not None:
        plain.load_state_dict(backbone)
    for index in (0, 2):
        inner = plain[index]
        assert isinstance(inner, nn.Linear)
        plain[index] = LoraLinear(inner)
    return plain, torch.optim.AdamW(plain.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    given = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
    loss: Any = (model(given) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def test_an_adapter_is_stored_without_its_backbone(root: str) -> None:
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).state_dict()
    model, optimizer = adapted(0, backbone)
    with Checkpointer(root, include=["*lora_*"], model=model, optimizer=optimizer) as checkpointer:
        for step in range(4):
            train(model, optimizer, step)
            checkpointer.step(step)
        state = checkpointer.store.restore(3)
        stored = {path[1] for path in state if path[0] == "model"}
        assert stored == {f"{index}.lora_{part}" for index in (0, 2) for part in "ab"}
        assert ("optimizer", "state", "0.lora_a", "exp_avg") in state
        assert {path[0] for path in state} == {"model", "optimizer", "rng"}
        assert checkpointer.stats.state_bytes < 30_000  # the backbone alone has 33,280
        expected = [train(model, optimizer, step) for step in range(4, 8)]
    other, fresh = adapted(1, backbone)
    with Checkpointer(root, include=["*lora_*"], model=other, optimizer=fresh) as checkpointer:
        start = checkpointer.restore(3)
        assert [train(other, fresh, step) for step in range(start, 8)] == expected


def test_a_model_without_the_adapter_is_an_error(root: str) -> None:
    model, optimizer = adapted(0)
    with Checkpointer(root, include="*lora_*", model=model, optimizer=optimizer) as checkpointer:
        checkpointer.step(0)
    plain = nn.Sequential(nn.Linear(64, 64))
    with (
        Checkpointer(root, include="*lora_*", model=plain) as checkpointer,
        pytest.raises(InvalidInput, match="lora_a"),
    ):
        checkpointer.restore()
    with (
        Checkpointer(root, model=model) as checkpointer,
        pytest.raises(InvalidInput, match=r"missing.*0\.inner\.weight"),
    ):
        checkpointer.restore()


def test_what_is_excluded_is_neither_stored_nor_touched(root: str) -> None:
    run = make_run()
    exclude = ["model/norm.*", "optimizer/norm.*", "scheduler"]
    with Checkpointer(root, exclude=exclude, **run.objects) as checkpointer:
        losses_of(run, range(2), checkpointer)
        state = checkpointer.store.restore(1)
        assert not [path for path in state if "norm" in str(path)]
        assert "scheduler" not in {path[0] for path in state}
    other = make_run(seed=1)
    losses_of(other, range(1))
    norm = {key: value.clone() for key, value in other.model.get_submodule("norm").state_dict().items()}
    parameter = other.model.get_parameter("norm.weight")
    moments = {key: value.clone() for key, value in other.optimizers["optimizer"].state[parameter].items()}
    with Checkpointer(root, exclude=exclude, **other.objects) as checkpointer:
        checkpointer.restore()
    assert_same(norm, dict(other.model.get_submodule("norm").state_dict()))
    assert_same(moments, dict(other.optimizers["optimizer"].state[parameter]))
    assert_same(run.model.get_parameter("body.0.weight"), other.model.get_parameter("body.0.weight"))


@pytest.mark.parametrize(
    ("include", "exclude", "names", "kept"),
    [
        (None, None, ("model/a",), True),
        ("*lora*", None, ("model/a.lora",), True),
        ("*lora*", None, ("model/a.weight",), False),
        ("model/a.*", None, ("optimizer/a.weight", "model/a.weight"), True),
        ("*", "optimizer/a.*", ("optimizer/a.weight", "model/a.weight"), False),
        ("*", "model/a.*", ("optimizer/a.weight", "model/a.weight"), True),
        ([lambda name: name.endswith("bias"), "*norm*"], None, ("model/a.bias",), True),
        (lambda name: "norm" in name, None, ("model/a.bias",), False),
    ],
)
def test_patterns(include: Any, exclude: Any, names: tuple[str, ...], kept: bool) -> None:
    assert Selection(include, exclude).keeps(*names) is kept


@pytest.mark.parametrize("bad", [3, [], [3], ["*", None]])
def test_patterns_that_are_none(bad: Any) -> None:
    with pytest.raises(InvalidInput, match="include"):
        Selection(include=bad)
    with pytest.raises(InvalidInput, match="exclude"):
        Selection(exclude=bad)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"include": "*loraa*"}, r"include: nothing has a name like '\*loraa\*'; there are .*lora_a"),
        ({"include": ["*lora_*", "model"]}, r"include.*'model'.*model/0\.lora_a"),
        ({"exclude": ["rng", "optimzer"]}, "exclude.*'optimzer'; there are optimizer, "),
        ({"exclude": "model/0.iner.*"}, r"exclude.*model/0\.inner\."),
    ],
)
def test_a_pattern_that_means_nothing_is_an_error(root: str, options: dict[str, Any], text: str) -> None:
    model, optimizer = adapted(0)
    with Checkpointer(root, model=model, optimizer=optimizer, **options) as checkpointer:
        for act in (lambda: checkpointer.step(0), checkpointer.restore, lambda: checkpointer.step(0)):
            with pytest.raises(InvalidInput, match=text):
                act()
        assert checkpointer.store.commits() == []


def test_patterns_that_mean_something(root: str) -> None:
    model, optimizer = adapted(0)
    options: dict[str, Any] = {"exclude": ["ema", "ema/*", "rng", "extra", "optimizer/0.lora_a", lambda _: False]}
    with Checkpointer(root, model=model, optimizer=optimizer, ema=nn.Linear(1, 1), **options) as checkpointer:
        checkpointer.step(0)
    # What only the commit has may be left out of a restore.
    shorter = nn.ModuleDict({"2": model[2]})  # type: ignore[index]
    with Checkpointer(root, model=shorter, exclude=["model/0.*", "rng"]) as checkpointer:
        assert checkpointer.restore() == 1


def test_what_is_left_out_is_told_once(root: str, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = adapted(0)
    options: dict[str, Any] = {"include": "*lora_*", "exclude": "ema"}
    with Checkpointer(root, model=model, optimizer=optimizer, ema=nn.Linear(1, 1), **options) as checkpointer:
        checkpointer.step(0)
        assert "leave out" not in caplog.text
        checkpointer.restore()
        checkpointer.restore()
    told = [record.getMessage() for record in caplog.records if "leave out" in record.getMessage()]
    assert len(told) == 1
    assert "leave out 4 of 8 tensors of model, all of ema: not in the store" in told[0]
