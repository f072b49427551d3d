"""References and lines of history, on catalogs that are only data."""

from __future__ import annotations

from typing import Any

import pytest

from deltastore.errors import Corruption, InvalidInput, NotFound, UnsupportedFormat
from deltastore.history.catalog import Catalog, CatalogEntry
from deltastore.history.lineage import (
    chain_entries,
    line,
    needs_tags,
    newest,
    newest_complete,
    on_line,
    resolve,
    segments_of,
)
from deltastore.ondisk.names import pack_name
from deltastore.ondisk.records import CommitRef

Lineage = tuple[tuple[int, int], ...]


class History:
    """A catalog that is written down commit by commit."""

    def __init__(self) -> None:
        self.catalog = Catalog()

    def add(
        self,
        epoch: int,
        sequence: int,
        step: int,
        parent: CatalogEntry | None = None,
        *,
        lineage: Lineage | None = None,
    ) -> CatalogEntry:
        """Add a base where `lineage` is given or there is no parent, else a delta."""
        commit = f"c{epoch:03x}{sequence:04x}" + "0" * 24
        ref = CommitRef(commit, f"{epoch:04x}{sequence:04x}" * 8, epoch, sequence, step)
        kind = "base" if parent is None or lineage is not None else "delta"
        pack = pack_name(epoch, step, step, f"{epoch:08x}{sequence:08x}")
        entry = CatalogEntry(ref, None if parent is None else parent.ref, kind, "", True, 10, {}, lineage or (), pack)
        self.catalog.add(entry, 10)
        return entry

    def drop(self, *entries: CatalogEntry) -> None:
        for entry in entries:
            self.catalog.drop_pack(entry.pack)


@pytest.fixture
def history() -> History:
    return History()


def steps(entries: list[CatalogEntry]) -> list[int]:
    return [entry.step for entry in entries]


def forked(history: History) -> dict[str, CatalogEntry]:
    """Epoch 1 goes to step 4; epoch 2 goes on from its step 2; epoch 3 from step 11 of epoch 2, as a base."""
    found: dict[str, CatalogEntry] = {}
    before = None
    for sequence in range(5):
        before = found[f"1.{sequence}"] = history.add(1, sequence, sequence, before)
    before = found["1.2"]
    for sequence in range(3):
        before = found[f"2.{sequence}"] = history.add(2, sequence, 10 + sequence, before)
    found["3.0"] = history.add(3, 0, 20, found["2.1"], lineage=((2, 1), (1, 2)))
    found["3.1"] = history.add(3, 1, 21, found["3.0"])
    return found


def test_the_newest_commit_is_that_of_the_highest_epoch(history: History) -> None:
    assert newest(history.catalog) is None
    assert newest_complete(history.catalog) is None
    found = forked(history)
    assert newest(history.catalog) == found["3.1"] == newest_complete(history.catalog)


def test_segments_follow_the_line_back_through_epochs(history: History) -> None:
    found = forked(history)
    assert segments_of(history.catalog, found["1.4"]) == ((1, 4),)
    assert segments_of(history.catalog, found["2.2"]) == ((2, 2), (1, 2))
    assert segments_of(history.catalog, found["3.0"]) == ((3, 0), (2, 1), (1, 2))
    assert segments_of(history.catalog, found["3.1"]) == ((3, 1), (2, 1), (1, 2))


def test_a_line_leaves_side_branches_out(history: History) -> None:
    found = forked(history)
    assert steps(line(history.catalog, found["3.1"])) == [0, 1, 2, 10, 11, 20, 21]
    assert steps(line(history.catalog, found["1.4"])) == [0, 1, 2, 3, 4]
    segments = segments_of(history.catalog, found["3.1"])
    assert not on_line(segments, found["1.3"])
    assert not on_line(segments, found["2.2"])


def test_a_line_is_known_though_commits_between_were_pruned(history: History) -> None:
    found = forked(history)
    history.drop(found["2.0"], found["2.1"], found["1.1"])
    assert segments_of(history.catalog, found["3.1"]) == ((3, 1), (2, 1), (1, 2))
    assert steps(line(history.catalog, found["3.1"])) == [0, 2, 20, 21]
    # The chain of 2.2 is gone: where its line came from stands only in what is left of it.
    assert segments_of(history.catalog, found["2.2"]) == ((2, 2),)


