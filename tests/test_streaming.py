"""A streamed commit is the commit that a copied one would be: same layers, same reading, nothing kept."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import deltastore
from deltastore.deferred import Deferred, HeldWhole
from deltastore.dtypes import storage_dtype
from deltastore.errors import Corruption, InvalidInput
from deltastore.policy import Policy
from deltastore.store import Store
from deltastore.testing.compare import assert_same
from deltastore.tiers.memory import MemoryTier
from deltastore.torch_bridge import TORCH

LARGE = 12 << 20
"""Elements of a tensor that lies in several partitions."""


class Elsewhere(Deferred):
    """A tensor that counts how often it is read."""

    def __init__(self, tensor: torch.Tensor, *, whole: bool = False) -> None:
        about = TORCH.describe(tensor)
        super().__init__(about.dtype, about.shape, id(tensor))
        self.tensor = tensor
        self.whole = whole
        self.reads: list[Any] = []

    @property
    def is_read_whole(self) -> bool:
        return self.whole

    def read(self, index: Any) -> np.ndarray:
        self.reads.append(index)
        if self.tensor is BROKEN:
            raise Corruption("the file ends here")
        return TORCH.as_array(self.tensor[index].contiguous()).view(storage_dtype(self.logical))


BROKEN = torch.zeros(4)


@pytest.fixture
def store() -> Iterator[Store]:
    with Store(MemoryTier(f"streaming-{secrets.token_hex(8)}")) as store:
        yield store


def state(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    weights = {f"layer.{number}": torch.randn(64, 64, generator=generator) for number in range(4)}
    weights["tied"] = weights["layer.0"]
    return {"model": weights, "step": seed, "empty": torch.zeros(0, 3), "scalar": torch.tensor(1.5)}


def test_what_is_streamed_is_what_was_given(store: Store) -> None:
    given = state()
    commit = store.commit_streamed(3, given, tag="first", metrics={"loss": 0.5})
    assert (commit.kind, commit.step, commit.exact, commit.tags) == ("base", 3, True, ("first",))
    assert commit.metrics == {"loss": 0.5}
    assert_same(store.at("first").to_state_dict(), given)
    assert store.verify(deep=True).ok


def test_a_series_becomes_deltas_of_what_changed(store: Store) -> None:
    given = state()
    full = store.commit_streamed(0, given).bytes
    given["model"]["layer.2"][7, 7] += 1
    small = store.commit_streamed(1, given)
    assert small.kind == "delta"
    assert small.bytes < full / 5
    given["model"]["layer.1"] *= 1.5
    given["model"]["new"] = torch.ones(9)
    store.commit_streamed(2, given)
    assert_same(store.at(2).to_state_dict(), given)
    assert store.verify(deep=True).ok


def test_copied_and_streamed_commits_follow_each_other(store: Store) -> None:
    given = state()
    store.commit(0, given).wait()
    given["model"]["layer.3"][0] = 0
    assert store.commit_streamed(1, given).kind == "delta"
    assert_same(store.at(1).to_state_dict(), given)
    assert store.commit(2, given).wait().kind == "base"  # nobody kept the reconstruction
    store.restore("latest")
    given["step"] = 9
    assert store.commit_streamed(3, given).kind == "delta"
    assert_same(store.at(3).to_state_dict(), given)
    assert store.verify(deep=True).ok


def test_after_an_inexact_commit_comes_a_base(store: Store) -> None:
    store.set_policy(Policy(budget=0.5))
    given = {"w": torch.zeros(256, 256)}
    store.commit(0, given).wait()
    given["w"] += torch.randn(256, 256)
    assert not store.commit(1, given).wait().exact
    assert (found := store.commit_streamed(2, given)).kind == "base"
    assert found.exact
    assert_same(store.at(2).to_state_dict(), given)


def test_a_chain_ends_where_reading_it_costs_too_much(store: Store) -> None:
    store.set_restore_cost(2)
    kinds = [store.commit_streamed(step, {"w": torch.randn(1 << 18)}).kind for step in range(6)]
    assert kinds.count("base") > 1
    assert kinds[1] == "delta"


def test_a_large_tensor_is_read_piece_by_piece(store: Store) -> None:
    by_rows, whole = Elsewhere(torch.randn(LARGE // 1024, 1024)), Elsewhere(torch.randn(LARGE), whole=True)
    store.commit_streamed(0, {"rows": by_rows, "whole": whole})
    assert len(by_rows.reads) > 1
    assert ... not in by_rows.reads
    assert whole.reads == [...]
    found = store.at(0)
    assert torch.equal(found["rows"][...], by_rows.tensor)
    assert torch.equal(found["whole"][...], whole.tensor)


def test_held_tensors_are_read_again_when_they_are_asked_for_again() -> None:
    inner = Elsewhere(torch.arange(100.0))
    held = HeldWhole(inner)
    for _ in range(2):
        for start in (50, 0):
            out = np.zeros(50, np.float32)
            held.copy_into(out, start, 50)
            assert out[0] == start
    assert len(inner.reads) == 2


def test_what_cannot_be_read_leaves_the_store_as_it_was(store: Store) -> None:
    given = state()
    store.commit_streamed(0, given)
    with pytest.raises(Corruption, match="the file ends here"):
        store.commit_streamed(1, {**given, "broken": Elsewhere(BROKEN)})
    assert [commit.step for commit in store.commits()] == [0]
    given["model"]["layer.0"][0] = 1
    assert store.commit_streamed(1, given).kind == "delta"
    assert_same(store.at(1).to_state_dict(), given)
    with pytest.raises(InvalidInput, match="never decrease"):
        store.commit_streamed(0, given)


def test_it_reads_its_parent_after_the_store_was_opened_again(tmp_path: Any) -> None:
    given = state()
    with deltastore.open(tmp_path) as first:
        first.commit_streamed(0, given)
    with deltastore.open(tmp_path) as second:
        given["model"]["layer.1"][0] = 1
        assert second.commit_streamed(1, given).kind == "base"  # what the chain costs is not known yet
        given["model"]["layer.1"][1] = 1
        assert second.commit_streamed(2, given).kind == "delta"
        assert_same(second.at(2).to_state_dict(), given)
