"""How a commit predicts partitions from what its parent left, as its record says it (spec 6.7)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from deltastore.errors import Corruption
from deltastore.ondisk.fields import Fields
from deltastore.ondisk.limits import MAX_PARTITION_ID
from deltastore.types import Json

HOLD: Final = "hold"
ADAM: Final = "adam"
SGD: Final = "sgd"
REPLAY_ADAM: Final = "replay-adam"
REPLAY_SGD: Final = "replay-sgd"

PREDICT: Final = {
    ADAM: "predict-adam",
    SGD: "predict-sgd",
    REPLAY_ADAM: "replay-adam",
    REPLAY_SGD: "replay-sgd",
}
"""The feature that a reader needs for each."""
REPLAYS: Final = {ADAM: REPLAY_ADAM, SGD: REPLAY_SGD}
"""The kinds that take the gradient itself instead of codes."""
CODES_FEATURE: Final = "codes"
CODE_NAMES: Final = frozenset({"bit", "ternary", "pair"})

MEMBERS: Final = {
    ADAM: ("param", "exp_avg", "exp_avg_sq"),
    SGD: ("param", "momentum_buffer"),
    REPLAY_ADAM: ("param", "exp_avg", "exp_avg_sq"),
    REPLAY_SGD: ("param", "momentum_buffer"),
}
"""The roles of the partitions that are predicted together, in the order of the record."""
SHARED: Final = {ADAM: 8, SGD: 4, REPLAY_ADAM: 6, REPLAY_SGD: 5}
"""Constants that all steps of a set have in common."""
EACH: Final = {ADAM: 3, SGD: 2, REPLAY_ADAM: 3, REPLAY_SGD: 1}
"""Constants of each optimizer step."""
MAX_STEPS: Final = 64
"""Optimizer steps of one commit; one where it is replayed."""
_ARRAYS = frozenset({"codes", "scales"})
_REFINED = frozenset({"signs", "factors"})
_REPLAYED = frozenset({"gradient"})


@dataclass(frozen=True, slots=True)
class PredictionRecord:
    """The prediction of one group of partitions, and the codes that correct it.

    Attributes
    ----------
    kind : {"adam", "sgd", "replay-adam", "replay-sgd"}
    partitions : tuple of int
        Weights, then the optimizer's buffers, as :data:`MEMBERS` names them; all of one length.
    code : {"bit", "ternary", "pair"} or None
        None where the gradient is stored.
    arrays : dict of str to str
        Names of its arrays and the digests of their content; they stand under the second partition.
    constants : tuple of tuple of int
        Sets of binary32 bits: what all steps share, then what each has.
    ranges : tuple of (int, int, int)
        First element, the one after the last, and the set that holds for the tensors that begin there; what no range
        has is held.
    refine : tuple of (int, int) or None
        Period and phase of the blocks whose `exp_avg_sq` is corrected.
    """

    kind: str
    partitions: tuple[int, ...]
    code: str | None
    arrays: dict[str, str]
    constants: tuple[tuple[int, ...], ...]
    ranges: tuple[tuple[int, int, int], ...]
    refine: tuple[int, int] | None = None

    @property
    def features(self) -> set[str]:
        """What a reader must know."""
        return {PREDICT[self.kind]} | ({CODES_FEATURE} if self.code is not None else set())

    @property
    def carrier(self) -> int:
        """The partition under which the arrays stand."""
        return self.partitions[1]

    @property
    def steps(self) -> tuple[int, ...]:
        """How many optimizer steps each set has."""
        return count_steps(self.kind, self.constants)


def count_steps(kind: str, sets: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return how many optimizer steps each set of constants has."""
    return tuple((len(constants) - SHARED[kind]) // EACH[kind] for constants in sets)


def encode_prediction(prediction: PredictionRecord) -> Json:
    """Return a prediction as the record holds it."""
    refine = prediction.refine
    return {
        "arrays": prediction.arrays,
        "code": prediction.code,
        "constants": [list(constants) for constants in prediction.constants],
        "kind": prediction.kind,
        "partitions": list(prediction.partitions),
        "ranges": [list(item) for item in prediction.ranges],
        "refine": None if refine is None else {"period": refine[0], "phase": refine[1]},
    }


def parse_predictions(values: list[Json], where: str) -> tuple[PredictionRecord, ...]:
    """Return the predictions of a record.

    Raises
    ------
    Corruption
        They do not follow the spec.
    """
    found = tuple(_parse(Fields(value, where)) for value in values)
    partitions = [number for prediction in found for number in prediction.partitions]
    if len(set(partitions)) != len(partitions):
        raise Corruption(f"{where}: a partition is predicted twice")
    return found


def _parse(fields: Fields) -> PredictionRecord:
    kind = fields.choice("kind", tuple(MEMBERS))
    is_coded = kind in REPLAYS
    partitions = fields.items("partitions")
    if len(partitions) != len(MEMBERS[kind]) or not all(_is_number(n, MAX_PARTITION_ID) for n in partitions):
        raise fields.fault("partitions", f"the numbers of {len(MEMBERS[kind])} partitions")
    refine = _parse_refine(fields, kind) if fields.nullable("refine") else None
    if fields.nullable("code") != is_coded:
        raise fields.fault("code", "a code, or null in a replay")
    arrays = fields.mapping("arrays")
    if arrays.keys() != ((_ARRAYS | _REFINED if refine else _ARRAYS) if is_coded else _REPLAYED):
        raise fields.fault(
            "arrays", "the arrays codes and scales, with signs and factors where it refines; or gradient"
        )
    constants = tuple(_parse_constants(fields, kind, values) for values in fields.items("constants"))
    ranges = fields.items("ranges")
    if not all(
        isinstance(item, list)
        and len(item) == 3
        and all(_is_number(n, 1 << 62) for n in item)
        and item[0] < item[1]
        and item[2] < len(constants)
        for item in ranges
    ) or any(one[1] > other[0] for one, other in pairwise(ranges)):
        raise fields.fault("ranges", "ranges in order, each with one of the sets")
    return PredictionRecord(
        kind=kind,
        partitions=tuple(partitions),
        code=fields.choice("code", tuple(sorted(CODE_NAMES))) if is_coded else None,
        arrays=arrays,
        constants=constants,
        ranges=tuple((first, last, number) for first, last, number in ranges),
        refine=refine,
    )


def _parse_refine(fields: Fields, kind: str) -> tuple[int, int]:
    inner = Fields(fields.raw("refine"), fields.where)
    period, phase = inner.integer("period"), inner.integer("phase")
    if kind != ADAM or not 0 <= phase < period:
        raise fields.fault("refine", "period and phase, of adam only")
    return period, phase


def _parse_constants(fields: Fields, kind: str, values: Json) -> tuple[int, ...]:
    if isinstance(values, list) and all(_is_number(value, (1 << 32) - 1) for value in values):
        steps, rest = divmod(len(values) - SHARED[kind], EACH[kind])
        if not rest and 1 <= steps <= (MAX_STEPS if kind in REPLAYS else 1):
            return tuple(values)
    raise fields.fault("constants", f"{SHARED[kind]} numbers of 32 bits and {EACH[kind]} for each step")


def _is_number(value: Json, largest: int) -> bool:
    return type(value) is int and 0 <= value <= largest
