"""The mover: gives the commits of a local store to another tier while it is written (spec 10.8).

``python -m deltastore.mover`` is started by a store that was opened with ``tiers``: a process of its own, so that the
training's interpreter is left alone. It outlives a training that is killed until everything is pushed. It may die at
any moment and be started again, and two of them do no harm: what it does is :func:`deltastore.history.push.push`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import secrets
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from deltastore.errors import Conflict, DeltaStoreError, NotFound
from deltastore.history.flush import PACK_BYTES
from deltastore.history.push import push
from deltastore.ondisk.names import PACKS, parse_pack_name
from deltastore.tiers.base import FileInfo, Tier
from deltastore.urls import is_remote, open_tier

log = logging.getLogger("deltastore")

FLUSH = "flush"
"""Push now; a number behind it is told with the report of the push that begins after it."""
END = "end"
"""Push what is there, then end."""
STOP = "stop"
"""End at once."""

STDOUT = 1
POLL_SECONDS = 0.25
LISTING_SHARE = 0.05
"""Of its time at most, a mover that has nothing to do lists packs."""
LAG_SECONDS = 60.0
"""How long commits wait for more of them, to be merged into one pack, where the user sets no limit."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 30.0
"""Between attempts on a tier that cannot be reached."""
END_SECONDS = 24 * 3600.0
"""How long an ended training's commits are tried to be pushed."""

Report = Callable[[dict[str, Any]], None]


class Mover:
    """Pushes from one tier to another until it is told to end.

    Parameters
    ----------
    report : callable
        Called after each attempt with ``commits``, ids that are known to be there since the last report, whole chains
        only; ``broken``, what is wrong with each that cannot be moved; ``answered``, the last number that came with a
        flush before the attempt, None where that failed; ``error``, None or what went wrong; ``is_final`` says that no
        further attempt can help.
    lag_seconds : float
        How old a commit may become before it is pushed.
    pack_bytes : int
        As soon as so much waits, it is pushed.
    """

    def __init__(
        self,
        source: Tier,
        target: Tier,
        report: Report,
        *,
        lag_seconds: float = LAG_SECONDS,
        pack_bytes: int = PACK_BYTES,
    ) -> None:
        self.commands: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._source = source
        self._target = target
        self._report = report
        self._lag_seconds = lag_seconds
        self._pack_bytes = pack_bytes
        self._asked = 0
        self._told: set[str] = set()
        self._pushed: set[str] = set()
        self._waiting_since: float | None = None
        self._listing_seconds = 0.0

    def run(self) -> None:
        """Push until the end is asked for; a damaged place is reported, and does not stop it."""
        is_wanted, ends_at, pause = True, None, FIRST_PAUSE_SECONDS  # at first: what an earlier writer left
        while True:
            command = self._command(0.0 if is_wanted else max(POLL_SECONDS, self._listing_seconds / LISTING_SHARE))
            if command == STOP:
                return
            if command == END:
                ends_at = time.monotonic() + END_SECONDS
            is_wanted = is_wanted or command is not None or self._is_due()
            if not is_wanted:
                continue
            done = self._push()
            if done is None or (ends_at is not None and (done or time.monotonic() > ends_at)):
                return
            is_wanted = not done
            pause = FIRST_PAUSE_SECONDS if done else min(2 * pause, LONGEST_PAUSE_SECONDS)
            if not done:
                self._wait(pause)

    def _command(self, seconds: float) -> str | None:
        try:
            command = self.commands.get(timeout=seconds) if seconds else self.commands.get_nowait()
        except queue.Empty:
            return None
        word, _, number = command.partition(" ")
        self._asked = max(self._asked, int(number or 0))
        return word

    def _wait(self, seconds: float) -> None:
        """Wait, but not after somebody asked for something."""
        command = self._command(seconds)
        if command is not None:
            self.commands.put(command)

    def _is_due(self) -> bool:
        """Return whether enough commits wait, or one for long enough."""
        waiting = [info for info in self._packs() if info.name not in self._pushed]
        if not waiting:
            self._waiting_since = None
            return False
        now = time.monotonic()
        self._waiting_since = now if self._waiting_since is None else self._waiting_since
        is_old = now - self._waiting_since >= self._lag_seconds
        return is_old or sum(info.size for info in waiting) >= self._pack_bytes

    def _packs(self) -> list[FileInfo]:
        begun = time.monotonic()
        try:
            return [info for info in self._source.list(PACKS) if parse_pack_name(info.name)]
        except DeltaStoreError as error:
            log.debug("the packs that wait cannot be listed: %s", error)
            return []
        finally:
            self._listing_seconds = time.monotonic() - begun

    def _has_store(self) -> bool:
        try:
            return self._source.exists()
        except DeltaStoreError:
            return True

    def _push(self) -> bool | None:
        """Push everything; return whether that succeeded, None if it never will."""
        asked, before = self._asked, {info.name for info in self._packs()}
        try:
            found = push(self._source, self._target, secrets.token_hex(8), pack_bytes=self._pack_bytes)
        except Conflict as error:
            self._report(failed(str(error), is_final=True))
            return None
        except DeltaStoreError as error:
            if isinstance(error, NotFound):
                if not self._has_store():
                    return True  # nothing is committed yet, or the machine lost its disk
                log.debug("retention was faster: %s", error)
                return False
            self._report(failed(str(error)))
            return False
        self._pushed, self._waiting_since = before, None
        self._report(
            {
                "commits": sorted(found.present - self._told),
                "broken": dict(found.broken),
                "answered": asked,
                "error": None,
                "is_final": False,
            }
        )
        self._told |= found.present
        return True


def failed(error: str, *, is_final: bool = False) -> dict[str, Any]:
    """Return the report of an attempt that failed."""
    return {"commits": [], "broken": {}, "answered": None, "error": error, "is_final": is_final}


def main() -> None:
    """Read what to do from the standard input, a line of JSON and then commands; its end is the training's."""
    order = json.loads(sys.stdin.readline())
    source, target = (
        open_tier(url, order["storage_options"] if is_remote(url) else None)
        for url in (order["source"], order["target"])
    )

    def report(facts: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the training may be gone
            os.write(STDOUT, json.dumps(facts).encode() + b"\n")

    mover = Mover(source, target, report, lag_seconds=order["lag_seconds"], pack_bytes=order["pack_bytes"])

    def listen() -> None:
        for line in sys.stdin:
            mover.commands.put(line.strip())
        mover.commands.put(END)

    threading.Thread(target=listen, daemon=True).start()
    mover.run()


if __name__ == "__main__":
    main()
