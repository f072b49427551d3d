"""A run of commits, tags and restores as a training loop makes them, drawn from a seed."""

from __future__ import annotations

import random
from typing import Protocol

from deltastore.errors import NotFound
from deltastore.handle import Handle
from deltastore.store import Store
from tests.crash._journal import serial_of
from tests.crash._states import make_state


class Notes(Protocol):
    """Where a run writes down what it did and was promised."""

    def submit(self, serial: int, step: int) -> None: ...

    def handed_over(self, serial: int, handle: Handle) -> None: ...

    def follow(self, serial: int | None) -> None: ...

    def restored(self, serial: int, commit: str) -> None: ...

    def try_tag(self, name: str, serial: int) -> None: ...

    def tagged(self, name: str, serial: int) -> None: ...


def run(
    store: Store,
    notes: Notes,
    rng: random.Random,
    *,
    seed: int,
    first_serial: int,
    commits: int,
    restores: bool = True,
    scale: int = 1,
) -> None:
    """Write some commits; between them go back, tag, or wait."""
    store.set_restore_cost(rng.choice([1.2, 2.0, 8.0]))
    step = begin(store, notes, rng)
    last: tuple[int, Handle] | None = None
    for serial in range(first_serial, first_serial + commits):
        action = rng.random()
        if restores and action < 0.12 and last is not None:
            step = _go_back(store, notes, rng)
        elif action < 0.3 and last is not None:
            name = "best" if action < 0.22 else f"t{last[0]}"
            tagged = last[1].wait().id
            notes.try_tag(name, last[0])
            store.tag(name, tagged, move=True)
            notes.tagged(name, last[0])
        tag = f"c{serial}" if 0.3 < action < 0.4 else None
        step += rng.random() > 0.1
        notes.submit(serial, step)
        if (
            tag is not None
        ):  # after the serial is used up: who is killed in between leaves no tag to the next one's commit
            notes.try_tag(tag, serial)
        handle = store.commit(step, make_state(seed, serial, scale=scale), tag=tag, metrics={"serial": serial})
        notes.handed_over(serial, handle)
        last = serial, handle
        if rng.random() < 0.5:
            handle.wait()
    store.flush()


def begin(store: Store, notes: Notes, rng: random.Random) -> int:
    """Choose what the first commit follows; return its step."""
    try:
        if rng.random() < 0.7:
            newest = store.restore("latest").commit
            notes.restored(serial_of(newest), newest.id)
        else:
            newest = store.at("latest").commit
            notes.follow(serial_of(newest))
    except NotFound:
        notes.follow(None)
        return 0
    return newest.step


def _go_back(store: Store, notes: Notes, rng: random.Random) -> int:
    store.flush()
    try:
        there = store.restore(f"latest~{rng.randrange(3)}").commit
    except NotFound:
        there = store.restore("latest").commit
    notes.restored(serial_of(there), there.id)
    return there.step
