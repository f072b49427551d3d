"""Small models of four kinds that train in seconds, on text and pictures that every machine has."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

BATCH, LENGTH, WIDTH, CLASSES, SIDE = 8, 64, 96, 10, 16
MASK = 256
"""The token of a masked byte."""


class Transformer(nn.Module):
    """Bytes in, bytes out: causal as GPT, or in both directions as BERT."""

    def __init__(self, *, causal: bool, layers: int = 4) -> None:
        super().__init__()
        self.causal = causal
        self.tokens = nn.Embedding(257, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        block = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(tokens) + self.places.weight
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=hidden.dtype) if self.causal else None
        logits: torch.Tensor = self.head(self.blocks(hidden, mask=mask, is_causal=self.causal))
        return logits


class Pictures(nn.Module):
    """A convolutional network, or a transformer over patches."""

    def __init__(self, *, patches: bool) -> None:
        super().__init__()
        if patches:
            block = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
            self.stem: nn.Module = nn.Sequential(nn.Conv2d(3, WIDTH, 4, 4), nn.Flatten(2))
            self.body: nn.Module = nn.TransformerEncoder(block, 4, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
            self.head = nn.Linear(WIDTH, CLASSES)
        else:
            widths = (3, 48, 96, 128)
            convolutions = [nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(8, b), nn.ReLU(), nn.MaxPool2d(2))
                            for a, b in pairwise(widths)]  # fmt: skip
            self.stem, self.body = nn.Sequential(*convolutions), nn.Identity()
            self.head = nn.Linear(widths[-1] * (SIDE // 8) ** 2, CLASSES)
        self.patches = patches

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(pictures)
        hidden = self.body(hidden.transpose(1, 2)).mean(1) if self.patches else hidden.flatten(1)
        logits: torch.Tensor = self.head(hidden)
        return logits


Batch = tuple[torch.Tensor, torch.Tensor]


def text() -> torch.Tensor:
    """Return some of the sources of Python's standard library as bytes."""
    root = Path(sysconfig.get_paths()["stdlib"])
    data = b"".join(path.read_bytes() for path in sorted(root.glob("*.py"))[:120])
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


def text_batch(data: torch.Tensor, generator: torch.Generator, *, masked: bool) -> Batch:
    """Return tokens and targets; -100 where nothing is asked."""
    starts = torch.randint(len(data) - LENGTH - 1, (BATCH,), generator=generator)
    rows = torch.stack([data[at : at + LENGTH + 1] for at in starts.tolist()])
    if not masked:
        return rows[:, :-1], rows[:, 1:]
    hidden = torch.rand((BATCH, LENGTH), generator=generator) < 0.15
    tokens = rows[:, :-1]
    return torch.where(hidden, MASK, tokens), torch.where(hidden, tokens, -100)


def picture_batch(generator: torch.Generator) -> Batch:
    """Return noisy gratings; their class is their direction."""
    labels = torch.randint(CLASSES, (4 * BATCH,), generator=generator)
    angle = labels.float().mul(torch.pi / CLASSES).view(-1, 1, 1)
    grid = torch.linspace(-3, 3, SIDE)
    wave = torch.sin(4 * (torch.cos(angle) * grid.view(1, 1, -1) + torch.sin(angle) * grid.view(1, -1, 1)))
    noise = torch.randn((4 * BATCH, 3, SIDE, SIDE), generator=generator)
    return wave.unsqueeze(1) + 1.5 * noise, labels


KINDS = ("gpt", "mlm", "cnn", "vit")
OPTIMIZERS = ("adamw", "sgd")
PRECISIONS = ("fp32", "bf16")


class Training:
    """A model, its optimizer, and the data of each step, all by a seed.

    Parameters
    ----------
    precision : {"fp32", "bf16"}
        "bf16": the model computes in bfloat16, the optimizer works on a float32 master copy.
    """

    def __init__(self, kind: str, optimizer: str, precision: str, seed: int) -> None:
        torch.manual_seed(seed)
        model = Transformer(causal=kind == "gpt") if kind in ("gpt", "mlm") else Pictures(patches=kind == "vit")
        self.kind, self.seed = kind, seed
        self.master = [nn.Parameter(p.detach().clone()) for p in model.parameters()] if precision == "bf16" else None
        self.model = model.bfloat16() if self.master else model
        parameters = self.master or list(self.model.parameters())
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
            if optimizer == "adamw"
            else torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
        )
        self._text = text() if kind in ("gpt", "mlm") else None

    def batch(self, step: int) -> Batch:
        """Return the data of a step; negative ones are for validation."""
        generator = torch.Generator().manual_seed(1000 * self.seed + step if step >= 0 else -step)
        if self._text is None:
            return picture_batch(generator)
        return text_batch(self._text, generator, masked=self.kind == "mlm")

    def loss(self, step: int) -> torch.Tensor:
        """Return the loss of a step's data."""
        inputs, targets = self.batch(step)
        if inputs.is_floating_point():
            inputs = inputs.to(next(self.model.parameters()).dtype)
        logits = self.model(inputs).float()
        return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())

    def step(self, step: int) -> float:
        """Train one step, and return its loss."""
        loss = self.loss(step)
        loss.backward()  # type: ignore[no-untyped-call]
        if self.master is not None:
            for copy, parameter in zip(self.master, self.model.parameters(), strict=True):
                copy.grad = None if parameter.grad is None else parameter.grad.float()
                parameter.grad = None
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.master is not None:
            with torch.no_grad():
                for copy, parameter in zip(self.master, self.model.parameters(), strict=True):
                    parameter.copy_(copy)
        return loss.item()

    @torch.no_grad()
    def validate(self) -> float:
        """Return the mean loss of sixteen batches that are never trained on."""
        return sum(self.loss(-1 - number).item() for number in range(16)) / 16

    def state(self) -> dict[str, Any]:
        """Return what a commit takes."""
        found: dict[str, Any] = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return found if self.master is None else {**found, "master": [copy.detach() for copy in self.master]}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.master is not None:
            with torch.no_grad():
                for copy, saved in zip(self.master, state["master"], strict=True):
                    copy.copy_(saved)

    def weights(self) -> torch.Tensor:
        """Return the weights that the optimizer works on, as one vector."""
        return torch.cat([p.detach().flatten() for p in self.master or self.model.parameters()]).clone()


Maker = Callable[[], Training]
