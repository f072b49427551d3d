"""Writing: bases against safetensors, the pack writer against zarr-python, the cost of many tensors."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from safetensors.torch import save_file
from zarr.codecs import BloscCodec, Crc32cCodec
from zarr.storage import ZipStore

import deltastore
from deltastore.config import Retention
from deltastore.ondisk.names import new_commit_id
from deltastore.ondisk.pack import PackArray, PackCommit, PackWriter, encode_array
from deltastore.ondisk.zarr_profile import plan_array
from deltastore.store import Store
from deltastore.tiers.local import LocalTier
from tests.bench.measure import (
    REPETITIONS,
    Clock,
    Figure,
    alternate,
    at_least,
    median,
    ratio,
    shown,
    sync_path,
)
from tests.bench.states import Tensors, gpt2_small, nbytes, small_tensors, train, weights

ALL_BASES = Retention(keep_last=1, keep_every=1)
"""Keeps every commit, so that each is a base."""

Candidates = dict[str, Callable[[], Mapping[str, float]]]


def _save_safetensors(tensors: Tensors, path: Path) -> dict[str, float]:
    with Clock() as clock:
        save_file(tensors, path)
        sync_path(path)
    path.unlink()
    return {"wall": clock.wall, "cpu": clock.cpu}


def _commit(store: Store, step: int, state: Mapping[str, Any]) -> dict[str, float]:
    with Clock() as clock:
        with Clock() as stall:
            handle = store.commit(step, state)
        commit = handle.wait()
    assert commit.kind == "base"
    for pack in (Path(store.url) / "packs").iterdir():
        pack.unlink()
    return {"wall": clock.wall, "cpu": clock.cpu, "stall": stall.wall, "bytes": float(commit.bytes)}


def _first(folder: Path, codec: str, state: Mapping[str, Any]) -> dict[str, float]:
    with deltastore.open(folder, codec=codec, retention=ALL_BASES) as store:
        found = _commit(store, 0, state)
    shutil.rmtree(folder)
    return found


def base_write(folder: Path, quick: bool) -> list[Figure]:
    """commit() to acknowledged, against save_file + fsync of the same tensors."""
    tensors = weights(100 if quick else 500)
    size = nbytes(tensors)
    stores = {
        c: deltastore.open(folder / f"steady-{c}", codec=c, retention=ALL_BASES) for c in ("raw", "auto", "blosc")
    }
    steps = iter(range(10**6))
    for store in stores.values():
        for _ in range(2):  # two sets of buffers: the parent's and the next one's
            _commit(store, next(steps), {"model": tensors})

    def steady(codec: str) -> Callable[[], dict[str, float]]:
        return lambda: _commit(stores[codec], next(steps), {"model": tensors})

    candidates: Candidates = {
        "safetensors": lambda: _save_safetensors(tensors, folder / "a.safetensors"),
        "first raw": lambda: _first(folder / "first", "raw", {"model": tensors}),
        **{f"steady {codec}": steady(codec) for codec in stores},
    }
    found = alternate(candidates, 3 if quick else 2 * REPETITIONS - 1)
    for store in stores.values():
        store.close()
    reference = found["safetensors"]["wall"]
    rate = f"{size / median(reference) / 1e6:.0f} MB/s"
    figures = []
    for name, result in found.items():
        if name == "safetensors":
            continue
        value, spread = ratio(reference, result["wall"])
        detail: dict[str, Any] = {
            "rounds": spread,
            "seconds": median(result["wall"]),
            "safetensors": median(reference),
            "stall": median(result["stall"]),
            "cpu": median(result["cpu"]),
            "stored": f"{median(result['bytes']) / size:.3f}",
        }
        title = f"base write, {name}, throughput / safetensors + fsync"
        if name.endswith("raw"):
            figures.append(at_least(title, value, 0.95, "x", **detail))
        else:
            figures.append(shown(title, value, "x", **detail))
    figures.append(shown("safetensors save_file + fsync", size / median(reference) / 1e6, "MB/s", rate=rate))
    return figures


def pack_writer(folder: Path, quick: bool) -> list[Figure]:
    """CPU seconds of the pack writer, and of zarr-python's ZipStore for the same arrays."""
    rng = np.random.default_rng(3)
    arrays = {f"p{n}.data": rng.normal(0, 0.02, 4 << 20).astype(np.float32) for n in range(3 if quick else 12)}
    figures = []
    for codec in ("raw", "blosc"):
        found = alternate(
            {
                "zarr": lambda codec=codec: _zip_store(folder / "z.zip", arrays, codec),  # type: ignore[misc]
                "direct": lambda codec=codec: _direct(folder, arrays, codec),  # type: ignore[misc]
            },
            3 if quick else REPETITIONS,
        )
        value, spread = ratio(found["zarr"]["cpu"], found["direct"]["cpu"])
        detail: dict[str, float | str] = {
            "rounds": spread,
            **{f"{name} cpu s": median(found[name]["cpu"]) for name in found},
        }
        figures.append(at_least(f"zarr ZipStore / direct pack writer, CPU, {codec}", value, 2.0, "x", **detail))
    return figures


