"""The prediction of one commit: its codes, read and made ready to be applied to runs of blocks (spec 9.9)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from deltastore.errors import Corruption
from deltastore.history.chain import Link
from deltastore.history.chunks import Wanted, read_arrays
from deltastore.history.corrections import checked_array
from deltastore.history.packs import Packs
from deltastore.layers.blocks import Blocks
from deltastore.layers.codes import CODES, FACTORS, LANE_BYTES, SCALES
from deltastore.layers.encoded import array_path
from deltastore.layers.passes import passes
from deltastore.layers.replay import replay_spans
from deltastore.layers.rules import padded
from deltastore.ondisk.predictions import SGD, PredictionRecord


class Prediction(Protocol):
    """What a commit predicts of the elements that were read."""

    def apply(self, begin: int, end: int, arrays: Sequence[np.ndarray]) -> None:
        """Bring runs of the partitions from one commit to the next, in place.

        Parameters
        ----------
        begin, end : int
            Which elements, counted from the first that was read; whole blocks.
        arrays : sequence of ndarray of float32
            These elements of each partition of the group.
        """


class Replayed:
    """The gradients of the elements from `first` on of one group of partitions."""

    def __init__(self, prediction: PredictionRecord, blocks: Blocks, first: int, gradient: np.ndarray) -> None:
        self._prediction = prediction
        self._spans = blocks.spans_of(prediction.ranges)
        self._first = first
        self._gradient = gradient
        self._constants = padded(prediction.constants)

    def apply(self, begin: int, end: int, arrays: Sequence[np.ndarray]) -> None:
        """Do the optimizer's step."""
        gradient = self._gradient[begin:end]
        replay_spans(
            self._prediction.kind,
            arrays,
            gradient,
            self._spans,
            self._constants,
            self._first + begin,
            self._first + end,
        )


