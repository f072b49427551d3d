"""Which converter a file gets, and what is loaded for it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import deltastore
from deltastore import formats
from deltastore.errors import Backend, InvalidInput, NotFound


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".ckpt", ".PT"])
def test_the_extension_names_the_format(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"state{suffix}"
    size = formats.save({"w": torch.arange(3)}, path)
    assert size == path.stat().st_size
    assert torch.equal(formats.load(path)["w"], torch.arange(3))


@pytest.mark.parametrize("is_zip", [True, False])
def test_without_a_known_extension_the_content_names_it(tmp_path: Path, is_zip: bool) -> None:
    path = tmp_path / "pytorch_model"
    torch.save({"w": torch.arange(3)}, path, _use_new_zipfile_serialization=is_zip)
    assert torch.equal(formats.load(str(path))["w"], torch.arange(3))


def test_a_named_format_needs_no_extension(tmp_path: Path) -> None:
    formats.save({"w": 1}, tmp_path / "state", format="torch")
    assert formats.load(tmp_path / "state", format="torch") == {"w": 1}


@pytest.mark.parametrize(
    "call",
    [
        lambda path: formats.save({}, path, format="pickle"),
        lambda path: formats.load(path, format="pickle"),
        lambda path: formats.save({}, path),
        formats.load,
    ],
    ids=["save by name", "load by name", "save by extension", "load by content"],
)
def test_an_unknown_format_names_the_known_ones(tmp_path: Path, call: Callable[[Path], object]) -> None:
    path = tmp_path / "state.xyz"
    path.write_bytes(b"neither fish nor fowl")
    with pytest.raises(InvalidInput, match=r"'torch' \(\.pt \.pth \.bin \.ckpt\)"):
        call(path)
    assert path.read_bytes() == b"neither fish nor fowl"


@pytest.mark.parametrize("name", ["absent.pt", "absent"])
def test_a_missing_file_is_not_found(tmp_path: Path, name: str) -> None:
    with pytest.raises(NotFound, match="no such file"):
        formats.load(tmp_path / name)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(Backend):
        formats.load(tmp_path)
    (tmp_path / "folder.pt").mkdir()
    with pytest.raises(InvalidInput, match="is a folder"):
        formats.load(tmp_path / "folder.pt")


def test_a_state_and_a_lazy_tensor_are_read(tmp_path: Path) -> None:
    with deltastore.open(tmp_path / "store") as store:
        store.commit(1, {"model": {"w": torch.arange(4.0)}, "step": 1}).wait()
        state = store.at(1)
        formats.save(state, tmp_path / "all.pt")
        formats.save(state["model"], tmp_path / "part.pt")
        formats.save(state["model", "w"], tmp_path / "one.pt")
    assert formats.load(tmp_path / "all.pt")["step"] == 1
    assert torch.equal(formats.load(tmp_path / "part.pt")["w"], torch.arange(4.0))
    assert torch.equal(formats.load(tmp_path / "one.pt"), torch.arange(4.0))


def test_the_package_of_a_format_is_imported_when_it_is_used() -> None:
    program = "import sys, deltastore.formats; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
