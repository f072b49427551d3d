"""Bounded commits from end to end: every element lies within the bound that its commit records (spec 6.6, 9.8)."""

from __future__ import annotations

import errno
import itertools
import math
import secrets
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DataObject
from torch import nn

from deltastore.config import WriterOptions
from deltastore.encoder import LINK_BYTES
from deltastore.errors import Backend
from deltastore.handle import Commit
from deltastore.layers.importance import SAMPLE
from deltastore.policy import Policy
from deltastore.store import Store
from deltastore.testing.compare import assert_same
from deltastore.testing.faulty import FailAt, FaultyTier, no_faults
from deltastore.tiers.memory import MemoryTier
from tests.bounded_kit import (
    NEVER,
    PATTERNS,
    as_tensor,
    check_state,
    lazy,
    measured,
    open_bounded,
    updated,
    words_of,
)
from tests.cases.kit import bits
from tests.layers.reference import round_up, specials, to_words

DTYPES = ["float32", "float64", "bfloat16", "float16"]
BUDGETS = [1e-6, 0.005, 0.02, 0.1, 0.5, 1.0]
AT_ONCE = WriterOptions(give_up_seconds=0.0)
State = dict[str, Any]


def normal(seed: int, dtype: str, *shape: int) -> torch.Tensor:
    values = np.random.default_rng(seed).standard_normal(math.prod(shape))
    return as_tensor(to_words(values, dtype), dtype, shape)


# ---------------------------------------------------------------- random histories


