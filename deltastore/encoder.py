"""A staged state becomes a commit: base or delta, layers, record (spec 9, 10.2)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from deltastore.buffers import Buffers, StagedState
from deltastore.history.lineage import Segments
from deltastore.layers.checks import covered_crc
from deltastore.layers.encoded import EncodedLayer, array_path, attributes
from deltastore.layers.exact import choose_layer
from deltastore.layout import FORWARD, Layout, Partition
from deltastore.ondisk.codecs import BLOSC, RAW, EncodedChunk, content_digest, encode_chunk
from deltastore.ondisk.layouts import encode_layout
from deltastore.ondisk.pack import PackArray, PackCommit, chunk_values
from deltastore.ondisk.records import BASE, DELTA, FULL, Check, CommitRecord, CommitRef, LayerRecord, encode_record, now
from deltastore.ondisk.zarr_profile import ArraySpec, plan_array
from deltastore.parallel import run_ahead, run_all
from deltastore.patch import diff
from deltastore.types import Json

LINK_BYTES = 512 << 10
"""What one more commit of a chain costs to read beside its bytes: opening it takes as long as reading these."""


@dataclass
class ChainState:
    """What the next commit builds upon. `rec` None: the next commit is a base."""

    parent: CommitRef | None = None
    earlier: Segments = ()
    """The line of history before this epoch."""
    sequence: int = 0
    rec: Buffers | None = None
    rec_is_shared: bool = False
    """A restored state reads these buffers too: they are never used again."""
    layout: Layout | None = None
    document: Json = None
    full_bytes: int = 0
    """Stored bytes of the chain's base: the cost of a full load."""
    chain_bytes: int = 0
    """Stored bytes from the base to the parent: the cost of reading the parent."""
    last_bytes: int = 0
    """Stored bytes of the parent, the forecast for the next delta."""
    _encoded: tuple[Layout, bytes, str] | None = field(default=None, init=False, repr=False)

    def encoded_layout(self, layout: Layout) -> tuple[bytes, str]:
        """Return blob and digest of a layout; the one asked for last is kept, for most commits have their parent's."""
        if self._encoded is None or self._encoded[0] is not layout:
            self._encoded = (layout, *encode_layout(layout))
        return self._encoded[1:]

    def base_due(self, restore_cost: float) -> bool:
        """Return whether reading the next delta would cost more than `restore_cost` full loads (spec 9, "Bases")."""
        return self.rec is None or self.chain_bytes + self.last_bytes > restore_cost * self.full_bytes


@dataclass
class EncodedCommit:
    """A commit that can be written, as often as it takes."""

    id: str
    step: int
    kind: str
    layers: list[EncodedLayer | FullLayer]
    layouts: dict[str, bytes]
    fields: dict[str, Any]
    """What the record holds beside its layers."""

    @property
    def largest_bytes(self) -> int:
        """What the layers take at most: full ones that are yet to be compressed count as they are."""
        return sum(layer.stored_bytes for layer in self.layers)

    def arrays(self) -> Iterator[PackArray]:
        """Yield the arrays, chunks encoded while they are consumed; a new start for each attempt."""
        for layer in self.layers:
            yield from layer.arrays

    def finish(self) -> tuple[CommitRecord, PackCommit]:
        """Return record and pack entry; the arrays must have been consumed before."""
        record = CommitRecord(
            id=self.id,
            step=self.step,
            kind=self.kind,
            layers=tuple(layer.record for layer in self.layers),
            **self.fields,
        )
        blob, digest = encode_record(record)
        return record, PackCommit(self.id, self.step, self.kind, blob, digest, self.layouts)


@dataclass
class FullLayer:
    """A full layer whose chunks are encoded on the way to the pack, so that they never lie in memory together."""

    partition: Partition
    values: np.ndarray
    codec: str
    commit: str
    _digest: str = field(default="", init=False)

    @property
    def record(self) -> LayerRecord:
        """The layer's record, once its chunks were consumed."""
        return LayerRecord(self.partition.id, FULL, {"data": self._digest})

    @property
    def stored_bytes(self) -> int:
        """What the layer takes at most."""
        return self.values.nbytes

    @property
    def arrays(self) -> tuple[PackArray, ...]:
        """The layer's only array."""
        spec = plan_array(self.values.dtype, len(self.values), self.codec)
        path = array_path(self.commit, self.partition.id, "data")
        return (PackArray(path, spec, attributes(self.partition, FULL), self._chunks()),)

    def _chunks(self) -> Iterator[EncodedChunk]:
        spec = plan_array(self.values.dtype, len(self.values), self.codec)
        crcs: list[int] = []
        starts = range(0, spec.length, spec.chunk)
        # A raw chunk is only read and summed: faster right before it is written, while it is in the cache.
        encode = partial(self._encode, spec)
        for chunk in map(encode, starts) if self.codec == RAW else run_ahead(encode, starts):
            crcs.append(chunk.content_crc)
            yield chunk
        self._digest = content_digest(spec.dtype, spec.length, spec.chunk, crcs)

    def _encode(self, spec: ArraySpec, start: int) -> EncodedChunk:
        return encode_chunk(chunk_values(self.values, spec, start), spec.codec)


