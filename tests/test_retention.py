"""Retention: what is kept, what is gone, what a reader finds afterwards (spec 11.6)."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import deltastore
from deltastore.errors import Backend, Conflict, InvalidInput, NotFound
from deltastore.handle import Commit
from deltastore.store import Store
from deltastore.testing.compare import assert_same
from deltastore.tiers.local import LocalTier
from tests.forge import Pack

SIZE = 6000
KEEP = {"keep_last": 10, "keep_every": 100}


def state_at(step: int, branch: int = 0) -> dict[str, Any]:
    """Return the state of a step: each differs from the one before in a few elements of each tensor."""
    weight = torch.arange(SIZE, dtype=torch.float32)
    for back in range(min(step, 40) + 1):
        weight[(step - back) * 7 % SIZE :: 997] = (step - back) + branch / 10
    return {"model": {"w": weight, "b": torch.full((100,), float(step))}, "step": step, "branch": branch}


def put(store: Store, step: int, branch: int = 0, **options: Any) -> Commit:
    return store.commit(step, state_at(step, branch), **options).wait()


class Journal:
    """Remembers what was committed, and says what must be there."""

    def __init__(self) -> None:
        self.commits: dict[str, Commit] = {}
        self.line: list[str] = []

    def add(self, commit: Commit) -> None:
        self.commits[commit.id] = commit
        self.line.append(commit.id)

    def chain(self, commit: str) -> list[str]:
        found = [commit]
        while self.commits[found[-1]].kind == "delta":
            found.append(str(self.commits[found[-1]].parent))
        return found

    def closure(self, kept: Iterable[str]) -> set[str]:
        return {member for commit in kept for member in self.chain(commit)}

    def kept(self, keep_last: int, keep_every: int | None, tagged: Iterable[str] = ()) -> set[str]:
        round_ones = [c for c in self.line if keep_every and self.commits[c].step % keep_every == 0]
        return self.closure([*self.line[-keep_last:], *round_ones, *tagged])


def ids(store: Store) -> set[str]:
    store.refresh()
    return {commit.id for commit in store.commits()}


def packs(root: Path) -> set[str]:
    return {path.name for path in (root / "packs").iterdir()}


def check_all_read_back(root: Path) -> None:
    with deltastore.open(root, mode="r") as store:
        for commit in store.commits():
            state = store.at(commit.id).to_state_dict()
            assert_same(state_at(commit.step, state["branch"]), state)


@pytest.mark.slow
@pytest.mark.parametrize("restarted", [False, True])
def test_a_thousand_commits(tmp_path: Path, restarted: bool) -> None:
    journal = Journal()
    looked_at = {0, 5, 9, 10, 11, 99, 100, 101, 109, 110, 111, 200, 399, 400, 555, 899, 900, 999}
    step = 0
    for last in (437, 999) if restarted else (999,):
        with deltastore.open(tmp_path, retention=KEEP) as store:
            if step:
                assert store.restore().commit.step == step - 1
            while step <= last:
                journal.add(put(store, step))
                if step in looked_at:
                    assert ids(store) == journal.kept(10, 100)
                step += 1
    kept = journal.kept(10, 100)
    chain = journal.chain(journal.line[-1])
    bases = [c for c in kept if journal.commits[c].kind == "base"]
    expected = sum(journal.commits[c].bytes for c in {*bases, *chain})
    everything = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert everything <= 1.2 * expected
    with deltastore.open(tmp_path, mode="r") as store:
        commits = store.commits()
        assert {commit.id for commit in commits} == kept
        steps = {commit.step for commit in commits}
        assert steps >= {*range(0, 1000, 100), *range(990, 1000)}
        assert [c.kind for c in commits if c.step % 100 == 0] == ["base"] * 10
        assert len(bases) <= 10 + 2
    assert len(packs(tmp_path)) == len(kept)
    check_all_read_back(tmp_path)


def make(root: Path, steps: Iterable[int], restore_cost: float = 50) -> Journal:
    journal = Journal()
    with deltastore.open(root) as store:
        store.set_restore_cost(restore_cost)
        for step in steps:
            journal.add(put(store, step))
    return journal


def test_prune_is_a_dry_run_unless_asked(tmp_path: Path) -> None:
    journal = make(tmp_path, range(12), restore_cost=1.02)
    before = packs(tmp_path)
    with deltastore.open(tmp_path) as store:
        report = store.prune(keep_last=2)
        assert report.dry_run
        assert set(report.commits) == set(journal.line) - journal.kept(2, None)
        assert report.bytes == sum(journal.commits[c].bytes for c in report.commits)
        assert report.commits
        assert packs(tmp_path) == before
        done = store.prune(keep_last=2, dry_run=False)
        assert not done.dry_run
        assert done.commits == report.commits
        assert ids(store) == journal.kept(2, None)
    assert len(packs(tmp_path)) == len(journal.kept(2, None))
    check_all_read_back(tmp_path)


def test_prune_keeps_round_steps_and_chains(tmp_path: Path) -> None:
    journal = make(tmp_path, range(20), restore_cost=1.05)
    with deltastore.open(tmp_path) as store:
        assert len(journal.kept(1, 6)) < len(journal.line)
        store.prune(keep_last=1, keep_every=6, dry_run=False)
        assert ids(store) == journal.kept(1, 6)
    check_all_read_back(tmp_path)
    with deltastore.open(tmp_path, mode="r") as store:
        assert store.verify(deep=True).ok


def test_prune_of_a_live_store_is_a_conflict(tmp_path: Path) -> None:
    with deltastore.open(tmp_path) as writer:
        put(writer, 0)
        put(writer, 1)
        before = packs(tmp_path)
        with deltastore.open(tmp_path) as other:
            assert other.prune(keep_last=1).dry_run
            with pytest.raises(Conflict, match=str(os.getpid())):
                other.prune(keep_last=1, dry_run=False)
        assert packs(tmp_path) == before
        put(writer, 2)
    with deltastore.open(tmp_path) as other:
        other.prune(keep_last=1, dry_run=False)


def test_the_writer_itself_may_prune(tmp_path: Path) -> None:
    journal = Journal()
    with deltastore.open(tmp_path) as store:
        store.set_restore_cost(1)
        for step in range(6):
            journal.add(put(store, step))
        store.prune(keep_last=1, dry_run=False)
        assert ids(store) == journal.kept(1, None)
        for step in range(6, 9):
            journal.add(put(store, step))
        assert ids(store) >= journal.kept(4, None)
    check_all_read_back(tmp_path)


@pytest.mark.parametrize("wrong", [{"keep_last": 0}, {"keep_last": -1}, {"keep_every": 0}, {"keep_last": True}])
def test_what_cannot_be_meant(tmp_path: Path, wrong: dict[str, Any]) -> None:
    make(tmp_path, range(2))
    with deltastore.open(tmp_path) as store, pytest.raises(InvalidInput):
        store.prune(**wrong)
    with pytest.raises(InvalidInput):
        deltastore.open(tmp_path, retention=wrong)
    with pytest.raises(InvalidInput, match="keep_first"):
        deltastore.open(tmp_path, retention={"keep_first": 1})


def test_tags_protect_their_chains(tmp_path: Path) -> None:
    journal = Journal()
    retention = {"keep_last": 2}
    with deltastore.open(tmp_path, retention=retention) as store:
        for step in range(20):
            journal.add(put(store, step, tag="best" if step == 8 else None))
            if step == 4:
                store.tag("good", 4)
        tagged = [journal.line[4], journal.line[8]]
        assert journal.commits[tagged[1]].kind == "base"
        assert ids(store) == journal.kept(2, None, tagged)
        store.tag("good", None)
        store.tag("best", "latest", move=True)
        newest = journal.line[-1]
        journal.add(put(store, 20))
        assert ids(store) == journal.kept(2, None, [newest])
        for step in range(21, 25):
            journal.add(put(store, step))
        assert ids(store) == journal.kept(2, None, [newest])
        assert store.at("best").commit.step == 19
    check_all_read_back(tmp_path)


def test_references_after_gaps(tmp_path: Path) -> None:
    """`latest~n` counts what is there; a step that is gone is not found, and the nearest is named."""
    with deltastore.open(tmp_path, retention={"keep_last": 3, "keep_every": 10}) as store:
        for step in range(26):
            put(store, step)
    with deltastore.open(tmp_path, mode="r") as store:
        steps = [commit.step for commit in store.commits()]
        assert set(steps) >= {0, 10, 20, 23, 24, 25}
        for back, step in enumerate(reversed(steps)):
            assert store.at(f"latest~{back}").commit.step == step
        with pytest.raises(NotFound, match=f"only {len(steps)} commits"):
            store.at(f"latest~{len(steps)}")
        gone = next(step for step in range(1, 26) if step not in steps)
        with pytest.raises(NotFound) as caught:
            store.at(gone)
        assert caught.value.fields["nearest"] == min(steps, key=lambda step: (abs(step - gone), step))


def test_a_line_across_epochs_whose_middle_is_gone(tmp_path: Path) -> None:
    """Going back after retention: the base tells which older epochs belong to its line."""
    retention = {"keep_last": 3, "keep_every": 10}
    journal = Journal()
    with deltastore.open(tmp_path, retention=retention) as store:
        for step in range(14):
            journal.add(put(store, step))
    with deltastore.open(tmp_path, retention=retention) as store:
        assert store.restore("latest~2").commit.step == 11
        side = journal.line[-2:]
        del journal.line[-2:]
        for step in range(12, 36):
            journal.add(put(store, step, branch=1))
        # The side branch was nowhere near the last ones.
        assert ids(store) == journal.kept(3, 10)
        assert ids(store).isdisjoint(side)
        assert [store.at(step).commit.epoch for step in (0, 10, 20, 30)] == [1, 1, 2, 2]
        steps = [commit.step for commit in store.commits()]
        assert [store.at(f"latest~{back}").commit.step for back in range(len(steps))] == steps[::-1]
    check_all_read_back(tmp_path)


def test_a_tagged_side_branch_stays(tmp_path: Path) -> None:
    journal = make(tmp_path, range(8))
    with deltastore.open(tmp_path) as store:
        store.tag("side", 7)
        store.restore(3)
        del journal.line[4:]
        tagged = store.at("side").commit.id
        for step in range(4, 8):
            journal.add(put(store, step, branch=1))
        store.prune(keep_last=1, dry_run=False)
        assert ids(store) == journal.kept(1, None, [tagged])
        assert store.at("side").to_state_dict()["branch"] == 0
        assert store.at(7).to_state_dict()["branch"] == 1
        store.tag("side", None)
        store.prune(keep_last=1, dry_run=False)
        assert ids(store) == journal.kept(1, None)
    check_all_read_back(tmp_path)


def double(root: Path, name: str, write: str) -> str:
    """Publish the commit of a pack a second time, as a writer does whose first outcome was unknown."""
    pack = Pack.parse((root / "packs" / name).read_bytes())
    pack.index["write"] = write
    copy = f"{name.rsplit('-', 1)[0]}-{write}.zip"
    (root / "packs" / copy).write_bytes(pack.build())
    return copy


@pytest.mark.parametrize("write", ["0" * 16, "f" * 16])
def test_a_commit_in_two_packs(tmp_path: Path, write: str) -> None:
    """One commit to every reader; prune deletes one of the copies, the same one whoever runs it."""
    journal = make(tmp_path, range(4))
    shutil.rmtree(tmp_path / "cache")
    name = next(name for name in packs(tmp_path) if "-2-2-" in name)
    copy = double(tmp_path, name, write)
    with deltastore.open(tmp_path, mode="r") as store:
        assert [commit.step for commit in store.commits()] == [0, 1, 2, 3]
        assert store.verify(deep=True).ok
    check_all_read_back(tmp_path)
    with deltastore.open(tmp_path) as store:
        store.prune(keep_last=4, dry_run=False)
        assert ids(store) == set(journal.line)
    assert packs(tmp_path) & {name, copy} == {max(name, copy)}
    assert len(packs(tmp_path)) == 4
    check_all_read_back(tmp_path)


def test_both_copies_of_a_commit_go(tmp_path: Path) -> None:
    journal = make(tmp_path, range(6), restore_cost=1.02)
    name = next(name for name in packs(tmp_path) if "-0-0-" in name)
    copy = double(tmp_path, name, "8" * 16)
    with deltastore.open(tmp_path) as store:
        store.prune(keep_last=1, dry_run=False)
        assert ids(store) == journal.kept(1, None)
    assert packs(tmp_path).isdisjoint({name, copy})


def test_a_damaged_pack_stops_deleting_below_it(tmp_path: Path) -> None:
    """It may name any older commit as its parent."""
    make(tmp_path, range(10), restore_cost=1.02)
    damaged = next(name for name in packs(tmp_path) if "-6-6-" in name)
    data = bytearray((tmp_path / "packs" / damaged).read_bytes())
    data[-60] ^= 1
    (tmp_path / "packs" / damaged).write_bytes(data)
    shutil.rmtree(tmp_path / "cache")
    before = packs(tmp_path)
    with deltastore.open(tmp_path) as store:
        report = store.prune(keep_last=5, dry_run=False)
    gone = {int(name.split("-")[1]) for name in before - packs(tmp_path)}
    assert all(step > 6 for step in gone)
    assert damaged in packs(tmp_path)
    assert [name.endswith(damaged) for name in report.held_back] == [True]


def test_a_damaged_pack_that_would_not_be_kept_stops_nothing(tmp_path: Path) -> None:
    make(tmp_path, range(10), restore_cost=1.02)
    damaged = next(name for name in packs(tmp_path) if "-2-2-" in name)
    os.truncate(tmp_path / "packs" / damaged, 100)
    shutil.rmtree(tmp_path / "cache")
    with deltastore.open(tmp_path) as store:
        report = store.prune(keep_last=3, dry_run=False)
        assert report.held_back == ()
        assert store.at("latest").commit.step == 9
    left = {int(name.split("-")[1]) for name in packs(tmp_path)}
    assert {7, 8, 9} <= left
    assert not left & {0, 1}


def test_a_reader_goes_on(tmp_path: Path) -> None:
    """What a reader has opened stays readable for it; after a look at the store the rest is not found."""
    make(tmp_path, range(6), restore_cost=1.02)
    with deltastore.open(tmp_path, mode="r") as reader, deltastore.open(tmp_path) as store:
        state = reader.at(1)
        assert_same(state_at(1), state.to_state_dict())
        store.prune(keep_last=1, dry_run=False)
        assert_same(state_at(1), state.to_state_dict())
        reader.refresh()
        with pytest.raises(NotFound):
            reader.at(1)
        assert_same(state_at(5), reader.at(5).to_state_dict())


@pytest.mark.parametrize("after", range(6))
def test_broken_off_while_deleting(tmp_path: Path, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it stops, what is left has its parents, and the next run finishes."""
    journal = make(tmp_path, range(30), restore_cost=1.05)
    doomed = set(journal.line) - journal.kept(1, None)
    assert {journal.commits[commit].kind for commit in doomed} == {"base", "delta"}
    deleted: list[str] = []
    delete = LocalTier.delete

    def failing(self: LocalTier, name: str) -> None:
        if len(deleted) == after:
            raise Backend("it broke off", errno=5)
        deleted.append(name)
        delete(self, name)

    with monkeypatch.context() as patch, deltastore.open(tmp_path) as store:
        patch.setattr(LocalTier, "delete", failing)
        with pytest.raises(Backend):
            store.prune(keep_last=1, dry_run=False)
    check_all_read_back(tmp_path)
    with deltastore.open(tmp_path) as store:
        assert store.verify(deep=True).ok
        store.prune(keep_last=1, dry_run=False)
        assert ids(store) == journal.kept(1, None)
    check_all_read_back(tmp_path)


