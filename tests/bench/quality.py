"""python -m tests.bench.quality [--quick] [--page FOLDER]: what bounded commits are worth, beside naive rules.

Two experiments. *Chains*: a base, then a commit at every step without another base; at the end the reconstruction is
compared with the training state. *Kills*: training that is resumed from a bounded commit at five random steps, against
the same training uninterrupted.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import deltastore
from tests.bench.measure import machine
from tests.bench.quality_page import write_page
from tests.bench.training import KINDS, OPTIMIZERS, PRECISIONS, Training

BUDGETS = (0.01, 0.02, 0.05, 0.1)
WARM = 40
"""Steps before the base: the first ones are unlike all later."""
AFTER = 10
"""Losses that are compared after a resume."""
KILLS = 5
KILL_BUDGET = 0.02


@dataclass(frozen=True)
class ChainRow:
    """How near a reconstruction is at the end of a chain."""

    training: str
    steps: int
    rule: str
    bytes_share: float
    """Bytes of a delta over those of the state, median."""
    error: float
    """Norm of the weights' error over that of their movement since the base."""
    cosine: float
    """Between the next update from the reconstruction and from the training state."""
    losses: float
    """Mean difference of the first ten losses after a resume."""


@dataclass(frozen=True)
class KillRow:
    """Final validation losses of paired seeds."""

    training: str
    budget: float
    uninterrupted: list[float]
    killed: list[float]


Flat = dict[str, torch.Tensor]


def flat(state: Any, path: str = "") -> Flat:
    """Return the tensors of a state by name."""
    if isinstance(state, torch.Tensor):
        return {path: state.detach()} if state.is_floating_point() else {}
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list | tuple) else ()
    return {name: tensor for key, value in items for name, tensor in flat(value, f"{path}/{key}").items()}


class Naive:
    """A rule without feedback: the largest changes of a step, added to what there is.

    Parameters
    ----------
    signed : bool
        False: as published for AsymCheck, whose sparse updates are absolute values.
    """

    def __init__(self, state: Any, share: float, *, signed: bool) -> None:
        self.share, self.signed = share, signed
        self.before = {name: tensor.clone() for name, tensor in flat(state).items()}
        self.rec = {name: tensor.clone() for name, tensor in self.before.items()}

    def take(self, state: Any) -> None:
        """Follow one step."""
        for name, tensor in flat(state).items():
            change = (tensor - self.before[name]).flatten()
            count = max(1, round(self.share * len(change)))
            chosen = change.abs().topk(count).indices
            update = change[chosen] if self.signed else change[chosen].abs()
            self.rec[name].view(-1)[chosen] += update
            self.before[name].copy_(tensor)

    def state(self, template: Any, path: str = "") -> Any:
        """Return a state with what was reconstructed."""
        if isinstance(template, torch.Tensor):
            return self.rec[path].clone() if path in self.rec else template
        if isinstance(template, dict):
            return {key: self.state(value, f"{path}/{key}") for key, value in template.items()}
        if isinstance(template, list | tuple):
            return type(template)(self.state(value, f"{path}/{key}") for key, value in enumerate(template))
        return template


def chain(make: Callable[[], Training], title: str, steps: int, folder: Path) -> list[ChainRow]:
    """Follow one training with a store for each budget and with the naive rules, and compare at the end."""
    training = make()
    for step in range(WARM):
        training.step(step)
    stores = {budget: deltastore.open(folder / f"{budget}") for budget in BUDGETS}
    naive = {
        "difference to the step before, 2 %": Naive(training.state(), 0.02, signed=True),
        "absolute values (AsymCheck), 2 %": Naive(training.state(), 0.02, signed=False),
    }
    base = training.weights()
    for budget, store in stores.items():
        store.set_policy(deltastore.Policy(budget=budget, restore_cost=math.inf))
        store.commit(0, training.state()).wait()
    for step in range(steps):
        training.step(WARM + step)
        for store in stores.values():
            store.commit(1 + step, training.state())
        for rule in naive.values():
            rule.take(training.state())
    truth = _clone(training.state())
    rows = []
    for budget, store in stores.items():
        store.flush()
        sizes = [commit.bytes for commit in store.commits() if commit.kind == "delta"]
        state = store.at("latest")
        share = float(np.median(sizes)) / state.layout.bytes
        rows.append(_compare(make, truth, state.to_state_dict(), base, title, steps, f"filter, {budget:.0%}", share))
        store.close()
    for name, rule in naive.items():
        rows.append(_compare(make, truth, rule.state(truth), base, title, steps, name, math.nan))
    shutil.rmtree(folder)
    return rows


