"""O07, O10, O12, O19, O27, O28: what a training loop does to a store."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from deltastore.errors import InvalidInput, NotFound
from tests.cases.kit import Store, freeze, full, mlp, raises, restore_optimizer, same, train, used

# ---------------------------------------------------------------- O07: optimizer state of another dtype


def half_precision() -> tuple[nn.Parameter, torch.optim.AdamW]:
    parameter = nn.Parameter(torch.randn(64).to(torch.bfloat16))
    optimizer = torch.optim.AdamW([("w", parameter)])
    parameter.grad = torch.randn(64).to(torch.bfloat16)
    optimizer.step()
    return parameter, optimizer


def test_optimizer_state_keeps_its_own_dtypes(tmp_path: Path) -> None:
    parameter, optimizer = half_precision()
    state = optimizer.state[parameter]
    state["exp_avg"] = torch.randn(64)  # fp32 moments over a bf16 weight
    state["exp_avg_sq"] = torch.rand(64) * 1e-12
    state["step"] = torch.tensor(16_777_217.0, dtype=torch.float64)  # 2**24 + 1: not a float32
    truth = freeze(optimizer.state_dict())
    with Store(tmp_path / "store") as store:
        store.save(1, {"model": {"w": parameter}, "optim": optimizer.state_dict()})
        store.wait()
        back = store.read(1)
        same(truth, back["optim"])
        other = nn.Parameter(parameter.detach().clone())
        fresh = torch.optim.AdamW([("w", other)])
        restore_optimizer(fresh, back["optim"])
        same(dict(state), dict(fresh.state[other]))
        # ... and straight from the store
        third = nn.Parameter(parameter.detach().clone())
        living = torch.optim.AdamW([("w", third)])
        assert store.product.at(1).load_into(optim=living).ok
        same(dict(state), dict(living.state[third]))


class Counting(torch.optim.SGD):
    """An optimizer that counts with a Python integer, as many outside of torch do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["step"] = self.state[parameter].get("step", 0) + 1


@pytest.mark.parametrize("step", [2**24, 2**53 + 1, 2**60])
def test_a_step_counter_of_python_stays_exact(tmp_path: Path, step: int) -> None:
    parameter, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer, fresh = Counting([("w", parameter)], lr=0.1), Counting([("w", other)], lr=0.1)
    optimizer.state[parameter]["step"] = step
    optimizer.step()
    with Store(tmp_path / "store") as store:
        store.save(1, {"optim": optimizer.state_dict()})
        store.wait()
        same(optimizer.state_dict(), store.read(1)["optim"])
        store.product.at(1).load_into(optim=fresh)
        same({"step": step + 1}, dict(fresh.state[other]))


def test_state_that_appears_after_the_first_step_and_goes_again(tmp_path: Path) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    truth = []
    with Store(tmp_path / "store") as store:
        for step in range(4):
            if step == 3:
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # a fresh one, without moments
            elif step:
                train(model, optimizer)
            truth.append(freeze(full(model, optimizer)))
            store.save(step, full(model, optimizer))
        store.wait()
        for step, state in enumerate(truth):
            same(state, store.read(step))


# ---------------------------------------------------------------- O10: random states


def test_every_generator_goes_on_with_its_stream(tmp_path: Path) -> None:
    random.seed(1)
    np.random.seed(2)  # noqa: NPY002
    torch.manual_seed(3)
    random.gauss(0, 1)
    np.random.randn()  # a cached gaussian is left in both  # noqa: NPY002
    own = torch.Generator().manual_seed(4)
    pcg = np.random.default_rng(5)
    pcg.integers(9, dtype=np.uint32)

    def grab() -> dict[str, Any]:
        return {
            "py": random.getstate(),
            "np": np.random.get_state(),  # noqa: NPY002
            "torch": torch.get_rng_state(),
            "gen": own.get_state(),
            "pcg": pcg.bit_generator.state,
        }

    def draw() -> list[Any]:
        return [
            random.gauss(0, 1),
            np.random.randn(),  # noqa: NPY002
            torch.randn(3),
            torch.randn(3, generator=own),
            float(pcg.normal()),
        ]

    with Store(tmp_path / "store") as store:
        store.save(1, {"rng": grab()})
        expected = draw()
        store.save(2, {"rng": grab()})
        then = draw()
        store.wait()
        for step, numbers in ((1, expected), (2, then)):
            back = store.read(step)["rng"]
            random.setstate(back["py"])
            np.random.set_state(back["np"])  # noqa: NPY002
            torch.set_rng_state(back["torch"])
            own.set_state(back["gen"])
            pcg.bit_generator.state = back["pcg"]
            same(numbers, draw())


