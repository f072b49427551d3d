"""The test's end of the warm server: orders a writer, follows what it says, checks what it left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from deltastore.config import Retention
from deltastore.store import Store
from deltastore.tiers.local import LocalTier
from deltastore.tiers.lock import parse_owner
from tests.crash._journal import Journal, check, serial_of
from tests.crash._states import make_state

ROOT = Path(__file__).parents[2]


@dataclass
class Outcome:
    """How a writer ended."""

    killed: bool
    status: int
    acks: int
    done: bool
    """It had reported its last acknowledgement."""
    seconds: float
    reached: dict[tuple[str, str], int]


class Server:
    """A warm server, from ``with`` on."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash._server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(120)
        self._process.stdout.close()

    def write(
        self,
        root: Path,
        journal: Journal,
        rng: int,
        *,
        commits: int,
        retention: Retention | None = None,
        after_acks: int | None = None,
        delay: float = 0.0,
        point: tuple[str, str, int] | None = None,
        count: bool = False,
    ) -> Outcome:
        """Let a writer work until it ends or is killed, and note in the journal what it was promised.

        `after_acks` and `delay` say when it is killed: some seconds after so many acknowledgements (0: after the
        start). `point`: it kills itself there.
        """
        order = {
            "root": str(root),
            "seed": journal.seed,
            "scale": journal.scale,
            "first_serial": journal.next_serial,
            "rng": rng,
            "commits": commits,
            "retention": None if retention is None else [retention.keep_last, retention.keep_every],
            "after_acks": after_acks,
            "delay": delay,
            "point": point,
            "count": count,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        reached = {}
        names = [note[0] for note in answer["notes"]]
        for name, *facts in answer["notes"]:
            if name == "reached":
                reached[facts[0], facts[1]] = facts[2]
            elif name not in ("done", "closed"):
                getattr(journal, name)(*facts)
        assert answer["killed"] or (answer["status"], names[-1:]) == (0, ["closed"]), answer
        return Outcome(
            answer["killed"], answer["status"], names.count("ack"), "done" in names, answer["seconds"], reached
        )


def go_on(root: Path, journal: Journal, retention: Retention | None = None) -> None:
    """Be the next writer: clean up, restore, commit, and find all of it in order."""
    options: dict[str, Any] = {} if retention is None else {"retention": retention}
    serial = journal.next_serial
    with Store(LocalTier(root), **options) as store:
        step = 0
        if store.commits():
            found = store.restore("latest").commit
            journal.restored(serial_of(found), found.id)
            step = found.step + 1
        else:
            journal.follow(None)
        journal.submit(serial, step)
        state = make_state(journal.seed, serial, scale=journal.scale)
        journal.ack(serial, store.commit(step, state, metrics={"serial": serial}).wait().id)
        assert leftovers(root) <= 1  # our own folder
    assert leftovers(root) == 0
    check(LocalTier(root), journal, retention)


def leftovers(root: Path) -> int:
    """Count the sessions below tmp; those killed before their owner was on record are left for a day or a minute."""
    sessions = 0
    for folder in (root / "tmp").iterdir():
        owner = folder / "OWNER"
        sessions += owner.exists() and parse_owner(owner.read_bytes()) is not None
    return sessions