class History:
    """A store whose disk may fail, and what each of its commits should hold."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.tier = FaultyTier(MemoryTier(f"bounded-{secrets.token_hex(8)}"), no_faults)
        self.truth: dict[str, State] = {}
        self.store = self._open()
        self.step = 0

    def _open(self) -> Store:
        store = Store(self.tier, options=AT_ONCE)
        store.set_policy(self.policy)
        return store

    def commit(self, state: State, **options: Any) -> Commit:
        self.step += 1
        commit = self.store.commit(self.step, state, **options).wait()
        self.truth[commit.id] = state
        return commit

    def fail(self, state: State, number: int) -> None:
        self.tier.plan = FailAt("stage", number, name="packs")
        with pytest.raises(Backend):
            self.store.commit(self.step + 1, state).wait()
        self.tier.plan = no_faults

    def restart(self) -> State:
        """Close, open and restore; return what was restored."""
        self.store.close()
        self.store = self._open()
        restored = self.store.restore()
        check_state(restored, self.truth[restored.commit.id])
        state: State = restored.to_state_dict()
        return state

    def check(self) -> None:
        for commit, state in self.truth.items():
            check_state(self.store.at(commit), state)
        assert self.store.verify(deep=True).ok


@st.composite
def first_states(draw: st.DrawFn) -> State:
    seed = draw(st.integers(0, 2**32 - 1))
    chosen = draw(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=4))
    sizes = st.sampled_from([(4096,), (64, 64), (4097,), (90, 100), (20_000,)])
    model: dict[str, torch.Tensor] = {
        f"w{number}": normal(seed + number, dtype, *draw(sizes)) for number, dtype in enumerate(chosen)
    }
    model["small"] = normal(seed, draw(st.sampled_from(DTYPES)), 4095)
    model["mask"] = torch.arange(5000) % 3 == 0
    model["count"] = torch.arange(5000)
    return {"model": model, "lr": 0.1, "losses": [0.5, math.nan]}


def next_state(state: State, data: DataObject) -> State:
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), label="seed"))
    model = {}
    for name, tensor in state["model"].items():
        if tensor.is_floating_point():
            model[name] = updated(tensor, data.draw(st.sampled_from(PATTERNS), label=name), generator)
        else:
            model[name] = tensor.roll(1)
    return {**state, "model": model, "lr": float(generator.random())}


ACTIONS = ["go on", "go on", "go on", "restart", "resume", "fail", "exact"]


@given(st.data(), st.sampled_from(BUDGETS), st.sampled_from([2.0, NEVER]))
def test_every_element_lies_within_the_bound_of_its_commit(data: DataObject, budget: float, cost: float) -> None:
    """The bound is also the smallest: check_state compares it with the largest deviation that is measured."""
    history = History(Policy(budget=budget, restore_cost=cost))
    state: State = data.draw(first_states(), label="state")
    history.commit(state)
    for _ in range(data.draw(st.integers(1, 6), label="steps")):
        action = data.draw(st.sampled_from(ACTIONS), label="then")
        if action == "restart":  # the true values come back, as from a training that is repeated
            history.restart()
        elif action == "resume":
            state = history.restart()
        state = next_state(state, data)
        if action == "fail":
            history.fail(state, data.draw(st.sampled_from([errno.ENOSPC, errno.EIO]), label="error"))
            assert history.commit(state).kind == "base"
        elif action == "exact":
            assert history.commit(state, exact=True).exact
        else:
            history.commit(state)
    history.check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_kind_of_update_of_every_dtype(dtype: str, pattern: str, seed: int) -> None:
    generator = np.random.default_rng(seed)
    history = History(Policy(budget=0.02, restore_cost=NEVER))
    state: State = {"model": {"w": normal(seed, dtype, 100, 90)}}
    history.commit(state)
    for _ in range(4):
        state = {"model": {"w": updated(state["model"]["w"], pattern, generator)}}
        history.commit(state)
    history.check()


# ---------------------------------------------------------------- small facts


def two_steps(policy: Policy, before: State, after: State) -> Store:
    """A store with a base and a commit on it."""
    store = open_bounded(policy)
    store.commit(0, before)
    store.commit(1, after).wait()
    return store


def model(**tensors: torch.Tensor) -> State:
    return {"model": tensors}


def test_a_commit_within_a_budget_is_bounded(seed: int) -> None:
    store = two_steps(Policy(), model(w=normal(seed, "float32", 9000)), model(w=normal(seed + 1, "float32", 9000)))
    assert [(commit.kind, commit.exact) for commit in store.commits()] == [("base", True), ("delta", False)]


def test_the_bound_is_rounded_up(seed: int) -> None:
    zeros, ones = torch.zeros(5000), torch.full((5000,), 1.0)
    zeros -= 2.0**-30  # the deviation has more digits than a binary32
    store = two_steps(Policy(budget=1e-6), model(w=zeros), model(w=ones))
    assert store.at(1).fidelity.bound("model", "w") == float(np.float32(1 + 2**-23))


def test_deviations_that_no_binary32_reaches_are_stored() -> None:
    top = torch.finfo(torch.float32).max
    after = model(w=torch.full((5000,), top))
    store = two_steps(Policy(budget=1e-6), model(w=torch.full((5000,), -1e30)), after)
    check_state(store.at(1), after)


def test_deviations_below_every_binary32_have_its_smallest_as_bound() -> None:
    after = model(w=torch.full((5000,), 1e-60, dtype=torch.float64))
    store = two_steps(Policy(budget=1e-6), model(w=torch.zeros(5000, dtype=torch.float64)), after)
    assert store.at(1).fidelity.bound("model", "w") in (0.0, 2.0**-149)
    check_state(store.at(1), after)


def test_the_budget_holds_for_deviations_below_every_binary32(seed: int) -> None:
    w = normal(seed, "float64", 100_000) * 1e-55
    store = two_steps(Policy(), model(w=w), model(w=w + 1e-57 * normal(seed + 1, "float64", 100_000)))
    assert store.commits()[1].bytes < 40_000


@pytest.mark.parametrize("kind", ["exact", "filter"])
def test_the_role_says_whether_a_tensor_is_filtered(kind: str, seed: int) -> None:
    before, after = (model(w=normal(seed + i, "float32", 5000), v=normal(seed + i, "float32", 5000)) for i in (0, 1))
    store = two_steps(Policy(roles={"model/v": kind}), before, after)
    assert (store.at(1).fidelity.bound("model", "v") == 0) is (kind == "exact")
    check_state(store.at(1), after)


def test_exact_beside_filtered_ones(seed: int) -> None:
    """An exact tensor shares partitions with filtered ones."""
    before, after = (model(w=normal(seed + i, "float32", 5000), v=normal(seed + i, "float32", 5000)) for i in (0, 1))
    store = two_steps(Policy(roles={"model/v": "exact"}), before, after)
    assert bits(lazy(store.at(1), "model", "v")) == bits(after["model"]["v"])


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5])
def test_a_share_is_kept_whatever_the_budget_says(share: float, seed: int) -> None:
    before, after = (model(w=normal(seed + i, "float32", 100_000)) for i in (0, 1))
    store = two_steps(Policy(budget=0.001, roles={"param": share}), before, after)
    found = store.at(1).fidelity.of("model", "w")
    assert found is not None
    # Four standard deviations of the share above a quantile of the sample.
    assert found.kept == pytest.approx(share * 100_000, rel=4 / math.sqrt(share * SAMPLE[0]))


def test_the_share_of_all_elements_is_exact(seed: int) -> None:
    before, after = (model(w=normal(seed + i, "float32", 5000)) for i in (0, 1))
    assert two_steps(Policy(roles={"param": 1.0}), before, after).at(1).fidelity.exact


def test_a_budget_for_everything_leaves_nothing_out(seed: int) -> None:
    before = model(w=normal(seed, "float32", 5000), frozen=normal(seed, "float32", 50_000))
    after = model(w=normal(seed + 1, "float32", 5000), frozen=before["model"]["frozen"])
    assert two_steps(Policy(budget=1.0), before, after).at(1).fidelity.exact


def test_the_record_says_how_many_elements_were_stored(seed: int) -> None:
    before, after = (model(w=normal(seed + i, "float32", 50_000)) for i in (0, 1))
    state = two_steps(Policy(), before, after).at(1)
    found = state.fidelity.of("model", "w")
    assert found is not None
    assert found.kept == np.count_nonzero(words_of(lazy(state, "model", "w")) == words_of(after["model"]["w"]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_record_has_the_norms(dtype: str, seed: int) -> None:
    before, after = (model(w=normal(seed + i, dtype, 50_000)) for i in (0, 1))
    state = two_steps(Policy(), before, after).at(1)
    found, truth = state.fidelity.of("model", "w"), after["model"]["w"].double()
    assert found is not None
    assert found.whole == pytest.approx(float(truth.norm()), rel=1e-3)
    assert found.missing == pytest.approx(float((lazy(state, "model", "w").double() - truth).norm()), rel=1e-3)


def test_what_a_role_lacks(seed: int) -> None:
    before, after = (model(w=normal(seed + i, "float32", 50_000), v=normal(seed - i, "float32", 9000)) for i in (0, 1))
    state = two_steps(Policy(), before, after).at(1)
    lacks = [lazy(state, "model", name).double() - after["model"][name].double() for name in "wv"]
    assert state.fidelity.residual("param") == pytest.approx(float(torch.cat(lacks).norm()), rel=1e-3)


@given(
    st.sampled_from(DTYPES),
    st.sampled_from([1e-6, 0.02]),
    st.sampled_from([1e-45, 1e-6, 0.1, 0.7, 2.0]),
    st.sampled_from(["noise", "burst", "signs", "specials", "bits"]),
    st.integers(0, 2**32 - 1),
)
def test_the_largest_deviation_of_the_user_is_never_exceeded(
    dtype: str, budget: float, limit: float, pattern: str, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    store = open_bounded(Policy(budget=budget, restore_cost=NEVER, max_deviation=limit))
    state = model(w=normal(seed, dtype, 5000))
    store.commit(0, state)
    for step in range(1, 4):
        state = model(w=updated(state["model"]["w"], pattern, generator))
        store.commit(step, state).wait()
        assert measured(state["model"]["w"], lazy(store.at(step), "model", "w")) <= limit
        check_state(store.at(step), state)


def test_the_limit_of_a_role_is_for_that_role(seed: int) -> None:
    before, after = (model(w=normal(seed + i, "float32", 5000), v=normal(seed + i, "float32", 5000)) for i in (0, 1))
    fidelity = two_steps(Policy(max_deviation={"model/v": 0.5}), before, after).at(1).fidelity
    assert fidelity.bound("model", "v") <= 0.5 < fidelity.bound("model", "w")


@pytest.mark.parametrize("options", [{"exact": True}, {"tag": "best"}])
def test_exact_commits_of_a_bounded_chain_are_bases(options: dict[str, Any], seed: int) -> None:
    store = open_bounded()
    for step in range(3):
        store.commit(step, model(w=normal(seed + step, "float32", 9000)))
    after = model(w=normal(seed + 9, "float32", 9000))
    commit = store.commit(3, after, **options).wait()
    assert (commit.kind, commit.exact) == ("base", True)
    assert_same(after, store.at(3).to_state_dict())


def test_a_step_that_is_repeated_exactly(seed: int) -> None:
    store = open_bounded()
    state = model(w=normal(seed, "float32", 9000))
    store.commit(0, model(w=normal(seed + 1, "float32", 9000)))
    store.commit(1, state)
    store.commit(1, state, exact=True).wait()
    assert_same(state, store.at(1).to_state_dict())


def test_a_step_that_is_repeated_with_other_values_has_a_bound_that_holds(seed: int) -> None:
    """Also where the budget is too small for a single element."""
    store = open_bounded(Policy(budget=1e-6, restore_cost=NEVER))
    store.commit(0, model(w=torch.zeros(9000)))
    store.commit(1, model(w=torch.ones(9000)))
    after = model(w=torch.full((9000,), 100.0))
    check_state(store.at(store.commit(1, after).wait().id), after)


def test_an_exact_commit_after_exact_ones_is_a_delta(seed: int) -> None:
    store = open_bounded()
    store.commit(0, model(w=torch.zeros(9000)))
    store.commit(1, model(w=torch.zeros(9000), n=torch.tensor(1)))
    assert store.commit(2, model(w=torch.ones(9000), n=torch.tensor(1)), exact=True).wait().kind == "delta"


def test_no_policy_is_exact_again(seed: int) -> None:
    store = two_steps(Policy(), model(w=torch.zeros(9000)), model(w=normal(seed, "float32", 9000)))
    store.set_policy(None)
    assert store.commit(2, model(w=normal(seed + 1, "float32", 9000))).wait().exact


def test_plain_values_are_exact(seed: int) -> None:
    store = open_bounded()
    for step in range(4):
        after = {
            **model(w=normal(seed + step, "float32", 9000)),
            "lr": 0.1 / (step + 1),
            "losses": [1.0 / (i + 3) for i in range(40 + step)],
            "name": f"step {step}",
        }
        store.commit(step, after).wait()
        read = store.at(step).to_state_dict()
        assert_same({key: after[key] for key in ("lr", "losses", "name")}, {k: read[k] for k in read if k != "model"})


# ---------------------------------------------------------------- layouts that change


def chain_with(change: Any, seed: int) -> tuple[Store, list[State]]:
    """A chain of six bounded commits in whose middle the state changes its form."""
    store, generator = open_bounded(), np.random.default_rng(seed)
    state = model(
        a=normal(seed, "float32", 60_000), b=normal(seed + 1, "float32", 5000), c=normal(seed, "bfloat16", 4500)
    )
    states = []
    for step in range(6):
        state = model(**{name: updated(tensor, "noise", generator) for name, tensor in state["model"].items()})
        if step == 3:
            change(state["model"])
        states.append(state)
        store.commit(step, state).wait()
    return store, states


def removed(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["b"]


def added(tensors: dict[str, torch.Tensor]) -> None:
    tensors["d"] = torch.ones(70, 70)


def reshaped(tensors: dict[str, torch.Tensor]) -> None:
    tensors["b"] = tensors["b"].reshape(50, 100)


def grown(tensors: dict[str, torch.Tensor]) -> None:
    tensors["b"] = torch.cat([tensors["b"], torch.zeros(100)])


def recast(tensors: dict[str, torch.Tensor]) -> None:
    tensors["b"] = tensors["b"].to(torch.bfloat16)


def tied(tensors: dict[str, torch.Tensor]) -> None:
    tensors["c"] = tensors["b"]


CHANGES = pytest.mark.parametrize("change", [removed, added, reshaped, grown, recast, tied], ids=lambda c: c.__name__)


@CHANGES
def test_bounds_hold_when_the_form_changes(change: Any, seed: int) -> None:
    store, states = chain_with(change, seed)
    for step, state in enumerate(states):
        check_state(store.at(step), state)


@CHANGES
def test_the_chain_goes_on_when_the_form_changes(change: Any, seed: int) -> None:
    store, _ = chain_with(change, seed)
    assert [commit.kind for commit in store.commits()] == ["base"] + 5 * ["delta"]
    assert store.verify(deep=True).ok


def test_a_new_tensor_is_exact_in_its_first_commit(seed: int) -> None:
    store, _ = chain_with(added, seed)
    assert store.at(3).fidelity.bound("model", "d") == 0 < store.at(3).fidelity.bound("model", "a")


def tied_steps(seed: int, policy: Policy | None = None) -> tuple[Store, list[State]]:
    store, generator, states = open_bounded(policy), np.random.default_rng(seed), []
    shared = normal(seed, "float32", 100, 90)
    for step in range(4):
        shared = updated(shared, "noise", generator)
        states.append(model(emb=shared, body=normal(seed, "float32", 50), head=shared))
        store.commit(step, states[-1]).wait()
    return store, states


def test_tied_tensors_have_one_bound(seed: int) -> None:
    store, _ = tied_steps(seed)
    fidelity = store.at(3).fidelity
    assert fidelity.bound("model", "emb") == fidelity.bound("model", "head") > 0


def test_tied_tensors_are_within_their_bound(seed: int) -> None:
    store, states = tied_steps(seed)
    for step, state in enumerate(states):
        check_state(store.at(step), state)


def test_tied_tensors_stay_tied(seed: int) -> None:
    store, _ = tied_steps(seed)
    read = store.at(3).to_state_dict()["model"]
    assert read["emb"] is read["head"]


def test_a_limit_for_either_name_of_a_tied_tensor_holds(seed: int) -> None:
    store, _ = tied_steps(seed, Policy(max_deviation={"model/head": 1e-3}, restore_cost=NEVER))
    assert store.at(3).fidelity.bound("model", "head") <= 1e-3


# ---------------------------------------------------------------- loading


def moved_linear(seed: int) -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(seed)
    return nn.Linear(100, 100), nn.Linear(100, 100)


def test_a_load_reports_what_is_inexact(seed: int) -> None:
    before, after = moved_linear(seed)
    store = two_steps(Policy(), {"net": before.state_dict()}, {"net": after.state_dict()})
    assert store.at(1).load_into(net=before).inexact == ["net/weight"]


def test_a_load_from_below_a_prefix_reports_what_is_inexact(seed: int) -> None:
    before, after = moved_linear(seed)
    store = two_steps(Policy(), {"run": {"net": before.state_dict()}}, {"run": {"net": after.state_dict()}})
    assert len(store.at(1)["run"].load_into(net=before).inexact) == 1


# ---------------------------------------------------------------- bases


def test_a_base_is_written_when_reading_would_cost_too_much(seed: int) -> None:
    store = open_bounded(Policy(budget=0.1, restore_cost=2))
    state = normal(seed, "float32", 1_000_000)
    for step in range(9):
        state = state + 1e-3 * normal(seed + step, "float32", 1_000_000)
        store.commit(step, model(w=state)).wait()
    chain = last = full = 0
    for commit in store.commits():
        cost = commit.bytes + LINK_BYTES
        due = full == 0 or chain + last > 2 * full
        assert (commit.kind, commit.exact) == (("base", True) if due else ("delta", False))
        full = cost if due else full
        chain, last = (cost, 0) if due else (chain + cost, cost)
    assert [commit.kind for commit in store.commits()].count("base") == 2


# ---------------------------------------------------------------- ties


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("share", [0.1, 0.25])
def test_ties_take_turns(dtype: str, share: float, seed: int) -> None:
    """Sign updates: all elements deviate by multiples of one step; none waits much longer than 1/share commits."""
    store = open_bounded(Policy(budget=0.001, restore_cost=NEVER, roles={"param": share}))
    count = 20_000
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], count)
    age = np.zeros(count, int)
    oldest = 0
    for step in range(round(2.5 / share)):
        w = as_tensor(to_words(signs * 2.0**-3 * step, dtype), dtype, (count,))
        store.commit(step, model(w=w)).wait()
        is_exact = words_of(lazy(store.at(step), "model", "w")) == words_of(w)
        age = np.where(is_exact, 0, age + 1)
        oldest = max(oldest, int(age.max()))
    assert oldest <= 1.2 / share + 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ties_keep_to_their_share(dtype: str, seed: int) -> None:
    store = open_bounded(Policy(budget=0.001, restore_cost=NEVER, roles={"param": 0.1}))
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], 20_000)
    for step in range(5):
        store.commit(step, model(w=as_tensor(to_words(signs * 2.0**-3 * step, dtype), dtype, (20_000,)))).wait()
    kept = [store.at(step).fidelity.of("model", "w") for step in range(1, 5)]
    assert all(item is not None and item.kept == pytest.approx(2000, rel=0.1) for item in kept)


# ---------------------------------------------------------------- budgets


def rates() -> list[float]:
    """Warm-up, plateau, a spike, decay."""
    return [1e-6, 1e-5, 1e-4, 1e-3, 1e-3, 1e-3, 2e-2, 1e-3, 5e-4, 1e-4, 1e-5, 1e-6]


def adam_steps(seed: int, dtype: torch.dtype, touched: float = 1.0) -> Iterator[State]:
    """A million parameters in tensors of several sizes, as Adam moves them.

    `touched` is the share of the first one's rows that get a gradient, others at each step.
    """
    generator = torch.Generator().manual_seed(seed)
    shapes = {"emb": (2000, 200), "a": (500, 500), "b": (500, 500), "c": (300, 300), "norm": (500,), "bias": (3000,)}
    master = {name: 0.02 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    slots = {name: (torch.zeros(shape), torch.zeros(shape)) for name, shape in shapes.items()}
    for step, rate in enumerate(rates(), 1):
        for number, (name, w) in enumerate(master.items()):
            gradient = 10.0 ** -(1 + number % 4) * torch.randn(w.shape, generator=generator)
            gradient *= 100 if step == 7 else 1
            if name == "emb":
                gradient *= (torch.rand(2000, 1, generator=generator) < touched).float()
            first, second = slots[name]
            first.mul_(0.9).add_(gradient, alpha=0.1)
            second.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
            w -= rate * (first / (1 - 0.9**step)) / ((second / (1 - 0.999**step)).sqrt() + 1e-8)
        yield {
            "model": {name: w.to(dtype) for name, w in master.items()},
            "optimizer": {
                "state": {name: {"exp_avg": m, "exp_avg_sq": v, "step": torch.tensor(float(step))}
                for name, (m, v) in slots.items()}
            },
            "lr": rate,
        }  # fmt: skip


def shares_taken(budget: float, states: Iterator[State]) -> list[float]:
    """Bytes of each delta, over what its record says that it was meant to take."""
    store = open_bounded(Policy(budget=budget, restore_cost=NEVER))
    taken = []
    for step, state in enumerate(states):
        commit = store.commit(step, state).wait()
        fidelity = store.at(step).fidelity
        if commit.kind == "delta":
            taken.append(round(commit.bytes / max(fidelity.budget, fidelity.floor), 3))
    return taken


def test_the_budget_is_a_share_of_the_state(seed: int) -> None:
    before, after = (model(w=normal(seed + i, "float32", 9000)) for i in (0, 1))
    assert two_steps(Policy(budget=0.05), before, after).at(1).fidelity.budget == round(0.05 * 36_000)


@pytest.mark.parametrize("rare", [9, 10, 19, 21])
def test_a_sample_that_lies_about_the_tails_is_made_up_for(rare: int) -> None:
    (taken,) = shares_taken(0.005, itertools.islice(adam_steps(rare, torch.float32), 2))
    assert 0.9 <= taken <= 1.05


BUDGETED = [(share, torch.float32) for share in (0.005, 0.01, 0.02, 0.05, 0.1)] + [(0.02, torch.bfloat16)]


@pytest.mark.parametrize(("budget", "dtype"), BUDGETED, ids=str)
def test_delta_commits_take_what_the_budget_says(budget: float, dtype: torch.dtype, seed: int) -> None:
    taken = shares_taken(budget, adam_steps(seed, dtype))
    assert len(taken) == len(rates()) - 1
    assert all(0.9 <= share <= 1.05 for share in taken), taken


@pytest.mark.parametrize("budget", [0.01, 0.02])
def test_the_budget_holds_where_few_rows_get_a_gradient(budget: float) -> None:
    """Rows are longer than the runs of a sample: it tells less than as many elements on their own."""
    taken = shares_taken(budget, adam_steps(5, torch.float32, touched=0.2))
    assert all(0.9 <= share <= 1.05 for share in taken), taken


def sign_steps(count: int) -> Iterator[State]:
    signs = np.random.default_rng(1).choice([-1.0, 1.0], count)
    for step in range(12):
        yield model(w=as_tensor(to_words(signs * 2.0**-3 * step, "float32"), "float32", (count,)))


def test_the_budget_holds_for_sign_updates() -> None:
    taken = shares_taken(0.02, sign_steps(1_000_000))
    assert all(0.9 <= share <= 1.05 for share in taken), taken


def test_specials_alone_are_stored_whatever_the_budget(seed: int) -> None:
    """The reference's numbers that must be exact: all of them are, in one commit."""
    words = specials("float32")
    before = as_tensor(np.resize(words, 5000), "float32", (5000,))
    after = as_tensor(np.resize(np.roll(words, 1), 5000), "float32", (5000,))
    store = two_steps(Policy(budget=1e-6), model(w=before), model(w=after))
    found = measured(after, lazy(store.at(1), "model", "w"))
    assert round_up(found) == store.at(1).fidelity.bound("model", "w")


def test_values_that_all_became_alike_do_not_loosen_the_next_budget() -> None:
    """They take nothing, however many are stored: no measure for what other elements will take."""
    generator = torch.Generator().manual_seed(0)
    wide, other = torch.randn(400_000, generator=generator), torch.randn(200_000, generator=generator).double()
    with open_bounded(Policy(budget=0.02, restore_cost=NEVER)) as store:
        for step in range(6):
            if step in (2, 3):
                other[:] = float("inf") if step == 2 else 3.0
            wide += 1e-3 * torch.randn(400_000, generator=generator)
            store.commit(step, {"wide": wide, "other": other}).wait()
        for commit in store.commits()[1:]:
            fidelity = store.at(commit.id).fidelity
            assert commit.bytes <= 1.05 * max(fidelity.budget, fidelity.floor), commit.step
