"""What the demo trains: a small GPT on the bytes of Python's own standard library, in plain torch."""

from __future__ import annotations

import math
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

VOCABULARY = 256
CORPUS_BYTES = 4 << 20


@dataclass(frozen=True)
class Shape:
    """The sizes of a model; the defaults have about two million parameters."""

    layers: int = 4
    heads: int = 4
    width: int = 200
    context: int = 64


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.c_attn = nn.Linear(shape.width, 3 * shape.width)
        self.c_proj = nn.Linear(shape.width, shape.width)
        self.heads = shape.heads
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("mask", torch.ones(shape.context, shape.context).tril().bool(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what each position gathers from those before it."""
        batch, length, width = x.shape
        parts = self.c_attn(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = parts[0], parts[1], parts[2]
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
        mask: Any = self.mask
        weights = scores.masked_fill(~mask[:length, :length], -math.inf).softmax(-1)
        mixed = (self.dropout(weights) @ value).transpose(1, 2).reshape(batch, length, width)
        out: torch.Tensor = self.c_proj(mixed)
        return out


class Block(nn.Module):
    """One layer: attention and a perceptron, each added to its input."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(shape.width)
        self.attn = Attention(shape, dropout)
        self.ln_2 = nn.LayerNorm(shape.width)
        self.mlp = nn.Sequential(
            nn.Linear(shape.width, 4 * shape.width),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * shape.width, shape.width),
            nn.Dropout(dropout),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the next layer's input."""
        x = x + self.attn(self.ln_1(x))
        out: torch.Tensor = x + self.mlp(self.ln_2(x))
        return out


class GPT(nn.Module):
    """A GPT-2 for bytes; input and output embedding are one tensor, as in GPT-2."""

    def __init__(self, shape: Shape, dropout: float = 0.1) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, shape.width)
        self.wpe = nn.Embedding(shape.context, shape.width)
        self.h = nn.ModuleList(Block(shape, dropout) for _ in range(shape.layers))
        self.ln_f = nn.LayerNorm(shape.width)
        self.lm_head = nn.Linear(shape.width, VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        self.lm_head.weight = self.wte.weight

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss of predicting each next byte."""
        hidden = self.wte(x) + self.wpe(torch.arange(x.shape[1]))
        for block in self.h:
            hidden = block(hidden)
        logits = self.lm_head(self.ln_f(hidden))
        return functional.cross_entropy(logits.view(-1, VOCABULARY), targets.reshape(-1))


class Batches:
    """Random pieces of the corpus: a data loader that can be asked where it is."""

    def __init__(self, corpus: torch.Tensor, shape: Shape, size: int, seed: int) -> None:
        self._corpus = corpus
        self._context = shape.context
        self._size = size
        self._generator = torch.Generator().manual_seed(seed)
        self._drawn = 0

    def draw(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the next batch: bytes, and the bytes that follow them."""
        starts = torch.randint(len(self._corpus) - self._context - 1, (self._size, 1), generator=self._generator)
        rows = self._corpus[starts + torch.arange(self._context + 1)].long()
        self._drawn += 1
        return rows[:, :-1], rows[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        """Return where the loader is."""
        return {"generator": self._generator.get_state(), "drawn": self._drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._generator.set_state(state["generator"])
        self._drawn = state["drawn"]


@dataclass
class Training:
    """Everything that a run consists of."""

    model: GPT
    optimizer: torch.optim.AdamW
    scheduler: torch.optim.lr_scheduler.LRScheduler
    data: Batches

    def state_dict(self) -> dict[str, Any]:
        """Return what a full checkpoint has to hold."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "data": self.data.state_dict(),
            "rng": torch.get_rng_state(),
        }


def corpus() -> torch.Tensor:
    """Return the first megabytes of the standard library's sources, in the order of their names."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= CORPUS_BYTES:
            break
    return torch.frombuffer(text[:CORPUS_BYTES], dtype=torch.uint8)


def start_training(shape: Shape, *, steps: int, batch: int, seed: int, threads: int) -> Training:
    """Return a run at its beginning: the same arguments give the same run, bit for bit."""
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(seed)
    model = GPT(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    return Training(model, optimizer, scheduler, Batches(corpus(), shape, batch, seed))
