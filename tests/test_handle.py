"""Handles: what they tell before, when and after a commit is settled."""

from __future__ import annotations

import threading

import pytest

from deltastore.errors import Backend, Internal, InvalidInput, Timeout
from deltastore.handle import Commit, Failure, Handle

COMMIT = Commit("c" * 32, 4, None, 1, "base", 10, True, "", (), {})


def make(step: int = 4, *, skipped: bool = False) -> Handle:
    return Handle(step, None if skipped else "c" * 32, ("local", "remote"), skipped=skipped)


def test_a_handle_that_is_still_written() -> None:
    handle = make()
    assert (handle.done(), handle.error, handle.skipped, handle.id, handle.step) == (False, None, False, "c" * 32, 4)
    with pytest.raises(Timeout, match="step 4: not acknowledged within 0 s") as caught:
        handle.wait(timeout=0)
    assert (caught.value.step, caught.value.timeout) == (4, 0)
    assert isinstance(caught.value, TimeoutError)


def test_a_handle_that_succeeded() -> None:
    handle = make()
    handle._succeed(Commit("d" * 32, 4, None, 1, "base", 10, True, "", (), {}))
    assert handle.id == "d" * 32  # nothing had changed: it is the commit before
    assert handle.done()
    assert handle.wait().id == "d" * 32
    assert handle.wait("remote", timeout=0).id == "d" * 32
    assert handle.error is None


def test_a_handle_that_failed_says_so_each_time() -> None:
    handle, failure = make(), Failure(Backend("disk full", errno=28))
    handle._fail(failure)
    assert not handle.done()
    assert handle.error is failure.error
    assert not failure.seen
    for _ in range(2):
        with pytest.raises(Backend, match="disk full"):
            handle.wait()
    assert failure.seen


def test_a_step_that_was_left_out_stands_for_the_next() -> None:
    skipped, following = make(3, skipped=True), make()
    with pytest.raises(Timeout, match="step 3"):
        skipped.wait(timeout=0)
    skipped._follow(following)
    assert not skipped.done()
    with pytest.raises(Timeout, match="step 4"):
        skipped.wait(timeout=0)
    following._succeed(COMMIT)
    assert skipped.done()
    assert skipped.wait() == COMMIT
    assert skipped.id is None


def test_a_step_that_was_left_out_shares_the_failure() -> None:
    skipped, following = make(3, skipped=True), make()
    skipped._follow(following)
    following._fail(Failure(Backend("disk full")))
    assert skipped.error is following.error
    with pytest.raises(Backend):
        skipped.wait()


@pytest.mark.parametrize("tier", ["memory", "", "LOCAL"])
def test_a_tier_that_the_store_does_not_have(tier: str) -> None:
    with pytest.raises(InvalidInput, match="it has local, remote"):
        make().done(tier)
    with pytest.raises(InvalidInput):
        make().wait(tier, timeout=0)


def test_a_handle_settled_with_nothing_is_a_bug() -> None:
    handle = make()
    handle._settled.set()
    with pytest.raises(Internal, match="settled without"):
        handle.wait()


def test_all_who_wait_are_told() -> None:
    handle, found = make(), []
    threads = [threading.Thread(target=lambda: found.append(handle.wait(timeout=30))) for _ in range(4)]
    for thread in threads:
        thread.start()
    handle._succeed(COMMIT)
    for thread in threads:
        thread.join()
    assert found == [COMMIT] * 4