@pytest.mark.parametrize(
    ("ref", "step"),
    [
        ("latest", 21),
        ("latest~0", 21),
        ("latest~1", 20),
        ("latest~2", 11),
        ("latest~4", 2),
        ("latest~6", 0),
        ("latest~06", 0),
    ],
)
def test_latest_and_its_predecessors(history: History, ref: str, step: int) -> None:
    forked(history)
    assert resolve(history.catalog, {}, ref).step == step


def test_predecessors_are_counted_over_gaps(history: History) -> None:
    found = forked(history)
    history.drop(found["2.1"], found["1.1"])
    assert [resolve(history.catalog, {}, f"latest~{n}").step for n in range(5)] == [21, 20, 10, 2, 0]


def test_too_far_back_names_the_oldest(history: History) -> None:
    forked(history)
    with pytest.raises(NotFound, match="only 7 commits lead to the latest; the oldest is step 0"):
        resolve(history.catalog, {}, "latest~7")


def test_a_step_means_the_commit_on_the_line_of_the_latest(history: History) -> None:
    found = forked(history)
    again = history.add(2, 7, 2, found["2.2"])  # the same step, newer, but on a side branch
    assert resolve(history.catalog, {}, 2) == found["1.2"]
    history.drop(found["1.2"])
    assert resolve(history.catalog, {}, 2) == again
    assert resolve(history.catalog, {}, 4) == found["1.4"]  # off the line, but the only one
    twice = history.add(3, 2, 21, found["3.1"])
    assert resolve(history.catalog, {}, 21) == twice  # of one step the newest


@pytest.mark.parametrize(
    ("step", "nearest"), [(5, 4), (7, 4), (8, 10), (15, 12), (16, 12), (17, 20), (1000, 21), (-3, 0)]
)
def test_a_step_that_is_missing_names_the_nearest(history: History, step: int, nearest: int) -> None:
    forked(history)
    with pytest.raises(NotFound, match=f"nearest is step {nearest}") as caught:
        resolve(history.catalog, {}, step)
    assert (caught.value.ref, caught.value.nearest) == (step, nearest)


def test_a_step_may_be_written_as_text(history: History) -> None:
    found = forked(history)
    assert resolve(history.catalog, {}, "21") == resolve(history.catalog, {}, "021") == found["3.1"]
    with pytest.raises(NotFound, match="nearest is step 4"):
        resolve(history.catalog, {}, "7")
    with pytest.raises(NotFound):
        resolve(history.catalog, {}, "00000021")  # eight digits and more: the beginning of an id


def test_tags_and_beginnings_of_ids(history: History) -> None:
    found = forked(history)
    tags = {"best": found["1.3"].id, "gone": "f" * 32}
    assert resolve(history.catalog, tags, "best") == found["1.3"]
    assert resolve(history.catalog, tags, found["2.1"].id) == found["2.1"]
    assert resolve(history.catalog, tags, found["2.1"].id[:8]) == found["2.1"]
    with pytest.raises(NotFound, match=f"tag 'gone' names commit {'f' * 32}"):
        resolve(history.catalog, tags, "gone")
    with pytest.raises(NotFound, match="tags: best, gone"):
        resolve(history.catalog, tags, "bset")
    with pytest.raises(NotFound, match="tags: none"):
        resolve(history.catalog, {}, found["2.1"].id[:7])


def test_a_beginning_of_several_ids_is_refused(history: History) -> None:
    first = history.add(1, 0, 0)
    ref = CommitRef("c0010000" + "1" * 24, "c" * 64, 1, 1, 1)
    history.catalog.add(CatalogEntry(ref, first.ref, "delta", "", True, 1, {}, (), pack_name(1, 1, 1, "c" * 16)), 1)
    with pytest.raises(InvalidInput, match="begins 2 commit ids"):
        resolve(history.catalog, {}, "c0010000")
    assert resolve(history.catalog, {}, "c00100001").step == 1


@pytest.mark.parametrize("ref", [None, 1.0, True, b"latest", ("a",)])
def test_what_names_no_commit_is_refused(history: History, ref: Any) -> None:
    forked(history)
    with pytest.raises(InvalidInput, match="names no commit"):
        resolve(history.catalog, {}, ref)


@pytest.mark.parametrize("ref", ["latest~", "latest~-1", "latest~x", "Latest", "latest~1~1", "", "latest~" + "9" * 10])
def test_what_looks_like_a_reference_is_not_found(history: History, ref: str) -> None:
    forked(history)
    with pytest.raises(NotFound):
        resolve(history.catalog, {}, ref)


