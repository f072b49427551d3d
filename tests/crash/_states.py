"""States whose content follows from a seed and a serial number, so that whoever reads one can tell what it must be."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

BLOCKS = 8
BLOCK_ELEMENTS = 256


def make_state(seed: int, serial: int, *, scale: int = 1) -> dict[str, Any]:
    """Return the state of one commit: an eighth of ``w`` is new each time, ``b`` wholly, ``fixed`` never.

    ``late`` appears after some commits and ``odd`` comes and goes, so that layouts change along a chain.
    """
    width = BLOCK_ELEMENTS * scale
    parts = []
    for block in range(BLOCKS):
        since = serial - (serial - block) % BLOCKS
        parts.append(_floats(seed, block, max(since, -1) + 1, width))
    state: dict[str, Any] = {
        "w": torch.from_numpy(np.concatenate(parts)),
        "b": torch.from_numpy(_floats(seed, 100, serial, 96)).to(torch.bfloat16),
        "fixed": torch.from_numpy(_floats(seed, 101, 0, 200)),
        "count": torch.tensor(serial),
        "plain": {"serial": serial, "lr": 0.1 / (serial + 1), "losses": [1.0 / (i + 1) for i in range(serial)]},
    }
    if serial >= 3:
        state["late"] = [torch.from_numpy(_floats(seed, 102, serial // 4, 70)), (serial, "x")]
    if serial % 7 == 5:
        state["odd"] = torch.arange(serial, dtype=torch.int64)
    return state


def _floats(seed: int, part: int, number: int, count: int) -> np.ndarray:
    return np.random.default_rng((seed, part, number)).standard_normal(count, dtype=np.float32)
