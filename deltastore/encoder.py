"""A staged state becomes a commit: base or delta, layers, record (spec 9, 10.2)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deltastore.buffers import Buffers, StagedState
from deltastore.deltas import EncodedLayers, Layers, Predictions, can_predict, encode_base, encode_bounded, encode_exact
from deltastore.history.lineage import Segments
from deltastore.layers.bounded import FilterState
from deltastore.layers.checks import covered_crc
from deltastore.layers.rules import Rule
from deltastore.layout import Layout
from deltastore.ondisk.fidelity import CommitFidelity
from deltastore.ondisk.layouts import encode_layout
from deltastore.ondisk.pack import PackArray, PackCommit
from deltastore.ondisk.records import BASE, DELTA, Check, CommitRecord, CommitRef, encode_record, now
from deltastore.patch import diff
from deltastore.policy import Policy
from deltastore.types import Json, Path

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
    fidelity: CommitFidelity = field(default_factory=CommitFidelity)
    """How near the reconstruction is to the training state of the parent."""
    filter: FilterState = field(default_factory=FilterState)
    _encoded: tuple[Layout, bytes, str] | None = field(default=None, init=False, repr=False)

    def encoded_layout(self, layout: Layout) -> tuple[bytes, str]:
        """Return blob and digest of a layout; the one asked for last is kept, for most commits have their parent's."""
        if self._encoded is None or self._encoded[0] is not layout:
            self._encoded = (layout, *encode_layout(layout))
        return self._encoded[1:]

    def base_due(self, restore_cost: float) -> bool:
        """Return whether reading the next delta would cost more than `restore_cost` full loads (spec 9, "Bases")."""
        return self.rec is None or self.is_costly(restore_cost)

    def is_costly(self, restore_cost: float) -> bool:
        """Return whether reading the next delta would cost that much, wherever the reconstruction is."""
        return self.chain_bytes + self.last_bytes > restore_cost * self.full_bytes

    def advance(self, record: CommitRecord, digest: str, pack_bytes: int, layout: Layout, document: Json) -> None:
        """Make a published commit the parent of the next one; where its reconstruction is, the caller says."""
        self.parent = CommitRef(record.id, digest, record.epoch, record.sequence, record.step)
        self.sequence += 1
        self.rec_is_shared = False
        self.layout, self.document, self.fidelity = layout, document, record.fidelity
        cost = pack_bytes + LINK_BYTES
        if record.kind == BASE:
            self.full_bytes = self.chain_bytes = cost
            self.last_bytes = 0
        else:
            self.chain_bytes += cost
            self.last_bytes = cost


@dataclass
class EncodedCommit:
    """A commit that can be written, as often as it takes."""

    id: str
    step: int
    kind: str
    layers: Layers
    layouts: dict[str, bytes]
    fields: dict[str, Any]
    """What the record holds beside its layers."""
    rec: Buffers
    """The reconstruction, once the commit is published."""
    predictions: Predictions

    @property
    def largest_bytes(self) -> int:
        """What the layers take at most: full ones that are yet to be compressed count as they are."""
        return sum(item.stored_bytes for item in (*self.layers, *self.predictions))

    def arrays(self) -> Iterator[PackArray]:
        """Yield the arrays, chunks encoded while they are consumed; a new start for each attempt."""
        for item in (*self.layers, *self.predictions):
            yield from item.arrays

    def finish(self) -> tuple[CommitRecord, PackCommit]:
        """Return record and pack entry; the arrays must have been consumed before."""
        record = CommitRecord(
            id=self.id,
            step=self.step,
            kind=self.kind,
            layers=tuple(layer.record for layer in self.layers),
            predictions=tuple(prediction.record for prediction in self.predictions),
            **self.fields,
        )
        blob, digest = encode_record(record)
        return record, PackCommit(self.id, self.step, self.kind, blob, digest, self.layouts)


