"""A commit with everything that its reconstruction needs: chain, layout, document (spec 9.1)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from deltastore.dtypes import storage_dtype
from deltastore.errors import Corruption, NotFound
from deltastore.history.catalog import Catalog, CatalogEntry, record_of
from deltastore.history.lineage import chain_entries
from deltastore.history.packs import Packs
from deltastore.layout import Layout
from deltastore.ondisk.index import layout_entry
from deltastore.ondisk.layouts import parse_layout
from deltastore.ondisk.pack import PackTail
from deltastore.ondisk.records import DELTA, FULL, CommitRecord, CommitRef, LayerRecord
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
        """The layout of the commit that is read; each of its partitions has a full layer of its size.

        Raises
        ------
        Corruption
            The layout is damaged, or it promises more than the packs hold: nothing is allocated for it.
        """
        layout = layout_of(self.links, self.record.layout)
        full: dict[int, Link] = {}
        for link in reversed(self.links):
            for layer in link.record.layers:
                if layer.kind == FULL:
                    full.setdefault(layer.partition, link)
        for partition in layout.partitions:
            link_or_none = full.get(partition.id)
            if link_or_none is None:
                raise self._no_full_layer(partition.id)
            path = f"{link_or_none.record.id}/p{partition.id}.data"
            array = link_or_none.tail.index.arrays.get(path)
            expected = (storage_dtype(partition.dtype).name, partition.length)
            found = None if array is None else (array.spec.dtype, array.spec.length)
            if found != expected:
                raise Corruption(
                    f"{link_or_none.tail.where}, {path}: the pack has {found or 'no such array'}, the layout of step "
                    f"{self.record.step} asks for {expected}",
                    where=link_or_none.tail.where,
                    entry=path,
                    expected=expected,
                    found=found,
                )
        return layout

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
            layer = self.layer_of(link, partition)
            if layer is not None:
                found.append((link, layer))
                if layer.kind == FULL:
                    return found[::-1]
        raise self._no_full_layer(partition)

    def layer_of(self, link: Link, partition: int) -> LayerRecord | None:
        """Return what a commit of the chain stores of a partition."""
        return self._by_partition[link.record.id].get(partition)

    @cached_property
    def ties(self) -> dict[int, tuple[int, ...]]:
        """For each partition that is ever predicted, all that are needed to read it: those predicted together."""
        found: dict[int, tuple[int, ...]] = {}
        for link in self.links:
            for prediction in link.record.predictions:
                members = sorted({number for one in prediction.partitions for number in found.get(one, (one,))})
                found |= dict.fromkeys(members, tuple(members))
        return found

    def layout_at(self, link: Link) -> Layout:
        """Return the layout of one commit of the chain."""
        digest = link.record.layout
        if digest == self.record.layout:
            return self.layout
        if digest not in self._layouts:
            self._layouts[digest] = layout_of(self.links, digest)
        return self._layouts[digest]

    @cached_property
    def _layouts(self) -> dict[str, Layout]:
        return {}

    def _no_full_layer(self, partition: int) -> Corruption:
        return Corruption(
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
    before: CommitRef | None = None
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
        record = record_of(tail, member.id, member.ref.digest)
        # The catalog may come from a cache: what the records themselves say of their parents decides.
        if (record.kind == DELTA) != bool(links) or (links and record.parent != before):
            raise Corruption(
                f"{tail.where}: the record of step {record.step} does not follow the commit that the catalog names "
                "as its parent; remove the folder cache/ of the store",
                where=tail.where,
                expected=None if before is None else before.id,
                found=None if record.parent is None else record.parent.id,
            )
        before = member.ref
        links.append(Link(record, tail, member.pack))
    return Chain(tuple(links))