def _zip_store(path: Path, arrays: dict[str, np.ndarray], codec: str) -> dict[str, float]:
    blosc = BloscCodec(cname="zstd", clevel=1, shuffle="shuffle", blocksize=1 << 20, typesize=4)
    compressors = [Crc32cCodec()] if codec == "raw" else [blosc, Crc32cCodec()]
    with Clock() as clock:
        with ZipStore(path, mode="w") as store:
            group = zarr.create_group(store)
            for name, values in arrays.items():
                spec = plan_array(values.dtype, len(values), codec)
                array = group.create_array(
                    name,
                    shape=values.shape,
                    chunks=(spec.chunk,),
                    dtype=values.dtype,
                    compressors=compressors,
                    filters=None,
                    fill_value=0,
                    config={"write_empty_chunks": True},
                )
                array[:] = values
        sync_path(path)
    path.unlink()
    return {"cpu": clock.cpu}


def _direct(folder: Path, arrays: dict[str, np.ndarray], codec: str) -> dict[str, float]:
    tier = LocalTier(folder / "direct")
    tier.create()
    with Clock() as clock:
        pack = PackWriter(new_commit_id(), "0" * 16)

        def parts() -> Any:
            for name, values in arrays.items():
                spec = plan_array(values.dtype, len(values), codec)
                for buffers in pack.array(PackArray(name, spec, {}, encode_array(values, spec))):
                    yield from buffers
            for buffers in pack.finish([PackCommit(new_commit_id(), 0, "base", b"", "")]):
                yield from buffers

        tier.publish_new("packs/p.zip", parts(), "0" * 16)
    shutil.rmtree(folder / "direct")
    return {"cpu": clock.cpu}


def stalls(folder: Path, quick: bool, full: bool) -> list[Figure]:
    """What commit() holds the caller up for, and what the background needs until the acknowledgement."""
    cases: dict[str, tuple[dict[str, Tensors], int, float]] = {
        "4,000 tensors of 32": ({"model": small_tensors()}, 10 if quick else 30, 0.05)
    }
    if full:
        cases["GPT-2 small with AdamW, 1.5 GB"] = (gpt2_small(), 6, 0.02)
    figures = []
    for name, (state, commits, share) in cases.items():
        copies = {part: {key: value.clone() for key, value in tensors.items()} for part, tensors in state.items()}
        walls, cpus, backs, copying = [], [], [], []
        with deltastore.open(folder / "stalls") as store:
            for step in range(commits):
                for part, tensors in state.items():
                    train(tensors, share, step)
                    with Clock() as clock:
                        for key, tensor in tensors.items():
                            copies[part][key].copy_(tensor)
                    copying.append(clock.wall)
                with Clock() as all_in:
                    with Clock() as stall:
                        handle = store.commit(step, state)
                    handle.wait()
                if step >= 3:
                    walls.append(stall.wall)
                    backs.append(all_in.wall - stall.wall)
                    cpus.append(all_in.cpu)
        shutil.rmtree(folder / "stalls")
        count = sum(map(len, state.values()))
        copy = median(copying) * len(state)
        figures.append(
            shown(
                f"stall of a delta commit, {name}",
                1e3 * median(walls),
                "ms",
                **{
                    "us a tensor": 1e6 * median(walls) / count,
                    "background ms": 1e3 * median(backs),
                    "cpu ms": 1e3 * median(cpus),
                    "plain copy_ ms": 1e3 * copy,
                },
            )
        )
    return figures
