"""The demo's reader, in a process of its own: nothing is in memory, everything comes from files.

``python -m deltastore.cli._demo_check --store URL --step 10 --reference FULL.pt --export OUT.pt`` reads one tensor of
an old step lazily, exports the step as a standard state_dict, loads that with torch alone, and compares both with the
full checkpoint of an uninterrupted run. The result is one JSON object on stdout.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch

import deltastore
from deltastore import formats

TENSOR = ("model", "wte.weight")


def main() -> None:
    """Read, export, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("store", "reference", "export"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--step", type=int, required=True)
    options = parser.parse_args()
    expected = torch.load(options.reference, weights_only=True)
    begin = time.perf_counter()
    with deltastore.open(options.store, "r") as store:
        opened = time.perf_counter()
        state = store.at(options.step)
        lazy = state[TENSOR]
        tensor = lazy[...]
        read = time.perf_counter()
        whole = state.to_state_dict()
        loaded = time.perf_counter()
        size = formats.save({name: whole[name] for name in ("model", "optimizer")}, options.export)
    exported = torch.load(options.export, weights_only=True)
    result = {
        "tensor": "/".join(TENSOR),
        "tensor_bytes": lazy.nbytes,
        "open_seconds": opened - begin,
        "tensor_seconds": read - opened,
        "load_seconds": loaded - read,
        "export_bytes": size,
        "tensor_equal": identical(tensor, expected["model"]["wte.weight"]),
        "export_equal": all(identical(exported[name], expected[name]) for name in ("model", "optimizer")),
    }
    print(json.dumps(result))


def identical(one: Any, other: Any) -> bool:
    """Return whether two nested states are the same, tensors bit for bit."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        alike = one.dtype == other.dtype and one.shape == other.shape
        return alike and one.contiguous().numpy().tobytes() == other.contiguous().numpy().tobytes()
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(identical(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(identical, one, other))
    return type(one) is type(other) and bool(one == other)


if __name__ == "__main__":
    main()