class Predicted:
    """The codes of the elements first..last of one group of partitions."""

    def __init__(
        self,
        prediction: PredictionRecord,
        blocks: Blocks,
        first: int,
        last: int,
        packed: np.ndarray,
        scales: np.ndarray,
        where: str,
    ) -> None:
        self._prediction = prediction
        self._code = CODES[prediction.code or ""]
        self._blocks = blocks
        self._first = first
        self._lowest = blocks.covering(first, last)[0]
        self._packed = packed
        self._scales = SCALES[scales]
        self._where = where
        self._sets = blocks.sets_of(prediction.ranges)
        self._constants = padded(prediction.constants)
        self._steps = np.array(prediction.steps, np.int64)
        self._kernels = passes("prediction_kernels")
        self.refinement: Refinement | None = None

    def apply(self, begin: int, end: int, arrays: Sequence[np.ndarray]) -> None:
        """Do the optimizer's steps with the codes in place of gradients."""
        code = self._code
        begin, end = self._first + begin, self._first + end
        group = begin // code.group
        read_from = self._first // code.group
        packed = self._packed[(group - read_from) * LANE_BYTES : (-(-end // code.group) - read_from) * LANE_BYTES]
        integers = np.empty(len(packed) * code.digits, np.int8)
        if not passes("packing_kernels").unpack(len(code.values), packed, integers):
            raise Corruption(f"{self._where}: a byte is none of {code.name} codes", entry=self._where)
        low, high = self._blocks.covering(begin, end)
        places = [table[low:high] for table in (self._blocks.starts, self._blocks.ends)]
        apply = self._kernels.sgd_blocks if self._prediction.kind == SGD else self._kernels.adam_blocks
        apply(
            *arrays,
            *(table - begin for table in places),
            self._blocks.slots[low:high],
            self._sets,
            integers[begin - group * code.group :],
            self._scales[low - self._lowest : high - self._lowest],
            self._constants,
            self._steps,
        )
        if self.refinement is not None:
            self.refinement.apply(low, high, begin, arrays[-1])


class Refinement:
    """Signs and factors that bring exp_avg_sq of some of the blocks nearer to the truth.

    Parameters
    ----------
    numbers : ndarray of int64
        The blocks whose turn it is, of those that were read.
    offsets : ndarray of int64
        Where the signs of each of these blocks begin in `signs`, and their end.
    """

    def __init__(
        self, blocks: Blocks, numbers: np.ndarray, offsets: np.ndarray, signs: np.ndarray, factors: np.ndarray
    ) -> None:
        self._blocks = blocks
        self._numbers = numbers
        self._offsets = offsets
        self._signs = signs
        self._factors = factors

    def apply(self, low: int, high: int, begin: int, v: np.ndarray) -> None:
        """Refine those of the blocks low..high whose turn it is; `v` begins with element `begin`."""
        one, other = np.searchsorted(self._numbers, (low, high))
        chosen = self._numbers[one:other]
        signs = self._signs[self._offsets[one] : self._offsets[other]]
        passes("prediction_kernels").refine_blocks(
            v, self._blocks.starts[chosen] - begin, self._blocks.ends[chosen] - begin, signs, self._factors[one:other],
            FACTORS,
        )  # fmt: skip


def fetch_prediction(
    packs: Packs, link: Link, prediction: PredictionRecord, blocks: Blocks, length: int, first: int, last: int
) -> Prediction:
    """Read what a prediction has for the elements first..last.

    Parameters
    ----------
    length : int
        Elements of each partition.

    Raises
    ------
    Corruption
        An array is missing, damaged, or not as long as the partition asks for.
    """
    if prediction.code is None:
        path = array_path(link.record.id, prediction.carrier, "gradient")
        gradient = np.empty(last - first, np.float32)
        read_arrays(packs, link, [Wanted(path, checked_array(link, path, "float32", length), first, gradient)])
        return Replayed(prediction, blocks, first, gradient)
    code = CODES[prediction.code]
    low, high = blocks.covering(first, last)
    packed = np.empty((-(-last // code.group) - first // code.group) * LANE_BYTES, np.uint8)
    scales = np.empty(high - low, np.uint8)
    asked = [
        _wanted(link, prediction, "codes", code.packed_length(length), first // code.group * LANE_BYTES, packed),
        _wanted(link, prediction, "scales", len(blocks), low, scales),
    ]
    if prediction.refine is None:
        read_arrays(packs, link, asked)
        return Predicted(prediction, blocks, first, last, packed, scales, asked[0].path)
    numbers = blocks.refined(*prediction.refine)
    ends = np.append(np.zeros(1, np.int64), np.cumsum(blocks.ends[numbers] - blocks.starts[numbers]))
    one, other = np.searchsorted(numbers, (low, high))
    bit = CODES["bit"]
    begin, end = int(ends[one]), int(ends[other])
    signs = np.empty((-(-end // bit.group) - begin // bit.group) * LANE_BYTES, np.uint8)
    factors = np.empty(other - one, np.uint8)
    start = begin // bit.group * LANE_BYTES
    asked += [
        _wanted(link, prediction, "signs", bit.packed_length(int(ends[-1])), start, signs),
        _wanted(link, prediction, "factors", len(numbers), int(one), factors),
    ]
    read_arrays(packs, link, asked)
    predicted = Predicted(prediction, blocks, first, last, packed, scales, asked[0].path)
    unpacked = np.empty(len(signs) * bit.digits, np.int8)
    passes("packing_kernels").unpack(len(bit.values), signs, unpacked)
    offsets = ends[one : other + 1] - begin // bit.group * bit.group
    predicted.refinement = Refinement(blocks, numbers[one:other], offsets, unpacked, factors)
    return predicted


def _wanted(link: Link, prediction: PredictionRecord, name: str, length: int, start: int, out: np.ndarray) -> Wanted:
    path = array_path(link.record.id, prediction.carrier, name)
    return Wanted(path, checked_array(link, path, "uint8", length), start, out)
