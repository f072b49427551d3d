"""Tells whether everything is there and is what was written (spec 13)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from deltastore.document import PLAIN, build, leaves
from deltastore.errors import Corruption, DeltaStoreError
from deltastore.history.catalog import Catalog, CatalogEntry
from deltastore.history.chain import Link, open_chain
from deltastore.history.chunks import Wanted, read_arrays
from deltastore.history.lineage import chain_entries
from deltastore.history.packs import Packs
from deltastore.history.session import claimed_epochs, read_claim, read_format
from deltastore.history.tags import read_tags
from deltastore.history.walk import first_fault
from deltastore.layers.encoded import array_path
from deltastore.layout import Layout
from deltastore.ondisk.codecs import digest_values
from deltastore.ondisk.fidelity import check_tensors
from deltastore.ondisk.framing import check_headers, directory_entries
from deltastore.ondisk.index import ArrayIndex, storage_dtype_of
from deltastore.ondisk.layouts import check_pieces
from deltastore.ondisk.limits import MAX_CHUNK_BYTES
from deltastore.ondisk.names import parse_content_digest, parse_pack_name
from deltastore.ondisk.records import DELTA
from deltastore.types import Json

BATCH_BYTES = 32 << 20
"""Arrays of so many bytes are read and checked together."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be."""

    kind: str
    """The error's kind, such as "corruption"."""
    where: str
    message: str
    step: int | None = None
    commit: str | None = None


@dataclass
class VerifyReport:
    """What a verification found.

    Attributes
    ----------
    newest_intact : CatalogEntry or None
        The newest commit of which everything that it needs is intact.
    """

    commits: int = 0
    packs: int = 0
    deep: bool = False
    findings: list[Finding] = field(default_factory=list)
    newest_intact: CatalogEntry | None = None

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    @property
    def damaged_steps(self) -> list[int]:
        """Steps of commits that cannot be read."""
        return sorted({finding.step for finding in self.findings if finding.step is not None})


Progress = Callable[[int, int], None]


def verify(packs: Packs, catalog: Catalog, *, deep: bool, progress: Progress | None = None) -> VerifyReport:
    """Return what is wrong with a store; nothing is changed.

    Parameters
    ----------
    deep : bool
        Read every byte: each chunk against its checksums, each array against its digest, each reconstruction against
        its record, and the ZIP framing that only stock readers use. Otherwise metadata and chains only.
    progress : callable, optional
        Called with (commits done, commits in all); where `deep` is true each is counted twice.
    """
    report = VerifyReport(commits=len(catalog.by_id), packs=len(catalog.packs) + len(catalog.damaged), deep=deep)
    _check_root(packs, catalog, report)
    for name, error in catalog.damaged.items():
        about = parse_pack_name(name)
        step = about.first_step if about is not None and about.first_step == about.last_step else None
        report.findings.append(Finding(error.kind, name, str(error), step))
    for name in sorted(catalog.packs):
        try:
            _check_framing(packs, name, deep=deep)
        except DeltaStoreError as error:
            report.findings.append(Finding(error.kind, name, str(error)))
    broken: set[str] = set()
    entries = catalog.ordered()
    in_all = 2 * len(entries) if deep else len(entries)

    def told(done: int) -> None:
        if progress is not None:
            progress(done, in_all)

    for done, entry in enumerate(entries):
        told(done)
        for one in (entry, *catalog.copies.get(entry.id, [])):
            try:
                _check_commit(packs, catalog, one, broken - {entry.id}, deep=deep)
            except DeltaStoreError as error:
                if one is entry:
                    broken.add(entry.id)
                step = entry.step if one is entry else None
                report.findings.append(Finding(error.kind, one.pack, str(error), step, one.id))
    if deep:
        _check_states(packs, catalog, broken, report, lambda done: told(len(entries) + done))
    report.newest_intact = next((entry for entry in reversed(entries) if entry.id not in broken), None)
    told(in_all)
    return report


def _check_states(
    packs: Packs, catalog: Catalog, broken: set[str], report: VerifyReport, told: Callable[[int], object]
) -> None:
    """Reconstruct every commit that is not broken, each chain once; what cannot be is broken, with what follows it."""
    intact = [entry for entry in catalog.ordered() if entry.id not in broken]
    followed = {entry.parent.id for entry in intact if entry.kind == DELTA and entry.parent is not None}
    done = 0
    for entry in intact:
        if entry.id in followed:
            continue
        chain = chain_entries(catalog, entry)
        try:
            fault = first_fault(packs, open_chain(packs, catalog, entry))
        except DeltaStoreError as error:  # what it needs was deleted meanwhile
            fault = len(chain) - 1, error
        if fault is not None:
            at, problem = fault
            for member in chain[at:]:
                if member.id not in broken:
                    text = str(problem) if member is chain[at] else _needs(member, chain[at])
                    report.findings.append(Finding(problem.kind, member.pack, text, member.step, member.id))
                    broken.add(member.id)
        done += len(chain)
        told(min(done, len(intact)))


def _needs(entry: CatalogEntry, other: CatalogEntry) -> str:
    return (
        f"step {entry.step} (commit {entry.id[:12]}) needs step {other.step} (commit {other.id[:12]}), which is damaged"
    )


