"""A state becomes a commit while its pack is written: one partition after the other, nothing of it is kept (spec 9)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deltastore.buffers import Fill, StreamedState
from deltastore.deltas import FullLayer, full_layer
from deltastore.dtypes import storage_dtype
from deltastore.encoder import ChainState, CommitOrder, record_fields
from deltastore.layers.checks import covered_crc
from deltastore.layers.encoded import EncodedLayer
from deltastore.layers.exact import choose_layer
from deltastore.layout import BACKWARD_BYTES, Layout, Partition
from deltastore.ondisk.fidelity import CommitFidelity
from deltastore.ondisk.pack import PackArray, PackCommit
from deltastore.ondisk.records import BASE, DELTA, Check, CommitRecord, LayerRecord, encode_record
from deltastore.parallel import TAKEN_AHEAD, run_before
from deltastore.patch import diff

COPIES = 6
"""What a partition takes while it is encoded, in times of itself: new, old, their difference, compressed, and what is
on its way to the disk."""


@dataclass(frozen=True)
class _Made:
    """What was made of one partition."""

    layer: FullLayer | EncodedLayer | None
    check: int | None


@dataclass
class StreamedCommit:
    """A commit whose layers are made on their way into the pack, anew for each attempt; see `EncodedCommit`."""

    state: StreamedState
    order: CommitOrder
    codec: str
    parent: Layout | None
    """How the commit that the deltas build upon is laid out; None: a base."""
    phase: int
    layouts: dict[str, bytes]
    fields: dict[str, Any]
    _layers: list[LayerRecord] = field(default_factory=list, init=False)
    _checks: dict[int, int] = field(default_factory=dict, init=False)

    @property
    def step(self) -> int:
        """The step."""
        return self.order.step

    @property
    def largest_bytes(self) -> int:
        """What the layers take at most."""
        return self.state.layout.bytes

    def arrays(self) -> Iterator[PackArray]:
        """Yield the arrays of each partition, read and encoded while those before are written."""
        self._layers, self._checks = [], {}
        partitions = self.state.layout.partitions
        for partition, made in zip(partitions, run_before(self._make, partitions), strict=True):
            if made.layer is not None:
                yield from made.layer.arrays
                self._layers.append(made.layer.record)
            if made.check is not None:
                self._checks[partition.id] = made.check

    def _make(self, partition: Partition) -> _Made:
        values = _filled(partition, self.state.read)
        if self.parent is None or self.state.read_parent is None:
            return _Made(full_layer(partition, values, self.codec, self.order.id), None)
        check = covered_crc(values, self.phase)
        old = self.parent.by_id.get(partition.id)
        if old is None or (old.dtype, old.length) != (partition.dtype, partition.length):
            return _Made(full_layer(partition, values, self.codec, self.order.id), check)
        return _Made(choose_layer(partition, values, _filled(old, self.state.read_parent), self.order.id), check)

    def finish(self) -> tuple[CommitRecord, PackCommit]:
        """Return record and pack entry; the arrays must have been consumed before."""
        record = CommitRecord(
            id=self.order.id,
            step=self.step,
            kind=BASE if self.parent is None else DELTA,
            layers=tuple(self._layers),
            predictions=(),
            check=None if self.parent is None else Check(self.phase, self._checks),
            **self.fields,
        )
        blob, digest = encode_record(record)
        return record, PackCommit(record.id, record.step, record.kind, blob, digest, self.layouts)


def _filled(partition: Partition, read: Fill) -> np.ndarray:
    values = np.zeros(partition.length, storage_dtype(partition.dtype))
    read(partition, values)
    return values


def stream_commit(
    chain: ChainState, state: StreamedState, order: CommitOrder, *, epoch: int, session: str, codec: str
) -> StreamedCommit:
    """Return the commit of a streamed state: a delta where its parent can be read and the layout goes on from it."""
    is_base = order.base or state.fresh or state.read_parent is None
    blob, digest = chain.encoded_layout(state.layout)
    fields = record_fields(
        chain,
        order,
        epoch=epoch,
        session=session,
        layout=digest,
        values={"full": state.document} if is_base else {"patch": diff(chain.document, state.document)},
        fidelity=CommitFidelity(),
    )
    layouts = {digest: blob} if is_base or state.layout is not chain.layout else {}
    return StreamedCommit(state, order, codec, None if is_base else chain.layout, chain.sequence, layouts, fields)


def needed_bytes(state_bytes: int) -> int:
    """Return how much memory it takes at most to stream a state, beside what its tensors take to be read."""
    return COPIES * min(state_bytes, TAKEN_AHEAD * BACKWARD_BYTES)
