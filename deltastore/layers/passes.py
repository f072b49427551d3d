"""The compiled passes over memory, loaded when they are needed: numba takes a second to import."""

from __future__ import annotations

import importlib
from typing import Any


def passes(name: str) -> Any:
    """Return a module of compiled passes, such as "prediction_kernels"."""
    return importlib.import_module(f"deltastore.layers.{name}")
