"""Loading: whole states against safetensors, one tensor of one step."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

import deltastore
from deltastore.history.chain import open_chain
from deltastore.store import Store
from tests.bench.counting import counted_store
from tests.bench.measure import (
    REPETITIONS,
    Clock,
    Figure,
    alternate,
    at_least,
    at_most,
    forget,
    median,
    ratio,
    shown,
    sync_path,
)
from tests.bench.states import Tensors, train, weights

MAX_MILLISECONDS = 20.0
MIB = 1 << 20


class Blocks(nn.Module):
    """A module with the tensors of :func:`weights`."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name.replace(".", "_"), torch.zeros_like(tensor))


def load(folder: Path, quick: bool) -> list[Figure]:
    """Loading a 500 MB state, warm and cold, into new and into existing memory."""
    tensors = {name.replace(".", "_"): value for name, value in weights(100 if quick else 500).items()}
    size = sum(tensor.nbytes for tensor in tensors.values())
    file = folder / "a.safetensors"
    save_file(tensors, file)
    sync_path(file)
    roots = {codec: folder / codec for codec in ("raw", "auto")}
    for codec, root in roots.items():
        with deltastore.open(root, codec=codec) as store:
            store.commit(0, {"model": tensors})
    module = Blocks(tensors)
    warm: dict[str, Callable[[], object]] = {
        # load_file maps the file and reads nothing; a training state must be memory of its own, so it is copied.
        "safetensors, copied": lambda: {name: value.clone() for name, value in load_file(file).items()},
        "safetensors, mapped and touched": lambda: [
            value.view(torch.uint8).view(-1)[::4096].sum() for value in load_file(file).values()
        ],
        "safetensors into a module": lambda: module.load_state_dict(load_file(file)),
        **{f"deltastore {codec}": (lambda root=root: _state_dict(root)) for codec, root in roots.items()},  # type: ignore[misc]
        "deltastore raw into a module": lambda: _load_into(roots["raw"], module),
    }
    figures = []
    for temperature in ("warm", "cold"):

        def timed(function: Callable[[], object], cold: bool = temperature == "cold") -> Callable[[], dict[str, float]]:
            def run() -> dict[str, float]:
                if cold:
                    forget(file, *roots.values())
                with Clock() as clock:
                    kept = function()
                del kept
                return {"wall": clock.wall}

            return run

        candidates = {name: timed(function) for name, function in warm.items()}
        if temperature == "warm":
            for function in warm.values():
                function()
        found = alternate(candidates, 3 if quick else REPETITIONS)
        pairs = {
            "deltastore raw": "safetensors, copied",
            "deltastore auto": "safetensors, copied",
            "deltastore raw into a module": "safetensors into a module",
        }
        for ours, theirs in pairs.items():
            value, spread = ratio(found[theirs]["wall"], found[ours]["wall"])
            detail: dict[str, Any] = {
                "rounds": spread,
                "seconds": median(found[ours]["wall"]),
                theirs: median(found[theirs]["wall"]),
                "mapped and touched": median(found["safetensors, mapped and touched"]["wall"]),
                "MB/s": size / median(found[ours]["wall"]) / 1e6,
            }
            title = f"load, {temperature}, {ours.removeprefix('deltastore ')} / safetensors"
            made = (
                at_least(title, value, 0.9, "x", **detail) if "auto" not in ours else shown(title, value, "x", **detail)
            )
            figures.append(made)
    return figures


def _state_dict(root: Path) -> object:
    with deltastore.open(root, mode="r") as store:
        return store.at("latest").to_state_dict()


def _load_into(root: Path, module: nn.Module) -> object:
    with deltastore.open(root, mode="r") as store:
        return store.at("latest").load_into(model=module)


def one_tensor(folder: Path, quick: bool) -> list[Figure]:
    """One tensor of 1 MiB of one step, cold: time and bytes, from a base and from the end of a chain."""
    tensors = {f"w{number}": torch.randn(512, 512) for number in range(64 if quick else 256)}
    deltas = 5 if quick else 20
    root = folder / "one"
    for sparse in (True, False):
        with deltastore.open(root / ("sparse" if sparse else "dense")) as store:
            for step in range(deltas + 1):
                store.commit(step, {"model": tensors})
                if sparse:
                    train(tensors, 0.02, step)
                else:
                    for tensor in tensors.values():
                        tensor.mul_(1.0001)
    figures = []
    for kind in ("sparse", "dense"):
        with deltastore.open(root / kind, mode="r") as store:
            steps = {"base": 0, f"chain of {_deltas(store, deltas)} deltas": deltas}
        for name, step in steps.items():
            if kind == "dense" and name == "base":
                continue
            figures += _one(root / kind, step, f"{kind} {name}" if name != "base" else name, quick)
    shutil.rmtree(root)
    return figures


def _deltas(store: Store, step: int) -> int:
    entry = store._view.resolve(step)
    return len(open_chain(store._view.packs, store._view.catalog, entry).links) - 1


def _one(root: Path, step: int, name: str, quick: bool) -> list[Figure]:
    path = ("model", "w40")

    def read() -> Mapping[str, float]:
        store, ops = counted_store(root)
        store.commits()  # opened: the catalog is known
        forget(root / "packs")
        store._view.packs.close()
        ops.reset()
        with Clock() as clock:
            state = store.at(step)
            opened = ops.bytes
            tensor = state[path][...]
        assert tensor.nbytes == MIB
        share, chunks = _share(store, step, path)
        store.close()
        return {
            "wall": clock.wall, "tails": opened, "bytes": ops.bytes - opened, "reads": ops.reads,
            "share": share, "chunks": chunks,
        }  # fmt: skip

    def disk() -> Mapping[str, float]:
        pack = max((root / "packs").iterdir(), key=lambda item: item.stat().st_size)
        forget(pack)
        with Clock() as clock, pack.open("rb", buffering=0) as file:
            length = len(file.read(16 * MIB))
        return {"rate": length / clock.wall}

    found = alternate({"one": read, "disk": disk}, 3 if quick else 2 * REPETITIONS - 1)
    one = {key: median(values) for key, values in found["one"].items()}
    rate = median(found["disk"]["rate"])
    allowed = MAX_MILLISECONDS + 1e3 * (one["bytes"] + one["tails"]) / rate
    return [
        at_most(f"1 MiB tensor, cold, {name}", 1e3 * one["wall"], allowed, "ms", **{"disk MB/s": rate / 1e6}),
        at_most(
            f"  bytes read for it, {name}",
            one["bytes"] / MIB,
            (2 * one["share"] + one["chunks"]) / MIB,
            "MiB",
            **{"share of the chain MiB": one["share"] / MIB, "tails MiB": one["tails"] / MIB, "reads": one["reads"]},
        ),
    ]


def _share(store: Store, step: int, path: tuple[str, ...]) -> tuple[float, float]:
    """Return the tensor's share of its chain's stored bytes, and one chunk of each array that it needs."""
    view = store._view
    chain = open_chain(view.packs, view.catalog, view.resolve(step))
    share = chunks = 0.0
    for piece in chain.layout.by_path[path].pieces:
        partition = chain.layout.by_id[piece.partition]
        for link, _layer in chain.layers(piece.partition):
            for name, array in link.tail.index.arrays.items():
                if name.startswith(f"{link.record.id}/p{piece.partition}."):
                    stored = [extent.length for extent in array.chunks]
                    share += sum(stored) * piece.count / partition.length
                    chunks += max(stored)
    return share, chunks
