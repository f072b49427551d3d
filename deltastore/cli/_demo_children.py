"""The processes of the demo: started, followed line by line, and asked how they ended."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deltastore.errors import DeltaStoreError

_TAIL_CHARACTERS = 4000


@dataclass(frozen=True)
class Child:
    """A training process that has ended, and all that it reported."""

    code: int
    """As subprocess has it: the negative number of the signal that ended it."""
    events: list[dict[str, Any]]

    @property
    def losses(self) -> dict[int, float]:
        """The loss of each step, with all its bits."""
        return {event["step"]: float.fromhex(event["loss"]) for event in self.all("step")}

    def all(self, name: str) -> list[dict[str, Any]]:
        """Return the events of one kind."""
        return [event for event in self.events if event["event"] == name]

    def only(self, name: str) -> dict[str, Any]:
        """Return the one event of a kind."""
        (event,) = self.all(name)
        return event


def run_training(kind: str, arguments: list[str], show: Callable[[int], None]) -> Child:
    """Run one training process to its end.

    Parameters
    ----------
    kind : {"reference", "train"}
        Which module.
    show : callable
        Called with the number of steps done.

    Raises
    ------
    DeltaStoreError
        The process failed in another way than it was told to.
    """
    events: list[dict[str, Any]] = []
    command = [sys.executable, "-m", f"deltastore.cli._demo_{kind}", *arguments]
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            try:
                for line in process.stdout or ():
                    events.append(json.loads(line))
                    show(sum(event["event"] == "step" for event in events))
            except BaseException:
                process.kill()
                raise
        child = Child(process.returncode, events)
        if not child.all("end") and not child.all("kill"):
            raise _failed(kind, child.code, errors)
    return child


def run_check(arguments: list[str]) -> dict[str, Any]:
    """Run the process that reads and exports, and return what it found."""
    command = [sys.executable, "-m", "deltastore.cli._demo_check", *arguments]
    with tempfile.TemporaryFile("w+") as errors:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, text=True, check=False)
        if done.returncode != 0:
            raise _failed("check", done.returncode, errors)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _failed(kind: str, code: int, errors: Any) -> DeltaStoreError:
    errors.seek(0)
    tail = errors.read().strip()[-_TAIL_CHARACTERS:]
    last = tail.splitlines()[-1].strip() if tail else "it said nothing"
    return DeltaStoreError(f"the process {kind!r} of the demo ended with code {code}: {last}", details=tail)
