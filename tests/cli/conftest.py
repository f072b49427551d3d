"""Fixtures: the command line, a store to look at, a store to change."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cli.kit import Run, invoke, make_store


@pytest.fixture(scope="session")
def run() -> Run:
    """Return the command line."""
    return invoke


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store that no test changes."""
    path = tmp_path_factory.mktemp("cli") / "store"
    make_store(path)
    return path


@pytest.fixture
def copy(small: Path, tmp_path: Path) -> Path:
    """Return a store of its own for a test that changes it."""
    path = tmp_path / "store"
    shutil.copytree(small, path)
    return path
