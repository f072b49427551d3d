"""The wheel: only ``deltastore/`` at its top level, nothing missing, importable without the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parent.parent
IGNORED = shutil.ignore_patterns("__pycache__", ".*")
SOURCE_FOLDERS = ("deltastore", "formats", "adapters")
LINKED = {"formats": "deltastore/formats", "adapters": "deltastore/adapters"}


def files_of(folder: str) -> set[str]:
    """Return the files below a top-level folder, links not followed, as paths from the root of the repository."""
    found = set()
    for parent, folders, files in os.walk(ROOT / folder):
        folders[:] = [name for name in folders if name != "__pycache__" and not name.startswith(".")]
        found |= {Path(parent, name).relative_to(ROOT).as_posix() for name in files if not name.endswith(".pyc")}
    return found


def place_in_wheel(source: str) -> str:
    top, _, rest = source.partition("/")
    return f"{LINKED.get(top, top)}/{rest}"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("source")
    for entry in ROOT.iterdir():
        if entry.is_file():
            shutil.copy2(entry, copy)
    for folder in SOURCE_FOLDERS:
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True, ignore=IGNORED)
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(copy)]
    built = subprocess.run(command, cwd=out, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def wheel_names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


@pytest.mark.parametrize("folder", sorted(LINKED))
def test_links_are_relative(folder: str) -> None:
    # An absolute link works on the machine that made it, and nowhere else.
    link = ROOT / LINKED[folder]
    assert link.is_symlink()
    assert os.readlink(link) == f"../{folder}"


def test_only_the_package_is_at_top_level(wheel_names: set[str]) -> None:
    tops = {PurePosixPath(name).parts[0] for name in wheel_names}
    infos = {top for top in tops if top.endswith(".dist-info")}
    assert len(infos) == 1
    assert infos.pop().startswith("deltastore_checkpoint-")
    assert {top for top in tops if not top.endswith(".dist-info")} == {"deltastore"}


def test_no_file_is_missing_and_none_is_added(wheel_names: set[str]) -> None:
    expected = {place_in_wheel(source) for folder in SOURCE_FOLDERS for source in files_of(folder)}
    assert "deltastore/py.typed" in expected
    assert "deltastore/formats/__init__.py" in expected
    assert {name for name in wheel_names if name.startswith("deltastore/")} == expected


def test_metadata_names_the_command_and_the_extras(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (info,) = {PurePosixPath(name).parts[0] for name in archive.namelist() if ".dist-info/" in name}
        metadata = archive.read(f"{info}/METADATA").decode()
        commands = archive.read(f"{info}/entry_points.txt").decode()
    assert "deltastore = deltastore.cli:main" in commands
    extras = {line.removeprefix("Provides-Extra: ") for line in metadata.splitlines() if line.startswith("Provides-E")}
    assert extras == {"hdf5", "hdfs", "fsspec", "huggingface", "lightning", "deepspeed", "report", "dev", "all"}


def test_unpacked_wheel_imports_from_elsewhere(wheel: Path, tmp_path: Path) -> None:
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    imports = "import deltastore, deltastore.errors; print(deltastore.__file__)"
    program = f"import sys; sys.path.insert(0, {str(site)!r})\n{imports}"
    # -I -S: no PYTHONPATH, no site-packages. Neither the editable install nor any dependency can help.
    command = [sys.executable, "-I", "-S", "-c", program]
    imported = subprocess.run(command, cwd=elsewhere, capture_output=True, text=True, check=False)
    assert imported.returncode == 0, imported.stderr
    assert Path(imported.stdout.strip()) == site / "deltastore" / "__init__.py"