@pytest.mark.parametrize("kind", ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"])
def test_every_bit_generator_of_numpy(tmp_path: Path, kind: str) -> None:
    generator = np.random.Generator(getattr(np.random, kind)(7))
    generator.normal(size=5)
    with Store(tmp_path / "store") as store:
        for step in range(3):
            store.save(step, {"rng": {"own": generator.bit_generator.state}})
            expected = generator.normal(size=4)
            store.wait()
            generator.bit_generator.state = store.read(step)["rng"]["own"]
            assert np.array_equal(generator.normal(size=4), expected)


def test_random_states_cost_little_when_little_was_drawn(tmp_path: Path) -> None:
    source = random.Random(1)
    with Store(tmp_path / "store") as store:
        store.save(0, {"rng": {"py": source.getstate()}, "model": {"w": torch.randn(1000)}})
        for step in range(1, 4):
            source.random()
            store.save(step, {"rng": {"py": source.getstate()}, "model": {"w": torch.ones(1000)}})
        store.wait()
        again = random.Random()
        again.setstate(store.read(3)["rng"]["py"])
        assert again.random() == source.random()
        assert store.product.at(3).commit.bytes < 6000


# ---------------------------------------------------------------- O12: going back


def test_going_back_follows_the_new_line_of_history(tmp_path: Path) -> None:
    root = tmp_path / "store"
    truth: dict[int, Any] = {}

    def run(store: Store, model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
        for step in range(first, last + 1):
            train(model, optimizer)
            store.save(step, full(model, optimizer))
            truth[step] = freeze(full(model, optimizer))

    model: nn.Module = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    with Store(root) as store:
        run(store, model, optimizer, 1, 5)
        store.wait()
    abandoned = dict(truth)
    with Store(root) as store:
        back = store.read(3)
        model = mlp(9)
        model.load_state_dict(back["model"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        optimizer.load_state_dict(back["optim"])
        optimizer.param_groups[0]["lr"] = 0.5
        old = {step: store.product.at(step).commit.id for step in (4, 5)}
        run(store, model, optimizer, 4, 4)
        store.wait()  # a crash right here: step 5 of the old line still lies on disk
        same(truth[4], store.read(4))
        assert store.latest() == 4
        assert store.product.at(4).commit.parent == store.product.at(3).commit.id
        run(store, model, optimizer, 5, 6)
        store.wait()
        assert store.latest() == 6
        for step in range(1, 7):
            same(truth[step], store.read(step))
        for step, commit in old.items():  # the old line stays reachable by its own names
            same(abandoned[step], store.product.at(commit).to_state_dict())
        store.save(6, full(model, optimizer))  # by the interval ...
        store.save(6, {**full(model, optimizer), "final": True})  # ... and at the end of training
        store.wait()
        same({**truth[6], "final": True}, store.read(6))
        assert store.steps().count(6) == 1
    with Store(root, owner=False) as reader:
        assert reader.latest() == 6
        for step in range(1, 6):
            same(truth[step], reader.read(step))
        assert not reader.verify()


def test_the_same_step_again_costs_nothing_when_nothing_changed(tmp_path: Path) -> None:
    root = tmp_path / "store"
    state = {"model": {"w": torch.randn(50_000)}, "user": {"log": list(range(100))}}
    with Store(root) as store:
        store.save(1, state)
        store.wait()
        before, commit = used(root), store.product.at(1).commit.id
        for _ in range(5):
            store.save(1, state)
        store.wait()
        assert used(root) == before
        assert store.product.at(1).commit.id == commit
        store.save(2, state)  # another step is another commit
        store.wait()
        assert store.steps() == [1, 2]
        assert store.product.at(2).commit.bytes < 5000


def test_a_smaller_step_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with Store(tmp_path / "store") as store:
        store.save(5, {"model": {"w": torch.ones(3)}})
        error = raises(lambda: store.product.commit(4, {"model": {"w": torch.zeros(3)}}), InvalidInput)
        assert "restore" in str(error)
        store.wait()
        assert store.steps() == [5]


def test_going_back_again_and_again(tmp_path: Path) -> None:
    """A diverging run that is put back to step 2 three times, each time on other batches."""
    with Store(tmp_path / "store") as store:
        for step in range(4):
            store.save(step, {"model": {"w": torch.full((2000,), float(step))}})
        for attempt in range(1, 4):
            restored = store.product.restore(2)
            assert (restored["model", "w"][...] == 2).all()
            for step in (3, 4):
                store.product.commit(step, {"model": {"w": torch.full((2000,), 10.0 * attempt + step)}})
            store.wait()
            found = [float(store.read(step)["model"]["w"][0]) for step in range(5)]
            assert found == [0, 1, 2, 10 * attempt + 3, 10 * attempt + 4]
            assert store.product.at("latest~2").commit.step == 2
        assert len(store.product.commits()) == 4 + 3 * 2
        raises(lambda: store.product.at("latest~5"), NotFound)


# ---------------------------------------------------------------- O19: nearly everything is frozen


def test_frozen_weights_cost_a_reference_not_bytes(tmp_path: Path) -> None:
    root = tmp_path / "store"
    base = {f"base.{i}.weight": torch.randn(256, 256) for i in range(16)}  # 4 MiB, frozen
    lora = {f"lora.{i}.A": torch.randn(4, 256) for i in range(16)}
    truth = []
    with Store(root) as store:
        for step in range(20):
            for tensor in lora.values():
                tensor += 0.01
            if step == 12:
                base["base.3.weight"][7] += 1  # one row is unfrozen once
            state = {"model": {**base, **lora}}
            truth.append(freeze(state))
            store.save(step, state)
        store.wait()
        for step, state in enumerate(truth):
            same(state, store.read(step))
        assert used(root) < 12 * 2**20, f"{used(root) / 2**20:.0f} MiB for 4 MiB of frozen weights"
        raises(lambda: nn.Linear(4, 4).load_state_dict(store.read(3)["model"], strict=True))
        error = raises(lambda: store.product.at(3).load_into(model=nn.Linear(4, 4)), InvalidInput)
        assert "weight" in str(error)


def test_a_restarted_run_does_not_write_the_frozen_weights_again(tmp_path: Path) -> None:
    root = tmp_path / "store"
    base = {f"base.{i}": torch.randn(256, 256) for i in range(16)}
    adapter = torch.randn(4, 256)
    for step in range(6):
        with Store(root) as store:  # killed and started again after each step
            adapter += 0.01
            store.save(step, {"model": {**base, "lora": adapter}})
    assert used(root) < 2 * 4 * 2**20
    with Store(root, owner=False) as reader:
        same({**base, "lora": adapter}, reader.read(5)["model"])
        assert not reader.verify()


def test_an_adapter_alone_is_read_without_the_base(tmp_path: Path) -> None:
    with Store(tmp_path / "store") as store:
        adapter = {f"lora.{i}": torch.randn(4, 8) for i in range(4)}
        store.save(1, {"base": {"w": torch.randn(500, 500)}, "adapter": adapter})
        store.wait()
        same(adapter, store.product.at(1)["adapter"].to_state_dict())
        error = raises(lambda: store.product.at(1).load_into(adapter=nn.Linear(8, 4)), InvalidInput)
        assert "adapter" in str(error)


# ---------------------------------------------------------------- O27: the model changes


def test_each_step_reads_in_its_own_shape(tmp_path: Path) -> None:
    truth: dict[int, Any] = {}
    model = nn.ModuleDict({"emb": nn.Embedding(100, 16), "head": nn.Linear(16, 100)})
    for parameter in model["head"].parameters():
        parameter.requires_grad_(False)
    optimizer = torch.optim.AdamW(model["emb"].parameters(), lr=1e-3)

    def work() -> None:
        optimizer.zero_grad()
        y = model["emb"](torch.arange(50)).float()
        (y * y).mean().backward()
        optimizer.step()

    with Store(tmp_path / "store") as store:

        def put(step: int, state: dict[str, Any]) -> None:
            truth[step] = freeze(state)
            store.save(step, state)

        work()
        put(1, full(model, optimizer))
        larger = nn.Embedding(108, 16)  # 8 more tokens
        larger.load_state_dict({"weight": torch.cat([model["emb"].state_dict()["weight"], larger.weight.data[100:]])})
        model["emb"] = larger
        optimizer = torch.optim.AdamW(model["emb"].parameters(), lr=1e-3)
        work()
        put(2, full(model, optimizer))
        model["extra"] = nn.Linear(16, 16)  # a layer more
        put(3, full(model, optimizer))
        optimizer.add_param_group({"params": list(model["head"].parameters()), "lr": 1e-5})
        for parameter in model["head"].parameters():
            parameter.requires_grad_(True)
        put(4, full(model, optimizer))
        model.to(torch.bfloat16)
        put(5, full(model))
        del model["extra"]
        put(6, full(model))
        model.to(torch.float32)
        put(7, full(model, optimizer))
        store.wait()
        for step, state in truth.items():
            same(state, store.read(step))
        error = raises(lambda: store.product.at(1).load_into(model=model), InvalidInput)
        assert "emb.weight" in str(error)
        assert "(100, 16)" in str(error)
        assert "(108, 16)" in str(error)


def test_a_vocabulary_that_grows_step_by_step(tmp_path: Path) -> None:
    with Store(tmp_path / "store") as store:
        body = torch.randn(20_000)
        rows = torch.randn(10, 16)
        truth = []
        for step in range(8):
            truth.append(freeze({"model": {"emb": rows, "body": body}, "optim": {"state": {0: {"m": rows * 2}}}}))
            store.save(step, truth[-1])
            rows = torch.cat([rows, torch.randn(step % 3, 16)])
            body = body.clone()
            body[step] += 1
        store.wait()
        for step, state in enumerate(truth):
            same(state, store.read(step))


def test_a_misfit_touches_nothing(tmp_path: Path) -> None:
    with Store(tmp_path / "store") as store:
        store.save(1, {"model": dict(mlp(width=16).state_dict())})
        store.wait()
        other = mlp(1, width=20)
        before = freeze(dict(other.state_dict()))
        raises(lambda: store.product.at(1).load_into(model=other), InvalidInput)
        same(before, dict(other.state_dict()))
        report = store.product.at(1).load_into(model=other, strict=False)
        names = ["0.weight", "0.bias", "1.weight", "1.bias", "3.weight"]
        assert report.mismatched == [f"model/{name}" for name in names]
        assert not report.ok


# ---------------------------------------------------------------- O28: in the middle of an accumulation


def build() -> tuple[nn.Module, torch.optim.Optimizer, Any, Any]:
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    return model, optimizer, scheduler, scaler


def micro(number: int, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, scaler: Any) -> None:
    window = 4
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(number))
    loss = (model(x) ** 2).mean() / window
    if number == 9:
        loss = loss * float("inf")  # this window overflows and is skipped
    scaler.scale(loss).backward()
    if number % window == window - 1:
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if scaler.get_scale() >= before:
            scheduler.step()


@pytest.mark.parametrize("stop", [3, 6, 10, 14, 23])  # inside and at the edge of windows
def test_a_run_stopped_at_any_micro_batch_goes_on_bit_for_bit(tmp_path: Path, stop: int) -> None:
    whole = build()
    for number in range(40):
        micro(number, *whole)
    model, optimizer, scheduler, scaler = build()
    for number in range(stop):
        micro(number, model, optimizer, scheduler, scaler)
    with Store(tmp_path / "store") as store:
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        extra = {"sched": scheduler.state_dict(), "scaler": scaler.state_dict(), "grads": gradients}
        store.save(stop, full(model, optimizer, **extra, user={"micro": stop}))
        store.wait()
        back = store.read(stop)
    model, optimizer, scheduler, scaler = build()
    model.load_state_dict(back["model"])
    optimizer.load_state_dict(back["optim"])
    scheduler.load_state_dict(back["sched"])
    scaler.load_state_dict(back["scaler"])
    for name, parameter in model.named_parameters():
        parameter.grad = back["grads"][name]
    for number in range(back["user"]["micro"], 40):
        micro(number, model, optimizer, scheduler, scaler)
    same(dict(whole[0].state_dict()), dict(model.state_dict()))
    assert optimizer.param_groups[0]["lr"] == whole[1].param_groups[0]["lr"]


def test_objects_are_loaded_in_place_and_go_on_bit_for_bit(tmp_path: Path) -> None:
    whole = build()
    for number in range(24):
        micro(number, *whole)
    model, optimizer, scheduler, scaler = build()
    with Store(tmp_path / "store") as store:
        for number in range(12):
            micro(number, model, optimizer, scheduler, scaler)
            state = full(model, optimizer, sched=scheduler.state_dict(), scaler=scaler.state_dict())
            store.save(number, state)
        store.wait()
        for stop in (3, 7, 11):  # at the edges of windows: no gradients are pending
            model, optimizer, scheduler, scaler = build()
            report = store.product.at(stop).load_into(model=model, optim=optimizer, sched=scheduler, scaler=scaler)
            assert report.ok
            for number in range(stop + 1, 24):
                micro(number, model, optimizer, scheduler, scaler)
            same(dict(whole[0].state_dict()), dict(model.state_dict()))
            same(whole[1].state_dict(), optimizer.state_dict())
            assert scaler.get_scale() == whole[3].get_scale()


def test_gradients_come_and_go(tmp_path: Path) -> None:
    model = mlp()
    with Store(tmp_path / "store") as store:
        truth = []
        for step, kind in enumerate(itertools.islice(itertools.cycle([None, "zero", "some"]), 7)):
            for parameter in model.parameters():
                parameter.grad = None if kind is None else torch.zeros_like(parameter)
            if kind == "some":
                (model(torch.randn(2, 8)) ** 2).mean().backward()
            gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
            truth.append(freeze({"model": dict(model.state_dict()), "grads": gradients}))
            store.save(step, {"model": dict(model.state_dict()), "grads": gradients})
        store.wait()
        for step, state in enumerate(truth):
            same(state, store.read(step))
