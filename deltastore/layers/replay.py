"""Exact deltas by replay: the gradient is stored, the optimizer's step done again, its misses corrected (spec 9.11)."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from deltastore.layers.encoded import EncodedLayer, EncodedPrediction, encode_arrays
from deltastore.layers.exact import choose_layer
from deltastore.layers.groups import RuledGroup
from deltastore.layers.passes import passes
from deltastore.layers.rules import padded
from deltastore.layout import Layout
from deltastore.ondisk.codecs import BLOSC
from deltastore.ondisk.predictions import REPLAY_SGD, REPLAYS, PredictionRecord
from deltastore.ondisk.records import FULL
from deltastore.types import Path

POOR_SHARE = 0.5
"""A replay that takes more than this of the raw bytes is compared with the xor of the states."""

Arrays = dict[int, np.ndarray]


@dataclass(frozen=True)
class Replay:
    """What a group takes by replay."""

    prediction: EncodedPrediction
    layers: list[EncodedLayer]

    @property
    def stored_bytes(self) -> int:
        """Bytes of gradient and corrections."""
        return self.prediction.stored_bytes + sum(layer.stored_bytes for layer in self.layers)


def replay_group(
    layout: Layout, ruled: RuledGroup, current: Arrays, rec: Arrays, gradients: Mapping[Path, np.ndarray], commit: str
) -> Replay | None:
    """Return the replay of one group; None where it is worth nothing.

    Parameters
    ----------
    gradients : mapping of path to ndarray of float32
        The gradient of each parameter that has a rule, row-major, by where the optimizer has its buffers. It is copied
        before it is used: a training that goes on may overwrite it, which costs bytes, not bits.
    """
    group = ruled.group
    constants, ranges = ruled.replay_sets()
    kind = REPLAYS[group.kind]
    spans = group.blocks.spans_of(ranges)
    length = layout.by_id[group.partitions[0]].length
    gradient, *predicted = _scratch(1 + len(group.partitions), length)
    gradient[:] = 0
    for slot, rule in zip(group.slots, ruled.rules, strict=True):
        if rule is not None:
            _gather(layout, slot.tensors[0], group.partitions[0], gradients[slot.owner], gradient)
    for number, array in zip(group.partitions, predicted, strict=True):
        array[:] = rec[number]
    replay_spans(kind, predicted, gradient, spans, padded(constants), 0, length)
    layers = []
    for number, array in zip(group.partitions, predicted, strict=True):
        layer = choose_layer(layout.by_id[number], current[number], array, commit)
        if layer is not None:
            layers.append(layer)
    if any(layer.record.kind == FULL for layer in layers):
        return None
    carrier = layout.by_id[group.partitions[1]]
    digests, encoded, stored = encode_arrays(carrier, "gradient", {"gradient": gradient}, BLOSC, commit)
    record = PredictionRecord(kind, group.partitions, None, digests, constants, ranges)
    return Replay(EncodedPrediction(record, encoded, stored), layers)


_memory = threading.local()


def _scratch(count: int, length: int) -> list[np.ndarray]:
    """Return arrays of float32 in memory that the next call of this thread uses again."""
    block: np.ndarray | None = getattr(_memory, "block", None)
    if block is None or len(block) < count * length:
        block = _memory.block = np.empty(count * length, np.float32)
    return [block[number * length : (number + 1) * length] for number in range(count)]


def _gather(layout: Layout, tensor: int, partition: int, values: np.ndarray, out: np.ndarray) -> None:
    """Copy the elements of a tensor that lie in a partition to their places."""
    start = 0
    for piece in layout.tensors[tensor].pieces:
        if piece.partition == partition:
            out[piece.offset : piece.offset + piece.count] = values[start : start + piece.count]
        start += piece.count


def replay_spans(
    kind: str,
    arrays: Sequence[np.ndarray],
    gradient: np.ndarray,
    spans: Sequence[tuple[int, int, int]],
    constants: np.ndarray,
    begin: int,
    end: int,
) -> None:
    """Do one optimizer step of the elements begin..end, in place.

    Parameters
    ----------
    spans : sequence of (int, int, int)
        Elements of each tensor that moves, with the row of `constants` that holds for it.
    """
    kernels = passes("replay_kernels")
    run = kernels.replay_sgd if kind == REPLAY_SGD else kernels.replay_adam
    for first, last, number in spans:
        low, high = max(first, begin) - begin, min(last, end) - begin
        if low < high:
            run(*(array[low:high] for array in arrays), gradient[low:high], constants[number])
