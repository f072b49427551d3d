"""A store against a plain model: commit, go back, tag, prune, reopen and verify in any order."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.strategies import DataObject

import deltastore
from deltastore.errors import AlreadyExists, InvalidInput, NotFound
from deltastore.store import Store
from deltastore.testing.compare import assert_same
from deltastore.testing.strategies import edit, states

TAGS = st.sampled_from(["best", "epoch.1", "a-b_c"])


@dataclass(frozen=True)
class Known:
    """What the model knows of a commit, also of one that was pruned."""

    id: str
    step: int
    parent: str | None
    kind: str
    state: dict[Any, Any]


class StoreMachine(RuleBasedStateMachine):
    """The model: commits in the order in which they were made, which of them are there, and the tags."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[str, Known] = {}
        self.present: list[str] = []
        self.tags: dict[str, str] = {}
        self.head: str | None = None
        """What the next commit of this writer follows."""
        self.store: Store
        self.folder: str | None = None

    @initialize(data=st.data(), on_disk=st.booleans(), restore_cost=st.sampled_from([1.0, 2.0, 1e9]))
    def make(self, data: DataObject, on_disk: bool, restore_cost: float) -> None:
        self.folder = tempfile.mkdtemp(prefix="machine-") if on_disk else None
        self.url = f"memory://machine-{secrets.token_hex(8)}" if self.folder is None else f"{self.folder}/store"
        self.restore_cost = restore_cost
        self.open()
        self.put(0, data.draw(states(), label="state"), None)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
        if self.folder is not None:
            shutil.rmtree(self.folder)

    # ------------------------------------------------------------ the model

    def open(self) -> None:
        self.store = deltastore.open(self.url)
        self.store.set_restore_cost(self.restore_cost)
        self.head = self.present[-1] if self.present else None

    def line(self) -> list[str]:
        """Return the commits that lead to the newest, oldest first, as far as they are there."""
        found: list[str] = []
        at: str | None = self.present[-1]
        while at is not None:
            if at in self.present:
                found.append(at)
            at = self.known[at].parent
        return found[::-1]

    def chain(self, commit: str) -> list[str]:
        """Return a commit and what it needs."""
        found = [commit]
        while self.known[found[-1]].kind == "delta":
            parent = self.known[found[-1]].parent
            assert parent is not None
            found.append(parent)
        return found

    def at_step(self, step: int) -> str | None:
        matching = [commit for commit in self.present if self.known[commit].step == step]
        on_line = [commit for commit in self.line() if commit in matching]
        found = on_line or matching
        return found[-1] if found else None

    def refs(self) -> list[int | str]:
        steps = sorted({self.known[commit].step for commit in self.present})
        back = [f"latest~{number}" for number in range(len(self.line()))]
        return [*steps, "latest", *back, *self.tags, *(commit[:12] for commit in self.present)]

    def meant(self, ref: int | str) -> str:
        found = None
        if isinstance(ref, int):
            found = self.at_step(ref)
        elif ref.startswith("latest"):
            found = self.line()[-1 - int(ref.partition("~")[2] or 0)]
        elif ref in self.tags:
            found = self.tags[ref]
        else:
            found = next(commit for commit in self.present if commit.startswith(ref))
        assert found is not None
        return found

    def put(self, step: int, state: dict[Any, Any], tag: str | None, *, streamed: bool = False) -> None:
        if streamed:
            made = self.store.commit_streamed(step, state, tag=tag)
            assert made.id not in self.known
        else:
            made = self.store.commit(step, state, tag=tag).wait()
        if made.id in self.known:
            # The same step and nothing changed: no new commit, the one before is it.
            assert made.id == self.head
            assert self.known[made.id].step == step
            assert_same(self.known[made.id].state, state)
        else:
            assert made.parent == self.head
            assert made.kind == "base" or tag is None
            self.known[made.id] = Known(made.id, made.step, made.parent, made.kind, state)
            self.present.append(made.id)
            if tag is not None:
                self.tags[tag] = made.id
        self.head = made.id

    # ------------------------------------------------------------ what happens

    @rule(data=st.data(), more=st.integers(0, 2), tag=st.none() | TAGS, streamed=st.booleans())
    def commit(self, data: DataObject, more: int, tag: str | None, streamed: bool) -> None:
        last = self.known[self.head or ""]
        state: dict[Any, Any] = data.draw(edit(last.state), label="state")
        if tag in self.tags:
            with pytest.raises(AlreadyExists, match=tag):
                self.store.commit(last.step + more, state, tag=tag)
            tag = None
        self.put(last.step + more, state, tag, streamed=streamed)

    @precondition(lambda self: self.known[self.head].step > 0)
    @rule(data=st.data())
    def commit_backwards(self, data: DataObject) -> None:
        last = self.known[self.head or ""]
        state: dict[Any, Any] = data.draw(edit(last.state), label="state")
        with pytest.raises(InvalidInput, match="never decrease"):
            self.store.commit(last.step - 1, state)

    @rule(data=st.data())
    def restore(self, data: DataObject) -> None:
        ref = data.draw(st.sampled_from(self.refs()), label="ref")
        expected = self.known[self.meant(ref)]
        restored = self.store.restore(ref)
        assert restored.commit.id == expected.id
        assert_same(expected.state, restored.to_state_dict())
        self.head = expected.id

    @rule(data=st.data(), name=TAGS, move=st.booleans())
    def tag(self, data: DataObject, name: str, move: bool) -> None:
        ref = data.draw(st.sampled_from(self.refs()), label="ref")
        commit = self.meant(ref)
        if name in self.tags and self.tags[name] != commit and not move:
            with pytest.raises(AlreadyExists, match=name):
                self.store.tag(name, ref)
        else:
            self.store.tag(name, ref, move=move)
            self.tags[name] = commit

    @precondition(lambda self: self.tags)
    @rule(data=st.data())
    def untag(self, data: DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.tags)), label="tag")
        self.store.tag(name, None)
        del self.tags[name]

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.open()

    @rule(keep_last=st.integers(1, 3), keep_every=st.none() | st.integers(2, 4))
    def prune(self, keep_last: int, keep_every: int | None) -> None:
        # Not while a writer goes on from a commit: that one is the parent of its next delta.
        self.reopen()
        line = self.line()
        kept = line[-keep_last:] + [c for c in line if keep_every is not None and self.known[c].step % keep_every == 0]
        needed = {member for commit in [*kept, *self.tags.values()] for member in self.chain(commit)}
        doomed = [commit for commit in self.present if commit not in needed]
        assert self.store.prune(keep_last, keep_every).commits == tuple(reversed(doomed))
        assert len(self.store.commits()) == len(self.present)
        report = self.store.prune(keep_last, keep_every, dry_run=False)
        assert report.commits == tuple(reversed(doomed))
        self.present = [commit for commit in self.present if commit in needed]

    @rule(deep=st.booleans())
    def verify(self, deep: bool) -> None:
        report = self.store.verify(deep=deep)
        assert report.ok, report.findings
        assert report.commits == len(self.present)
        assert report.newest_intact is not None
        assert report.newest_intact.id == self.present[-1]

    # ------------------------------------------------------------ what must hold

    @invariant()
    def lists_what_the_model_lists(self) -> None:
        if not self.present:
            return
        listed = self.store.commits()
        assert [commit.id for commit in listed] == self.present
        for commit in listed:
            known = self.known[commit.id]
            assert (commit.step, commit.kind, commit.parent) == (known.step, known.kind, known.parent)
            assert set(commit.tags) == {name for name, target in self.tags.items() if target == commit.id}
            assert commit.exact

    @rule(data=st.data(), as_reader=st.booleans())
    def read(self, data: DataObject, as_reader: bool) -> None:
        ref = data.draw(st.sampled_from(self.refs()), label="ref")
        store = deltastore.open(self.url, "r") if as_reader else self.store
        state = store.at(ref)
        expected = self.known[self.meant(ref)]
        assert state.commit.id == expected.id
        assert_same(expected.state, state.to_state_dict())
        with pytest.raises(NotFound, match="nearest"):
            store.at(1 + max(self.known[commit].step for commit in self.present))
        if as_reader:
            store.close()


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=max(5, settings().max_examples // 2))
