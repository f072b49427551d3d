"""Which commits go into which pack."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deltastore.history.catalog import Catalog, CatalogEntry
from deltastore.history.flush import plan_flush
from deltastore.ondisk.records import CommitRef


def catalog_of(commits: list[tuple[int, int, bool]]) -> Catalog:
    """Return a catalog of (epoch, bytes, is base), each the child of the one before."""
    catalog = Catalog()
    parent: CommitRef | None = None
    for number, (epoch, size, base) in enumerate(sorted(commits, key=lambda commit: commit[0])):
        ref = CommitRef(f"{number:032x}", f"{number:064x}", epoch, number, number)
        kind = "base" if base or parent is None else "delta"
        catalog.add(CatalogEntry(ref, parent, kind, "", True, size, {}, (), f"packs/{number}"), size)
        parent = ref
    return catalog


def numbers(batches: tuple[tuple[CatalogEntry, ...], ...]) -> list[list[int]]:
    return [[entry.step for entry in batch] for batch in batches]


def test_small_commits_share_a_pack_and_large_ones_do_not() -> None:
    catalog = catalog_of([(1, size, False) for size in (100, 10, 10, 10, 90, 10)])
    assert numbers(plan_flush(catalog, set(), pack_bytes=100).batches) == [[0], [1, 2, 3], [4, 5]]


def test_an_epoch_begins_a_pack() -> None:
    catalog = catalog_of([(1, 10, True), (1, 10, False), (2, 10, False)])
    assert numbers(plan_flush(catalog, set()).batches) == [[0, 1], [2]]


def test_what_is_there_is_left_out() -> None:
    catalog = catalog_of([(1, 10, True), (1, 10, False), (1, 10, False)])
    plan = plan_flush(catalog, {f"{0:032x}", f"{2:032x}"})
    assert numbers(plan.batches) == [[1]]
    assert plan.commits == 1


def test_damage_holds_back_what_needs_it() -> None:
    catalog = catalog_of([(1, 10, True), (1, 10, False), (1, 10, False), (1, 10, True), (1, 10, False)])
    plan = plan_flush(catalog, set(), {f"{1:032x}"})
    assert numbers(plan.batches) == [[0, 3, 4]]
    assert [entry.step for entry in plan.held_back] == [1, 2]


def test_a_child_whose_parent_is_nowhere_is_held_back() -> None:
    catalog = catalog_of([(1, 10, True), (1, 10, False)])
    catalog.drop_pack("packs/0")
    plan = plan_flush(catalog, set())
    assert plan.batches == ()
    assert [entry.step for entry in plan.held_back] == [1]


@given(
    commits=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 50), st.booleans()), max_size=30),
    present=st.sets(st.integers(0, 29)),
    pack_bytes=st.integers(1, 100),
)
def test_every_commit_goes_once_and_after_its_parent(
    commits: list[tuple[int, int, bool]], present: set[int], pack_bytes: int
) -> None:
    catalog = catalog_of(commits)
    there = {f"{number:032x}" for number in present}
    plan = plan_flush(catalog, there, pack_bytes=pack_bytes)
    going = [entry for batch in plan.batches for entry in batch]
    assert {entry.id for entry in (*going, *plan.held_back)} == catalog.by_id.keys() - there
    seen = set(there)
    for batch in plan.batches:
        assert len({entry.ref.epoch for entry in batch}) == 1
        assert len(batch) == 1 or sum(entry.bytes for entry in batch) <= pack_bytes
        for entry in batch:
            assert entry.kind == "base" or (entry.parent is not None and entry.parent.id in seen)
            seen.add(entry.id)
