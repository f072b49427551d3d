"""What the tests of the converters share."""

from __future__ import annotations

from typing import Any

import torch

from deltastore.dtypes import LOGICAL
from deltastore.torch_bridge import TORCH

TENSOR_FORMATS = {"safetensors": "safetensors", "hdf5": "h5", "numpy": "npz", "zarr": "zarr", "dcp": "dcp"}
"""The formats of named tensors, and an extension of each."""
DTYPES = [name for name in LOGICAL if hasattr(torch, name)]


def tensor(dtype: str, *shape: int) -> torch.Tensor:
    """Return a tensor of random bits; a bool of random truth."""
    made = TORCH.empty(dtype, shape)
    top = 2 if dtype == "bool" else 256
    array = TORCH.as_array(made).view("u1")
    array[:] = torch.randint(0, top, (array.size,), dtype=torch.uint8).numpy()
    return made


def training_state() -> dict[str, Any]:
    """Return a state as trainings have it: tied weights, an optimizer with integer keys, plain values."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 4, bias=False))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(5, 4)).sum().backward()
    optimizer.step()
    weights = dict(model.state_dict())
    weights["tied.weight"] = weights["0.weight"]
    return {
        "model": weights,
        "optimizer": optimizer.state_dict(),
        "step": 7,
        "rng": torch.get_rng_state(),
        "list": [torch.zeros(2), (torch.ones(1, dtype=torch.bfloat16), "text")],
    }
