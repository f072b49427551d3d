"""The facade: arguments, references, tags, handles, closing, and what an interrupted commit leaves."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import deltastore
from deltastore import staging
from deltastore.errors import AlreadyExists, Conflict, DeltaStoreError, InvalidInput, NotFound, ReadOnly
from deltastore.ondisk.limits import MAX_NUMBER
from deltastore.store import Store
from deltastore.testing.compare import assert_same


def weights(value: float, size: int = 1000) -> dict[str, Any]:
    return {"w": torch.full((size,), float(value)), "h": torch.arange(1000.0)}


@pytest.fixture
def url() -> str:
    return f"memory://store-{secrets.token_hex(8)}"


@pytest.fixture
def store(url: str) -> Store:
    return deltastore.open(url)


# ---------------------------------------------------------------- opening


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("mode", "w"),
        ("codec", "lz4"),
        ("max_pending", 0),
        ("max_pending", 1.5),
        ("retention", {"keep_lst": 1}),
        ("retention", {"keep_last": 0}),
        ("retention", {"keep_last": 1, "keep_every": -1}),
        ("retention", 5),
        ("session", "zz"),
        ("on_limit", "x"),
        ("pickle", "yes"),
        ("tiers", "hdfs://namenode/run"),
        ("max_lag_seconds", "soon"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(url: str, argument: str, value: Any) -> None:
    with pytest.raises(InvalidInput):
        deltastore.open(url, **{argument: value})


@pytest.mark.parametrize("place", ["webhdfs://a/b", "hdfs://a", "c://x", ""])
def test_places_that_this_version_cannot_open_are_refused(place: str) -> None:
    with pytest.raises(InvalidInput):
        deltastore.open(place)


def test_opening_writes_nothing(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with deltastore.open(root) as store:
        assert store.commits() == []
        assert store.durable() is None
    assert not root.exists()
    with pytest.raises(NotFound):
        deltastore.open(root, "r")


def test_a_reader_writes_nothing(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with deltastore.open(root) as store:
        store.commit(1, weights(1))
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    with deltastore.open(root, "r") as reader:
        reader.refresh()
        reader.at(1).to_state_dict()
        reader.verify(deep=True)
        reader.prune(dry_run=True)
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before


@pytest.mark.parametrize(
    "write",
    [
        lambda store: store.commit(2, weights(2)),
        lambda store: store.restore(),
        lambda store: store.tag("x"),
        lambda store: store.prune(dry_run=False),
    ],
    ids=["commit", "restore", "tag", "prune"],
)
def test_a_reader_and_a_closed_store_refuse_to_write(store: Store, write: Callable[[Store], Any]) -> None:
    store.commit(1, weights(1)).wait()
    with pytest.raises(ReadOnly, match="mode 'a'"):
        write(deltastore.open(store.url, "r"))
    store.close()
    store.close()
    with pytest.raises(InvalidInput, match="closed"):
        write(store)


def test_an_empty_store_answers(store: Store) -> None:
    assert store.commits() == []
    assert store.prune().commits == ()
    for ref in (1, "latest", "latest~1", "best"):
        with pytest.raises(NotFound):
            store.at(ref)
        with pytest.raises(NotFound):
            store.restore(ref)
    store.commit(1, weights(1)).wait()  # the failed restores claimed it, and writing goes on
    assert_same(weights(1), store.at(1).to_state_dict())


def test_verifying_a_store_that_was_never_written_finds_nothing(store: Store) -> None:
    assert store.verify().ok


# ---------------------------------------------------------------- commits


@pytest.mark.parametrize("step", [-1, 1.0, True, "1", None, np.float64(3), MAX_NUMBER + 1, 2**63, 10**19])
def test_a_step_that_cannot_be_stored_is_refused(store: Store, step: Any) -> None:
    with pytest.raises(InvalidInput, match="step"):
        store.commit(step, weights(1))
    assert store.commits() == []


def test_the_largest_step(store: Store) -> None:
    store.commit(MAX_NUMBER, weights(1)).wait()
    with deltastore.open(store.url, "r") as reader:
        assert_same(weights(1), reader.at(MAX_NUMBER).to_state_dict())


@pytest.mark.parametrize("state", [[1], None, 3, torch.ones(3), "state"])
def test_a_state_that_is_no_mapping_is_refused(store: Store, state: Any) -> None:
    with pytest.raises(InvalidInput, match="dict"):
        store.commit(1, state)


@pytest.mark.parametrize(
    "metrics", [{"a": object()}, {"a": torch.ones(3)}, {"a": np.ones(3)}, [1], "loss", {"a": {"b": torch.ones(1)}}]
)
def test_metrics_that_are_not_plain_are_refused(store: Store, metrics: Any) -> None:
    with pytest.raises(InvalidInput):
        store.commit(1, weights(1), metrics=metrics)
    store.commit(1, weights(1)).wait()
    assert len(store.commits()) == 1


def test_metrics_come_back(store: Store) -> None:
    given = {
        "loss": float("inf"),
        "acc": np.float32(0.5),
        "n": 2**70,
        "s": "x",
        "t": torch.tensor(2),
        "b": True,
        "z": None,
    }
    expected = {"loss": float("inf"), "acc": 0.5, "n": 2**70, "s": "x", "t": 2, "b": True, "z": None}
    assert store.commit(1, weights(1), metrics=given).wait().metrics == expected
    with deltastore.open(store.url, "r") as reader:
        assert reader.commits()[0].metrics == expected


class Interrupt(BaseException):
    """Stands in for Ctrl-C."""


@pytest.mark.parametrize("after", [0, 1])
def test_a_commit_that_was_interrupted_while_it_was_copied_leaves_no_trace(
    store: Store, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """Ctrl-C in the middle of a commit, and the final commit of the handler works."""
    store.commit(0, weights(0)).wait()
    changed = {"other": torch.randn(3000), "half": torch.randn(7).half(), **weights(1)}
    copy, calls = staging._copy_pieces, []

    def interrupted(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) > after:
            raise Interrupt
        copy(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(staging, "_copy_pieces", interrupted)
        with pytest.raises(Interrupt):
            store.commit(1, changed)
    assert not store.busy()
    store.commit(1, changed).wait()
    store.commit(2, weights(2)).wait()
    assert_same(changed, store.at(1).to_state_dict())
    assert_same(weights(2), store.at(2).to_state_dict())


def test_a_key_that_cannot_be_stored_is_refused_at_once(store: Store) -> None:
    key = 10**6000  # more digits than Python turns into text
    try:
        store.commit(1, {"model": {key: torch.ones(2)}})
    except InvalidInput:
        return
    store.flush()
    assert_same({"model": {key: torch.ones(2)}}, store.at(1).to_state_dict())


# ---------------------------------------------------------------- references, tags, handles


@pytest.mark.parametrize("ref", [True, 1.0, None, b"latest", ("latest",)])
def test_what_is_no_reference_is_refused(store: Store, ref: Any) -> None:
    store.commit(1, weights(1)).wait()
    with pytest.raises(InvalidInput):
        store.at(ref)


@pytest.mark.parametrize(
    "ref", ["", "latest~", "latest~-1", "LATEST", "abc", "5", -1, 2, "0" * 8, "latest~99999999999"]
)
def test_a_reference_to_nothing_is_not_found(store: Store, ref: int | str) -> None:
    store.commit(1, weights(1)).wait()
    with pytest.raises(NotFound):
        store.at(ref)


def test_a_commit_is_found_by_all_its_names(store: Store) -> None:
    commits = [store.commit(step, weights(step), tag=f"t{step}").wait() for step in range(3)]
    names: tuple[Any, ...] = (1, "1", np.int64(1), "latest~1", "t1", commits[1].id, commits[1].id[:8])
    for ref in names:
        assert store.at(ref).commit == commits[1]
    with pytest.raises(NotFound, match="nearest is step 2"):
        store.at(5)


def test_tags(store: Store) -> None:
    for step in range(3):
        store.commit(step, weights(step)).wait()
    store.tag("best", 1)
    store.tag("best", 1)
    with pytest.raises(AlreadyExists):
        store.tag("best", 2)
    with pytest.raises(AlreadyExists):
        store.commit(3, weights(3), tag="best")
    store.tag("best", 2, move=True)
    assert store.at("best").commit.tags == ("best",)
    assert deltastore.open(store.url, "r").at("best").commit.step == 2
    store.tag("best", None)
    with pytest.raises(NotFound):
        store.at("best")
    with pytest.raises(NotFound):
        store.tag("best", None)
    store.tag("best", 0)
    assert store.at("best").commit.step == 0


def test_a_handle_tells_of_its_commit(store: Store) -> None:
    handle = store.commit(4, weights(4))
    commit = handle.wait("memory", timeout=60)
    assert handle.done()
    assert handle.done("memory")
    assert (handle.id, handle.step, handle.error, handle.skipped) == (commit.id, 4, None, False)
    assert store.wait(4) == commit
    assert store.durable() == store.durable("memory") == 4
    for call in (handle.done, handle.wait, store.durable):
        with pytest.raises(InvalidInput, match="no tier"):
            call("remote")
    with pytest.raises(NotFound):
        store.wait(99)


def test_a_second_writer_is_refused_until_the_first_closes(store: Store) -> None:
    store.commit(1, weights(1)).wait()
    other = deltastore.open(store.url)
    for write in (lambda: other.commit(2, weights(2)), other.restore, lambda: other.prune(dry_run=False)):
        with pytest.raises(Conflict):
            write()
    assert_same(weights(1), other.at(1).to_state_dict())
    store.close()
    other.commit(2, weights(2)).wait()
    assert [commit.step for commit in other.commits()] == [1, 2]
    other.close()


def test_the_error_of_a_with_block_is_not_hidden(store: Store) -> None:
    def work() -> None:
        with store:
            store.commit(1, weights(1))
            raise RuntimeError("the loss is NaN")

    with pytest.raises(RuntimeError, match="the loss"):
        work()
    assert deltastore.open(store.url, "r").durable() == 1


def test_errors_are_one_tree() -> None:
    assert issubclass(NotFound, DeltaStoreError)
    assert issubclass(NotFound, LookupError)
    assert issubclass(InvalidInput, ValueError)
