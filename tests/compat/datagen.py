"""Makes the golden stores of one format version; run by hand, once for each version, by the version that it names.

    python -m tests.compat.datagen 1.0

Tests never run it. What is there already is not made again: golden data says what a *released* writer wrote.
"""

from __future__ import annotations

import json
import shutil
import socket
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

import deltastore
from deltastore.adapters.pytorch import Checkpointer
from deltastore.dtypes import LOGICAL
from deltastore.errors import UnsupportedFormat
from deltastore.history.tags import read_tags
from deltastore.ondisk import zarr_profile
from deltastore.ondisk.fidelity import encode_fidelity
from deltastore.ondisk.index import FORMAT_MAJOR, FORMAT_MINOR
from deltastore.store import Store
from deltastore.torch_bridge import TORCH
from tests.compat.bad import make_bad
from tests.compat.kit import BAD, DATA, Foreign, Opened, Tensor, describe, sha256
from tests.stock.read_zarr import read as read_with_zarr

Point = namedtuple("Point", ("x", "y"))
States = dict[str, Any]
"""Commit id -> the state as it was committed."""


def foreign(value: Any) -> Any:
    """Return the stand-in of an object of torch or of a numpy array, by torch's own means."""
    if isinstance(value, torch.Tensor) and value.is_quantized:
        parts = {"int_repr": value.int_repr(), "scale": value.q_scale(), "zero_point": value.q_zero_point()}
        return Foreign("quantized", ["per_tensor", str(value.dtype).removeprefix("torch."), parts])
    if isinstance(value, torch.Tensor | np.ndarray):
        about = TORCH.describe(value)
        values = np.empty(int(np.prod(about.shape, dtype=np.int64)), LOGICAL[about.dtype])
        TORCH.copy_into(value, values, 0, len(values))
        kind = "ndarray" if isinstance(value, np.ndarray) else "tensor"
        return Tensor(kind, about.dtype, about.shape, sha256(values))
    if isinstance(value, torch.Size):
        return Foreign("torch.Size", list(value))
    if isinstance(value, torch.dtype | torch.device):
        return Foreign(f"torch.{type(value).__name__}", str(value).removeprefix("torch."))
    raise TypeError(type(value))


def commit(store: Store, made: States, step: int, state: Any, **options: Any) -> str:
    """Commit a state and remember it as it is now."""
    done = store.commit(step, state, **options).wait()
    made[done.id] = describe(state, foreign)
    return done.id


def bits(dtype: str, length: int, seed: int) -> torch.Tensor:
    """Return elements of any bits."""
    size = length * LOGICAL[dtype].itemsize
    data = np.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 256, size, np.uint8)
    return torch.from_numpy(data).view(getattr(torch, dtype))


def chain(root: Path) -> States:
    """Two chains, on a raw and on a compressed base: base, overlay, xor, full in a delta, no layer at all."""
    made: States = {}
    generator = torch.Generator().manual_seed(1)
    model = {"w": torch.randn(201, generator=generator), "h": torch.randn(9, 11, generator=generator).bfloat16()}

    def put(store: Store, step: int) -> None:
        log = [0.5 * number for number in range(step)]
        metrics = {"loss": 1 / (1 + step), "note": "é"}
        commit(store, made, step, {"model": dict(model), "log": log, "step": step}, metrics=metrics)

    for first, codec in ((0, "raw"), (10, "blosc")):
        with deltastore.open(root, codec=codec) as store:
            store.set_restore_cost(50)
            put(store, first)
            model["w"][7::71] += 1
            model["h"][2, :3] = float("nan")
            put(store, first + 1)
            model["w"] = model["w"] * 1.0001
            put(store, first + 2)
            model["w"] = torch.randn(201, generator=generator)
            put(store, first + 3)
            model["w"] = torch.zeros(201)
            put(store, first + 4)
            put(store, first + 5)
    return made


