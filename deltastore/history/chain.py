"""A commit with everything that its reconstruction needs: chain, layout, document (spec 9.1)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from deltastore.errors import Corruption, NotFound
from deltastore.history.catalog import Catalog, CatalogEntry, record_of
from deltastore.history.lineage import chain_entries
from deltastore.history.packs import Packs
from deltastore.layout import Layout
from deltastore.ondisk.index import layout_entry
from deltastore.ondisk.layouts import parse_layout
from deltastore.ondisk.pack import PackTail
from deltastore.ondisk.records import FULL, CommitRecord, LayerRecord
from deltastore.patch import apply
from deltastore.types import Json


@dataclass(frozen=True)
class Link:
    """One commit of a chain."""

    record: CommitRecord
    tail: PackTail
    pack: str


@dataclass(frozen=True)
class Chain:
    """The commits from a base to the one that is read."""

    links: tuple[Link, ...]

    @property
    def record(self) -> CommitRecord:
        """The record of the commit that is read."""
        return self.links[-1].record

    @cached_property
    def layout(self) -> Layout:
        """The layout of the commit that is read."""
        return layout_of(self.links, self.record.layout)

    @cached_property
    def document(self) -> Json:
        """The document of the commit that is read: the base's, patched along the chain."""
        document: Json = None
        ops: list[Json] = []
        for link in self.links:
            values = link.record.values
            if "full" in values:
                document, ops = values["full"], []
            else:
                ops += values["patch"]
        return apply(document, ops)

    def layers(self, partition: int) -> list[tuple[Link, LayerRecord]]:
        """Return what reconstructs a partition: a full layer, then the corrections in order.

        Raises
        ------
        Corruption
            No commit of the chain has a full layer of it.
        """
        found: list[tuple[Link, LayerRecord]] = []
        for link in reversed(self.links):
            layer = self._by_partition[link.record.id].get(partition)
            if layer is not None:
                found.append((link, layer))
                if layer.kind == FULL:
                    return found[::-1]
        raise Corruption(
            f"step {self.record.step} (commit {self.record.id[:12]}): no commit of the chain has a full layer of "
            f"partition {partition}",
            step=self.record.step,
            partition=partition,
        )

    @cached_property
    def _by_partition(self) -> dict[str, dict[int, LayerRecord]]:
        return {link.record.id: {layer.partition: layer for layer in link.record.layers} for link in self.links}


def layout_of(links: tuple[Link, ...], digest: str) -> Layout:
    """Return a layout by its digest from the newest pack of a chain that holds it."""
    name = layout_entry(digest)
    for link in reversed(links):
        if name in link.tail.index.blobs:
            return parse_layout(link.tail.blob(name), digest, f"{link.tail.where}, {name}")
    last = links[-1]
    raise Corruption(
        f"{last.tail.where}: layout {digest[:12]} of step {last.record.step} stands in no pack of the chain"
    )


def open_chain(packs: Packs, catalog: Catalog, entry: CatalogEntry) -> Chain:
    """Return the chain of a commit; its packs' metadata is read, no chunk is.

    Raises
    ------
    Corruption
        A parent is missing or is not what its child names, or a pack is damaged.
    NotFound
        A pack was deleted meanwhile.
    """
    links: list[Link] = []
    for member in chain_entries(catalog, entry):
        try:
            tail = packs.tail(member.pack)
        except NotFound as error:
            raise NotFound(
                f"step {entry.step} needs {member.pack}, which is gone (pruned since the store was opened?); "
                "call refresh()",
                step=entry.step,
                where=member.pack,
            ) from error
        links.append(Link(record_of(tail, member.id, member.ref.digest), tail, member.pack))
    return Chain(tuple(links))
