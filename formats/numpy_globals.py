"""Numpy arrays of numbers in torch files: what makes them holds no code, and random states are full of them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

_NUMBERS = "? b h i l q B H I L Q e f d F D".split()
# What a pickle names: found by pickling, for it is elsewhere in other versions of numpy.
_RECONSTRUCT = np.empty(0).__reduce__()[0]
_SCALAR = np.float64(0).__reduce__()[0]
_FOLDERS = ("numpy.core.multiarray", "numpy._core.multiarray")


def numpy_allowed() -> AbstractContextManager[Any]:
    """Return a context in which ``weights_only`` loads arrays and scalars of numbers; of objects it does not."""
    named = [(_RECONSTRUCT, "_reconstruct"), (_SCALAR, "scalar")]
    makers: list[Any] = [(maker, f"{folder}.{name}") for maker, name in named for folder in _FOLDERS]
    kinds = [type(np.dtype(name)) for name in _NUMBERS]
    return torch.serialization.safe_globals([*makers, np.ndarray, np.dtype, *kinds])