@pytest.mark.parametrize("ref", [0, "latest", "latest~1", "best", "0" * 32])
def test_a_store_without_commits_says_so(history: History, ref: int | str) -> None:
    with pytest.raises(NotFound, match="holds no commits"):
        resolve(history.catalog, {}, ref)


@pytest.mark.parametrize(
    ("ref", "expected"),
    [(3, False), ("latest", False), ("latest~2", False), ("0123abcd", False), ("best", True), ("", True)],
)
def test_tags_are_read_only_for_what_may_be_one(ref: int | str, expected: bool) -> None:
    assert needs_tags(ref) is expected


# ---------------------------------------------------------------- chains


def test_a_chain_leads_from_the_base(history: History) -> None:
    found = forked(history)
    assert steps(chain_entries(history.catalog, found["2.1"])) == [0, 1, 2, 10, 11]
    assert steps(chain_entries(history.catalog, found["3.1"])) == [20, 21]


def test_a_chain_with_a_missing_parent_is_damaged(history: History) -> None:
    found = forked(history)
    history.drop(found["1.1"])
    with pytest.raises(Corruption, match=r"step 11 .* of step 1, which is in no readable pack") as caught:
        chain_entries(history.catalog, found["2.1"])
    assert caught.value.missing == found["1.1"].id
    history.drop(found["3.0"], found["3.1"])
    complete = newest_complete(history.catalog)
    assert complete == found["1.0"]


@pytest.mark.parametrize("change", [{"digest": "e" * 64}, {"step": 77}, {"epoch": 0}])
def test_a_parent_that_is_not_what_its_child_names_is_damage(history: History, change: dict[str, Any]) -> None:
    first = history.add(1, 0, 0)
    second = history.add(1, 1, 1, first)
    ref = CommitRef(
        **{name: getattr(first.ref, name) for name in ("id", "digest", "epoch", "sequence", "step")} | change
    )
    history.catalog.by_id[first.id] = CatalogEntry(ref, None, "base", "", True, 1, {}, (), first.pack)
    with pytest.raises(Corruption, match="names parent"):
        chain_entries(history.catalog, second)


def test_commits_that_name_each_other_end(history: History) -> None:
    """A stranger's records may form a ring: neither chain nor line goes round for ever."""
    refs = [CommitRef(f"{n}" * 32, "d" * 64, 1, n, n) for n in (0, 1)]
    for own, other in ((0, 1), (1, 0)):
        history.catalog.add(
            CatalogEntry(refs[own], refs[other], "delta", "", True, 1, {}, (), pack_name(1, own, own, f"{own}" * 16)), 1
        )
    ring = history.catalog.by_id["1" * 32]
    with pytest.raises(Corruption):
        chain_entries(history.catalog, ring)
    assert segments_of(history.catalog, ring) == ((1, 1),)
    assert newest_complete(history.catalog) is None


# ---------------------------------------------------------------- damaged packs


def test_a_step_in_a_damaged_pack_is_not_replaced_by_an_older_one(history: History) -> None:
    found = forked(history)
    broken = Corruption("broken", where="x")
    history.catalog.damaged[pack_name(3, 11, 11, "e" * 16)] = broken
    with pytest.raises(Corruption, match=r"step 11 cannot be read: broken; the newest commit .* step 21") as caught:
        resolve(history.catalog, {}, 11)
    assert caught.value.newest_intact == 21
    assert resolve(history.catalog, {}, 10) == found["2.0"]
    history.catalog.damaged.clear()
    history.catalog.damaged[pack_name(1, 11, 11, "e" * 16)] = broken  # older than what is there
    assert resolve(history.catalog, {}, 11) == found["2.1"]
    history.catalog.damaged["packs/other"] = broken
    assert resolve(history.catalog, {}, 11) == found["2.1"]


@pytest.mark.parametrize("kind", [Corruption, UnsupportedFormat])
def test_a_store_of_damaged_packs_is_not_empty(history: History, kind: type[Corruption | UnsupportedFormat]) -> None:
    history.catalog.damaged[pack_name(9, 1, 1, "0" * 16)] = kind("newest pack", where="y")
    history.catalog.damaged[pack_name(10, 0, 0, "0" * 16)] = kind("really newest pack", where="y")
    for ref in (0, "latest", "best"):
        with pytest.raises(kind, match="really newest pack") as caught:
            resolve(history.catalog, {}, ref)
        assert caught.value.newest_intact is None
