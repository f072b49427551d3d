"""Which commits a tier holds: read from the tails of its packs, remembered in a disposable cache (spec 11.2)."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

from deltastore.errors import Backend, Corruption, DeltaStoreError, NotFound
from deltastore.history.packs import Packs
from deltastore.ondisk.canonical import compress, decompress, parse_sealed, seal
from deltastore.ondisk.fields import Fields
from deltastore.ondisk.index import record_entry
from deltastore.ondisk.limits import MAX_CACHE_BYTES
from deltastore.ondisk.names import CACHE, PACKS, catalog_name, parse_catalog_name, parse_pack_name
from deltastore.ondisk.pack import PackTail
from deltastore.ondisk.records import CommitRecord, CommitRef, parse_record
from deltastore.types import Json

log = logging.getLogger("deltastore")


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A commit and the pack that holds it."""

    ref: CommitRef
    parent: CommitRef | None
    kind: str
    created: str
    exact: bool
    bytes: int
    """Stored bytes: those of the whole pack where it holds one commit."""
    metrics: dict[str, Json]
    lineage: tuple[tuple[int, int], ...]
    pack: str

    @property
    def id(self) -> str:
        """The commit's id."""
        return self.ref.id

    @property
    def step(self) -> int:
        """The commit's step."""
        return self.ref.step

    @property
    def order(self) -> tuple[int, int, str]:
        """Commits are ordered by epoch, then sequence; the id only makes the order total."""
        return self.ref.epoch, self.ref.sequence, self.ref.id


@dataclass
class Catalog:
    """All commits that a tier's packs hold, and the packs that could not be opened."""

    by_id: dict[str, CatalogEntry] = field(default_factory=dict)
    packs: dict[str, int] = field(default_factory=dict)
    """Name -> size of each pack that was read."""
    damaged: dict[str, DeltaStoreError] = field(default_factory=dict)
    copies: dict[str, list[CatalogEntry]] = field(default_factory=dict)
    """Further packs that hold a commit of `by_id`."""

    def ordered(self) -> list[CatalogEntry]:
        """Return the commits, oldest first."""
        return sorted(self.by_id.values(), key=lambda entry: entry.order)

    def add(self, entry: CatalogEntry, pack_bytes: int) -> None:
        """Add a commit.

        Raises
        ------
        Corruption
            The same id is known with another record: one of the two is not what was committed.
        """
        known = self.by_id.get(entry.id)
        if known is not None and known.ref.digest != entry.ref.digest:
            raise Corruption(
                f"commit {entry.id} (step {entry.step}) stands in {known.pack} and {entry.pack} with different records",
                expected=known.ref.digest,
                found=entry.ref.digest,
            )
        # Of several copies the one with the greatest name is used: every reader picks the same.
        if known is not None and known.pack != entry.pack:
            self.copies.setdefault(entry.id, []).append(min(known, entry, key=lambda item: item.pack))
        if known is None or known.pack < entry.pack:
            self.by_id[entry.id] = entry
        self.packs[entry.pack] = pack_bytes

    def drop_pack(self, name: str) -> None:
        """Forget a pack and the commits that stand in no other."""
        self.drop_packs([name])

    def drop_packs(self, names: Iterable[str]) -> None:
        """Forget packs and the commits that stand in no other."""
        dropped = set(names)
        for name in dropped:
            self.packs.pop(name, None)
            self.damaged.pop(name, None)
        for commit in list(self.copies):
            self.copies[commit] = [copy for copy in self.copies[commit] if copy.pack not in dropped]
        for commit in [entry.id for entry in self.by_id.values() if entry.pack in dropped]:
            del self.by_id[commit]
            copies = self.copies.pop(commit, [])
            if copies:
                self.by_id[commit] = max(copies, key=lambda item: item.pack)
                self.copies[commit] = [copy for copy in copies if copy is not self.by_id[commit]]


def read_catalog(packs: Packs, known: Catalog | None = None) -> Catalog:
    """Return the catalog of a tier; packs that `known` holds are not read again.

    A pack that cannot be opened does not hinder the others: it is listed as damaged and logged.
    """
    listed = {info.name: info.size for info in packs.tier.list(PACKS) if parse_pack_name(info.name)}
    catalog = known if known is not None else _read_cache(packs)
    for name in [name for name, size in catalog.packs.items() if listed.get(name) != size]:
        catalog.drop_pack(name)
        packs.forget(name)
    catalog.damaged = {}
    for name in sorted(set(listed) - set(catalog.packs)):
        try:
            tail = packs.tail(name)
            if packs.store is None:
                packs.store = tail.index.store  # no FORMAT.json to tell: all packs must at least agree
            for entry in entries_of(tail, name):
                catalog.add(entry, listed[name])
            catalog.packs[name] = listed[name]
        except NotFound:
            continue  # deleted since it was listed
        except (DeltaStoreError, OSError) as error:
            fault = error if isinstance(error, DeltaStoreError) else Backend(f"{name}: {error}", errno=error.errno)
            catalog.damaged[name] = fault
            log.warning("pack cannot be used: %s", fault)
    return catalog


