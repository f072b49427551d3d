"""Converting: a safetensors checkpoint into a store and out again, against copying the file."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

import deltastore
from deltastore import formats
from deltastore.formats.series import find_series, import_series
from tests.bench.measure import REPETITIONS, Clock, Figure, alternate, at_least, median, ratio, shown, sync_path
from tests.bench.states import nbytes, weights


def _copy(source: Path, target: Path) -> dict[str, float]:
    with Clock() as clock:
        subprocess.run(["cp", source, target], check=True)
        sync_path(target)
    target.unlink()
    return {"wall": clock.wall, "cpu": clock.cpu}


def _import(source: Path, folder: Path, codec: str) -> dict[str, float]:
    with Clock() as clock, deltastore.open(folder, codec=codec) as store:
        import_series(store, find_series([str(source)], steps_from_name=False))
    shutil.rmtree(folder)
    return {"wall": clock.wall, "cpu": clock.cpu}


def _export(folder: Path, target: Path) -> dict[str, float]:
    with Clock() as clock, deltastore.open(folder, "r") as store:
        formats.save(store.at("latest"), target)
    target.unlink()
    return {"wall": clock.wall, "cpu": clock.cpu}


def convert(folder: Path, quick: bool) -> list[Figure]:
    """Import and export of one checkpoint, its bytes in the page cache, against cp + fsync of the same file."""
    tensors = weights(200 if quick else 2000)
    size = nbytes(tensors)
    source = folder / "source.safetensors"
    save_file(tensors, source)
    del tensors
    for codec in ("raw", "auto"):
        with deltastore.open(folder / f"store-{codec}", codec=codec) as store:
            import_series(store, find_series([str(source)], steps_from_name=False))
    candidates: dict[str, Callable[[], Mapping[str, float]]] = {
        "cp": lambda: _copy(source, folder / "copy"),
        "import, raw": lambda: _import(source, folder / "imported", "raw"),
        "export, raw": lambda: _export(folder / "store-raw", folder / "x.safetensors"),
        "import, compressed": lambda: _import(source, folder / "imported", "auto"),
        "export, compressed": lambda: _export(folder / "store-auto", folder / "x.safetensors"),
    }
    found = alternate(candidates, 3 if quick else REPETITIONS)
    reference = found.pop("cp")["wall"]
    figures = [shown("cp + fsync", size / median(reference) / 1e6, "MB/s", seconds=median(reference))]
    for name, result in found.items():
        value, spread = ratio(reference, result["wall"])
        detail: dict[str, Any] = {"rounds": spread, "seconds": median(result["wall"]), "cpu": median(result["cpu"])}
        title = f"{name}, throughput / cp + fsync"
        figures.append(at_least(title, value, 0.8, **detail) if "raw" in name else shown(title, value, "x", **detail))
    return figures
