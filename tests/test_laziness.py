"""What is read, counted in bytes: opening and listing reads no chunk, a slice only the chunks that it needs."""

from __future__ import annotations

import secrets
from typing import Any

import pytest
import torch

from deltastore.config import WriterOptions
from deltastore.history.chain import open_chain
from deltastore.history.packs import Packs
from deltastore.ondisk import zarr_profile
from deltastore.store import Store
from tests.counted import CountedTier

CHUNK = 4096
"""Bytes of a chunk here: 1024 float32, 16 rows of 64."""


@pytest.fixture
def tier(monkeypatch: pytest.MonkeyPatch) -> CountedTier:
    monkeypatch.setattr(zarr_profile, "CHUNK_BYTES", CHUNK)
    tier = CountedTier(f"lazy-{secrets.token_hex(8)}")
    with Store(tier, options=WriterOptions(codec="raw")) as store:
        state: dict[str, Any] = {
            "a": torch.arange(64 * 1024.0).view(1024, 64),
            "b": torch.ones(5000),
            "n": list(range(100)),
        }
        store.commit(0, state, tag="first").wait()
        state["a"][500] += 1
        store.commit(1, state).wait()
    tier.reads.clear()
    return tier


def chunk_reads(tier: CountedTier) -> list[int]:
    """Return the bytes of each read that touches chunks: those before the metadata of a pack."""
    reads, packs = tier.of("packs"), Packs(tier)
    found = [length for name, offset, length in reads if offset < packs.tail(name).trailer.tail_offset]
    tier.reads.clear()
    return found


def open_(tier: CountedTier) -> Store:
    return Store(tier, writable=False)


def test_opening_listing_and_plain_values_read_no_chunk(tier: CountedTier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltastore.history.packs.TAIL_GUESS_BYTES", 44)  # nothing but the trailer is guessed
    with open_(tier) as store:
        assert [commit.step for commit in store.commits()] == [0, 1]
        assert chunk_reads(tier) == []
        state = store.at("first")
        assert (len(state), state["n", 7], state["a"].shape) == (102, 7, (1024, 64))
        assert state.fidelity.exact
        assert state.to_state_dict("meta")["a"].is_meta
    assert chunk_reads(tier) == []


def test_with_a_cache_listing_reads_no_pack_at_all(tier: CountedTier) -> None:
    with open_(tier) as store:
        assert len(store.commits()) == 2
    assert tier.of("packs") == []


@pytest.mark.parametrize(("low", "high"), [(0, 1), (15, 16), (16, 32), (40, 41), (8, 24), (0, 1024)])
def test_a_slice_reads_only_its_chunks(tier: CountedTier, low: int, high: int) -> None:
    with open_(tier) as store:
        lazy = store.at(0)["a"]
        tier.reads.clear()
        found = lazy[low:high]
    assert torch.equal(found, torch.arange(64 * 1024.0).view(1024, 64)[low:high])
    chunks = -(-high // 16) - low // 16
    framing = 300 * chunks  # checksums, and the ZIP headers between neighbours
    assert chunks * CHUNK <= sum(chunk_reads(tier)) <= chunks * CHUNK + framing


def test_a_slice_of_nothing_reads_nothing(tier: CountedTier) -> None:
    with open_(tier) as store:
        lazy = store.at(0)["a"]
        tier.reads.clear()
        assert lazy[5:5].shape == (0, 64)
        assert tier.of("packs") == []


def test_a_tensor_reads_nothing_of_its_neighbours(tier: CountedTier) -> None:
    with open_(tier) as store:
        lazy = store.at(0)["b"]
        tier.reads.clear()
        assert torch.equal(lazy[...], torch.ones(5000))
    assert sum(chunk_reads(tier)) <= 5000 * 4 + 2 * CHUNK + 3000


def test_a_slice_of_a_delta_reads_of_every_layer_only_its_part(tier: CountedTier) -> None:
    with open_(tier) as store:
        lazy = store.at(1)["a"]
        tier.reads.clear()
        assert lazy[500, 3].item() == 500 * 64 + 4
    reads = chunk_reads(tier)
    assert max(reads) <= CHUNK + 4
    assert sum(reads) <= 2 * CHUNK + 4096  # a chunk of the base and three small arrays of the overlay


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("plain", [True, False])
def test_filling_reads_every_chunk_once(tier: CountedTier, step: int, plain: bool) -> None:
    a = torch.zeros(1024, 64) if plain else torch.zeros(64, 1024).T
    b = torch.zeros(5000)
    with open_(tier) as store:
        state = store.at(step)
        tier.reads.clear()
        state.fill({("a",): [a], ("b",): [b]})
        truth = state.to_state_dict()
    assert torch.equal(a, truth["a"])
    assert torch.equal(b, truth["b"])
    reads = chunk_reads(tier)
    half = len(reads) // 2  # to_state_dict reads the same again
    assert sorted(reads[:half]) == sorted(reads[half:])


def test_filling_some_reads_only_their_chunks(tier: CountedTier) -> None:
    b = torch.zeros(5000)
    with open_(tier) as store:
        state = store.at(0)
        tier.reads.clear()
        state.fill({("b",): [b]})
    assert torch.equal(b, torch.ones(5000))
    assert sum(chunk_reads(tier)) <= 5000 * 4 + 2 * CHUNK + 3000


def test_the_arrays_of_a_small_overlay_are_one_request(tier: CountedTier) -> None:
    with open_(tier) as store:
        lazy = store.at(1)["a"]
        tier.reads.clear()
        assert lazy[500, 3].item() == 500 * 64 + 4
    assert len(chunk_reads(tier)) == 2  # one of the base, one of the delta


def test_an_overlay_of_many_chunks_is_read(tier: CountedTier) -> None:
    with Store(tier, options=WriterOptions(codec="raw")) as store:
        state = store.at(1).to_state_dict()
        store.commit(2, state).wait()
        state["a"][::8] += 1
        store.commit(3, state).wait()
    with open_(tier) as store:
        chain = open_chain(store._view.packs, store._view.catalog, store._view.resolve(3))
        arrays = chain.links[-1].tail.index.arrays
        assert max(len(array.chunks) for name, array in arrays.items() if name.endswith(".gaps")) > 1
        assert torch.equal(store.at(3)["a"][500:510], state["a"][500:510])
        assert torch.equal(store.at(3)["a"][...], state["a"])


def test_streaming_reads_every_chunk_once(tier: CountedTier) -> None:
    with open_(tier) as store:
        state = store.at(0)
        tier.reads.clear()
        assert [path for path, _ in state.stream([("b",), ("a",)])]
    total = (64 * 1024 + 5000) * 4
    assert total <= sum(chunk_reads(tier)) <= total * 1.1 + CHUNK