def _clone(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        return {key: _clone(value) for key, value in state.items()}
    return [_clone(value) for value in state] if isinstance(state, list) else state


def _compare(
    make: Callable[[], Training],
    truth: Any,
    found: Any,
    base: torch.Tensor,
    title: str,
    steps: int,
    rule: str,
    share: float,
) -> ChainRow:
    updates, losses, weights = [], [], []
    for state in (truth, found):
        training = make()
        training.load(_clone(state))
        weights.append(training.weights())
        first = training.step(WARM + steps)
        updates.append((training.weights() - weights[-1]).double())
        losses.append([first, *(training.step(WARM + steps + 1 + number) for number in range(AFTER - 1))])
    error = (weights[1] - weights[0]).norm() / (weights[0] - base).norm()
    cosine = torch.dot(*updates) / (updates[0].norm() * updates[1].norm())
    difference = float(np.mean(np.abs(np.subtract(losses[0], losses[1]))))
    return ChainRow(title, steps, rule, share, error.item(), cosine.item(), difference)


def kills(make: Callable[[int], Training], title: str, steps: int, seeds: int, folder: Path) -> KillRow:
    """Train with and without kills, once for each seed."""
    uninterrupted, killed = [], []
    for seed in range(seeds):
        training = make(seed)
        for step in range(steps):
            training.step(step)
        uninterrupted.append(training.validate())
        killed.append(_killed(lambda seed=seed: make(seed), steps, seed, folder / f"{seed}"))  # type: ignore[misc]
    return KillRow(title, KILL_BUDGET, uninterrupted, killed)


def _killed(make: Callable[[], Training], steps: int, seed: int, root: Path) -> float:
    generator = np.random.default_rng(seed)
    ends = sorted(generator.choice(np.arange(WARM // 2, steps - 1), KILLS, replace=False).tolist())
    training, step = make(), 0
    for end in [*ends, steps]:
        with deltastore.open(root) as store:
            store.set_policy(deltastore.Policy(budget=KILL_BUDGET))
            if step:
                training = make()
                training.load(store.restore().to_state_dict())
            while step < end:
                training.step(step)
                store.commit(step, training.state())
                step += 1
    shutil.rmtree(root)
    return training.validate()


def main() -> None:
    """Run both experiments, print their rows, write the page."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.quality", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="training", help="only these, such as 'gpt adamw fp32'")
    parser.add_argument("--quick", action="store_true", help="one model, short chains, two seeds: to see that it runs")
    parser.add_argument("--page", type=Path, metavar="FOLDER", help="write the page and its plot here")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to a file too")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="deltastore-quality-"))
    kinds, lengths = (KINDS[:1], (20,)) if options.quick else (KINDS, (50,))
    trainings = [(k, o, p) for k in kinds for o in OPTIMIZERS for p in PRECISIONS]
    trainings = [names for names in trainings if not options.names or " ".join(names) in options.names]
    chains: list[ChainRow] = []
    killed: list[KillRow] = []
    for kind, optimizer, precision in trainings:
        title = f"{kind} {optimizer} {precision}"
        long = () if options.quick or title not in ("gpt adamw fp32", "gpt sgd fp32") else (500,)
        for steps in (*lengths, *long):
            chains += chain(lambda: Training(kind, optimizer, precision, 0), title, steps, folder / "chain")  # noqa: B023
            print(*chains[-len(BUDGETS) - 2 :], sep="\n", flush=True)
        seeds, length = (2, 60) if options.quick else (5, 150)
        killed.append(kills(lambda seed: Training(kind, optimizer, precision, seed), title, length, seeds, folder))  # noqa: B023
        print(killed[-1], flush=True)
    shutil.rmtree(folder)
    body = {"machine": machine(), "chains": [asdict(row) for row in chains], "kills": [asdict(row) for row in killed]}
    if options.json:
        options.json.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    if options.page:
        write_page(options.page, body)


if __name__ == "__main__":
    main()