def dtypes(root: Path) -> States:
    """Every dtype: some elements, none, and without dimensions; changed as overlay and as xor."""
    made: States = {}
    names = [name for name in LOGICAL if hasattr(torch, name)]
    with deltastore.open(root) as store:
        state: dict[str, Any] = {name: bits(name, 37, seed) for seed, name in enumerate(names)}
        state |= {f"empty.{name}": TORCH.empty(name, (0, 3)) for name in names}
        state |= {f"scalar.{name}": bits(name, 1, seed).view(()) for seed, name in enumerate(names[::9])}
        state["quantized"] = torch.quantize_per_tensor(torch.linspace(-1, 1, 9), 0.1, 3, torch.qint8)
        state["numpy"] = {"a": np.arange(6, dtype=">i4").reshape(2, 3), "b": np.array([True, False])}
        commit(store, made, 0, state)
        for name in names[::3]:  # all of them would be large
            state[name] = state[name].clone()
            state[name].view(torch.uint8)[0] ^= 1
        commit(store, made, 1, state)
        for name in names[1::3]:
            state[name] = state[name].clone()
            state[name].view(torch.uint8).view(37, -1)[:, 0] ^= 1
        commit(store, made, 2, state)
    return made


def layouts(root: Path) -> States:
    """Tied weights, then untied; tensors removed (holes), added, of another shape; keys that look alike."""
    made: States = {}
    with deltastore.open(root) as store:
        store.set_restore_cost(50)
        tied = torch.arange(60.0).view(20, 3)
        parts: dict[Any, Any] = {f"l{number}": torch.full((30,), float(number)) for number in range(12)}
        state: dict[Any, Any] = {
            "model": parts,
            "emb": tied,
            "head": tied,
            "keys": {0: torch.ones(3), "0": torch.ones(2)},
        }
        commit(store, made, 0, state)
        del parts["l7"]
        commit(store, made, 1, state)
        parts["l12"] = torch.full((20,), 40.0)
        commit(store, made, 2, state)
        state["head"] = tied + 1
        commit(store, made, 3, state)
        parts["l3"] = torch.full((31,), 3.5)
        parts["l9"][5] = 1
        commit(store, made, 4, state)
        state["head"] = state["emb"]
        commit(store, made, 5, state)
    return made


def values(root: Path) -> States:
    """Plain values of every tag, and patches of them; one pickle."""
    made: States = {}
    with deltastore.open(root, pickle="trust") as store:
        store.set_restore_cost(50)
        numbers = [None, True, False, 0, -1, 2**53, 2**53 + 1, -(2**70), 0.1, -0.0, 1e300, float("inf"), -float("inf")]
        nan = np.array([0x7FF8000000000123], np.uint64).view(np.float64)[0]
        state: dict[Any, Any] = {
            "numbers": numbers,
            "nan": float(nan),
            "complex": complex(-0.0, 2),
            "text": ["", "é😀", "\ud800", '"\\\n\x00'],
            "bytes": [b"", b"\x00\xff", bytearray(b"ab")],
            "ranges": [range(5), range(5, -5, -2), slice(None, 3), slice(1, None, 2)],
            "nested": ({}, [], (), {"a": [{"b": (1, [2])}]}),
            "keys": {1: "int", "1": "str", -5: 0, 2**60: 1},
            "odict": OrderedDict([("z", 1), ("a", 2)]),
            "counter": Counter("abca"),
            "defaultdict": defaultdict(list, {"a": [1]}),
            "default": defaultdict(None, {1: 2}),
            "point": Point(1, [2]),
            "deques": [deque([1, 2], 5), deque()],
            "sets": [{1, "a", (2, 3)}, frozenset({b"x"}), set()],
            "scalars": [np.float32(0.1), np.int64(-3), np.bool_(True), np.complex128(1j), np.uint8(7)],
            "torch": [torch.float16, torch.device("cpu"), torch.Size([2, 0, 3])],
            "ints": list(range(0, 1800, 3)),
            "tuple of ints": tuple(range(-40, 40)),
            "large ints": [2**63, *range(40)],
            "log": [0.5],
        }
        commit(store, made, 0, state)
        state["ints"] = [*state["ints"], *range(70_000, 70_050)]
        state["log"] = [0.5, 0.25]
        state["nested"] = (1, 2)
        commit(store, made, 1, state)
        del state["keys"]
        state["log"] = []
        state["new"] = {"x": 1}
        commit(store, made, 2, state)
        done = store.commit(3, {"fraction": Fraction(1, 3), "plain": 1}).wait()
        made[done.id] = {"refused": "pickle"}
    return made


