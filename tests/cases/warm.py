"""Child processes that start at once: forked from one process that has torch and the kit imported already.

A child runs a piece of code as a script of its own would: it ends through the ordinary end of the interpreter, exit
handlers included, and its standard output is a pipe to the test.
"""

from __future__ import annotations

import atexit
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).parents[2]
MAX_MESSAGE = 1 << 16

PRELUDE = """
import os, random, sys, threading, time
from pathlib import Path
import torch
from torch import nn
import deltastore
from tests.cases.kit import *
"""
"""What every child has imported."""


class Child:
    """A running child, with what tests use of :class:`subprocess.Popen`."""

    def __init__(self, pid: int, output: TextIO, server: Server) -> None:
        self.pid = pid
        self.output = output
        self._server = server
        self._status: int | None = None

    def wait(self, timeout: float = 120.0) -> int:
        """Return the exit status; a child that does not end in time is killed and fails the test."""
        if self._status is None:
            status = self._server.wait(self.pid, timeout)
            if status is None:
                self.kill()
                raise AssertionError(f"child {self.pid} did not end within {timeout} s")
            self._status = status
            self.output.close()
        return self._status

    def kill(self) -> None:
        """Send SIGKILL and wait for the end."""
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)  # not reaped before wait, so that the id is still this child's
            self.wait()

    def line(self) -> str:
        """Return the next line that the child prints."""
        return self.output.readline().strip()


class Server:
    """The process that children are forked from."""

    def __init__(self) -> None:
        self._here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-c", f"from tests.cases.warm import serve; serve({there.fileno()})"]
        self._process = subprocess.Popen(command, cwd=ROOT, pass_fds=[there.fileno()], stdin=subprocess.DEVNULL)
        there.close()
        self._children: set[int] = set()
        atexit.register(self.stop)

    def start(self, code: str) -> Child:
        """Fork a child that runs the code."""
        reading, writing = os.pipe()
        try:
            socket.send_fds(self._here, [b"run " + textwrap.dedent(code).encode()], [writing])
        finally:
            os.close(writing)
        child = Child(int(self._answer(60.0) or 0), os.fdopen(reading), self)
        self._children.add(child.pid)
        return child

    def wait(self, pid: int, timeout: float) -> int | None:
        """Return the exit status of a child, None when the time is over."""
        self._here.send(f"wait {pid} {timeout}".encode())
        answer = self._answer(timeout + 60.0)
        if answer == "running":
            return None
        self._children.discard(pid)
        return int(answer)

    def _answer(self, timeout: float) -> str:
        ready, _, _ = select.select([self._here], [], [], timeout)
        assert ready, "the process that children are forked from does not answer"
        answer = self._here.recv(MAX_MESSAGE).decode()
        assert answer, "the process that children are forked from is gone"
        return answer

    def stop(self) -> None:
        """End the server and whatever children are left."""
        for pid in self._children:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._here.close()
        self._process.wait(60)


def child(code: str) -> Child:
    """Run code in a process of its own that has :data:`PRELUDE` imported."""
    return _server().start(code)


@cache
def _server() -> Server:
    return Server()


def serve(descriptor: int) -> None:
    """Fork children until the test run ends; the one that returns from here is a child."""
    requests = socket.socket(fileno=descriptor)
    scope: dict[str, object] = {"__name__": "__main__"}
    exec(PRELUDE, scope)
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, MAX_MESSAGE, 1)
        if not message:
            return
        name, _, rest = message.partition(b" ")
        if name == b"wait":
            pid, timeout = rest.split()
            requests.send(_wait(int(pid), float(timeout)).encode())
            continue
        pid_of_child = os.fork()
        if pid_of_child == 0:
            requests.close()
            os.dup2(descriptors[0], 1)
            os.close(descriptors[0])
            # From here on an ordinary script: what it raises is printed, exit handlers run, the status tells.
            exec(compile(rest, "<child>", "exec"), scope)
            return
        os.close(descriptors[0])
        requests.send(str(pid_of_child).encode())


def _wait(pid: int, timeout: float) -> str:
    descriptor = os.pidfd_open(pid)
    try:
        ended, _, _ = select.select([descriptor], [], [], timeout)
    finally:
        os.close(descriptor)
    if not ended:
        return "running"
    return str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
