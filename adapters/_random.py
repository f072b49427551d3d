"""The global random states of Python, numpy, torch and CUDA: plain data out, the same streams back."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from deltastore.errors import InvalidInput
from deltastore.loading.objects import as_python_state, python_state

log = logging.getLogger("deltastore")


def capture_rng() -> dict[str, Any]:
    """Return the state of every global generator; those of CUDA only where CUDA is in use already."""
    state: dict[str, Any] = {
        "python": python_state(random.getstate()),
        "numpy": _numpy_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def _numpy_state() -> Any:
    state: Any = np.random.get_state(legacy=False)  # noqa: NPY002 - the global state is what users' code draws from
    inner = state["state"]
    if state["bit_generator"] != "MT19937":  # np.random.set_bit_generator was used: there is no tuple for it
        return state
    return "MT19937", inner["key"], inner["pos"], state["has_gauss"], state["gauss"]


def restore_rng(state: Mapping[str, Any]) -> None:
    """Let every global generator go on from a captured state.

    States of CUDA devices that are not here are left out, with a warning: a run that moves to other hardware draws
    other numbers there.

    Raises
    ------
    InvalidInput
        A state does not fit its generator.
    """
    try:
        random.setstate(as_python_state(state["python"]))
        np.random.set_state(state["numpy"])  # noqa: NPY002 - as above
        torch.set_rng_state(state["torch"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise InvalidInput(f"the random states of the commit do not fit: {type(error).__name__}: {error}") from error
    stored = list(state.get("cuda", ()))
    here = torch.cuda.device_count() if stored and torch.cuda.is_available() else 0
    for index, device_state in enumerate(stored[:here]):
        torch.cuda.set_rng_state(device_state, index)
    if len(stored) > here:
        log.warning("the commit has random states of %d CUDA devices, %d are here", len(stored), here)