def history(root: Path) -> States:
    """Epochs, a side branch, tags that were moved and removed."""
    made: States = {}
    weight = torch.zeros(50)

    def put(store: Store, step: int, value: float, **options: Any) -> None:
        weight[step % 50] = value
        commit(store, made, step, {"w": weight.clone(), "value": value}, **options)

    with deltastore.open(root) as store:
        for step in range(6):
            put(store, step, 1.0)
        store.tag("first", 1)
        store.tag("moved", 2)
        store.tag("gone", 3)
    with deltastore.open(root) as store:
        store.restore(3)
        put(store, 4, 2.0)
        put(store, 5, 2.0, tag="milestone")
        put(store, 6, 2.0)
        store.restore("latest~1")
        put(store, 6, 3.0)
        put(store, 7, 3.0)
        store.tag("moved", "latest", move=True)
        store.tag("gone", None)
    return made


def retention(root: Path) -> States:
    """What retention leaves of thirty commits, a tag, and an old branch."""
    made: States = {}
    weight = torch.zeros(64)
    with deltastore.open(root, retention={"keep_last": 3, "keep_every": 10}) as store:
        for step in range(15):
            weight[step] = step
            commit(store, made, step, {"w": weight.clone(), "step": step})
            if step == 4:
                store.tag("kept", step)
    with deltastore.open(root, retention={"keep_last": 3, "keep_every": 10}) as store:
        store.restore("latest~1")
        for step in range(14, 26):
            weight[step] = -step
            commit(store, made, step, {"w": weight.clone(), "step": step})
    return made


def bounded(root: Path) -> States:
    """Bounded commits on an exact base, an exact step among them, and a resume from what a reader gets."""
    made: States = {}
    generator = torch.Generator().manual_seed(2)
    wide, half = torch.randn(6000, generator=generator), torch.randn(4096, generator=generator).bfloat16()

    def put(store: Store, step: int, *, exact: bool = False) -> None:
        wide.add_(torch.randn(6000, generator=generator), alpha=1e-3)
        half.add_(torch.randn(4096, generator=generator).bfloat16(), alpha=1e-2)
        wide[7 * step] = float("nan")
        state = {"model": {"wide": wide, "half": half, "small": half[:9].clone()}, "step": step}
        done = store.commit(step, state, exact=exact).wait()
        made[done.id] = describe(store.at(step).to_state_dict(), foreign)

    for first in (0, 4):
        with deltastore.open(root) as store:
            store.set_policy(deltastore.Policy(budget=0.03, restore_cost=50))
            if first:
                restored = store.restore()
                wide, half = restored["model", "wide"][...].clone(), restored["model", "half"][...].clone()
            for step in range(first, first + 4):
                put(store, step, exact=step == 2)
    return made


