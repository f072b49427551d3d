"""Work in threads: order, errors, nesting, forks, and the end of the interpreter."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deltastore import parallel
from deltastore.parallel import run_ahead, run_all, run_reads

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(params=[1, 4], ids=["one core", "four cores"], autouse=True)
def _cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    pools: dict[tuple[int, int], ThreadPoolExecutor] = {}  # of their own: the other tests keep theirs
    monkeypatch.setattr(parallel, "_pools", pools)
    monkeypatch.setattr(parallel, "threads", lambda: request.param)
    yield
    for pool in pools.values():
        pool.shutdown()


def test_the_number_of_threads_is_that_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the real number, and the real pools, of which none is used here
    assert 1 <= parallel.threads() <= parallel.MAX_THREADS
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(100)))
    assert parallel.threads() == parallel.MAX_THREADS


@pytest.mark.parametrize("run", [run_all, run_ahead, run_reads])
@pytest.mark.parametrize("count", [0, 1, 2, 100])
def test_results_come_in_order(run: object, count: int) -> None:
    assert list(run(lambda n: n * n, range(count))) == [n * n for n in range(count)]  # type: ignore[operator]


def test_the_order_does_not_depend_on_who_is_faster() -> None:
    """The first item ends last: it waits for the second, where there is a second thread."""
    if parallel.threads() < 2:
        return
    second = threading.Event()

    def work(number: int) -> int:
        if number == 0:
            assert second.wait(30)
        second.set()
        return number

    assert run_all(work, range(2)) == [0, 1]
    second.clear()
    assert list(run_reads(work, range(2))) == [0, 1]


class Wrong(Exception):
    pass


@pytest.mark.parametrize("run", [run_all, run_ahead, run_reads])
def test_the_first_error_in_order_is_raised(run: object) -> None:
    def work(number: int) -> int:
        if number in (3, 5):
            raise Wrong(number)
        return number

    with pytest.raises(Wrong, match="3"):
        list(run(work, range(10)))  # type: ignore[operator]
    assert list(run(abs, range(10))) == list(range(10))  # type: ignore[operator]


@pytest.mark.parametrize("run", [run_ahead, run_reads])
def test_only_so_much_is_done_ahead(run: object) -> None:
    started: list[int] = []

    def work(number: int) -> int:
        started.append(number)
        return number

    results = run(work, range(1000))  # type: ignore[operator]
    assert started == []
    assert next(results) == 0
    results.close()
    assert len(started) <= 2 * parallel.READ_THREADS + 2


def test_reads_within_work() -> None:
    def work(number: int) -> int:
        return sum(run_reads(lambda n: n + number, range(20)))

    expected = [sum(n + number for n in range(20)) for number in range(16)]
    assert run_all(work, range(16)) == expected
    assert list(run_ahead(work, range(16))) == expected


def test_callers_of_several_threads() -> None:
    found: list[list[int]] = []
    callers = [threading.Thread(target=lambda: found.append(run_all(lambda n: -n, range(50)))) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert found == [[-n for n in range(50)]] * 4


AT_FORK = """
import os, sys, threading
from deltastore import parallel
parallel.threads = lambda: 4
assert parallel.run_all(abs, range(50)) == list(range(50))
held = threading.Event(); go = threading.Event()
def hold():
    with parallel._lock:
        held.set(); go.wait(30)
thread = threading.Thread(target=hold); thread.start(); held.wait()
child = os.fork()
if child == 0:
    assert parallel.run_all(abs, range(50)) == list(range(50))
    assert list(parallel.run_reads(abs, range(50))) == list(range(50))
    os._exit(7)
go.set(); thread.join()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert parallel.run_all(abs, range(50)) == list(range(50))
print("done")
"""

AT_END = """
import atexit, threading
from deltastore import parallel
parallel.threads = lambda: 4
if {warm}:
    parallel.run_all(abs, range(9))
def late():
    assert parallel.run_all(abs, range(50)) == list(range(50))
    assert list(parallel.run_ahead(abs, range(50))) == list(range(50))
    assert list(parallel.run_reads(abs, range(50))) == list(range(50))
    print("done")
atexit.register(late)
"""


@pytest.mark.parametrize(
    "program", [AT_FORK, AT_END.format(warm=True), AT_END.format(warm=False)], ids=["fork", "end, warm", "end, cold"]
)
def test_after_a_fork_and_at_the_end(program: str) -> None:
    if parallel.threads() == 1:
        return  # the program sets its own number
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
