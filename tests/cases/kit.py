"""What the failure cases share: comparing, training in miniature, files, child processes, and the store's seams.

A case touches the product through these seams only, so that it reads like a script of a user:

``Store(root, background=True, owner=True, max_pending=2)``
    Open for writing, which claims the store at once and recovers it; ``owner=False`` opens it for reading.
``save(step, state)``, ``wait()``, ``close()``, ``read(step, map_location=)``, ``steps()``, ``latest()``, ``verify()``
    Commit, flush, close, read one state, and what the store holds.
``restore_optimizer(optimizer, saved)``
    Put a stored optimizer state into an optimizer.
"""

from __future__ import annotations

import copy
import struct
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import torch
from torch import nn

import deltastore
from deltastore.buffers import Hints
from deltastore.errors import NotFound
from deltastore.testing.compare import assert_same
from deltastore.types import Path as LeafPath

State = dict[Any, Any]

# ---------------------------------------------------------------- comparing


def bits(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor's elements in row-major order: tells -0.0 from 0.0, keeps payloads of NaNs."""
    plain = tensor.detach().cpu()
    if plain.is_quantized:
        plain = plain.int_repr()
    plain = plain.resolve_conj().resolve_neg()
    if plain.dtype == torch.complex128:
        plain = torch.view_as_real(plain)
    # Integers of the element's size: torch copies them for every dtype and whatever the strides.
    word = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[plain.element_size()]
    return plain.view(word).contiguous().numpy().tobytes()


def same(a: Any, b: Any) -> None:
    """Assert that two nested states are equal bit for bit, type for type, with the same order of keys.

    Done twice: by the library's own comparison, and by one that knows nothing of the library.
    """
    _same(a, b, "state")
    assert_same(a, b)


def _unordered(value: Any) -> str:
    """Return a form in which sets of the same elements are the same, also those inside of others."""
    if isinstance(value, set | frozenset):
        return f"{type(value).__name__}({sorted(map(_unordered, value))})"
    return f"({[*map(_unordered, value)]})" if isinstance(value, tuple) else repr(value)


def _same(a: Any, b: Any, at: str) -> None:
    if isinstance(a, torch.Tensor):
        assert isinstance(b, torch.Tensor), f"{at}: tensor became {type(b).__name__}"
        assert a.dtype == b.dtype, f"{at}: {a.dtype} became {b.dtype}"
        assert a.shape == b.shape, f"{at}: {tuple(a.shape)} became {tuple(b.shape)}"
        assert bits(a) == bits(b), f"{at}: bits differ"
    elif isinstance(a, np.ndarray):
        assert isinstance(b, np.ndarray), f"{at}: array became {type(b).__name__}"
        assert (a.dtype, a.shape) == (b.dtype, b.shape), f"{at}: {a.dtype} {a.shape} became {b.dtype} {b.shape}"
        assert a.tobytes() == b.tobytes(), f"{at}: bits differ"
    elif isinstance(a, dict):
        assert type(a) is type(b), f"{at}: {type(a).__name__} became {type(b).__name__}"
        assert [*map(_unordered, a)] == [*map(_unordered, b)], f"{at}: keys {list(a)} became {list(b)}"
        for key in a:
            _same(a[key], b[key], f"{at}[{key!r}]")
    elif isinstance(a, list | tuple | deque):
        assert type(a).__name__ == type(b).__name__, f"{at}: {type(a).__name__} became {type(b).__name__}"
        assert len(a) == len(b), f"{at}: {len(a)} elements became {len(b)}"
        for index, (left, right) in enumerate(zip(a, b, strict=True)):
            _same(left, right, f"{at}[{index}]")
    elif isinstance(a, set | frozenset):
        # With a NaN inside, two of the same elements are neither equal nor in one order.
        assert type(a) is type(b), f"{at}: {a!r} became {b!r}"
        assert _unordered(a) == _unordered(b), f"{at}: {a!r} became {b!r}"
    elif isinstance(a, float) and isinstance(b, float):
        assert struct.pack("<d", a) == struct.pack("<d", b), f"{at}: {a!r} became {b!r}"
    else:
        assert type(a) is type(b), f"{at}: {a!r} became {b!r}"
        assert a == b or a != a or repr(a) == repr(b), f"{at}: {a!r} became {b!r}"


def walk(value: Any, path: LeafPath = ()) -> Iterator[tuple[LeafPath, Any]]:
    """Yield the path and value of every leaf of a nested state."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from walk(inner, (*path, key))
    elif isinstance(value, list | tuple | deque) and not isinstance(value, torch.Size):
        for index, inner in enumerate(value):
            yield from walk(inner, (*path, index))
    else:
        yield path, value


def raises(call: Callable[[], Any], *kinds: type[BaseException]) -> Exception:
    """Return the exception that a call raises, any or one of `kinds`; fail if it raises none."""
    with pytest.raises(kinds or Exception) as caught:
        call()
    assert isinstance(caught.value, Exception)
    return caught.value


# ---------------------------------------------------------------- training in miniature


def mlp(seed: int = 0, width: int = 16) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, width), nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, 4))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1, scale: float = 1.0) -> None:
    for _ in range(steps):
        x = torch.randn(16, 8).to(next(model.parameters()).dtype)
        loss = (model(x).float() ** 2).mean() * scale
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def full(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **more: Any) -> State:
    state: State = {"model": dict(model.state_dict())}
    if optimizer is not None:
        state["optim"] = optimizer.state_dict()
    return {**state, **more}


def freeze(state: Any) -> Any:
    """Return what the truth was at this moment."""
    return copy.deepcopy(state)


# ---------------------------------------------------------------- files


def files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def biggest(root: Path) -> Path:
    """Return the largest file below a folder: the pack with the most data."""
    return max(files(root), key=lambda path: path.stat().st_size)


def used(root: Path) -> int:
    return sum(path.stat().st_size for path in files(root))


# ---------------------------------------------------------------- the seams


class Store:
    """The product as the cases see it."""

    def __init__(
        self,
        root: str | PathLike[str],
        background: bool = True,
        owner: bool = True,
        max_pending: int = 2,
        **options: Any,
    ) -> None:
        self.product = deltastore.open(root, "a" if owner else "r", max_pending=max_pending, **options)
        self._background = background
        self._newest = -1
        if owner:
            self._claim()

    def _claim(self) -> None:
        try:
            with suppress(NotFound):  # a store without commits is claimed all the same
                self._newest = self.product.restore().commit.step
        except BaseException:
            self.product.close()
            raise

    def save(self, step: int, state: State) -> None:
        if step < self._newest:  # gone back to the step before: the line of history goes on from there
            self.product.flush()
            self.product.restore(max(known for known in self.steps() if known < step))
        handle = self.product.commit_with_hints(step, state, hints_of(state))
        self._newest = step
        if not self._background:
            handle.wait()

    def wait(self) -> None:
        self.product.flush()

    def close(self) -> None:
        self.product.close()

    def read(self, step: int, map_location: Any = "cpu") -> Any:
        return self.product.at(step).to_state_dict(map_location)

    def steps(self) -> list[int]:
        self.product.refresh()
        return sorted({commit.step for commit in self.product.commits()})

    def latest(self) -> int:
        self.product.refresh()
        return self.product.at("latest").commit.step

    def verify(self) -> dict[int | str, str]:
        """Return what is damaged, by step where it belongs to one."""
        findings = self.product.verify(deep=True).findings
        return {finding.where if finding.step is None else finding.step: finding.message for finding in findings}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


PARTS_THAT_MOVE = ("model", "optim")
"""Parts of a state whose tensors follow `map_location`; an adapter knows that, a nested dict does not."""


def hints_of(state: Mapping[Any, Any]) -> Hints:
    paths = (path for path, value in walk(state) if isinstance(value, torch.Tensor))
    return Hints(roles={path: "other" for path in paths if path[0] not in PARTS_THAT_MOVE})


def restore_optimizer(optimizer: torch.optim.Optimizer, saved: State) -> None:
    """Put a stored optimizer state into an optimizer, through a store of its own."""
    with deltastore.open(f"memory://restore-{id(optimizer)}") as store:
        store.commit(0, {"optimizer": saved}).wait()
        store.at(0).load_into(optimizer=optimizer)