def test_random_prunes(tmp_path: Path, seed: int) -> None:
    """Commits, going back, tags and prunes in any order: the closure of what is kept is there, and nothing else."""
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int) -> int:
        return int(torch.randint(high, (), generator=generator))

    journal, tags, step = Journal(), dict[str, str](), 0
    with deltastore.open(tmp_path) as store:
        store.set_restore_cost(1.05)
        for branch in range(12):
            for _ in range(1 + draw(6)):
                journal.add(put(store, step, branch))
                step += 1
            if draw(2):
                name = f"t{secrets.token_hex(3)}x"
                tags[name] = journal.line[draw(len(journal.line))]
                store.tag(name, tags[name])
            if draw(3) == 0:
                keep_last, keep_every = 1 + draw(4), (None, 2, 5)[draw(3)]
                store.prune(keep_last, keep_every, dry_run=False)
                kept = journal.kept(keep_last, keep_every, tags.values())
                assert ids(store) == kept
                journal.line = [c for c in journal.line if c in kept]
            if draw(3) == 0:
                back = draw(min(3, len(journal.line)))
                step = 1 + store.restore(f"latest~{back}").commit.step
                del journal.line[len(journal.line) - back :]
    with deltastore.open(tmp_path, mode="r") as store:
        assert store.verify(deep=True).ok
    check_all_read_back(tmp_path)
