"""What the tests of bounded commits share: stores with a policy, updates as trainings make them, and the measuring."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

import deltastore
from deltastore.policy import Policy
from deltastore.reader import LazyTensor, State
from deltastore.store import Store
from deltastore.types import Path
from tests.cases.kit import bits, walk
from tests.layers.reference import WORDS, round_up, specials, to_values, to_words, wide_deviations

NEVER = 1e9
"""A restore cost at which no base is written."""
PATTERNS = ["frozen", "noise", "burst", "specials", "explode", "shrink", "signs", "zeros", "bits", "learning"]


def open_bounded(policy: Policy | None = None, url: str | None = None, **options: Any) -> Store:
    """Return a store with a policy, by default a new one in memory that stores 2 % and never a base."""
    store = deltastore.open(url or f"memory://bounded-{secrets.token_hex(8)}", **options)
    store.set_policy(policy or Policy(budget=0.02, restore_cost=NEVER))
    return store


def dtype_of(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def words_of(tensor: torch.Tensor) -> np.ndarray:
    """Return the elements of a floating tensor as words."""
    return np.frombuffer(bits(tensor), WORDS[dtype_of(tensor)])


def as_tensor(words: np.ndarray, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    return torch.frombuffer(bytearray(words.tobytes()), dtype=kind).reshape(shape)


def tensors_of(state: Mapping[Any, Any]) -> dict[Path, torch.Tensor]:
    return {path: value for path, value in walk(state) if isinstance(value, torch.Tensor)}


def measured(truth: torch.Tensor, read: torch.Tensor) -> float:
    """Return the largest deviation of any element, in binary64; NaN and infinity must be exact."""
    one, other, dtype = words_of(truth), words_of(read), dtype_of(truth)
    finite = np.isfinite(to_values(one, dtype)) & np.isfinite(to_values(other, dtype))
    assert (one[~finite] == other[~finite]).all()
    differ = one != other
    deviations = wide_deviations(one, other, dtype)
    assert (deviations[differ] > 0).all(), "a zero of the other sign"
    return float(deviations[finite].max(initial=0.0))


def check_tensors(state: State, truth: Mapping[Any, Any]) -> None:
    """Assert that each tensor has exactly the bound that its record says, and is exact where it says none."""
    for path, tensor in tensors_of(truth).items():
        read, bound = lazy(state, *path), state.fidelity.bound(*path)
        if bound == 0:
            assert bits(read) == bits(tensor), path
        else:
            assert round_up(measured(tensor, read)) == bound, path


def check_state(state: State, truth: Mapping[Any, Any]) -> None:
    """Assert the same of a whole state, and that it is called exact only if every tensor is."""
    check_tensors(state, truth)
    read = tensors_of(state.to_state_dict())
    assert list(read) == list(tensors_of(truth))
    assert all(bits(tensor) == bits(lazy(state, *path)) for path, tensor in read.items())
    bounds = [state.fidelity.bound(*path) for path in read]
    assert state.commit.exact == state.fidelity.exact == (not any(bounds))


def lazy(state: State, *path: Any) -> torch.Tensor:
    """Return one tensor of a state."""
    found = state[path]
    assert isinstance(found, LazyTensor)
    return found[...]


def updated(tensor: torch.Tensor, pattern: str, generator: np.random.Generator) -> torch.Tensor:
    """Return a floating tensor after a step of a training of some kind."""
    with np.errstate(all="ignore"):
        made = _updated(words_of(tensor), dtype_of(tensor), pattern, generator)
    return as_tensor(made, dtype_of(tensor), tuple(tensor.shape))


def _updated(words: np.ndarray, dtype: str, pattern: str, generator: np.random.Generator) -> np.ndarray:
    values = to_values(words, dtype).astype("<f8")
    count = len(values)
    chosen = generator.random(count) < 0.01
    if pattern == "frozen":
        return words
    if pattern == "noise":
        return _plus(words, values, 1e-2 * generator.standard_normal(count), dtype)
    if pattern == "burst":
        return _plus(words, values, np.where(chosen, 1e3 * generator.standard_normal(count), 0.0), dtype)
    if pattern == "specials":
        return np.where(chosen, generator.choice(specials(dtype), count), words)
    if pattern == "explode":
        return _plus(words, values, values * generator.choice([1e2, 1e20, 1e38]), dtype)
    if pattern == "shrink":
        return _plus(words, values, values * (generator.choice([1e-3, 1e-36]) - 1), dtype)
    if pattern == "signs":
        return _plus(words, values, 2.0**-6 * generator.choice([-1.0, 1.0], count), dtype)
    if pattern == "zeros":
        return np.where(generator.random(count) < 0.3, generator.choice(specials(dtype)[:2], count), words)
    if pattern == "bits":
        return np.frombuffer(generator.bytes(words.nbytes), words.dtype)
    return _plus(words, values, 1e-4 * np.exp(2 * generator.standard_normal(count)), dtype)


def _plus(words: np.ndarray, values: np.ndarray, change: np.ndarray, dtype: str) -> np.ndarray:
    return np.where(change == 0, words, to_words(values + change, dtype))
