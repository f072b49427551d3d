"""What a conversion of 300 MB takes of memory, measured from outside: much less than 300 MB."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import deltastore
from deltastore import formats
from tests.formats.kit import TENSOR_FORMATS

TENSORS, TENSOR_BYTES = 75, 4 << 20
ALLOWED = 128 << 20
ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def grown(verb: str, source: Path, target: Path) -> int:
    command = [sys.executable, "-m", "tests.formats.memory_child", verb, str(source), str(target)]
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


@pytest.mark.parametrize("name", [*TENSOR_FORMATS, "pt"])
def test_export_takes_a_few_tensors(source: Path, tmp_path: Path, name: str) -> None:
    target = tmp_path / f"x.{TENSOR_FORMATS.get(name, name)}"
    told = formats.target_format(str(target)).converter.needed_bytes({"w": torch.ones(1 << 20)}, formats.Options())
    assert grown("export", source / "store", target) < min(told, ALLOWED + (64 << 20))


@pytest.mark.parametrize("name", TENSOR_FORMATS)
def test_from_file_to_file_takes_a_few_tensors(source: Path, tmp_path: Path, name: str) -> None:
    there, back = tmp_path / f"x.{TENSOR_FORMATS[name]}", tmp_path / "back.safetensors"
    assert grown("convert", source / "source.safetensors", there) < ALLOWED
    assert grown("convert", there, back) < ALLOWED
    assert back.stat().st_size >= TENSORS * TENSOR_BYTES
