"""A warm interpreter for tests that end their process: importing torch once for all of them."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Each script runs in a fork that has not used torch yet, so that no thread is lost, and ends as a program ends: with
# its traceback, its exit handlers and its status.
SERVER = """
import json, os, sys
import torch._dynamo, deltastore.adapters.pytorch, tests.adapters.training
program = None
for line in sys.stdin:
    request = json.loads(line)
    pid = os.fork()
    if pid == 0:
        output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        program = compile(request["code"], "script", "exec")
        break
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
if program is not None:
    exec(program, {"__name__": "__main__"})
"""


class Ended(NamedTuple):
    """How a script ended."""

    status: int
    """Exit status; minus the signal that ended it."""
    output: str


@pytest.fixture(scope="session")
def _server() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        yield server
        assert server.stdin is not None
        server.stdin.close()


@pytest.fixture
def run_script(_server: subprocess.Popen[str], tmp_path: Path) -> Callable[[str], Ended]:
    """Run a script in a process of its own; `root` in it is a folder for a store."""

    def run(code: str) -> Ended:
        assert _server.stdin is not None
        assert _server.stdout is not None
        output = tmp_path / "output"
        program = f"root = {str(tmp_path / 'store')!r}\n{textwrap.dedent(code)}"
        print(json.dumps({"code": program, "output": str(output)}), file=_server.stdin, flush=True)
        status = int(_server.stdout.readline())
        return Ended(status, output.read_text())

    return run