@dataclass(frozen=True)
class CommitOrder:
    """What is asked of a commit beside its state."""

    id: str
    step: int
    base: bool
    """Retention or a tag will keep it: write a base."""
    metrics: dict[str, Json]


def encode_commit(
    chain: ChainState,
    staged: StagedState,
    order: CommitOrder,
    *,
    epoch: int,
    session: str,
    restore_cost: float,
    codec: str,
) -> EncodedCommit | None:
    """Return the encoded commit of a staged state; None if its parent has the same step and the same content.

    What the chain says is not changed: :func:`advance` does that once the commit is published.
    """
    layers: list[EncodedLayer | FullLayer] = []
    kind = BASE if order.base or staged.fresh or chain.base_due(restore_cost) else DELTA
    if kind == DELTA:
        layers = _delta_layers(chain, staged, order.id, codec)
        fulls = sum(isinstance(layer, FullLayer) or layer.record.kind == FULL for layer in layers)
        if fulls == len(staged.layout.partitions) > 0:
            kind = BASE
    ops = diff(chain.document, staged.document) if kind == DELTA else []
    same_layout = staged.layout is chain.layout
    parent = chain.parent
    # The first commit of an epoch is written all the same: the line of history must lead to it.
    repeats = parent is not None and (parent.step, parent.epoch) == (order.step, epoch)
    if kind == DELTA and repeats and same_layout and not (layers or ops or order.metrics):
        return None
    if kind == BASE:
        layers = [FullLayer(p, staged.buffers[p.id], _full_codec(p, codec), order.id) for p in staged.layout.partitions]
    blob, digest = chain.encoded_layout(staged.layout)
    fields = {
        "epoch": epoch,
        "sequence": chain.sequence,
        "session": session,
        "created": now(),
        "parent": chain.parent,
        "lineage": chain.earlier if kind == BASE else (),
        "layout": digest,
        "values": {"full": staged.document} if kind == BASE else {"patch": ops},
        "check": None if kind == BASE else _check(staged, chain.sequence),
        "fidelity": {"exact": True},
        "metrics": order.metrics,
    }
    layouts = {} if kind == DELTA and same_layout else {digest: blob}
    return EncodedCommit(order.id, order.step, kind, layers, layouts, fields)


def _delta_layers(chain: ChainState, staged: StagedState, commit: str, codec: str) -> list[EncodedLayer | FullLayer]:
    rec = chain.rec or {}

    def encode(partition: Partition) -> EncodedLayer | FullLayer | None:
        current = staged.buffers[partition.id]
        before = rec.get(partition.id)
        if before is None or (before.dtype, before.shape) != (current.dtype, current.shape):
            return FullLayer(partition, current, _full_codec(partition, codec), commit)
        return choose_layer(partition, current, before, commit)

    return [layer for layer in run_all(encode, staged.layout.partitions) if layer is not None]


def _full_codec(partition: Partition, codec: str) -> str:
    """Small partitions are needed soonest and stay raw; large ones are compressed (design 6)."""
    if codec != "auto":
        return codec
    return RAW if partition.window == FORWARD else BLOSC


def _check(staged: StagedState, phase: int) -> Check:
    return Check(phase, {p.id: covered_crc(staged.buffers[p.id], phase) for p in staged.layout.partitions})


def advance(
    chain: ChainState, staged: StagedState, record: CommitRecord, digest: str, pack_bytes: int
) -> Buffers | None:
    """Make a published commit the parent of the next, and return the buffers that are free now."""
    free = chain.rec if chain.layout is staged.layout and not chain.rec_is_shared else None
    chain.rec_is_shared = False
    chain.parent = CommitRef(record.id, digest, record.epoch, record.sequence, record.step)
    chain.sequence += 1
    chain.rec, chain.layout, chain.document = staged.buffers, staged.layout, staged.document
    cost = pack_bytes + LINK_BYTES
    chain.last_bytes = cost
    if record.kind == BASE:
        chain.full_bytes = chain.chain_bytes = cost
        chain.last_bytes = 0
    else:
        chain.chain_bytes += cost
    return free