@dataclass(frozen=True)
class CommitOrder:
    """What is asked of a commit beside its state."""

    id: str
    step: int
    base: bool
    """Retention or a tag will keep it: write a base."""
    metrics: dict[str, Json]
    policy: Policy | None = None
    """None: every bit."""
    rules: Mapping[Path, Rule] = field(default_factory=dict)
    """What the optimizers did since the commit before."""
    gradients: Mapping[Path, np.ndarray] = field(default_factory=dict)
    """What they did it with, by where they have the buffers of each parameter; only of exact commits."""


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

    What the chain says is not changed but for the reconstruction under a bounded policy: :func:`advance` does that
    once the commit is published.
    """
    is_bounded = order.policy is not None and not order.policy.exact
    # After a bounded commit an exact one is a base: its whole residual would have to be stored anyway.
    is_base = order.base or staged.fresh or chain.base_due(restore_cost) or not (is_bounded or chain.fidelity.exact)
    delta = None if is_base else _encode_delta(chain, staged, order, codec)
    is_base = delta is None or delta.is_full
    encoded = delta if delta and not is_base else encode_base(staged.layout, staged.buffers, order.id, codec)
    kind = BASE if is_base else DELTA
    ops = [] if is_base else diff(chain.document, staged.document)
    same_layout = staged.layout is chain.layout
    parent = chain.parent
    # The first commit of an epoch is written all the same: the line of history must lead to it.
    repeats = parent is not None and (parent.step, parent.epoch) == (order.step, epoch)
    changes = (
        encoded.layers
        or encoded.predictions
        or ops
        or order.metrics
        or encoded.fidelity.bounds != chain.fidelity.bounds
    )
    if kind == DELTA and repeats and same_layout and not changes:
        return None
    blob, digest = chain.encoded_layout(staged.layout)
    fields = record_fields(
        chain,
        order,
        epoch=epoch,
        session=session,
        layout=digest,
        values={"full": staged.document} if kind == BASE else {"patch": ops},
        fidelity=encoded.fidelity,
    )
    fields["check"] = None if kind == BASE else _check(staged.layout, encoded.rec, chain.sequence)
    layouts = {} if kind == DELTA and same_layout else {digest: blob}
    return EncodedCommit(order.id, order.step, kind, encoded.layers, layouts, fields, encoded.rec, encoded.predictions)


def record_fields(
    chain: ChainState,
    order: CommitOrder,
    *,
    epoch: int,
    session: str,
    layout: str,
    values: dict[str, Json],
    fidelity: CommitFidelity,
) -> dict[str, Any]:
    """Return what the record of a commit that follows the chain holds beside its layers and their check."""
    return {
        "epoch": epoch,
        "sequence": chain.sequence,
        "session": session,
        "created": now(),
        "parent": chain.parent,
        "lineage": chain.earlier if "full" in values else (),
        "layout": layout,
        "values": values,
        "fidelity": fidelity,
        "metrics": order.metrics,
    }


def _encode_delta(chain: ChainState, staged: StagedState, order: CommitOrder, codec: str) -> EncodedLayers:
    rec = chain.rec or {}
    if order.policy is None or order.policy.exact:
        return encode_exact(
            staged.layout,
            staged.buffers,
            rec,
            order.id,
            codec,
            groups=chain.filter.known_groups(staged.layout) if order.gradients and can_predict(chain.filter) else (),
            rules=order.rules,
            gradients=order.gradients,
        )
    return encode_bounded(
        staged.layout,
        staged.buffers,
        rec,
        order.id,
        codec,
        policy=order.policy,
        state=chain.filter,
        rules=order.rules,
        rec_is_shared=chain.rec_is_shared,
    )


def _check(layout: Layout, rec: Buffers, phase: int) -> Check:
    return Check(phase, {p.id: covered_crc(rec[p.id], phase) for p in layout.partitions})


def advance(
    chain: ChainState, staged: StagedState, encoded: EncodedCommit, record: CommitRecord, digest: str, pack_bytes: int
) -> Buffers | None:
    """Make a published commit the parent of the next, and return the buffers that are free now."""
    free = None
    if chain.layout is staged.layout and chain.rec is not None and not chain.rec_is_shared:
        old = chain.rec
        free = {n: staged.buffers[n] if rec is old[n] else old[n] for n, rec in encoded.rec.items()}
    chain.advance(record, digest, pack_bytes, staged.layout, staged.document)
    chain.rec = encoded.rec
    if not (record.kind == BASE or record.exact):
        stored = len(encoded.layers) + len(encoded.predictions)
        chain.filter.overhead = stored, pack_bytes - encoded.largest_bytes
    return free
