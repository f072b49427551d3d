"""The catalog, and its cache that may be anything at any time."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deltastore
from deltastore.errors import Corruption
from deltastore.history.catalog import Catalog, CatalogEntry, read_catalog, write_cache
from deltastore.history.packs import Packs
from deltastore.history.session import read_format
from deltastore.ondisk.names import FORMAT_FILE, catalog_name
from deltastore.ondisk.records import CommitRef
from deltastore.store import Store
from deltastore.tiers.local import LocalTier
from tests.counted import CountedTier
from tests.forge import compress, decompress, sealed

SESSION = "1" * 16


def fill(store: Store, steps: int = 4) -> None:
    values = np.arange(1000.0)
    for step in range(steps):
        values[step] += 1
        store.commit(step, {"w": values.copy(), "n": step}, metrics={"loss": float(step)}).wait()


@pytest.fixture
def tier() -> CountedTier:
    """A store of four commits and its cache."""
    tier = CountedTier(f"catalog-{secrets.token_hex(8)}")
    with Store(tier) as store:
        fill(store)
    tier.reads.clear()
    return tier


def read(tier: CountedTier) -> Catalog:
    return read_catalog(Packs(tier, read_format(tier).store))


def cache_of(tier: CountedTier) -> str:
    (name,) = (info.name for info in tier.list("cache"))
    return name


def replace(tier: CountedTier, data: bytes) -> None:
    name = cache_of(tier)
    tier.delete(name)
    tier.publish_new(name, [data], SESSION)


def change(tier: CountedTier, edit: Callable[[Any], Any]) -> None:
    """Put an edited cache in place of the good one, with a true seal."""
    value = json.loads(decompress(tier.read(cache_of(tier))))
    replace(tier, compress(sealed(edit(value) or value)))


def without_cache(tier: CountedTier) -> Catalog:
    for info in tier.list("cache"):
        tier.delete(info.name)
    return read(tier)


def test_a_cache_saves_all_reads_of_packs(tier: CountedTier) -> None:
    cached = read(tier)
    assert tier.of("packs") == []
    fresh = without_cache(tier)
    assert len(tier.of("packs")) == 4
    assert cached == fresh
    assert [entry.step for entry in cached.ordered()] == [0, 1, 2, 3]
    assert cached.ordered()[2].metrics == {"loss": 2.0}


def test_only_packs_that_the_cache_does_not_know_are_read(tier: CountedTier) -> None:
    with Store(tier) as store:
        store.commit(9, {"w": np.ones(10)}).wait()
        (newest,) = {info.name for info in tier.list("packs")} - set(read(tier).packs) or {""}
        tier.reads.clear()
        catalog = read(tier)
        assert {name for name, _, _ in tier.of("packs")} <= {catalog.by_id[store.commits()[-1].id].pack, newest}
    assert [entry.step for entry in catalog.ordered()] == [0, 1, 2, 3, 9]


def test_a_known_catalog_is_only_brought_up_to_date(tier: CountedTier) -> None:
    catalog = read(tier)
    first = catalog.ordered()[0]
    tier.delete(first.pack)
    tier.reads.clear()
    again = read_catalog(Packs(tier, None), catalog)
    assert again is catalog
    assert tier.reads == []
    assert first.id not in again.by_id
    assert first.pack not in again.packs


DAMAGED: dict[str, Callable[[CountedTier], None]] = {
    "empty": lambda tier: replace(tier, b""),
    "not zstd": lambda tier: replace(tier, b"{}"),
    "not sealed": lambda tier: replace(tier, compress(b"{}")),
    "cut off": lambda tier: replace(tier, tier.read(cache_of(tier))[:-3]),
    "a list": lambda tier: replace(tier, compress(b"[]")),
    "no packs": lambda tier: change(tier, lambda value: value.pop("packs")),
    "no store": lambda tier: change(tier, lambda value: {**value, "store": 5}),
    "packs of numbers": lambda tier: change(tier, lambda value: {**value, "packs": {"x": 5}}),
    "packs of text": lambda tier: change(tier, lambda value: {**value, "packs": {"x": ["a", "bcd"]}}),
    "sizes of text": lambda tier: change(tier, lambda value: _each(value, lambda pack: pack.__setitem__(0, "9"))),
    "sizes of null": lambda tier: change(tier, lambda value: _each(value, lambda pack: pack.__setitem__(0, None))),
    "entries cut": lambda tier: change(tier, lambda value: _each(value, lambda pack: pack[1][0].pop())),
    "entries of null": lambda tier: change(tier, lambda value: _each(value, lambda pack: pack.__setitem__(1, None))),
    "a ref of text": lambda tier: change(tier, lambda value: _each(value, lambda pack: pack[1][0].__setitem__(0, "x"))),
    "a step of text": lambda tier: change(
        tier, lambda value: _each(value, lambda pack: pack[1][0][0].__setitem__(4, "many"))
    ),
    "metrics of numbers": lambda tier: change(
        tier, lambda value: _each(value, lambda pack: pack[1][0].__setitem__(6, [5]))
    ),
    "other sizes": lambda tier: change(tier, lambda value: _each(value, lambda pack: pack.__setitem__(0, pack[0] + 1))),
}


def _each(value: Any, edit: Callable[[Any], Any]) -> None:
    for pack in value["packs"].values():
        edit(pack)


@pytest.mark.parametrize("how", DAMAGED)
def test_a_cache_that_is_damaged_or_stale_is_not_used(tier: CountedTier, how: str) -> None:
    expected = read(tier)
    DAMAGED[how](tier)
    tier.reads.clear()
    assert read(tier) == expected
    assert len(tier.of("packs")) == 4


def test_a_cache_of_packs_that_are_gone_is_not_believed(tier: CountedTier) -> None:
    catalog = read(tier)
    gone = catalog.ordered()[3]
    tier.delete(gone.pack)
    again = read(tier)
    assert set(again.by_id) == set(catalog.by_id) - {gone.id}
    assert set(again.packs) == set(catalog.packs) - {gone.pack}


def test_the_highest_cache_counts_and_the_others_are_removed(tier: CountedTier) -> None:
    packs = Packs(tier, read_format(tier).store)
    catalog = read_catalog(packs)
    number = 41
    tier.publish_new(catalog_name(number), [b"damaged"], SESSION)
    write_cache(packs, catalog, SESSION)
    assert [info.name for info in tier.list("cache")] == [catalog_name(number + 1)]
    tier.reads.clear()
    assert read(tier) == catalog
    assert tier.of("packs") == []


def test_a_cache_that_cannot_be_written_is_only_logged(
    tier: CountedTier, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> int:
        raise Corruption("no cache today")

    monkeypatch.setattr(tier, "publish_new", refuse)
    packs = Packs(tier, read_format(tier).store)
    write_cache(packs, read_catalog(packs), SESSION)
    assert "no cache today" in caplog.text


def test_a_cache_of_another_store_is_not_used(tmp_path: Path) -> None:
    for name in ("one", "other"):
        with deltastore.open(tmp_path / name) as store:
            fill(store, 2)
    shutil.rmtree(tmp_path / "one" / "cache")
    shutil.copytree(tmp_path / "other" / "cache", tmp_path / "one" / "cache")
    (tmp_path / "one" / FORMAT_FILE).unlink()
    catalog = read_catalog(Packs(LocalTier(tmp_path / "one"), None))
    assert not catalog.damaged
    assert len(catalog.by_id) == 2


def test_a_cache_of_another_store_does_no_harm_beside_a_format_file(tmp_path: Path) -> None:
    for name in ("one", "other"):
        with deltastore.open(tmp_path / name) as store:
            fill(store, 2)
    shutil.rmtree(tmp_path / "one" / "cache")
    shutil.copytree(tmp_path / "other" / "cache", tmp_path / "one" / "cache")
    with deltastore.open(tmp_path / "one", "r") as store:
        assert [commit.step for commit in store.commits()] == [0, 1]
        assert store.at(1)["n"] == 1


# ---------------------------------------------------------------- entries


def entry(pack: str, digest: str = "d" * 64, commit: str = "c" * 32) -> CatalogEntry:
    return CatalogEntry(CommitRef(commit, digest, 1, 0, 5), None, "base", "", True, 10, {}, (), pack)


def test_of_several_copies_the_one_with_the_greatest_name_is_used() -> None:
    for order in (("a", "b", "c"), ("c", "b", "a"), ("b", "c", "a")):
        catalog = Catalog()
        for pack in order:
            catalog.add(entry(pack), 7)
        assert catalog.by_id["c" * 32].pack == "c"
        assert sorted(copy.pack for copy in catalog.copies["c" * 32]) == ["a", "b"]
        catalog.drop_pack("c")
        assert catalog.by_id["c" * 32].pack == "b"
        catalog.drop_pack("a")
        catalog.drop_pack("b")
        assert catalog.by_id == {}
        assert catalog.packs == {}


def test_one_id_with_two_records_is_damage() -> None:
    catalog = Catalog()
    catalog.add(entry("a"), 7)
    with pytest.raises(Corruption, match="stands in a and b with different records"):
        catalog.add(entry("b", digest="e" * 64), 7)
    assert catalog.by_id["c" * 32].pack == "a"


def test_a_pack_that_cannot_be_opened_does_not_hinder_the_others(
    tier: CountedTier, caplog: pytest.LogCaptureFixture
) -> None:
    expected = without_cache(tier)
    bad = expected.ordered()[1].pack
    data = tier.read(bad)
    tier.delete(bad)
    tier.publish_new(bad, [data[:-1]], SESSION)
    catalog = read(tier)
    assert list(catalog.damaged) == [bad]
    assert bad in caplog.text
    assert len(catalog.by_id) == 3
    tier.delete(bad)
    tier.publish_new(bad, [data], SESSION)
    assert read_catalog(Packs(tier, None), catalog).by_id == expected.by_id
    assert not catalog.damaged