def entries_of(tail: PackTail, name: str) -> list[CatalogEntry]:
    """Return the catalog entries of a pack's commits."""
    single = len(tail.index.commits) == 1
    result = []
    for commit, digest in tail.index.commits:
        record = record_of(tail, commit, digest)
        if single:
            stored = tail.trailer.file_size
        else:
            arrays = [array for path, array in tail.index.arrays.items() if path.startswith(f"{commit}/")]
            stored = tail.index.blobs[record_entry(commit)].length
            stored += sum(extent.length for array in arrays for extent in array.chunks)
        result.append(entry_of(record, digest, stored, name))
    return result


def record_of(tail: PackTail, commit: str, digest: str) -> CommitRecord:
    """Return a commit's record from its pack."""
    entry = record_entry(commit)
    record = parse_record(tail.blob(entry), digest, f"{tail.where}, {entry}")
    if record.id != commit:
        raise Corruption(f"{tail.where}: entry {entry} holds the record of {record.id}", where=tail.where)
    return record


def entry_of(record: CommitRecord, digest: str, stored_bytes: int, pack: str) -> CatalogEntry:
    """Return the catalog entry of a record."""
    ref = CommitRef(record.id, digest, record.epoch, record.sequence, record.step)
    return CatalogEntry(
        ref,
        record.parent,
        record.kind,
        record.created,
        record.exact,
        stored_bytes,
        record.metrics,
        record.lineage,
        pack,
    )


def write_cache(packs: Packs, catalog: Catalog, session: str) -> None:
    """Write the catalog cache; a failure is logged, for the cache can always be made again."""
    try:
        numbers = _cache_numbers(packs)
        by_pack: dict[str, list[Json]] = {name: [] for name in catalog.packs}
        for entry in [*catalog.by_id.values(), *(copy for copies in catalog.copies.values() for copy in copies)]:
            by_pack[entry.pack].append(_dump(entry))
        listed = {name: [catalog.packs[name], entries] for name, entries in by_pack.items()}
        body = {"store": packs.store, "packs": listed}
        packs.tier.publish_new(catalog_name(max(numbers, default=-1) + 1), [compress(seal(body))], session)
        for number in numbers:
            packs.tier.delete(catalog_name(number))
    except DeltaStoreError as error:
        log.warning("the catalog cache was not written: %s", error)


def _cache_numbers(packs: Packs) -> list[int]:
    numbers = (parse_catalog_name(info.name) for info in packs.tier.list(CACHE))
    return [number for number in numbers if number is not None]


def _read_cache(packs: Packs) -> Catalog:
    catalog = Catalog()
    numbers = _cache_numbers(packs)
    if not numbers:
        return catalog
    name = catalog_name(max(numbers))
    where = f"{packs.tier.url}/{name}"
    # Disposable: whatever is wrong with it, the packs are read instead.
    with contextlib.suppress(DeltaStoreError, TypeError, ValueError):
        fields = Fields(
            parse_sealed(decompress(packs.tier.read(name), MAX_CACHE_BYTES, where), where, MAX_CACHE_BYTES), where
        )
        if packs.store is None or fields.text("store") != packs.store:
            return catalog  # of another store, or nothing tells: the packs decide
        loaded = Catalog()
        for pack, (size, entries) in fields.mapping("packs").items():
            loaded.packs[pack] = int(size)
            for entry in entries:
                loaded.add(_load(entry, pack), size)
        catalog = loaded
    return catalog


def _dump(entry: CatalogEntry) -> Json:
    ref, parent = entry.ref, entry.parent
    return [
        [ref.id, ref.digest, ref.epoch, ref.sequence, ref.step],
        None if parent is None else [parent.id, parent.digest, parent.epoch, parent.sequence, parent.step],
        entry.kind,
        entry.created,
        entry.exact,
        entry.bytes,
        entry.metrics,
        [list(segment) for segment in entry.lineage],
    ]


def _load(value: Json, pack: str) -> CatalogEntry:
    ref, parent, kind, created, exact, stored, metrics, lineage = value
    segments = tuple((int(epoch), int(last)) for epoch, last in lineage)
    parent_ref = None if parent is None else _load_ref(parent)
    return CatalogEntry(
        _load_ref(ref), parent_ref, str(kind), str(created), bool(exact), int(stored), dict(metrics), segments, pack
    )


def _load_ref(value: Json) -> CommitRef:
    commit, digest, epoch, sequence, step = value
    return CommitRef(str(commit), str(digest), int(epoch), int(sequence), int(step))
