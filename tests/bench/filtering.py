"""The importance filter: its pass against a memory copy, and the bytes of its commits against the budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch

import deltastore
from deltastore.layers import kernels
from deltastore.parallel import run_all
from tests.bench.measure import REPETITIONS, Clock, Figure, alternate, at_most, median, shown
from tests.bench.states import Tensors, nbytes

PARTITION = 8 << 20
"""Elements that a thread takes at once: a backward partition."""
SHARE = 0.02
MOST_PASS = 1.5
MOST_SAMPLING = 0.1
WARM = 20
"""Steps of fine-tuning before its commits are measured: the first updates of Adam are of full size."""
BUDGETS = (0.005, 0.01, 0.02, 0.05, 0.1)
LEAST, MOST = 0.9, 1.05


def filter_pass(folder: Path, quick: bool) -> list[Figure]:
    """One pass over a state that is larger than any cache, in threads, against a copy in the same threads."""
    del folder
    figures: list[Figure] = []
    for dtype, bytes_each in (("float32", 4), ("bfloat16", 2), ("float64", 8)):
        figures += _one_pass(dtype, (256 if quick else 1024) * 2**20 // bytes_each, quick)
    return figures


def _one_pass(dtype: str, elements: int, quick: bool) -> list[Figure]:
    generator = torch.Generator().manual_seed(0)
    logical = getattr(torch, dtype)
    before = torch.randn(elements, generator=generator).to(logical)
    after = before + torch.randn(elements, generator=generator).mul_(0.01).to(logical)
    words = {"float32": np.uint32, "bfloat16": np.uint16, "float64": np.uint64}[dtype]
    current, start = (tensor.view(getattr(torch, np.dtype(words).name)).numpy() for tensor in (after, before))
    rec, target = start.copy(), np.empty_like(start)
    threshold = kernels.threshold_bits(
        float(torch.quantile((after - before)[:100_000].abs().float(), 1 - SHARE)), dtype
    )
    parts = [slice(at, min(at + PARTITION, elements)) for at in range(0, elements, PARTITION)]
    places = [np.empty(PARTITION, np.uint32) for _ in parts]
    old = [np.empty(PARTITION, words) for _ in parts]
    kept = [0]

    def copy(number: int) -> None:
        np.copyto(target[parts[number]], current[parts[number]])

    def run(number: int) -> int:
        part = parts[number]
        length = part.stop - part.start
        new, have = (kernels.as_words(array[part], dtype) for array in (current, rec))
        count: int = kernels.filter_run(new, have, 0, length, threshold, places[number], old[number], 0)[0]
        return count

    def sample(number: int) -> None:
        part = parts[number]
        made = np.empty((part.stop - part.start) // 256, np.uint32)
        new, have = (kernels.as_words(array[part], dtype) for array in (current, rec))
        kernels.sample_deviations(new, have, 0, part.stop - part.start, 0, made)
        made.partition(int((1 - SHARE) * len(made)))

    def timed(work: Callable[[int], int | None]) -> dict[str, float]:
        np.copyto(rec, start)
        with Clock() as clock:
            found = run_all(work, range(len(parts)))
        if work is run:
            kept[0] = sum(count or 0 for count in found)
        return {"wall": clock.wall}

    timed(run)  # compiled, and its memory touched
    found = alternate({"copy": partial(timed, copy), "filter": partial(timed, run), "sample": partial(timed, sample)},
                      3 if quick else 2 * REPETITIONS - 1)  # fmt: skip
    copied, filtered, sampled = (median(found[name]["wall"]) for name in ("copy", "filter", "sample"))
    detail = {"copy ms": 1e3 * copied, "filter ms": 1e3 * filtered, "kept": kept[0] / elements}
    return [
        at_most(f"filter pass / copy, {dtype}", filtered / copied, MOST_PASS, "x", **detail),
        at_most(f"  threshold sampling / pass, {dtype}", sampled / filtered, MOST_SAMPLING, "x"),
    ]


def budgets(folder: Path, quick: bool) -> list[Figure]:
    """Bytes of bounded deltas over the budget (or the floor), under warm-up, decay and spikes of the learning rate."""
    figures: list[Figure] = []
    for millions in (1, 4) if quick else (1, 10, 125):
        for budget in BUDGETS if millions < 100 else (0.02,):
            shares = list(
                _budget_shares(folder / f"{millions}-{budget}", millions, budget, 20 if millions < 100 else 6)
            )
            worst = max(shares, key=lambda share: abs(share - 1))
            detail: dict[str, float | int | str] = {"least": min(shares), "most": max(shares), "median": median(shares)}
            title = f"delta bytes / budget, {millions} M parameters, {budget:.1%}"
            met = min(shares) >= LEAST and max(shares) <= MOST
            figures.append(Figure(title, worst, "x", f"{LEAST}..{MOST} x", met, detail))
    return figures


def _budget_shares(root: Path, millions: int, budget: float, steps: int) -> Iterator[float]:
    parts = _adam_state(millions)
    generator = torch.Generator().manual_seed(1)
    with deltastore.open(root) as store:
        store.set_policy(deltastore.Policy(budget=budget))
        for step in range(steps):
            rate = 1e-3 * min(1.0, (step + 1) / 8) * (0.5 if step > 12 else 1.0) * (10.0 if step == 10 else 1.0)
            _adam_step(parts, step, rate, generator)
            store.commit(step, parts).wait()
        for commit in store.commits():
            fidelity = store.at(commit.id).fidelity
            if not fidelity.exact:
                yield commit.bytes / max(fidelity.budget, fidelity.floor)


def _adam_state(millions: int) -> dict[str, Tensors]:
    generator = torch.Generator().manual_seed(0)
    width = int((millions * 10**6 / 48) ** 0.5) // 64 * 64 or 64
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(4):
        shapes |= {f"{layer}.qkv": (3 * width, width), f"{layer}.out": (width, width), f"{layer}.norm": (width,)}
        shapes |= {f"{layer}.up": (4 * width, width), f"{layer}.down": (width, 4 * width)}
    weights = {name: torch.randn(shape, generator=generator).mul_(0.02) for name, shape in shapes.items()}
    zeros = {part: {name: torch.zeros(shape) for name, shape in shapes.items()} for part in ("exp_avg", "exp_avg_sq")}
    return {"model": weights, **zeros}


def _adam_step(parts: dict[str, Tensors], step: int, rate: float, generator: torch.Generator) -> None:
    """Train on noise, whose scale differs by row; bias-corrected, as torch has it."""
    for number, (name, weight) in enumerate(parts["model"].items()):
        first, second = parts["exp_avg"][name], parts["exp_avg_sq"][name]
        rows = torch.rand(weight.shape[0], generator=torch.Generator().manual_seed(number))
        gradient = torch.randn(weight.shape, generator=generator)
        gradient *= 10 ** (rows * 2 - 4).view(-1, *[1] * (weight.ndim - 1))
        first.lerp_(gradient, 0.1)
        second.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
        root = (second / (1 - 0.999 ** (step + 1))).sqrt_().add_(1e-8)
        weight.addcdiv_(first, root, value=-rate / (1 - 0.9 ** (step + 1)))


def bf16(folder: Path, quick: bool) -> list[Figure]:
    """Exact deltas of bf16 weights at the learning rates of fine-tuning: most of their bits do not change."""
    figures = []
    for rate in (1e-6, 1e-5):
        with deltastore.open(folder / f"{rate}") as store:
            parts = _adam_state(4 if quick else 25)
            generator = torch.Generator().manual_seed(2)
            size, halves, before = 0, dict[str, torch.Tensor](), dict[str, torch.Tensor]()
            for step in range(WARM + 6):
                _adam_step(parts, step, rate, generator)
                if step >= WARM:
                    before = halves
                    halves = {name: weight.bfloat16() for name, weight in parts["model"].items()}
                    size = nbytes(halves)
                    store.commit(step, {"model": halves}).wait()
            changed = sum((halves[name] != half).sum().item() for name, half in before.items()) / (size / 2)
            deltas = [commit.bytes / size for commit in store.commits() if commit.kind == "delta"]
            same = all(torch.equal(store.at(WARM + 5)["model", name][...], half) for name, half in halves.items())
        title = f"exact bf16 delta / weights, learning rate {rate:g}"
        value = median(deltas)
        detail: dict[str, float | str] = {"changed": changed, "identical": str(same)}
        # Of 1e-6 the literature says that 99 % of the weights stay as they are, and 2 % of the bytes.
        figures.append(
            at_most(title, value, 0.02, "x", **detail) if rate < 1e-5 else shown(title, value, "x", **detail)
        )
    return figures
