"""What a conversion of 300 MB takes of memory, measured from outside: a fixed amount, whatever the checkpoint has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import deltastore
from deltastore import formats
from deltastore.streaming import needed_bytes
from deltastore.testing.compare import assert_same
from tests.formats.kit import TENSOR_FORMATS

TENSORS, TENSOR_BYTES = 75, 4 << 20
ALLOWED = 128 << 20
ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow
NAMES = [
    *(pytest.param(name, marks=() if name == "safetensors" else pytest.mark.soak) for name in TENSOR_FORMATS),
    "pt",
]
"""Of every format in make soak; a process for each, minutes in all."""


def grown(verb: str, *paths: Path) -> int:
    command = [sys.executable, "-m", "tests.formats.memory_child", verb, *map(str, paths)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memory")
    state = {"model": {f"layer.{number}": torch.randn(TENSOR_BYTES // 4096, 1024) for number in range(TENSORS)}}
    with deltastore.open(folder / "store", codec="raw") as store:
        store.commit(0, state).wait()
    formats.save(state, folder / "source.safetensors")
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_export_takes_a_few_tensors(source: Path, tmp_path: Path, name: str) -> None:
    target = tmp_path / f"x.{TENSOR_FORMATS.get(name, name)}"
    told = formats.target_format(str(target)).converter.needed_bytes({"w": torch.ones(1 << 20)}, formats.Options())
    took = grown("export", source / "store", target)
    assert took < min(told, ALLOWED + (64 << 20))


@pytest.mark.parametrize("name", NAMES[:-1])
def test_from_file_to_file_takes_a_few_tensors(source: Path, tmp_path: Path, name: str) -> None:
    there, back = tmp_path / f"x.{TENSOR_FORMATS[name]}", tmp_path / "back.safetensors"
    took = grown("convert", source / "source.safetensors", there)
    assert took < ALLOWED
    took = grown("convert", there, back)
    assert took < ALLOWED
    assert back.stat().st_size >= TENSORS * TENSOR_BYTES


@pytest.mark.parametrize("name", NAMES)
def test_import_takes_a_few_partitions(source: Path, tmp_path: Path, name: str) -> None:
    file = tmp_path / f"x.{TENSOR_FORMATS.get(name, name)}"
    formats.save(formats.open_contents(source / "source.safetensors"), file)
    took = grown("import", file, tmp_path / "store")
    assert took < ALLOWED + (112 << 20)


@pytest.mark.soak
def test_import_of_a_series_takes_a_few_partitions(tmp_path: Path) -> None:
    state = {"model": {f"layer.{number}": torch.randn(1024, 1024) for number in range(2 * TENSORS)}}
    formats.save(state, tmp_path / "0.safetensors")
    for number, tensor in enumerate(state["model"].values()):
        tensor[number] += 1
        if not number % 16:
            tensor += torch.randn_like(tensor)
    formats.save(state, tmp_path / "1.safetensors")
    took = grown("import", tmp_path / "0.safetensors", tmp_path / "1.safetensors", tmp_path / "store")
    assert took < needed_bytes(2 * TENSORS * TENSOR_BYTES) < 400 << 20
    with deltastore.open(tmp_path / "store", "r") as store:
        assert [commit.kind for commit in store.commits()] == ["base", "delta"]
        assert_same(store.at(1).to_state_dict(), state)
