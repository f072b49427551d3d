"""How a run ends: cleanly, by an exception, by SIGTERM, in a forked child. The store keeps what it promised."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import deltastore
from deltastore.adapters.pytorch import Checkpointer
from tests.adapters.conftest import Ended
from tests.adapters.training import losses_of, make_run

RunScript = Callable[[str], Ended]

PREAMBLE = """
import os, signal, sys, threading
import deltastore
from deltastore.adapters.pytorch import Checkpointer
from tests.adapters.training import losses_of, make_run
run = make_run()
def terminate(): os.kill(os.getpid(), signal.SIGTERM)
"""


def script(body: str) -> str:
    return PREAMBLE + body


def steps_in(folder: Path) -> list[int]:
    with deltastore.open(folder / "store", "r") as store:
        assert store.verify(deep=True).ok
        return [commit.step for commit in store.commits()]


def test_sigterm_takes_the_last_commit_and_ends_the_process(run_script: RunScript, tmp_path: Path) -> None:
    body = """
with Checkpointer(root, interval=100, **run.objects) as checkpointer:
    for step in range(1, 10):
        run.step(step)
        if step == 4:
            terminate()
            print("still here")
        checkpointer.step(step)
print("never")
"""
    ended = run_script(script(body))
    assert ended.status == -signal.SIGTERM
    assert "still here" in ended.output
    assert "never" not in ended.output
    assert steps_in(tmp_path) == [4]
    assert [line for line in ended.output.splitlines() if "SIGTERM" in line] == [
        "SIGTERM: writing step 4 as the last commit",
        "SIGTERM: step 4 is durable",
    ]
    resumed = make_run(seed=5)
    with Checkpointer(tmp_path / "store", **resumed.objects) as checkpointer:
        start = checkpointer.restore()
        assert losses_of(resumed, range(start, 8)) == losses_of(make_run(), range(1, 8))[start - 1 :]


def test_sigterm_after_a_step_is_answered_at_the_close(run_script: RunScript, tmp_path: Path) -> None:
    body = """
checkpointer = Checkpointer(root, interval=4, **run.objects)
losses_of(run, range(7), checkpointer)
terminate()
checkpointer.close()
print("never")
"""
    ended = run_script(script(body))
    assert ended.status == -signal.SIGTERM
    assert "never" not in ended.output
    assert "SIGTERM: writing step 6 as the last commit\nSIGTERM: step 6 is durable" in ended.output
    assert steps_in(tmp_path) == [0, 4, 6]


def test_a_last_commit_that_was_not_written_is_not_called_durable(run_script: RunScript, tmp_path: Path) -> None:
    body = """
import time
store = deltastore.open(root)
checkpointer = Checkpointer(store, **run.objects)
checkpointer.step(0).wait()
stage = store._tier.stage
def slow(*args):
    terminate()  # the second one, from the thread that writes
    time.sleep(60)
store._tier.stage = slow
terminate()
checkpointer.step(1)
"""
    ended = run_script(script(body))
    assert ended.status == -signal.SIGTERM
    assert "SIGTERM: writing step 1 as the last commit" in ended.output
    assert "durable" not in ended.output
    assert steps_in(tmp_path) == [0]


def test_the_earlier_handler_runs_after_the_last_commit(run_script: RunScript, tmp_path: Path) -> None:
    body = """
def mine(number, frame):
    with deltastore.open(root, "r") as store:
        print("mine", number == signal.SIGTERM, store.commits()[-1].step)
    sys.exit(7)
signal.signal(signal.SIGTERM, mine)
with Checkpointer(root, **run.objects) as checkpointer:
    checkpointer.step(0)
    terminate()
    checkpointer.step(1)
"""
    ended = run_script(script(body))
    assert (ended.status, ended.output.splitlines()[-1]) == (7, "mine True 1")


def test_a_second_sigterm_goes_straight_through(run_script: RunScript, tmp_path: Path) -> None:
    body = """
seen = []
signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
with Checkpointer(root, interval=100, **run.objects) as checkpointer:
    checkpointer.step(0)
    terminate()
    assert not seen
    terminate()
    assert len(seen) == 1
    checkpointer.step(1)
    assert len(seen) == 2
    terminate()
    assert len(seen) == 3
    checkpointer.step(2)
assert len(seen) == 3
terminate()
assert len(seen) == 4
signal.signal(signal.SIGTERM, signal.SIG_DFL)
terminate()
"""
    ended = run_script(script(body))
    assert ended.status == -signal.SIGTERM, ended.output
    assert steps_in(tmp_path) == [0, 1, 2]  # 2 was left out, and is the last commit of the clean exit


def test_handlers_come_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    run = make_run()
    with Checkpointer("memory://handlers", **run.objects) as checkpointer:
        assert signal.getsignal(signal.SIGTERM) != before
        checkpointer.step(0)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_handler_that_came_later_stays(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    run = make_run()
    seen: list[int] = []
    try:
        with Checkpointer("memory://later", **run.objects):
            signal.signal(signal.SIGTERM, lambda number, _frame: seen.append(number))
        signal.raise_signal(signal.SIGTERM)
        assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_in_another_thread_sigterm_is_not_watched(run_script: RunScript, tmp_path: Path) -> None:
    body = """
import logging
logging.basicConfig(level=logging.INFO)
def train():
    with Checkpointer(root, **run.objects) as checkpointer:
        losses_of(run, range(2), checkpointer)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
