"""A reader that somebody wrote from `spec/` alone restores what this library committed.

`stock/spec_reader.py` is kept as its authors left it, who had the specification, a store to try, and none of this code.
It is not changed when this code changes: if it stops reading, the format has changed. What the format gains is added to
it in the same way, from the text alone.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import deltastore
from deltastore.adapters.pytorch import Checkpointer
from deltastore.torch_bridge import TORCH

READER = Path(__file__).parent / "stock" / "spec_reader.py"
NAMES = ["codes", "scales", "signs", "factors"]
LAYERS = Path(__file__).parent.parent / "spec" / "09-layers.md"

Truth = dict[str, list[Any]]


def about(tensor: torch.Tensor) -> list[Any]:
    array = TORCH.as_array(tensor.detach().contiguous())
    return [array.dtype.name, list(tensor.shape), hashlib.sha256(array.tobytes()).hexdigest()]


def fill(root: Path) -> list[Truth]:
    """Commit a base, an overlay, an xor, a patched layout, a second base and a branch; return what each step holds."""
    torch.manual_seed(0)
    weights, half, counts = torch.randn(1_300_000), torch.randn(70_000).bfloat16(), torch.arange(1000)
    truth: list[Truth] = []

    def commit(store: deltastore.Store, **more: torch.Tensor) -> None:
        step = len(truth)
        model = {"w": weights, "tied": weights, "half": half, "counts": counts, "empty": torch.empty(0, 3), **more}
        user = {"step": step, "history": [0.5 * k for k in range(step)], "names": ("a", None, True, 2**70, b"xyz")}
        store.commit(step, {"model": model, "user": user}).wait()
        truth.append({f"model/{name}": about(tensor) for name, tensor in model.items()})

    with deltastore.open(root) as store:
        commit(store)
        weights[::1000] += 1
        half[5] = float("nan")
        commit(store)
        weights += 0.001 * torch.randn_like(weights)
        commit(store)
        commit(store, new=torch.ones(5, dtype=torch.float8_e5m2))
        counts[7] = -1
        store.restore(3)
        commit(store)
        assert [entry.kind for entry in store.commits()] == ["base", "delta", "delta", "delta", "delta"]
    return truth


def read(root: Path, step: int) -> subprocess.CompletedProcess[str]:
    guard = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__'); "
    guard += "assert not any(name.startswith('deltastore') for name in sys.modules)"
    return subprocess.run(
        [sys.executable, "-I", "-c", guard, str(READER), str(root), str(step)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_it_reads_every_step(tmp_path: Path) -> None:
    truth = fill(tmp_path / "store")
    for step, expected in enumerate(truth):
        done = read(tmp_path / "store", step)
        assert done.returncode == 0, done.stderr
        tensors, document = map(json.loads, done.stdout.splitlines())
        assert tensors == expected
        assert document["user"]["step"] == step
        assert document["user"]["history"] == [0.5 * k for k in range(step)]
        assert document["user"]["names"][:4] == ["a", None, True, 2**70]


@pytest.mark.parametrize("where", [0.2, 0.5, 0.9, 0.999])
def test_it_refuses_damage(tmp_path: Path, where: float) -> None:
    fill(tmp_path / "store")
    base = max((tmp_path / "store" / "packs").iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(base.read_bytes())
    data[int(where * len(data))] ^= 16
    base.write_bytes(data)
    done = read(tmp_path / "store", 0)
    assert done.returncode != 0
    assert "ValueError" in done.stderr


def test_it_reads_bounded_steps_as_the_library_does(tmp_path: Path) -> None:
    torch.manual_seed(0)
    weights = torch.randn(70_000)
    with deltastore.open(tmp_path / "store") as store:
        store.set_policy(deltastore.Policy(budget=0.05, restore_cost=50))
        for step in range(3):
            store.commit(step, {"model": {"w": weights, "small": weights[:9].clone()}}).wait()
            weights += 0.001 * torch.randn_like(weights)
        assert [entry.exact for entry in store.commits()] == [True, False, False]
        for step in range(3):
            done = read(tmp_path / "store", step)
            assert done.returncode == 0, done.stderr
            state = store.at(step)
            tensors, _document = map(json.loads, done.stdout.splitlines())
            assert tensors == {f"model/{name}": about(state["model", name][...]) for name in ("w", "small")}


class Net(nn.Module):
    """Tensors whose blocks are cut in all ways: rows of 96 and of 384, no rows, and some too small to be predicted."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(200, 96)
        self.up, self.down, self.norm = nn.Linear(96, 384), nn.Linear(384, 96), nn.LayerNorm(96)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        return self.norm(hidden + self.down(self.up(hidden).relu())) @ self.embedding.weight.T  # type: ignore[no-any-return]


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "adam":
        return torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)


