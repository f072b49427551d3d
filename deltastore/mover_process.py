"""A mover in a process of its own, as the store that started it sees it."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

log = logging.getLogger("deltastore")


class MoverProcess:
    """``python -m deltastore.mover``: lines of commands go in, lines of reports come out.

    Use it as a context manager: its end waits for that of the process.

    Parameters
    ----------
    order : mapping
        What it is to do, as JSON: :func:`deltastore.mover.main`.
    """

    def __init__(self, order: Mapping[str, Any]) -> None:
        # A session of its own: neither Ctrl-C nor the end of a job's process group takes it before all is pushed.
        # -P: nothing that lies in the working folder is imported. Without buffers: a fork while a thread writes leaves
        # the child no lock that nobody gives back.
        package = str(Path(__file__).resolve().parents[1])
        paths = [package, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "deltastore.mover"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        _started.add(self)
        self.send(json.dumps(order))

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """How it ended."""
        return self._process.returncode

    def reports(self) -> Iterator[dict[str, Any]]:
        """Yield what it tells, until it ends."""
        if self._process.stdout is not None:
            with io.BufferedReader(self._process.stdout) as lines:  # type: ignore[type-var]
                for line in lines:
                    yield json.loads(line)

    def send(self, line: str) -> None:
        """Write a line to it; it may have ended."""
        if self._process.stdin is not None:
            with _quietly():
                self._process.stdin.write(line.encode() + b"\n")

    def close(self) -> None:
        """Let it know that no more comes: it pushes what there is, then ends."""
        if self._process.stdin is not None:
            with _quietly():
                self._process.stdin.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()  # what was written to it may be lost with the process
        self._process.wait()


_started: weakref.WeakSet[MoverProcess] = weakref.WeakSet()


def _forget_in_child() -> None:
    """In a forked child: a mover waits for the end of its training, not for that of the training's workers."""
    for process in list(_started):
        process.close()


os.register_at_fork(after_in_child=_forget_in_child)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Let pass what the pipe of a process that has ended says."""
    try:
        yield
    except (OSError, ValueError) as error:
        log.debug("a mover has ended: %s", error)
