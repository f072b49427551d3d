"""The rules of the house: imports point down, heavy packages stay behind their doors, importing costs nothing."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import grimp
import pytest

import deltastore

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "deltastore"
IGNORED = shutil.ignore_patterns("__pycache__", ".*")

# One file each may import it: whoever else needs it goes through that file.
ONE_DOOR = ("crc32c", "fsspec", "h5py", "isal", "msgspec", "numba", "numcodecs", "pyhdfs", "zarr", "zstandard")
# torch has several doors, all named: the bridge, kernels, and the sides that talk to training code. The demo trains.
TORCH_DOORS = ("torch_bridge.py", "layers/*kernel*", "formats/*", "adapters/*", "loading/*", "cli/demo*", "cli/_demo*")
# Frameworks and foreign formats belong to the converters and adapters.
OUTSIDE_CORE = ("accelerate", "deepspeed", "lightning", "matplotlib", "safetensors", "tensorstore", "transformers")
LIGHT_MODULES = ("deltastore.tree", "deltastore.ondisk", "deltastore.history", "deltastore.reader")


def sources() -> Iterator[tuple[str, ast.Module]]:
    """Yield each module of the package but ``testing``, which is free to import anything."""
    for folder, prefix in ((PACKAGE, ""), (ROOT / "formats", "formats/"), (ROOT / "adapters", "adapters/")):
        for path in sorted(folder.rglob("*.py")):
            name = prefix + path.relative_to(folder).as_posix()
            # rglob follows the links on some versions of Python and not on others; the folders themselves come anyway.
            if not prefix and name.startswith(("formats/", "adapters/", "testing/")):
                continue
            yield name, ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported_packages(node: ast.AST) -> Iterator[str]:
    """Yield the top-level names that are imported at run time below a node, inside functions too."""
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        for branch in node.orelse:
            yield from imported_packages(branch)
        return
    if isinstance(node, ast.Import):
        yield from (alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield node.module.partition(".")[0]
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")) and node.args:
        target = node.args[0]
        if isinstance(target, ast.Constant) and isinstance(target.value, str):
            yield target.value.partition(".")[0]
    for child in ast.iter_child_nodes(node):
        yield from imported_packages(child)


@pytest.fixture(scope="module")
def importers() -> dict[str, set[str]]:
    """Return, for each imported package, the modules that import it."""
    found: dict[str, set[str]] = {}
    for name, tree in sources():
        for package in imported_packages(tree):
            found.setdefault(package, set()).add(name)
    return found


@pytest.mark.parametrize("package", ONE_DOOR)
def test_a_heavy_package_has_one_door(importers: dict[str, set[str]], package: str) -> None:
    assert len(importers.get(package, set())) <= 1, f"{package} is imported by {sorted(importers[package])}"


def test_torch_stays_behind_its_doors(importers: dict[str, set[str]]) -> None:
    torch_importers = importers.get("torch", set())
    assert {name for name in torch_importers if not any(fnmatch(name, door) for door in TORCH_DOORS)} == set()
    assert "torch_bridge.py" in torch_importers


@pytest.mark.parametrize("package", OUTSIDE_CORE)
def test_frameworks_stay_outside_the_core(importers: dict[str, set[str]], package: str) -> None:
    assert {name for name in importers.get(package, set()) if not name.startswith(("formats/", "adapters/"))} == set()


def test_the_search_finds_hidden_imports() -> None:
    in_function = "def f():\n    import zarr.storage\n    import_module('h5py')\n"
    for_types_only = "if TYPE_CHECKING:\n    import torch\nelse:\n    import numba\n"
    assert set(imported_packages(ast.parse(in_function + for_types_only))) == {"zarr", "h5py", "numba"}


def lint_imports(where: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    return subprocess.run(command, cwd=where, capture_output=True, text=True, check=False)


def test_imports_point_down_only() -> None:
    linted = lint_imports(ROOT)
    assert linted.returncode == 0, linted.stdout + linted.stderr


def test_the_import_rule_sees_the_linked_folders() -> None:
    modules = grimp.build_graph("deltastore", cache_dir=None).modules
    for folder in ("formats", "adapters"):
        expected = {path.stem for path in (ROOT / folder).glob("*.py")} - {"__init__"}
        assert {f"deltastore.{folder}.{stem}" for stem in expected} | {f"deltastore.{folder}"} <= modules


@pytest.mark.parametrize(
    ("place", "line", "contract"),
    [
        ("deltastore/ondisk/intruder.py", "import deltastore.formats", "Imports point down only"),
        ("deltastore/tiers/intruder.py", "import deltastore.ondisk", "Tiers know files"),
        ("deltastore/ondisk/intruder.py", "import mmap", "ondisk does no I/O"),
        ("formats/intruder.py", "import deltastore.adapters", "Imports point down only"),
        ("deltastore/nowhere.py", "", "Imports point down only"),
    ],
)
def test_the_import_rule_bites(tmp_path: Path, place: str, line: str, contract: str) -> None:
    shutil.copy2(ROOT / "pyproject.toml", tmp_path)
    for folder in ("deltastore", "formats", "adapters"):
        shutil.copytree(
            ROOT / folder, tmp_path / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", ".*")
        )
    (tmp_path / place).write_text(f"{line}\n")
    linted = lint_imports(tmp_path)
    assert linted.returncode == 1, linted.stdout + linted.stderr
    broken = [row for row in linted.stdout.splitlines() if " BROKEN" in row]
    assert any(row.startswith(contract) for row in broken), linted.stdout


def loaded_by(statement: str) -> set[str]:
    """Return the top-level modules that a fresh interpreter holds after a statement."""
    program = f"{statement}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in json.loads(done.stdout)}


def test_importing_the_package_loads_nothing_heavy() -> None:
    heavy = {"torch", "numpy", *ONE_DOOR, *OUTSIDE_CORE}
    assert loaded_by("import deltastore, deltastore.errors") & heavy == set()


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_storage_modules_import_without_torch(module: str) -> None:
    assert "torch" not in loaded_by(f"import {module}")


def test_every_public_name_is_there() -> None:
    assert set(deltastore.__all__) <= set(dir(deltastore))
    assert [name for name in deltastore.__all__ if getattr(deltastore, name, None) is None] == []


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'opne'"):
        getattr(deltastore, "opne")  # noqa: B009  mypy would refuse the plain spelling, as it should
