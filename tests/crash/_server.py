"""A warm process that forks writers and kills them: importing torch costs 1.7 s, a fork 10 ms.

Reads one order as a line of JSON, answers with one line. Run as ``python -m tests.crash._server``. It never starts a
thread, so that its children are as clean as a new process.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import random
import select
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from deltastore.config import Retention, WriterOptions
from deltastore.handle import Handle
from deltastore.store import Store
from deltastore.testing.faulty import FaultyOps
from deltastore.tiers.local import LocalTier
from tests.crash._workload import run

WAIT_SECONDS = 60.0


class PipeNotes:
    """Tells what happens through a pipe, each acknowledgement from the thread that waits for it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._waiting: queue.SimpleQueue[tuple[int, Handle] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._acknowledge)
        self._thread.start()

    def tell(self, *note: Any) -> None:
        """Write one line: less than a pipe takes at once, so a kill cannot cut it."""
        os.write(self._fd, json.dumps(note).encode() + b"\n")

    def submit(self, serial: int, step: int) -> None:
        self.tell("submit", serial, step)

    def handed_over(self, serial: int, handle: Handle) -> None:
        self._waiting.put((serial, handle))

    def follow(self, serial: int | None) -> None:
        self.tell("follow", serial)

    def restored(self, serial: int, commit: str) -> None:
        self.tell("restored", serial, commit)

    def try_tag(self, name: str, serial: int) -> None:
        self.tell("try_tag", name, serial)

    def tagged(self, name: str, serial: int) -> None:
        self.tell("tagged", name, serial)

    def finish(self) -> None:
        """Wait until every acknowledgement was told."""
        self._waiting.put(None)
        self._thread.join()

    def _acknowledge(self) -> None:
        while (item := self._waiting.get()) is not None:
            self.tell("ack", item[0], item[1].wait().id)


class Ops(FaultyOps):
    """The real system, with packs written in many calls."""

    IOV_MAX = 2


class KillAt:
    """A plan: die when a point is reached for the n-th time for one kind of file; or only count."""

    def __init__(self, point: str, kind: str, number: int) -> None:
        self.wanted = point, kind, number
        self.counts: Counter[tuple[str, str]] = Counter()
        self._guard = threading.Lock()

    def __call__(self, point: str, name: str, count: int) -> Exception | None:
        with self._guard:
            kind = kind_of(name)
            self.counts[point, kind] += 1
            if (point, kind, self.counts[point, kind]) == self.wanted:
                os.kill(os.getpid(), signal.SIGKILL)
        return None


def kind_of(path: str) -> str:
    """Return what a path is in a store: "packs", "tmp packs", "root", ..."""
    _, _, inside = path.partition("/store")
    names = inside.strip("/").split("/")
    if names[0] == "tmp" and len(names) == 3:
        return "tmp " + names[2].partition("-")[2].split(".")[0] if "-" in names[2] else f"tmp {names[2]}"
    return names[0] or ("root" if path.endswith("/store") else "outside")


def write(order: dict[str, Any], fd: int) -> None:
    """Do what an order says, in a child."""
    plan = KillAt(*(order["point"] or ("", "", 0)))
    notes = PipeNotes(fd)
    retention = Retention(*order["retention"]) if order["retention"] else None
    options = WriterOptions(give_up_seconds=0.0)
    with Store(LocalTier(order["root"], Ops(plan)), retention=retention, options=options) as store:
        run(
            store,
            notes,
            random.Random(order["rng"]),
            seed=order["seed"],
            first_serial=order["first_serial"],
            commits=order["commits"],
            scale=order["scale"],
        )
        notes.finish()
        notes.tell("done")
    if order["count"]:
        for (point, kind), number in plan.counts.items():
            notes.tell("reached", point, kind, number)
    notes.tell("closed")


def in_child(work: Callable[[int], None]) -> tuple[int, int]:
    """Fork; return the child's pid and the end of a pipe that it writes to."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    status = 1
    try:
        os.close(reading)
        work(writing)
        status = 0
    finally:
        os._exit(status)


def obey(order: dict[str, Any]) -> dict[str, Any]:
    """Run one writer; kill it some time after so many acknowledgements if the order says so."""
    pid, fd = in_child(lambda writing: write(order, writing))
    started = time.monotonic()
    end = started + WAIT_SECONDS
    text = b""
    acks_left = None if order["after_acks"] is None else order["after_acks"]
    if acks_left == 0:
        end = started + order["delay"]
    while True:
        ready, _, _ = select.select([fd], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            os.kill(pid, signal.SIGKILL)
            end = time.monotonic() + WAIT_SECONDS
            continue
        data = os.read(fd, 65536)
        if not data:
            break
        text += data
        if acks_left and text.count(b'["ack"') >= acks_left:
            acks_left = 0
            end = time.monotonic() + order["delay"]
    os.close(fd)
    _, status = os.waitpid(pid, 0)
    return {
        "notes": [json.loads(line) for line in text.splitlines()],
        "killed": os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL,
        "status": os.waitstatus_to_exitcode(status),
        "seconds": time.monotonic() - started,
    }


def main() -> None:
    """Obey orders until the input ends."""
    importlib.import_module("deltastore.staging")  # loaded with the first commit otherwise
    for line in sys.stdin:
        print(json.dumps(obey(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
