"""States to commit."""

from __future__ import annotations

import torch

Tensors = dict[str, torch.Tensor]


def weights(megabytes: int, seed: int = 0) -> Tensors:
    """Return fp32 tensors as a transformer has them: big matrices, with a bias and a norm beside each."""
    generator = torch.Generator().manual_seed(seed)
    tensors: Tensors = {}
    left = megabytes * 10**6 // 4
    number = 0
    while left > 0:
        for name, shape in (("weight", (1024, 1024)), ("bias", (1024,)), ("norm", (1024,))):
            tensor = torch.randn(shape, generator=generator).mul_(0.02)
            tensors[f"blocks.{number}.{name}"] = tensor
            left -= tensor.numel()
        number += 1
    return tensors


def small_tensors(count: int = 4000, elements: int = 32) -> Tensors:
    """Return many small tensors: what each of them costs beside its bytes."""
    generator = torch.Generator().manual_seed(1)
    return {f"layer{number}.scale": torch.randn(elements, generator=generator) for number in range(count)}


def gpt2_small() -> dict[str, Tensors]:
    """Return the parameters of a GPT-2 small and both AdamW moments: 1.5 GB in 444 tensors."""
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (50257, 768), "wpe.weight": (1024, 768)}
    for layer in range(12):
        block = f"h.{layer}"
        for name in ("ln_1", "ln_2"):
            shapes[f"{block}.{name}.weight"] = shapes[f"{block}.{name}.bias"] = (768,)
        for name, (rows, columns) in (
            ("attn.c_attn", (768, 2304)), ("attn.c_proj", (768, 768)),
            ("mlp.c_fc", (768, 3072)), ("mlp.c_proj", (3072, 768)),
        ):  # fmt: skip
            shapes[f"{block}.{name}.weight"] = (rows, columns)
            shapes[f"{block}.{name}.bias"] = (columns,)
    shapes["ln_f.weight"] = shapes["ln_f.bias"] = (768,)
    generator = torch.Generator().manual_seed(2)
    scales = {"model": 0.02, "exp_avg": 1e-3, "exp_avg_sq": 1e-6}
    return {
        part: {name: torch.randn(shape, generator=generator).mul_(scale) for name, shape in shapes.items()}
        for part, scale in scales.items()
    }


def nbytes(tensors: Tensors) -> int:
    """Return the bytes of all elements."""
    return sum(tensor.nbytes for tensor in tensors.values())


def train(tensors: Tensors, share: float, seed: int) -> None:
    """Change a share of each tensor's elements, as one step of training with sparse gradients would."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors.values():
        flat = tensor.view(-1)
        count = max(1, int(share * flat.numel()))
        flat[torch.randint(flat.numel(), (count,), generator=generator)] += 1e-3