def _check_root(packs: Packs, catalog: Catalog, report: VerifyReport) -> None:
    if not packs.tier.exists():
        return  # nothing was ever written here
    claims = claimed_epochs(packs.tier) | {entry.ref.epoch for entry in catalog.by_id.values()}
    checks: list[Callable[[], object]] = [partial(read_format, packs.tier), partial(read_tags, packs.tier)]
    checks += [partial(read_claim, packs.tier, number) for number in sorted(claims)]
    for check in checks:
        try:
            check()
        except DeltaStoreError as error:
            where = error.fields.get("where", error.fields.get("file", packs.tier.url))
            report.findings.append(Finding(error.kind, str(where), str(error)))


def _check_framing(packs: Packs, name: str, *, deep: bool) -> None:
    """Check what only stock readers look at: damage there hinders no commit."""
    tail = packs.tail(name)
    entries = directory_entries(tail)
    if deep:
        check_headers(tail, entries, packs.file(name).read)


def _check_commit(packs: Packs, catalog: Catalog, entry: CatalogEntry, broken: set[str], *, deep: bool) -> None:
    chain = open_chain(packs, catalog, entry)
    for needed in chain_entries(catalog, entry):
        if needed.id in broken:
            raise Corruption(_needs(entry, needed), step=entry.step)
    size = packs.file(entry.pack).size
    if size != chain.links[-1].tail.trailer.file_size:
        raise Corruption(
            f"{entry.pack}: {size} bytes, expected {chain.links[-1].tail.trailer.file_size}", where=entry.pack
        )
    layout = chain.layout
    check_pieces(layout, chain.links[-1].tail.where)
    check_tensors(chain.record.fidelity, len(layout.tensors), chain.links[-1].tail.where)
    _check_document(chain.document, layout, chain.links[-1].tail.where)
    if deep:
        _check_arrays(packs, chain.links[-1])


def _check_document(document: Json, layout: Layout, where: str) -> None:
    """Check the values, and that document and layout list the same tensors (spec 8.4). No code of a pickle is run."""
    found = {path for path, leaf in leaves(document) if leaf.kind != PLAIN}
    differing = found ^ {tensor.path for tensor in layout.tensors}
    if differing:
        path = min(differing, key=repr)
        lacking = "layout" if path in found else "document"
        raise Corruption(f"{where}: tensor {list(path)} is missing in the {lacking}", where=where, path=path)
    build(_without_pickles(document), lambda _path, _kind: None, _AnyFramework())


def _without_pickles(node: Json) -> Json:
    # As deep as `leaves` let it pass, and no deeper than the JSON parser did.
    if isinstance(node, list):
        return [_without_pickles(item) for item in node]
    if isinstance(node, dict):
        return None if node.get("$") == "pickle" else {name: _without_pickles(item) for name, item in node.items()}
    return node


class _AnyFramework:
    """Takes a framework's objects as they are: only the framework itself can tell whether they are good."""

    def owns(self, _tag: str) -> bool:
        return True

    def decode(self, _tag: str, _node: object) -> Any:
        return object()

    def join(self, _tag: str, _meta: object, _parts: object) -> Any:
        return object()


def _check_arrays(packs: Packs, link: Link) -> None:
    """Check the arrays of one commit against their content digests, those that lie side by side in one request."""
    batch: list[_Expected] = []
    for layer in link.record.layers:
        for name, digest in layer.arrays.items():
            expected = _expected(link, array_path(link.record.id, layer.partition, name), digest)
            if batch and sum(one.bytes for one in batch) + expected.bytes > BATCH_BYTES:
                _check_digests(packs, link, batch)
                batch = []
            batch.append(expected)
    _check_digests(packs, link, batch)


class _Expected(NamedTuple):
    """An array, and its content digest as the record says."""

    path: str
    array: ArrayIndex
    piece: int
    digest: str

    @property
    def bytes(self) -> int:
        return self.array.spec.length * self.array.spec.itemsize


def _expected(link: Link, path: str, digest: str) -> _Expected:
    array = link.tail.index.arrays.get(path)
    if array is None:
        raise Corruption(f"{link.tail.where}: array {path} is missing", where=link.tail.where, entry=path)
    piece = parse_content_digest(digest) or 0
    if not 0 < piece * array.spec.itemsize <= MAX_CHUNK_BYTES:
        raise Corruption(
            f"{link.tail.where}, {path}: pieces of {piece} elements in the content digest, at most "
            f"{MAX_CHUNK_BYTES} bytes are allowed",
            where=link.tail.where,
            entry=path,
        )
    return _Expected(path, array, piece, digest)


def _check_digests(packs: Packs, link: Link, batch: Sequence[_Expected]) -> None:
    wanted = [
        Wanted(one.path, one.array, 0, np.empty(one.array.spec.length, storage_dtype_of(one.array.spec)))
        for one in batch
    ]
    read_arrays(packs, link, wanted)
    for one, read in zip(batch, wanted, strict=True):
        found = digest_values(read.out, one.piece)
        if found != one.digest:
            raise Corruption(
                f"{link.tail.where}, {one.path}: content digest is {found[:24]}..., the record says "
                f"{one.digest[:24]}...",
                where=link.tail.where,
                entry=one.path,
                expected=one.digest,
                found=found,
            )