thread = threading.Thread(target=train)
thread.start()
thread.join()
"""
    ended = run_script(script(body))
    assert ended.status == 0, ended.output
    assert "main thread only" in ended.output
    assert steps_in(tmp_path) == [0, 1]


def test_steps_in_another_thread_answer_too(run_script: RunScript, tmp_path: Path) -> None:
    body = """
arrived, stepped = threading.Event(), threading.Event()
def train(checkpointer):
    checkpointer.step(0)
    stepped.set()
    arrived.wait()
    checkpointer.step(1)
    threading.Event().wait()
with Checkpointer(root, interval=100, **run.objects) as checkpointer:
    threading.Thread(target=train, args=(checkpointer,), daemon=True).start()
    stepped.wait()
    terminate()
    arrived.set()
    while True:
        signal.pause()
"""
    assert run_script(script(body)).status == -signal.SIGTERM
    assert steps_in(tmp_path) == [0, 1]


def test_an_exception_drains_the_queue_and_reads_no_tensor(run_script: RunScript, tmp_path: Path) -> None:
    body = """
with Checkpointer(root, interval=3, **run.objects) as checkpointer:
    losses_of(run, range(5), checkpointer)
    checkpointer._capture.take = None  # whoever asked for the state now would fail
    raise ZeroDivisionError("the user's own")
"""
    ended = run_script(script(body))
    assert ended.status == 1
    assert ended.output.rstrip().endswith("ZeroDivisionError: the user's own")
    assert ended.output.count("Traceback") == 1
    assert steps_in(tmp_path) == [0, 3]


def test_an_exception_is_not_hidden_by_a_failure_of_the_background(run_script: RunScript, tmp_path: Path) -> None:
    body = """
import errno
from deltastore.errors import Backend
with Checkpointer(root, **run.objects) as checkpointer:
    checkpointer.step(0).wait()
    def stage(*args):
        raise Backend("the disk is gone", errno=errno.EACCES)
    checkpointer.store._tier.stage = stage
    handle = checkpointer.step(1)
    raise ZeroDivisionError("the user's own")
"""
    ended = run_script(script(body))
    assert ended.status == 1
    assert ended.output.rstrip().endswith("ZeroDivisionError: the user's own")
    assert "the disk is gone" in ended.output


def test_sigterm_and_an_exception_show_the_exception_and_end(run_script: RunScript, tmp_path: Path) -> None:
    body = """
with Checkpointer(root, **run.objects) as checkpointer:
    losses_of(run, range(2), checkpointer)
    terminate()
    raise ZeroDivisionError("the user's own")
"""
    ended = run_script(script(body))
    assert ended.status == -signal.SIGTERM
    assert "ZeroDivisionError: the user's own" in ended.output
    assert steps_in(tmp_path) == [0, 1]


def test_a_program_that_never_closes_loses_nothing(run_script: RunScript, tmp_path: Path) -> None:
    ended = run_script(script("losses_of(run, range(4), Checkpointer(root, **run.objects))"))
    assert ended.status == 0, ended.output
    assert steps_in(tmp_path) == [0, 1, 2, 3]


def test_forked_children_do_not_commit(run_script: RunScript, tmp_path: Path) -> None:
    body = """
from deltastore.errors import Conflict
with Checkpointer(root, interval=2, **run.objects) as checkpointer:
    losses_of(run, range(2), checkpointer)
    pid = os.fork()
    if pid == 0:
        for act in (lambda: checkpointer.step(9), checkpointer.restore, checkpointer.flush):
            try:
                act()
            except Conflict as error:
                assert "forked" in str(error)
            else:
                os._exit(3)
        sys.exit(0)  # leaves the with block: nothing is taken, waited for or unlocked
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    losses_of(run, range(2, 6), checkpointer)
"""
    ended = run_script(script(body))
    assert ended.status == 0, ended.output
    assert steps_in(tmp_path) == [0, 2, 4, 5]


def test_data_loader_workers_forked_while_committing(run_script: RunScript, tmp_path: Path) -> None:
    body = """
import multiprocessing, time
import torch
from torch.utils.data import DataLoader, Dataset
class Data(Dataset):
    def __len__(self): return 6
    def __getitem__(self, index):
        with deltastore.open(root, "r") as store:
            return store.at(0)["model", "embedding.weight"][...].sum() * 0 + index
with Checkpointer(root, **run.objects) as checkpointer:
    checkpointer.step(0).wait()
    step = 1
    for epoch in range(2):
        for item in DataLoader(Data(), batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=60):
            run.step(step)
            checkpointer.step(step)
            step += 1
    ready, started = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=lambda: (started.send(1), time.sleep(60)))
    child.start()
    ready.recv()  # CPython drops what arrives earlier
    child.terminate()  # the flag of the parent is not for the child
    child.join()
    assert child.exitcode == -signal.SIGTERM, child.exitcode
"""
    ended = run_script(script(body))
    assert ended.status == 0, ended.output
    assert steps_in(tmp_path) == list(range(13))


@pytest.mark.parametrize("how", ["with", "close"])
def test_a_clean_end_takes_what_was_left_out(tmp_path: Path, how: str) -> None:
    run = make_run()
    checkpointer = Checkpointer(tmp_path / "store", interval=4, **run.objects)
    if how == "with":
        with checkpointer:
            losses_of(run, range(7), checkpointer)
    else:
        losses_of(run, range(7), checkpointer)
        checkpointer.close()
    checkpointer.close()  # again: nothing
    assert steps_in(tmp_path) == [0, 4, 6]
    with deltastore.open(tmp_path / "store", "r") as store:
        assert store.at("latest")["extra", "losses"] == 7
