"""What a writer was promised, and the check that a store keeps it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from deltastore.config import Retention
from deltastore.handle import Commit, Handle
from deltastore.history.session import claimed_epochs
from deltastore.ondisk.canonical import parse_sealed
from deltastore.ondisk.limits import MAX_SEALED_BYTES
from deltastore.ondisk.names import PACKS, epoch_name, parse_pack_name
from deltastore.store import Store
from deltastore.testing.compare import assert_same
from deltastore.tiers.base import Tier
from tests.crash._states import make_state


@dataclass
class Journal:
    """Commits by serial number, which never repeats: a greater one was submitted later.

    Attributes
    ----------
    parents : dict
        Serial -> serial of the commit that it follows, for all that were submitted.
    acked : dict
        Serial -> id of each acknowledged commit.
    tags : dict
        Tag -> serial, for each tag whose write returned.
    tried : dict
        Tag -> serials that a write has begun for since.
    followed : set
        Serials that a writer found and went on from.
    told_late : bool
        Acknowledgements are noted some time after they were given: any commit that was submitted may be published.
    """

    seed: int
    parents: dict[int, int | None] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    acked: dict[int, str] = field(default_factory=dict)
    tags: dict[str, int] = field(default_factory=dict)
    tried: dict[str, set[int]] = field(default_factory=dict)
    followed: set[int] = field(default_factory=set)
    head: int | None = None
    scale: int = 1
    told_late: bool = False
    _handles: dict[int, Handle] = field(default_factory=dict)

    @property
    def next_serial(self) -> int:
        """A number that no commit has."""
        return max(self.parents, default=-1) + 1

    def submit(self, serial: int, step: int) -> None:
        """Note that a commit is about to be handed over."""
        self.parents[serial], self.steps[serial], self.head = self.head, step, serial

    def handed_over(self, serial: int, handle: Handle) -> None:
        """Note the handle of a commit."""
        self._handles[serial] = handle

    def ack(self, serial: int, commit: str) -> None:
        """Note that a commit was acknowledged, and the tag with it that it was submitted with."""
        self.acked[serial] = commit
        if serial in self.tried.get(f"c{serial}", ()):
            self.tags[f"c{serial}"] = serial

    def follow(self, serial: int | None) -> None:
        """Note that the next commit follows this one, though nobody may have been told that it stands."""
        self.head = serial
        if serial is not None:
            self.followed.add(serial)

    def restored(self, serial: int, commit: str) -> None:
        """Note that a commit was restored for writing, which promises that it stays."""
        self.follow(serial)
        self.acked[serial] = commit

    def try_tag(self, name: str, serial: int) -> None:
        """Note that the write of a tag begins."""
        self.tried.setdefault(name, set()).add(serial)

    def tagged(self, name: str, serial: int) -> None:
        """Note that the write of a tag returned."""
        self.tags[name] = serial
        self.tried[name] = {serial}

    def settle(self) -> None:
        """Take over what the handles know by now."""
        for serial, handle in list(self._handles.items()):
            if handle.done() and self._handles.pop(serial, None) is not None:
                self.ack(serial, handle.wait().id)

    def freeze(self) -> Journal:
        """Return what is promised at this moment; any thread may ask."""
        self.settle()
        tried = {name: set(serials) for name, serials in self.tried.items()}
        return replace(
            self,
            parents=dict(self.parents),
            steps=dict(self.steps),
            acked=dict(self.acked),
            tags=dict(self.tags),
            tried=tried,
            followed=set(self.followed),
            _handles={},
        )

    def line(self, head: int | None = None) -> list[int]:
        """Return the serials of a line of history, oldest first; the present one by default."""
        found = []
        serial = self.head if head is None else head
        while serial is not None:
            found.append(serial)
            serial = self.parents[serial]
        return found[::-1]

    def required(self, retention: Retention | None) -> set[int]:
        """Return the serials that must be readable, with whatever retention may have deleted left out."""
        if retention is None:
            return set(self.acked)
        line = self.line()
        if self.told_late:
            kept = line[-retention.keep_last :]
        else:
            # One more may be published, and retention run for it, before it is acknowledged.
            line = [serial for serial in line if serial in self.acked or serial in self.followed]
            kept = line[-(retention.keep_last - 1) :] if retention.keep_last > 1 else []
        # Who goes back gets nothing again that was deleted while the line was longer.
        let_go: set[int] = set()
        for head in self.parents:
            let_go.update(self.line(head)[: -retention.keep_last])
        kept = [serial for serial in kept if serial not in let_go]
        kept += [serial for serial in line if retention.keeps_step(self.steps[serial])]
        return set(kept) & set(self.acked)


def check(tier: Tier, journal: Journal, retention: Retention | None = None, *, since: int = 0) -> None:
    """Assert that a store holds what its writers were promised, and nothing that is half written.

    Parameters
    ----------
    since : int
        Read only commits of this serial and later: the earlier ones were read before, and must still be there.
    """
    with Store(tier, writable=False) as store:
        commits = store.commits()
        packs = {info.name for info in tier.list(PACKS)}
        if since:
            assert len(packs) == len(commits), "a pack cannot be opened"
        else:
            report = store.verify(deep=True)
            # Where the first commit never came, FORMAT.json may be missing too.
            expected = set() if packs else {"not_found"}
            assert {finding.kind for finding in report.findings} <= expected, report.findings
        by_id = {commit.id: commit for commit in commits}
        serials = {commit.id: serial_of(commit) for commit in commits}
        for commit in commits:
            serial = serials[commit.id]
            assert serial in journal.parents, f"commit {commit.id} of serial {serial} was never submitted"
            assert journal.acked.get(serial, commit.id) == commit.id
            if serial >= since:
                assert_exact(store, journal, commit.id, serial)
            if commit.parent in serials:
                assert serials[commit.parent] == journal.parents[serial]
            elif retention is None:
                assert commit.parent is None, f"commit of serial {serial} is there, its parent is not"
        missing = {serial for serial in journal.required(retention) if journal.acked[serial] not in by_id}
        assert not missing, (
            f"acknowledged commits {sorted(missing)} are gone: steps {journal.steps}, line {journal.line()}, parents "
            f"{journal.parents}, acknowledged {sorted(journal.acked)}, there {sorted(serials.values())}, {retention}"
        )
        if journal.acked:
            assert serial_of(store.at("latest").commit) >= max(journal.acked)
        for name, serial in journal.tags.items():
            found = store.at(name).commit
            assert serials[found.id] in {serial, *journal.tried.get(name, ())}, name
        epochs = {about.epoch for about in map(parse_pack_name, packs) if about}
        assert epochs <= claimed_epochs(tier)
        for epoch in epochs:
            name = epoch_name(epoch)
            assert parse_sealed(tier.read(name), name, MAX_SEALED_BYTES)["epoch"] == epoch


def assert_exact(store: Store, journal: Journal, ref: int | str, serial: int) -> None:
    """Assert that a commit is the state of its serial number, bit for bit."""
    assert_same(make_state(journal.seed, serial, scale=journal.scale), store.at(ref).to_state_dict())


def serial_of(commit: Commit) -> int:
    """Return the serial number that a commit was made with."""
    serial = commit.metrics["serial"]
    assert type(serial) is int
    return serial