class Trained:
    """A small model of two halves, one trained by AdamW and one by SGD with Nesterov's momentum."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = nn.ModuleDict({"a": nn.Linear(66, 65), "b": nn.Linear(65, 66, bias=False)})
        self.adam = torch.optim.AdamW(self.model["a"].parameters(), lr=1e-3, weight_decay=0.1)
        self.sgd = torch.optim.SGD(self.model["b"].parameters(), lr=1e-3, momentum=0.9, nesterov=True)

    def step(self) -> None:
        """Train one step."""
        values = torch.randn(16, 66)
        (self.model["b"](torch.tanh(self.model["a"](values))) - values).square().mean().backward()
        for optimizer in (self.adam, self.sgd):
            optimizer.step()
            optimizer.zero_grad()

    def run(self, root: Path, policy: deltastore.Policy | None, steps: range, stride: int = 1) -> None:
        """Commit some steps, or every `stride`-th, after the newest commit if there is one."""
        with deltastore.open(root) as store:
            store.set_restore_cost(50)
            ckpt = Checkpointer(store, policy=policy, exclude="rng", model=self.model, adam=self.adam, sgd=self.sgd)
            ckpt.restore()
            for step in steps:
                for _ in range(stride):
                    self.step()
                ckpt.step(step)
                ckpt.flush()


def _read(root: Path) -> States:
    with deltastore.open(root, "r") as store:
        return {commit.id: describe(store.at(commit.id).to_state_dict(), foreign) for commit in store.commits()}


def predicted(root: Path) -> States:
    """Steps of optimizers predicted, with codes of all kinds; several optimizer steps in one commit."""
    training = Trained()
    training.run(root, None, range(1))
    training.run(root, deltastore.Policy(budget=0.25, restore_cost=50), range(1, 4), stride=2)
    for first, budget in ((4, 0.22), (7, 0.215)):
        training.run(root, deltastore.Policy(budget=budget, restore_cost=50), range(first, first + 3))
    return _read(root)


def replayed(root: Path) -> States:
    """Exact steps of optimizers, done again from their gradients."""
    Trained().run(root, None, range(5))
    return _read(root)


CASES: dict[str, Callable[[Path], States]] = {
    case.__name__: case for case in (chain, dtypes, layouts, values, history, retention, bounded, predicted, replayed)
}


def expected(root: Path, made: States) -> dict[str, Any]:
    """Return what every later version must read in a store."""
    opened = Opened(root)
    commits = []
    for entry in opened.catalog.ordered():
        about = {
            "id": entry.id,
            "step": entry.step,
            "epoch": entry.ref.epoch,
            "sequence": entry.ref.sequence,
            "kind": entry.kind,
            "parent": None if entry.parent is None else entry.parent.id,
            "metrics": entry.metrics,
            "aliases": [list(tensor.path) for tensor in opened.chain(entry).layout.tensors if tensor.alias is not None],
            "state": made[entry.id],
            "fidelity": encode_fidelity(opened.chain(entry).record.fidelity),
        }
        if "refused" not in about["state"] and opened.state(entry) != about["state"]:
            raise SystemExit(f"{root}: step {entry.step} does not read back")
        commits.append(about)
    with deltastore.open(root, mode="r") as store:
        refs = {str(ref): store.at(ref).commit.id for ref in references(store)}
    arrays = {}
    for path in sorted((root / "packs").iterdir()):
        arrays[path.name] = {name: row[:3] for name, row in read_with_zarr(str(path)).items()}
    result = {
        "format": [FORMAT_MAJOR, FORMAT_MINOR],
        "written_by": deltastore.__version__,
        "commits": commits,
        "references": refs,
        "tags": read_tags(opened.tier),
        "arrays": arrays,
    }
    opened.close()
    return result


def references(store: Store) -> Iterator[int | str]:
    """Yield references of every kind that mean a commit of the store."""
    steps = sorted({commit.step for commit in store.commits()})
    yield from steps
    yield from ("latest", "latest~1", "latest~2")
    yield from sorted({tag for commit in store.commits() for tag in commit.tags})


def main(version: str) -> None:
    """Make what is missing of a format version."""
    if version != f"{FORMAT_MAJOR}.{FORMAT_MINOR}":
        raise SystemExit(f"this is a writer of format {FORMAT_MAJOR}.{FORMAT_MINOR}: check out the one of {version}")
    for name, make in CASES.items():
        folder = DATA / version / name
        if folder.exists():
            print(f"{folder.relative_to(DATA)} is there already")
            continue
        # Several chunks in a small file, and no name of the machine that makes it.
        with (
            mock.patch.object(zarr_profile, "CHUNK_BYTES", 512),
            mock.patch.object(socket, "gethostname", return_value="golden"),
        ):
            made = make(folder / "store")
        for part in ("cache", "tmp", "LOCK"):  # no part of what a store says
            path = folder / "store" / part
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        text = json.dumps(expected(folder / "store", made), separators=(",", ":"), sort_keys=True)
        (folder / "expected.json").write_text(text + "\n", "ascii")
        print(f"{folder.relative_to(DATA)} is made")
    if not any(BAD.glob("*.zip")):
        example = DATA.parents[2] / "spec" / "examples" / "e1-0-0-b1b1b1b1b1b1b1b1.hex"
        make_bad(bytes.fromhex("".join(example.read_text("ascii").split())))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    try:
        main(sys.argv[1])
    except UnsupportedFormat as error:
        raise SystemExit(str(error)) from error
