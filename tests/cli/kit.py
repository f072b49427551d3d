"""What the tests of the command line share: a small store, and the commands run in this process."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from typer.testing import CliRunner

import deltastore
from deltastore.cli import app

STEPS = 6


@dataclass(frozen=True)
class Answer:
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The one JSON document on stdout, parsed strictly."""

        def refuse(constant: str) -> None:
            raise AssertionError(f"{constant} is no JSON")

        assert all(32 <= ord(char) < 127 or char == "\n" for char in self.out)
        return json.loads(self.out, parse_constant=refuse)


Run = Callable[..., Answer]


def invoke(*arguments: object) -> Answer:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Answer(result.exit_code, result.stdout, result.stderr)


def weight(step: int) -> torch.Tensor:
    """Return the weight that the small store has at a step."""
    return torch.arange(64 * 8, dtype=torch.float32).reshape(64, 8) + step / 8


def make_store(path: Path) -> None:
    """Write six commits, step 2 tagged "best"."""
    with deltastore.open(path) as store:
        for step in range(STEPS):
            wte = weight(step)
            state = {
                "model": {
                    "wte.weight": wte,
                    "head.weight": wte,
                    "a/b": torch.arange(6).reshape(2, 3),
                    "half": torch.tensor([1.5, math.inf, math.nan], dtype=torch.bfloat16),
                    "z": torch.tensor([1 + 2j]),
                    "0": torch.ones(1),
                },
                "list": [torch.zeros(2), {"lr": 0.001, 3: "int", "3": "text"}],
                "rng": {"python": random.Random(1).getstate(), "numpy": np.arange(3, dtype=np.uint32)},
                "plain": {"nan": math.nan, "big": 2**90, "raw": b"abc", "dtype": torch.float16, "none": None},
            }
            store.commit(step, state, tag="best" if step == 2 else None, metrics={"loss": 2.5 - step / 4}).wait()


def pack_of(path: Path, step: int) -> Path:
    """Return the file that holds the commit of a step."""
    (pack,) = path.glob(f"packs/e*-{step}-{step}-*.zip")
    return pack


def flip(path: Path, offset: int) -> None:
    """Change one byte of a file."""
    content = bytearray(path.read_bytes())
    content[offset] ^= 0xFF
    path.write_bytes(content)
