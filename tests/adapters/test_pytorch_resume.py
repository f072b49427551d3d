"""A run that is stopped and restored goes on with the losses of one that was not, bit for bit."""

from __future__ import annotations

import copy
import itertools
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import deltastore
from deltastore.adapters.pytorch import Checkpointer
from deltastore.errors import InvalidInput, NotFound
from deltastore.testing.compare import assert_same
from tests.adapters.training import Run, losses_of, make_run, seed_everything

KINDS = ["adamw", "sgd", "scaled adam", "several"]
_numbers = itertools.count()


@pytest.fixture
def root() -> str:
    """A place for a store, in memory: what the disk does is tested elsewhere."""
    return f"memory://resume-{next(_numbers)}"


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_the_uninterrupted_run(tmp_path: Path, kind: str) -> None:
    expected = losses_of(make_run(kind), range(10))
    losses: list[float] = []
    for attempt, stop in enumerate((2, 4, 5, 10)):  # step 3 of "scaled adam" overflows
        run = make_run(kind, seed=0 if attempt == 0 else 100 + attempt)
        with Checkpointer(tmp_path, **run.objects) as checkpointer:
            start = checkpointer.restore()
            assert start == len(losses)
            assert checkpointer.extra.get("losses", 0) <= start
            losses += losses_of(run, range(start, stop), checkpointer)
    assert losses == expected


def test_every_commit_can_be_gone_on_from(root: str) -> None:
    run = make_run()
    with Checkpointer(root, **run.objects) as checkpointer:
        expected = losses_of(run, range(6), checkpointer)
    for step in range(5):
        run = make_run(seed=9)
        with Checkpointer(root, **run.objects) as checkpointer:
            assert checkpointer.restore(_id_of(root, step, epoch=1)) == step + 1
            assert checkpointer.extra == {"losses": step + 1}
            assert losses_of(run, range(step + 1, 6)) == expected[step + 1 :]


def _id_of(root: str, step: int, epoch: int) -> str:
    with deltastore.open(root, "r") as store:
        return next(commit.id for commit in store.commits() if (commit.step, commit.epoch) == (step, epoch))


