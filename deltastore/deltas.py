"""The layers of a commit: a base's, an exact delta's, a bounded delta's (spec 9)."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from deltastore.buffers import Buffers
from deltastore.layers.bounded import BoundedDelta, FilterState
from deltastore.layers.coding import choose, code_groups, expected_bytes
from deltastore.layers.encoded import EncodedLayer, EncodedPrediction, array_path, attributes
from deltastore.layers.exact import choose_layer
from deltastore.layers.groups import Group, RuledGroup, replayable
from deltastore.layers.importance import Target
from deltastore.layers.replay import POOR_SHARE, Replay, replay_group
from deltastore.layers.rules import Rule
from deltastore.layers.self_test import kernels_agree
from deltastore.layout import FORWARD, Layout, Partition
from deltastore.ondisk.codecs import BLOSC, RAW, EncodedChunk, content_digest, encode_chunk
from deltastore.ondisk.fidelity import CommitFidelity
from deltastore.ondisk.pack import PackArray, PackCommit, PackWriter, chunk_values
from deltastore.ondisk.records import DELTA, FULL, LayerRecord
from deltastore.ondisk.zarr_profile import ArraySpec, plan_array
from deltastore.parallel import run_ahead, run_all
from deltastore.policy import Policy
from deltastore.types import Path

log = logging.getLogger("deltastore")

MISSED = (0.93, 1.04)
"""Shares of the wanted bytes outside of which the filter runs once more, with what it learnt."""
RUNS = 5
SAME = 0.01
"""A run that changed the bytes by less will not be bettered by another."""
ARRAY_BYTES = 1000
"""What an array takes beside its chunks, before that was measured."""
AIM = 0.99
"""Share of the budget for which codes are chosen: what they take is only known afterwards."""
WEIGHTS_BYTES = 0.0005 * 5
"""For each predicted element what overlays on the weights shall take at least: they catch what a code cannot follow."""
REFINED_BYTES = 1 / 8 / 16
"""For each predicted element what refinements take."""
RECORD_BYTES, LAYER_BYTES, TENSOR_BYTES = 800, 130, 20
"""The same for a record, its layers, and the tensors whose fidelity it lists."""


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


Layers = list[EncodedLayer | FullLayer]
Predictions = list[EncodedPrediction]


@dataclass(frozen=True)
class EncodedLayers:
    """What a commit stores of all partitions.

    Attributes
    ----------
    rec : dict of int to ndarray
        What a reader will get.
    """

    layers: Layers
    rec: Buffers
    fidelity: CommitFidelity
    predictions: Predictions = field(default_factory=list)

    @property
    def is_full(self) -> bool:
        """Whether every partition is stored whole: the commit can as well be a base."""
        fulls = sum(isinstance(layer, FullLayer) or layer.record.kind == FULL for layer in self.layers)
        return fulls == len(self.rec) > 0


def encode_base(layout: Layout, buffers: Buffers, commit: str, codec: str) -> EncodedLayers:
    """Return the layers of a base."""
    layers: Layers = [full_layer(p, buffers[p.id], codec, commit) for p in layout.partitions]
    return EncodedLayers(layers, buffers, CommitFidelity())


def encode_exact(
    layout: Layout,
    buffers: Buffers,
    rec: Buffers,
    commit: str,
    codec: str,
    *,
    groups: Sequence[Group] = (),
    rules: Mapping[Path, Rule] | None = None,
    gradients: Mapping[Path, np.ndarray] | None = None,
) -> EncodedLayers:
    """Return the layers that turn a reconstruction into new values bit for bit, the smallest of each partition.

    Where the gradients are known, the optimizer's step is done again, and only what it missed is stored beside them.
    """
    ruled = [
        group
        for group in replayable(groups, rules or {}, gradients or {})
        if all(_has(rec, buffers, number) for number in group.group.partitions)
    ]

    def replay(group: RuledGroup) -> Replay | list[EncodedLayer | FullLayer]:
        made = replay_group(layout, group, buffers, rec, gradients or {}, commit)
        partitions = [layout.by_id[number] for number in group.group.partitions]
        if made is not None and made.stored_bytes <= POOR_SHARE * sum(partition.bytes for partition in partitions):
            return made
        plain = [layer for p in partitions if (layer := _exact_layer(p, buffers, rec, commit, codec)) is not None]
        return plain if made is None or sum(x.stored_bytes for x in plain) <= made.stored_bytes else made

    layers: Layers = []
    predictions: Predictions = []
    for found in run_all(replay, ruled):
        if isinstance(found, Replay):
            predictions.append(found.prediction)
        layers += found.layers if isinstance(found, Replay) else found
    replayed = {number for group in ruled for number in group.group.partitions}
    others = [partition for partition in layout.partitions if partition.id not in replayed]
    layers += _exact_layers(others, buffers, rec, commit, codec)
    return EncodedLayers(layers, buffers, CommitFidelity(), predictions)


def encode_bounded(
    layout: Layout,
    buffers: Buffers,
    rec: Buffers,
    commit: str,
    codec: str,
    *,
    policy: Policy,
    state: FilterState,
    rules: Mapping[Path, Rule],
    rec_is_shared: bool,
) -> EncodedLayers:
    """Return the layers that bring a reconstruction as near to new values as the budget allows.

    Partitions of `rec` that are predicted or filtered are brought up to date in place, unless `rec_is_shared`.

    Parameters
    ----------
    rules : mapping of path to Rule
        What the optimizer did since the parent, for the paths under which it has the buffers of each parameter.
    """
    targets = [t for t in state.targets(layout, policy) if all(_has(rec, buffers, p.partition) for p in t.pieces)]
    filtered = {piece.partition for target in targets for piece in target.pieces}
    others = [partition for partition in layout.partitions if partition.id not in filtered]
    layers = _exact_layers(others, buffers, rec, commit, codec)
    updated = {number: rec[number].copy() if rec_is_shared else rec[number] for number in filtered}
    fidelity = CommitFidelity()
    predictions: Predictions = []
    if targets:
        budget = round((policy.budget or 0.0) * layout.bytes)
        groups = [g for g in state.groups(layout, policy, rules) if filtered.issuperset(g.group.partitions)]
        groups = groups if groups and can_predict(state) else []
        if groups:
            predictions = _predict(layout, groups, buffers, updated, commit, state, budget, layers)
        if predictions:
            targets = list(_only_weights(targets, groups))
        delta = BoundedDelta(layout, targets, buffers, updated, commit, state)
        floor = _run_within(delta, layers, predictions, budget, state.overhead, commit)
        if floor > budget and not state.has_told_floor:
            state.has_told_floor = True
            log.warning(
                "a commit needs %s bytes for small and exact tensors, record and container: more than the budget of %s "
                "(%.2g of the state), so that nothing else is stored; raise the budget",
                *(f"{floor:,}", f"{budget:,}", policy.budget),
            )
        fidelity = CommitFidelity(tuple(delta.settle()), budget, floor)
        layers += delta.layers
    reconstructed = {p.id: updated.get(p.id, buffers[p.id]) for p in layout.partitions}
    return EncodedLayers(layers, reconstructed, fidelity, predictions)


def can_predict(state: FilterState) -> bool:
    """Return whether this machine computes what the format says; the user is told once if it does not."""
    if not kernels_agree() and not state.has_told_disagreement:
        state.has_told_disagreement = True
        log.warning(
            "on this machine compiled code does not compute what the format says: steps are held, not predicted; "
            "remove the folder __pycache__ of deltastore/layers, and tell us about this processor"
        )
    return kernels_agree()


def _predict(
    layout: Layout,
    groups: Sequence[RuledGroup],
    buffers: Buffers,
    rec: Buffers,
    commit: str,
    state: FilterState,
    budget: int,
    exact: Layers,
) -> Predictions:
    """Return the predictions with the finest codes that the budget pays for, none where it pays for none."""
    elements = sum(group.elements for group in groups)
    around = _expected_around(state.overhead, len(exact) + len(layout.partitions))
    floor = sum(layer.stored_bytes for layer in exact) + around + state.exact_bytes
    room = (AIM * budget - floor - WEIGHTS_BYTES * elements) / state.coding.scale
    choice = choose(elements, room, REFINED_BYTES)
    if choice is None:
        return []
    made = code_groups(layout, groups, choice, buffers, rec, commit, state.coding)
    if all(prediction.record.code == choice.code for prediction in made):  # else a start or a burst took more
        found = sum(prediction.stored_bytes for prediction in made)
        state.coding.learn(found / (elements * expected_bytes(choice, REFINED_BYTES)))
    return made


def _only_weights(targets: Sequence[Target], groups: Sequence[RuledGroup]) -> Iterator[Target]:
    """Yield the targets, those of predicted buffers without a share: only what is not finite, or the user bounds."""
    weights = {slot.tensors[0] for group in groups for slot in group.group.slots}
    predicted = {tensor for group in groups for tensor in group.tensors} - weights
    for target in targets:
        yield replace(target, share=0.0) if target.tensor in predicted else target


Stored = FullLayer | EncodedLayer | EncodedPrediction


def _run_within(
    delta: BoundedDelta,
    exact: Layers,
    predictions: Predictions,
    budget: int,
    overhead: tuple[int, int] | None,
    commit: str,
) -> int:
    """Run the filter until the commit takes what it should; return the floor, what it takes in any case."""
    fixed = sum(layer.stored_bytes for layer in exact)
    coded = sum(prediction.stored_bytes for prediction in predictions)
    others: list[Stored] = [*exact, *predictions]
    around = _expected_around(overhead, len(exact) + delta.partitions)
    floor = fixed + around + delta.exact_bytes
    before = -1
    for _ in range(RUNS):
        delta.run(budget - floor - coded)
        if overhead is None or overhead[0] != len(others) + len(delta.layers):
            around = _container_bytes([*others, *delta.layers], delta.partitions, commit)
        floor = fixed + around + delta.exact_bytes
        found = fixed + coded + around + delta.stored_bytes
        near = MISSED[0] <= found / max(budget, floor) <= MISSED[1]
        if near or not delta.can_change(more=found < max(budget, floor)) or abs(found - before) < SAME * found:
            break
        before = found
        delta.correct()
    return floor


def _expected_around(overhead: tuple[int, int] | None, layers: int) -> int:
    """Return what a commit takes beside its layers: what the one before took, or a guess."""
    return ARRAY_BYTES * 3 * layers if overhead is None else overhead[1]


def _container_bytes(layers: Sequence[Stored], tensors: int, commit: str) -> int:
    """Return about what a pack takes beside its layers: written to nowhere, with a record of the usual length."""
    pack = PackWriter("0" * 32, "0" * 16)
    total = -sum(layer.stored_bytes for layer in layers)
    for layer in layers:
        if not isinstance(layer, FullLayer):
            for array in layer.arrays:
                total += sum(len(buffer) for buffers in pack.array(array) for buffer in buffers)
        else:
            total += layer.stored_bytes + ARRAY_BYTES
    record = bytes(RECORD_BYTES + LAYER_BYTES * len(layers) + TENSOR_BYTES * tensors)
    finished = pack.finish([PackCommit(commit, 0, DELTA, record, "0" * 64)])
    return total + sum(len(buffer) for buffers in finished for buffer in buffers)


def _has(rec: Buffers, buffers: Buffers, partition: int) -> bool:
    before, current = rec.get(partition), buffers[partition]
    return before is not None and (before.dtype, before.shape) == (current.dtype, current.shape)


def _exact_layers(partitions: Sequence[Partition], buffers: Buffers, rec: Buffers, commit: str, codec: str) -> Layers:
    found = run_all(lambda partition: _exact_layer(partition, buffers, rec, commit, codec), partitions)
    return [layer for layer in found if layer is not None]


def _exact_layer(
    partition: Partition, buffers: Buffers, rec: Buffers, commit: str, codec: str
) -> EncodedLayer | FullLayer | None:
    current = buffers[partition.id]
    if not _has(rec, buffers, partition.id):
        return full_layer(partition, current, codec, commit)
    return choose_layer(partition, current, rec[partition.id], commit)


def full_layer(partition: Partition, values: np.ndarray, codec: str, commit: str) -> FullLayer:
    """Return a full layer; small partitions are needed soonest and stay raw, large ones are compressed (design 6)."""
    chosen = codec if codec != "auto" else RAW if partition.window == FORWARD else BLOSC
    return FullLayer(partition, values, chosen, commit)
