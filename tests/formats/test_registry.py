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
from deltastore.errors import InvalidInput, NotFound
from deltastore.formats import registry


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
    with pytest.raises(InvalidInput, match="the folder holds no checkpoint that is known"):
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


@pytest.mark.parametrize("name", ["safetensors", "hdf5", "numpy", "zarr", "dcp", "torch"])
def test_the_content_decides_and_not_the_extension(tmp_path: Path, name: str) -> None:
    path = tmp_path / "misnamed.pt"
    formats.save({"w": torch.arange(3)}, path, format=name)
    assert formats.format_of(str(path)).name == name
    assert torch.equal(formats.load(path)["w"], torch.arange(3))


def test_another_package_adds_a_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "lines_format"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from pathlib import Path\nfrom deltastore.formats import Format\n"
        "from deltastore.formats.contents import take_apart\n"
        "class Lines:\n"
        "    def load(self, path):\n"
        "        return dict(enumerate(Path(path).read_text().splitlines()[1:]))\n"
        "    def open(self, path):\n"
        "        return take_apart(self.load(path))\n"
        "    def losses(self, state):\n"
        "        return ()\n"
        "    def save(self, state, path, options):\n"
        "        return Path(path).write_text('LINES\\n' + '\\n'.join(take_apart(state).state().values()))\n"
        "    def needed_bytes(self, state, options):\n"
        "        return 0\n"
        "CONVERTER = Lines()\n"
        "FORMAT = Format('lines', 'lines_format', ('.lines',), lambda probe: probe.begin.startswith(b'LINES'))\n"
    )
    about = tmp_path / "lines_format-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: lines-format\nVersion: 1\n")
    (about / "entry_points.txt").write_text(
        "[deltastore.formats]\nlines = lines_format:FORMAT\nbroken = no.such:thing\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    registry.known_formats.cache_clear()
    try:
        formats.save({0: "one", 1: "two"}, tmp_path / "x.lines")
        (tmp_path / "x.lines").rename(tmp_path / "unnamed")
        assert formats.load(tmp_path / "unnamed") == {0: "one", 1: "two"}
    finally:
        monkeypatch.undo()
        registry.known_formats.cache_clear()


def test_a_missing_package_names_the_extra() -> None:
    program = (
        "import sys; sys.modules['h5py'] = None\n"
        "from deltastore import formats\n"
        "try: formats.save({}, 'x.h5')\n"
        "except ImportError as error: print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("MissingDependency format 'hdf5' needs the package 'h5py'")
    assert "pip install 'deltastore-checkpoint[hdf5]'" in done.stdout
