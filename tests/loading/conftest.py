"""A store in memory, and the states of living objects in it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import deltastore
from deltastore.adapters._objects import Capture
from deltastore.adapters._selection import Selection
from deltastore.reader import State

_numbers = itertools.count()


@pytest.fixture
def store() -> Iterator[deltastore.Store]:
    with deltastore.open(f"memory://loading-{next(_numbers)}") as store:
        yield store


@pytest.fixture
def saved(store: deltastore.Store) -> Callable[..., State]:
    """Commit a nested state and return it as it is read."""
    steps = itertools.count()

    def save(**state: Any) -> State:
        step = next(steps)
        store.commit(step, state).wait()
        return store.at(step)

    return save


@pytest.fixture
def captured(store: deltastore.Store) -> Callable[..., State]:
    """Commit living objects as an adapter does, optimizers by parameter name."""
    steps = itertools.count(1000)

    def save(**objects: Any) -> State:
        step = next(steps)
        state, hints = Capture(objects, Selection()).take({})
        store.commit_with_hints(step, state, hints).wait()
        return store.at(step)

    return save