def test_going_back_within_a_run(root: str) -> None:
    expected = losses_of(make_run(), range(12))
    run = make_run()
    with Checkpointer(root, **run.objects) as checkpointer:
        assert checkpointer.restore() == 0
        losses = losses_of(run, range(6), checkpointer)
        with torch.no_grad():
            run.model.get_parameter("body.0.weight").fill_(math.nan)
        losses += losses_of(run, range(6, 8), checkpointer)
        assert math.isnan(losses[-1])
        start = checkpointer.restore("latest~3")
        assert start == 5
        losses[start:] = losses_of(run, range(start, 12), checkpointer)
        assert losses == expected
        commits = checkpointer.store.commits()
        assert [(c.epoch, c.step) for c in commits if c.step in (5, 6, 7)] == [
            (1, 5), (1, 6), (1, 7), (2, 5), (2, 6), (2, 7),
        ]  # fmt: skip
        branch = next(c for c in commits if (c.epoch, c.step) == (2, 5))
        assert branch.parent == next(c.id for c in commits if (c.epoch, c.step) == (1, 4))


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"capturable": True}])
def test_a_run_on_a_gpu(root: str, options: dict[str, Any]) -> None:
    def make(seed: int) -> Run:
        seed_everything(seed)
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 8)).cuda()
        return Run(model, {"optimizer": torch.optim.AdamW(model.parameters(), lr=0.01, **options)})

    def losses(run: Run, steps: range, checkpointer: Checkpointer | None = None) -> list[float]:
        found = []
        for step in steps:
            given = torch.randn(8, 8, generator=torch.Generator().manual_seed(step)).cuda()
            loss: Any = (run.model(given) ** 2).mean()
            loss.backward()
            run.optimizers["optimizer"].step()
            run.optimizers["optimizer"].zero_grad()
            found.append(loss.item())
            if checkpointer is not None:
                checkpointer.step(step)
        return found

    expected = losses(make(0), range(8))
    run = make(0)
    with Checkpointer(root, **run.objects) as checkpointer:
        before = losses(run, range(4), checkpointer)
    other = make(1)
    with Checkpointer(root, **other.objects) as checkpointer:
        start = checkpointer.restore()
        slots = next(iter(other.optimizers["optimizer"].state.values()))
        assert slots["exp_avg"].device.type == "cuda"
        assert slots["step"].device.type == ("cuda" if options else "cpu")
        assert before + losses(other, range(start, 8)) == expected


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_gpt2_from_transformers(root: str) -> None:
    transformers = pytest.importorskip("transformers")

    def make(seed: int) -> Run:
        seed_everything(seed)
        config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=100, n_positions=32)
        model = transformers.GPT2LMHeadModel(config)
        return Run(model, {"optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3)})

    def losses(run: Run, steps: range, checkpointer: Checkpointer | None = None) -> list[float]:
        found = []
        for step in steps:
            tokens = torch.randint(100, (2, 16), generator=torch.Generator().manual_seed(step))
            loss = run.model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            run.optimizers["optimizer"].step()
            run.optimizers["optimizer"].zero_grad()
            found.append(loss.item())
            if checkpointer is not None:
                checkpointer.step(step)
        return found

    expected = losses(make(0), range(6))
    run = make(0)
    with Checkpointer(root, **run.objects) as checkpointer:
        before = losses(run, range(3), checkpointer)
    run = make(7)
    with Checkpointer(root, **run.objects) as checkpointer:
        start = checkpointer.restore()
        tied = [run.model.get_submodule(name).weight for name in ("lm_head", "transformer.wte")]
        assert tied[0] is tied[1]
        assert before + losses(run, range(start, 6), checkpointer) == expected
        state = checkpointer.store.at(2)
        assert ("optimizer", "state", "transformer.wte.weight", "exp_avg") in state
        assert_same(state["model", "lm_head.weight"][...], state["model", "transformer.wte.weight"][...])


class Gradients:
    """Gathered gradients as part of the state: a plain object with a state_dict."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        return {name: parameter.grad for name, parameter in self._model.named_parameters()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, parameter in self._model.named_parameters():
            parameter.grad = state[name]


@pytest.mark.parametrize("stop", [1, 3, 4, 6])
def test_a_stop_within_an_accumulation_window(root: str, stop: int) -> None:
    def micro(run: Run, step: int) -> float:
        tokens = torch.randint(20, (16,), generator=torch.Generator().manual_seed(step))
        loss: Any = nn.functional.cross_entropy(run.model(tokens), tokens) / 4
        loss.backward()
        if step % 4 == 3:
            run.optimizers["optimizer"].step()
            run.optimizers["optimizer"].zero_grad()
        return float(loss.detach())

    reference = make_run()
    expected = [micro(reference, step) for step in range(12)]
    run = make_run()
    with Checkpointer(root, gradients=Gradients(run.model), **run.objects) as checkpointer:
        losses = []
        for step in range(stop):
            losses.append(micro(run, step))
            checkpointer.step(step)
    run = make_run(seed=3)
    with Checkpointer(root, gradients=Gradients(run.model), **run.objects) as checkpointer:
        start = checkpointer.restore()
        losses += [micro(run, step) for step in range(start, 12)]
    assert losses == expected
    assert_same(reference.model.state_dict(), run.model.state_dict())


def draw() -> list[Any]:
    return [random.gauss(0, 1), np.random.randn(), torch.randn(3).tolist()]  # noqa: NPY002 - the global state is meant


def test_random_states_come_back(root: str) -> None:
    seed_everything(4)
    draw()  # leaves cached gaussians behind
    generator = torch.Generator().manual_seed(1)
    with Checkpointer(root, generator=generator) as checkpointer:
        checkpointer.step(0)
        expected = [*draw(), torch.rand(2, generator=generator).tolist()]
        seed_everything(5)
        checkpointer.restore(0)
        assert [*draw(), torch.rand(2, generator=generator).tolist()] == expected


def test_extra_is_captured_and_filled(root: str) -> None:
    run = make_run()
    content: dict[Any, Any] = {
        "epoch": 3,
        "history": [0.5, math.inf],
        "best": None,
        "nested": {"a": (1, 2)},
        7: "seven",
    }
    with Checkpointer(root, **run.objects) as checkpointer:
        mine = checkpointer.extra
        mine.update(copy.deepcopy(content))
        checkpointer.step(0)
        mine["nested"]["a"] = "changed after the step"
        mine["more"] = 1
        checkpointer.restore()
        assert checkpointer.extra is mine
        assert_same(content, mine)


def test_a_new_store_starts_at_zero_and_is_claimed(tmp_path: Path) -> None:
    run = make_run()
    with Checkpointer(tmp_path, **run.objects) as checkpointer:
        assert checkpointer.restore() == 0
        assert list((tmp_path / "epochs").iterdir())
        with pytest.raises(NotFound):
            checkpointer.restore("best")
        checkpointer.step(0)
        with pytest.raises(NotFound):
            checkpointer.restore(5)
        checkpointer.step(1)  # a failed restore changes nothing


def test_objects_that_do_not_fit_are_not_touched(root: str) -> None:
    run = make_run()
    with Checkpointer(root, **run.objects) as checkpointer:
        losses_of(run, range(2), checkpointer)
    other = make_run(seed=1)
    other.model.get_submodule("body")[0] = nn.Linear(8, 9)  # type: ignore[operator]
    before = {key: value.clone() for key, value in other.model.state_dict().items()}
    with (
        Checkpointer(root, **other.objects) as checkpointer,
        pytest.raises(InvalidInput, match=r"model/body\.0\.weight: float32 \(8, 8\) in the commit, float32 \(9, 8\)"),
    ):
        checkpointer.restore()
    assert_same(before, dict(other.model.state_dict()))


def test_an_object_that_the_commit_lacks_is_an_error(root: str) -> None:
    run = make_run()
    with Checkpointer(root, model=run.model) as checkpointer:
        checkpointer.step(0)
    with Checkpointer(root, **run.objects) as checkpointer, pytest.raises(InvalidInput, match=r"missing.*optimizer"):
        checkpointer.restore()


def test_an_object_that_is_no_longer_there_is_warned_about(root: str, caplog: pytest.LogCaptureFixture) -> None:
    run = make_run()
    with Checkpointer(root, **run.objects) as checkpointer:
        checkpointer.step(0)
    with Checkpointer(root, model=run.model) as checkpointer:
        assert checkpointer.restore() == 1
    assert "also holds optimizer, scheduler" in caplog.text


def test_missing_random_states_are_an_error_unless_waived(root: str) -> None:
    run = make_run()
    with deltastore.open(root) as store:
        store.commit(3, {"model": run.model.state_dict()})
    with Checkpointer(root, model=run.model) as checkpointer, pytest.raises(InvalidInput, match="no random states"):
        checkpointer.restore()
    with Checkpointer(root, exclude="rng", model=run.model) as checkpointer:
        assert checkpointer.restore() == 4


@pytest.mark.parametrize(("before", "after"), [("sgd", "adamw"), ("adamw", "sgd")])
def test_an_optimizer_of_another_class_is_refused_untouched(root: str, before: str, after: str) -> None:
    def objects(run: Run) -> dict[str, Any]:
        return {"model": run.model, **run.optimizers}

    run = make_run(before)
    with Checkpointer(root, **objects(run)) as checkpointer:
        losses_of(run, range(2), checkpointer)
    other = make_run(after, seed=1)
    losses_of(other, range(1))
    states = [copy.deepcopy(each.state_dict()) for each in objects(other).values()]
    drawn = torch.get_rng_state()
    with Checkpointer(root, **objects(other)) as checkpointer:
        with pytest.raises(InvalidInput, match=r"optimizer: the commit has the state of .*restore\(strict=False\)"):
            checkpointer.restore()
        assert_same(states, [each.state_dict() for each in objects(other).values()])
        assert torch.equal(drawn, torch.get_rng_state())
        assert checkpointer.restore(strict=False) == 2
    assert_same(run.model.state_dict(), other.model.state_dict())
    assert_same(states[1], other.optimizers["optimizer"].state_dict())
    losses_of(other, range(2, 3))


def test_what_fits_is_restored(root: str, caplog: pytest.LogCaptureFixture) -> None:
    run = make_run()
    with Checkpointer(root, model=run.model) as checkpointer:
        checkpointer.extra["seen"] = 7
        checkpointer.step(3)
        expected = draw()
    other = make_run(seed=1)
    losses_of(other, range(1))
    moments = copy.deepcopy(other.optimizers["optimizer"].state_dict())
    ema = nn.Linear(2, 2)
    weight = ema.weight.detach().clone()
    with Checkpointer(root, ema=ema, **other.objects) as checkpointer:
        with pytest.raises(InvalidInput, match=r"missing.*ema.*restore\(strict=False\) restores the rest"):
            checkpointer.restore()
        assert checkpointer.restore(strict=False) == 4
        assert draw() == expected
        assert checkpointer.extra == {"seen": 7}
    assert "no fitting state for what stays as it is: ema, optimizer, scheduler" in caplog.text
    assert_same(run.model.state_dict(), other.model.state_dict())
    assert_same(moments, other.optimizers["optimizer"].state_dict())
    assert torch.equal(ema.weight, weight)


def test_a_commit_without_random_states_may_be_restored(root: str, caplog: pytest.LogCaptureFixture) -> None:
    run = make_run()
    with deltastore.open(root) as store:
        store.commit(3, {"model": run.model.state_dict()})
    with Checkpointer(root, model=run.model) as checkpointer:
        checkpointer.extra["mine"] = 1
        assert checkpointer.restore(strict=False) == 4
        assert checkpointer.extra == {"mine": 1}
    assert "stays as it is: rng" in caplog.text
    with Checkpointer(root, ema=nn.Linear(1, 1)) as checkpointer, pytest.raises(InvalidInput, match="nothing was l"):
        checkpointer.restore(strict=False)


def test_random_states_of_older_commits(root: str) -> None:
    seed_everything(4)
    draw()
    run = make_run()
    random.gauss(0, 1)
    with Checkpointer(root, model=run.model, own=random.Random(3)) as checkpointer:
        checkpointer.step(0).wait()
        state = checkpointer.store.at(0)
        assert state["rng", "python", 1].shape == (625,)
        assert len(state) < 50
        old = state.to_state_dict()
        old["rng"]["python"] = random.getstate()  # 625 integers, as the first versions wrote it
        old["own"] = random.Random(3).getstate()
        checkpointer.store.commit(1, old).wait()
        assert checkpointer.store.at(1)["rng", "python", 1, 0] == old["rng"]["python"][1][0]
        expected = draw()
    own = random.Random(5)
    for step in (0, 1):
        with Checkpointer(root, model=run.model, own=own) as checkpointer:
            seed_everything(5)
            assert checkpointer.restore(step) == step + 1
            assert draw() == expected
            assert own.random() == random.Random(3).random()
            checkpointer.step(step + 5)


def test_an_optimizer_without_state_is_emptied(root: str) -> None:
    run = make_run()
    with Checkpointer(root, **run.objects) as checkpointer:
        checkpointer.step(0)
        losses_of(run, range(1, 3), checkpointer)
        checkpointer.restore(0)
        assert not run.optimizers["optimizer"].state


def test_a_state_dict_of_a_commit_is_torchs_own(root: str) -> None:
    run = make_run()
    with Checkpointer(root, **run.objects) as checkpointer:
        losses_of(run, range(2), checkpointer)
        state = checkpointer.store.restore(1).to_state_dict()
    assert_same(run.model.state_dict(), state["model"])
    assert_same(run.optimizers["optimizer"].state_dict(), state["optimizer"])
    assert_same(run.others["scheduler"].state_dict(), state["scheduler"])
    fresh = make_run(seed=2)
    fresh.model.load_state_dict(state["model"])
    fresh.optimizers["optimizer"].load_state_dict(state["optimizer"])
