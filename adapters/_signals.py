"""SIGTERM during training: remembered at once, answered when the state is whole (design 6)."""

from __future__ import annotations

import inspect
import logging
import os
import signal
import threading
from types import FrameType
from typing import Any

log = logging.getLogger("deltastore")


class TerminationGate:
    """A SIGTERM handler that only sets a flag; a handler that reads live tensors would read a half-stepped model.

    The first signal makes :attr:`pending` true; whoever owns the gate takes the last commit and calls :meth:`deliver`,
    which runs the handler that was there before (by default the process ends). A second signal goes straight to that
    handler, and so does one in a forked child.
    """

    def __init__(self) -> None:
        self.pending = False
        self._seen = False
        self._installed = False
        self._retired = False
        self._earlier: Any = None
        self._pid = 0

    def install(self) -> None:
        """Take SIGTERM over, in front of the handler that is there; once, and in the main thread only."""
        if self._installed or self._retired:
            return
        self._installed = True
        if threading.current_thread() is not threading.main_thread():
            log.info("SIGTERM is not watched: handlers can be set in the main thread only")
            self._retired = True
            return
        earlier = signal.getsignal(signal.SIGTERM)
        if earlier is None:
            log.info("SIGTERM is not watched: its handler was not set from Python and could not be called")
            self._retired = True
            return
        self._earlier, self._pid = earlier, os.getpid()
        signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._seen or self._retired or os.getpid() != self._pid:
            self._pass_on(number, frame)
            return
        self._seen = self.pending = True

    def deliver(self) -> None:
        """Run the earlier handler for the signal that is pending; by default this ends the process."""
        self.pending = False
        if threading.current_thread() is threading.main_thread():
            self._pass_on(signal.SIGTERM, inspect.currentframe())
        else:
            os.kill(os.getpid(), signal.SIGTERM)  # a second one: it goes straight through, in the main thread

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if callable(self._earlier):
            self._earlier(number, frame)
        elif self._earlier == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def uninstall(self) -> None:
        """Give SIGTERM back; where another handler stands in front of this one, let everything pass instead."""
        watched = self._installed and not self._retired and os.getpid() == self._pid
        self._retired = True
        is_main = threading.current_thread() is threading.main_thread()
        if watched and is_main and signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._earlier)
