"""How a program ends decides nothing: what it committed is written, or it ends with an error that says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltastore.store import Store
from deltastore.testing.compare import assert_same
from deltastore.tiers.local import LocalTier
from tests.cases.warm import child
from tests.crash._states import make_state

SCALE = 30
"""States of some hundred kilobytes: the background is still busy when the script has come to its end."""

HEAD = f"""
os.dup2(os.open(ROOT + ".errors", os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
import errno
from deltastore.config import WriterOptions
from deltastore.store import Store
from deltastore.testing.faulty import FailAt, FaultyTier, no_faults
from deltastore.tiers.local import LocalTier
from tests.crash._states import make_state

def slow(point, name, count):  # nothing is written before the script has ended
    if point == "stage" and name.startswith("packs"):
        time.sleep(0.1)

def broken(point, name, count):
    slow(point, name, count)
    if point == "stage" and name.startswith("packs"):
        raise OSError(errno.ENOSPC, "No space left on device")

tier = FaultyTier(LocalTier(ROOT), slow)
store = Store(tier, options=WriterOptions(give_up_seconds=0.0, max_pending=4))

def commit(step):
    return store.commit(step, make_state(1, step, scale={SCALE}))
"""


def run(root: Path, script: str) -> tuple[int, str]:
    """Run a script to its end; return its exit code and what it said."""
    code = child(f"ROOT = {str(root)!r}\n{HEAD}{script}").wait()
    return code, Path(f"{root}.errors").read_text()


def steps(root: Path) -> list[int]:
    """Return the steps of a store, each read and found exact; another writer can take it at once."""
    with Store(LocalTier(root)) as store:
        found = [commit.step for commit in store.commits()]
        for step in found:
            assert_same(make_state(1, step, scale=SCALE), store.at(step).to_state_dict())
        assert store.verify(deep=True).ok
        if found:
            assert store.restore("latest").commit.step == found[-1]
    assert not any((root / "tmp").iterdir())
    return found


ENDS = {
    "it just ends": ("", 0, ""),
    "sys.exit": ("sys.exit(3)", 3, ""),
    "an exception": ("raise RuntimeError('the loss is NaN')", 1, "RuntimeError: the loss is NaN"),
    "an interrupt": ("raise KeyboardInterrupt", -2, "KeyboardInterrupt"),
    "an exception with another thread": (
        "threading.Thread(target=time.sleep, args=(0.5,)).start(); raise RuntimeError('x')",
        1,
        "RuntimeError: x",
    ),
    "an end in a with block": ("with store: sys.exit(3)", 3, ""),
    "an exception in a with block": ("with store: raise RuntimeError('the loss is NaN')", 1, "the loss is NaN"),
    "a store that is dropped": ("del store", 0, ""),
}


@pytest.mark.parametrize("how", ENDS)
def test_what_was_committed_is_written(tmp_path: Path, how: str) -> None:
    end, expected, said = ENDS[how]
    code, errors = run(tmp_path / "store", f"for step in range(3): commit(step)\n{end}\n")
    assert code == expected, errors
    assert said in errors
    assert said or not errors
    assert steps(tmp_path / "store") == [0, 1, 2]


FAILING = {
    "it just ends": "",
    "sys.exit": "sys.exit(0)",
    "sys.exit with a code": "sys.exit(3)",
    "an exception": "raise RuntimeError('the loss is NaN')",
    "a with block": "with store: pass",
    "a with block and an exception": "with store: raise RuntimeError('the loss is NaN')",
}


@pytest.mark.parametrize("how", FAILING)
def test_what_cannot_be_written_is_said(tmp_path: Path, how: str) -> None:
    script = f"commit(0).wait()\ntier.plan = broken\nfor step in (1, 2): commit(step)\n{FAILING[how]}\n"
    code, errors = run(tmp_path / "store", script)
    assert code > 0
    assert "No space left on device" in errors
    if "exception" in how:
        assert "RuntimeError: the loss is NaN" in errors
    assert steps(tmp_path / "store") == [0]


def test_what_was_told_before_is_not_said_again(tmp_path: Path) -> None:
    script = """
commit(0).wait()
tier.plan = broken
try:
    commit(1).wait()
except OSError:
    pass
tier.plan = slow
commit(2)
"""
    code, errors = run(tmp_path / "store", script)
    assert (code, "was lost" in errors) == (0, False), errors
    assert steps(tmp_path / "store") == [0, 2]


def test_a_conflict_that_was_told_before_is_no_failure(tmp_path: Path) -> None:
    """Whoever handled it, and has nothing pending, ends as it wants to."""
    script = """
from deltastore.errors import Conflict
from deltastore.history.session import Session
commit(0).wait()
os.unlink(f"{ROOT}/LOCK")
other = Session(LocalTier(ROOT), "00000000000000aa")
other.claim()
try:
    commit(1).wait()
except Conflict:
    other.close()
else:
    sys.exit("no conflict")
"""
    code, errors = run(tmp_path / "store", script)
    assert (code, "was lost" in errors) == (0, False), errors


CHILDREN = {
    "sys.exit": "sys.exit(0)",
    "an exception": "raise RuntimeError('in the child')",
    "os._exit": "os._exit(0)",
    "a with block": "\n    with store: sys.exit(0)",
}


@pytest.mark.parametrize("how", CHILDREN)
def test_a_forked_child_that_ends_does_nothing_to_what_its_parent_commits(tmp_path: Path, how: str) -> None:
    script = f"""
for step in range(3): commit(step)
pid = os.fork()
if pid == 0:
    {CHILDREN[how]}
begun = time.monotonic()
status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
assert status == {int(how == "an exception")}, status
assert time.monotonic() - begun < 20
commit(3)
"""
    code, errors = run(tmp_path / "store", script)
    assert code == 0, errors
    assert "was lost" not in errors
    assert steps(tmp_path / "store") == [0, 1, 2, 3]


def test_a_child_of_multiprocessing_that_ends(tmp_path: Path) -> None:
    script = """
import multiprocessing
for step in range(3): commit(step)
child = multiprocessing.get_context("fork").Process(target=sys.exit)
child.start()
child.join()
assert child.exitcode == 0
"""
    code, errors = run(tmp_path / "store", script)
    assert code == 0, errors
    assert steps(tmp_path / "store") == [0, 1, 2]


def test_two_stores_end_together(tmp_path: Path) -> None:
    """One that fails does not keep the other from being written."""
    script = """
other = Store(LocalTier(ROOT + "-2"))
commit(0).wait()
tier.plan = broken
commit(1)
for step in range(3): other.commit(step, make_state(1, step, scale=30))
"""
    code, errors = run(tmp_path / "store", script)
    assert code > 0
    assert errors.count("was lost") == 1
    assert steps(tmp_path / "store") == [0]
    assert steps(tmp_path / "store-2") == [0, 1, 2]