@pytest.fixture(scope="module", params=["adam", "sgd"])
def predicted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Return the kind and the root of a store whose deltas are predicted and bounded."""
    root = tmp_path_factory.mktemp(request.param) / "store"
    torch.manual_seed(0)
    model = Net()
    optimizer = optimizer_of(request.param, model)
    policy = deltastore.Policy(budget=0.05, restore_cost=1e9)
    with (
        deltastore.open(root) as store,
        Checkpointer(store, policy=policy, model=model, optimizer=optimizer) as ckpt,
    ):
        for step in range(20):
            tokens = torch.randint(200, (256,))
            functional.cross_entropy(model(tokens), (7 * tokens + 1) % 200).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            ckpt.step(step)
    return request.param, root


@pytest.mark.parametrize("step", [1, 9, 18])
def test_it_reads_predicted_steps_as_the_library_does(predicted: tuple[str, Path], step: int) -> None:
    kind, root = predicted
    done = read(root, step)
    assert done.returncode == 0, done.stderr
    tensors, _document = map(json.loads, done.stdout.splitlines())
    moments = {"adam": ("step", "exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}[kind]
    names = dict(Net().named_parameters())
    paths: list[tuple[str, ...]] = [("model", name) for name in names]
    paths += [("optimizer", "state", name, moment) for name in names for moment in moments]
    with deltastore.open(root, mode="r") as store:
        state = store.at(step)
        assert {"/".join(path): about(state[path][...]) for path in paths}.items() <= tensors.items()
        assert {path.split("/")[0] for path in tensors.keys() - {"/".join(path) for path in paths}} == {"rng"}


def test_its_deltas_are_predicted(predicted: tuple[str, Path]) -> None:
    kind, root = predicted
    reader = runpy.run_path(str(READER))
    found = []
    for pack in map(reader["open_pack"], sorted((root / "packs").iterdir())):
        for commit in pack["commits"]:
            extent = pack["blobs"][f"deltastore/records/{commit['id']}.json.zst"]
            found.append(reader["blob"](extent, pack["data"], 1 << 28, commit["digest"]))
    deltas = sorted((record for record in found if record["kind"] == "delta"), key=lambda record: record["step"])
    groups = [group for record in deltas for group in record["predictions"]]
    assert len(deltas) == len(groups) >= 18
    assert {group["kind"] for group in groups} == {kind}
    assert [group["refine"] is not None for group in groups] == [kind == "adam"] * len(groups)


def bits(text: str) -> list[int]:
    return [int(word, 16) for word in re.findall(r"\b[0-9a-f]{8}\b", text)]


def test_the_worked_example_of_a_prediction() -> None:
    reader = runpy.run_path(str(READER))
    (block,) = re.findall(r"^A prediction: .*?```\n(.*?)```", LAYERS.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    constants, steps, codes, *parts = block.splitlines()
    before, after = (
        [np.array(bits(line)[half : half + 4], np.uint32).view(np.float32) for line in parts] for half in (0, 4)
    )
    group = {"kind": "adam", "partitions": [0, 1, 2], "code": "ternary", "ranges": [[0, 1, 0]], "refine": None}
    group["constants"] = [bits(constants) + bits(steps)]
    layout = {"tensors": [{"path": ["w"], "shape": [4], "pieces": [[0, 0, 4]]}]}
    (head,) = re.findall(r"codes ((?:[0-9a-f]{2} )+)and 60 bytes 00", codes)
    stored = np.frombuffer(bytes.fromhex(head).ljust(64, b"\0"), np.uint8)
    reader["predict"](group, layout, before, stored, np.array([125], np.uint8))
    assert [part.tobytes() for part in before] == [part.tobytes() for part in after]


def test_its_powers_are_those_of_two() -> None:
    reader = runpy.run_path(str(READER))
    for n in range(-256, 257):
        root = 1 << 64 * 32 + n % 64  # the 64th power of 2 ** (32 + n % 64 / 64)
        for _ in range(6):
            root = math.isqrt(root)
        assert float(reader["power"](np.array(n))) == (root + 256) // 512 * 2.0 ** (n // 64 - 23)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("adam", {"kind": "rmsprop"}),
        ("adam", {"code": "byte"}),
        ("adam", {"partitions": [0, 1]}),
        ("adam", {"partitions": [0, 1, 1]}),
        ("adam", {"partitions": [0, 1, 3]}),  # of another length
        ("adam", {"partitions": [0, 1, 4]}),  # of another dtype
        ("adam", {"partitions": [0, 1, 5]}),  # with a full layer
        ("adam", {"partitions": [0, 1, 9]}),  # in no layout
        ("adam", {"constants": [[0] * 8]}),
        ("adam", {"constants": [[0] * 12]}),
        ("adam", {"constants": [[0] * (8 + 3 * 65)]}),
        ("adam", {"constants": [[1 << 32] * 11]}),
        ("adam", {"constants": [[1.0] * 11]}),
        ("adam", {"ranges": [[0, 64, 1]]}),
        ("adam", {"ranges": [[64, 64, 0]]}),
        ("adam", {"ranges": [[-2, -1, 0]]}),
        ("adam", {"ranges": [[0, 64, 0], [63, 70, 0]]}),
        ("adam", {"ranges": [[64, 70, 0], [0, 64, 0]]}),
        ("adam", {"refine": {"period": 8, "phase": 8}}),
        ("adam", {"refine": None}),  # with signs and factors
        ("sgd", {"refine": {"period": 8, "phase": 0}, "arrays": dict.fromkeys(NAMES)}),
    ],
)
def test_it_refuses_groups_that_the_text_forbids(kind: str, changes: dict[str, Any]) -> None:
    reader = runpy.run_path(str(READER))
    adam = kind == "adam"
    group: dict[str, Any] = {
        "kind": kind,
        "partitions": [0, 1, 2] if adam else [0, 1],
        "code": "pair",
        "constants": [[0] * 11 if adam else [0] * 6],
        "ranges": [[0, 64, 0], [64, 70, 0]],
        "refine": {"period": 8, "phase": 7} if adam else None,
        "arrays": dict.fromkeys(NAMES if adam else NAMES[:2]),
    }
    sizes = [("float32", 70)] * 3 + [("float32", 71), ("float64", 70), ("float32", 70)]
    record: dict[str, Any] = {"kind": "delta", "requires": ["codes", f"predict-{kind}"], "predictions": [group]}
    held = reader["check_groups"](record, dict(enumerate(sizes)), {5: "full"})
    assert held == dict.fromkeys(group["partitions"], kind)
    lacking = [{"requires": [name]} for name in ("codes", f"predict-{kind}")]
    others: list[dict[str, Any]] = [{"kind": "base"}, {"predictions": [group] * 2}, *lacking]
    for wrong in others:
        with pytest.raises(ValueError, match=r"prediction|group"):
            reader["check_groups"](record | wrong, dict(enumerate(sizes)), {5: "full"})
    group |= changes
    with pytest.raises(ValueError, match=r"prediction|group"):
        reader["check_groups"](record, dict(enumerate(sizes)), {5: "full"})


def test_it_refuses_codes_that_the_text_forbids() -> None:
    integers = runpy.run_path(str(READER))["integers"]
    stored = np.full(64, 242, np.uint8)
    assert integers(stored, "ternary", 320).tolist() == [-1.0] * 320
    for wrong, count in ((stored, 321), (stored[:63], 320), (stored.astype(np.uint16), 320), (stored + 1, 320)):
        with pytest.raises(ValueError, match="codes"):
            integers(wrong, "ternary", count)
