"""Tells whether everything is there and is what was written (spec 13)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from deltastore.dtypes import storage_dtype
from deltastore.errors import Corruption, DeltaStoreError, NotFound, UnsupportedFormat
from deltastore.history.catalog import Catalog, CatalogEntry
from deltastore.history.chain import Link, open_chain
from deltastore.history.decode import read_array, read_partition
from deltastore.history.packs import Packs
from deltastore.history.session import read_format
from deltastore.history.tags import read_tags
from deltastore.layers.encoded import array_path
from deltastore.ondisk.codecs import crc32, digest_values
from deltastore.ondisk.index import storage_dtype_of
from deltastore.ondisk.names import parse_content_digest
from deltastore.ondisk.zipfile64 import local_header


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
        Called with (commits done, commits in all).
    """
    report = VerifyReport(commits=len(catalog.by_id), packs=len(catalog.packs) + len(catalog.damaged), deep=deep)
    _check_root(packs, report)
    for name, error in catalog.damaged.items():
        report.findings.append(Finding(error.kind, name, str(error)))
    broken: set[str] = set()
    entries = catalog.ordered()
    for done, entry in enumerate(entries):
        if progress is not None:
            progress(done, len(entries))
        try:
            _check_commit(packs, catalog, entry, broken, deep=deep)
        except DeltaStoreError as error:
            broken.add(entry.id)
            report.findings.append(Finding(error.kind, entry.pack, str(error), entry.step, entry.id))
        else:
            report.newest_intact = entry
    if progress is not None:
        progress(len(entries), len(entries))
    return report


def _check_root(packs: Packs, report: VerifyReport) -> None:
    for check in (lambda: read_format(packs.tier), lambda: read_tags(packs.tier)):
        try:
            check()
        except (Corruption, NotFound, UnsupportedFormat) as error:
            report.findings.append(Finding(error.kind, str(error.fields.get("where", packs.tier.url)), str(error)))


def _check_commit(packs: Packs, catalog: Catalog, entry: CatalogEntry, broken: set[str], *, deep: bool) -> None:
    chain = open_chain(packs, catalog, entry)
    for link in chain.links:
        if link.record.id in broken:
            raise Corruption(
                f"step {entry.step} (commit {entry.id[:12]}) needs step {link.record.step} "
                f"(commit {link.record.id[:12]}), which is damaged",
                step=entry.step,
            )
    size = packs.file(entry.pack).size
    if size != chain.links[-1].tail.trailer.file_size:
        raise Corruption(
            f"{entry.pack}: {size} bytes, expected {chain.links[-1].tail.trailer.file_size}", where=entry.pack
        )
    layout, _document = chain.layout, chain.document
    for partition in layout.partitions:
        chain.layers(partition.id)
    if deep:
        _check_arrays(packs, chain.links[-1])
        for partition in layout.partitions:
            read_partition(packs, chain, partition, np.empty(partition.length, storage_dtype(partition.dtype)))


def _check_arrays(packs: Packs, link: Link) -> None:
    """Check content digests and local headers of the arrays of one commit."""
    file = packs.file(link.pack)
    for layer in link.record.layers:
        for name, expected in layer.arrays.items():
            path = array_path(link.record.id, layer.partition, name)
            array = link.tail.index.arrays.get(path)
            if array is None:
                raise Corruption(f"{link.tail.where}: array {path} is missing", entry=path)
            values = np.empty(array.spec.length, storage_dtype_of(array.spec))
            read_array(packs, link, array, path, 0, values)
            found = digest_values(values, parse_content_digest(expected) or 1)
            if found != expected:
                raise Corruption(
                    f"{link.tail.where}, {path}: content digest is {found[:12]}..., the record says {expected[:12]}...",
                    entry=path,
                    expected=expected,
                    found=found,
                )
            for number, extent in enumerate(array.chunks):
                entry = f"{path}/c/{number}"
                stored = file.read(extent.offset, extent.length)
                _check_header(file.read, entry, extent.offset, extent.length, crc32(stored), link.tail.where)


def _check_header(
    read: Callable[[int, int], bytes], name: str, data_offset: int, length: int, crc32: int, where: str
) -> None:
    """Compare the local header before a chunk with the only one that a writer may have written."""
    bare = 30 + len(name)
    # Data starts at a multiple of 64; the padding field has 4 to 67 bytes, or is absent.
    for extra in (0, *range(4, 68)):
        start = data_offset - bare - extra
        if start >= 0:
            expected, entry = local_header(name, start, length, crc32, align=True)
            if entry.data_offset == data_offset and read(start, len(expected)) == expected:
                return
    raise Corruption(
        f"{where}: the ZIP header of {name} is damaged; this library can read the chunk, other ZIP readers cannot",
        entry=name,
    )
