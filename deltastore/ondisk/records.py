"""The commit record: logical, immutable, named by its digest (spec 6.2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from deltastore.errors import Corruption, InvalidInput, UnsupportedFormat
from deltastore.ondisk.canonical import compress, decompress, digest_of, encode_canonical, parse_json
from deltastore.ondisk.fidelity import CommitFidelity, encode_fidelity, parse_fidelity
from deltastore.ondisk.fields import Fields
from deltastore.ondisk.limits import MAX_PARTITION_ID, MAX_RECORD_BYTES
from deltastore.ondisk.names import are_content_digests, is_commit_id, is_digest, is_write_id
from deltastore.ondisk.predictions import (
    CODES_FEATURE,
    HOLD,
    PREDICT,
    PredictionRecord,
    encode_prediction,
    parse_predictions,
)
from deltastore.types import Json

BASE = "base"
DELTA = "delta"
FULL = "full"
OVERLAY = "overlay"
XOR = "xor"

ARRAYS_OF = {FULL: ("data",), OVERLAY: ("indptr", "gaps", "values"), XOR: ("xor",)}
"""Which arrays a layer of each kind has."""
_ARRAY_SETS = {kind: frozenset(names) for kind, names in ARRAYS_OF.items()}

KNOWN_FEATURES = frozenset({FULL, OVERLAY, XOR, HOLD, CODES_FEATURE, *PREDICT.values()})
"""What `requires` may list for this reader; anything else is refused by name."""


@dataclass(frozen=True, slots=True)
class CommitRef:
    """How a record names another commit."""

    id: str
    digest: str
    epoch: int
    sequence: int
    step: int


@dataclass(frozen=True, slots=True)
class LayerRecord:
    """What a commit stores of one partition."""

    partition: int
    kind: str
    arrays: dict[str, str]
    """Name of each array -> digest of its decoded content."""


@dataclass(frozen=True, slots=True)
class Check:
    """CRC-32C of the reconstruction over a rotating share of each partition's blocks (spec 9.6)."""

    phase: int | None
    """None: all blocks."""
    crcs: dict[int, int]


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """One version of the state at one step."""

    id: str
    epoch: int
    sequence: int
    session: str
    created: str
    step: int
    kind: str
    parent: CommitRef | None
    lineage: tuple[tuple[int, int], ...]
    """Bases only: earlier segments (epoch, last sequence) of the line of history, newest first."""
    layout: str
    values: Json
    """``{"full": node}`` or ``{"patch": [op, ...]}`` against the parent's document."""
    layers: tuple[LayerRecord, ...]
    """Full layers, and corrections of what is predicted."""
    check: Check | None
    """None on a base: the content digests of its full layers cover everything."""
    fidelity: CommitFidelity
    predictions: tuple[PredictionRecord, ...] = ()
    """How partitions are predicted; the others are held."""
    metrics: dict[str, Json] = field(default_factory=dict)
    extra: dict[str, Json] = field(default_factory=dict)
    """Members that a newer minor version added; kept when the record is copied."""

    @property
    def exact(self) -> bool:
        """Whether the reconstruction equals the training state bit for bit."""
        return self.fidelity.exact

    @property
    def requires(self) -> list[str]:
        """Features that a reader must know."""
        features = {layer.kind for layer in self.layers}
        predicted = self.predicted
        features |= {HOLD for layer in self.layers if layer.kind != FULL and layer.partition not in predicted}
        for prediction in self.predictions:
            features |= prediction.features
        return sorted(features)

    @property
    def predicted(self) -> dict[int, str]:
        """Each partition that is not held, with the kind of its prediction."""
        return {number: prediction.kind for prediction in self.predictions for number in prediction.partitions}


def now() -> str:
    """Return the present time as records hold it, UTC with microseconds."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def encode_record(record: CommitRecord) -> tuple[bytes, str]:
    """Return the stored blob of a record and the record's digest."""
    layers: list[Json] = []
    predicted = record.predicted
    for layer in record.layers:
        entry: dict[str, Json] = {"partition": layer.partition, "kind": layer.kind, "arrays": layer.arrays}
        if layer.kind != FULL:
            entry["prediction"] = predicted.get(layer.partition, HOLD)
        layers.append(entry)
    parent = record.parent
    check = record.check
    data = encode_canonical(
        {
            **record.extra,
            "id": record.id,
            "epoch": record.epoch,
            "sequence": record.sequence,
            "session": record.session,
            "created": record.created,
            "step": record.step,
            "kind": record.kind,
            "parents": []
            if parent is None
            else [
                {
                    "id": parent.id,
                    "digest": parent.digest,
                    "epoch": parent.epoch,
                    "sequence": parent.sequence,
                    "step": parent.step,
                }
            ],
            "lineage": [list(segment) for segment in record.lineage],
            "layout": record.layout,
            "requires": record.requires,
            "values": record.values,
            "layers": layers,
            **({"predictions": [encode_prediction(item) for item in record.predictions]} if record.predictions else {}),
            "check": None
            if check is None
            else {"phase": check.phase, "crc32c": [list(pair) for pair in check.crcs.items()]},
            "fidelity": encode_fidelity(record.fidelity),
            "metrics": record.metrics,
        }
    )
    if len(data) > MAX_RECORD_BYTES:
        raise InvalidInput(
            f"step {record.step}: the plain values take {len(data):,} bytes, a record at most {MAX_RECORD_BYTES:,}; "
            "put large data into tensors or arrays",
            step=record.step,
        )
    return compress(data), digest_of(data)


_MEMBERS = frozenset(
    "id epoch sequence session created step kind parents lineage layout "
    "requires values layers predictions check fidelity metrics".split()
)


def parse_record(blob: bytes, digest: str, where: str) -> CommitRecord:
    """Return the record of a stored blob whose digest must be `digest`.

    Raises
    ------
    Corruption
        The bytes are damaged or do not follow the spec.
    UnsupportedFormat
        The commit needs a feature that this reader lacks.
    """
    data = decompress(blob, MAX_RECORD_BYTES, where)
    found = digest_of(data)
    if found != digest:
        raise Corruption(
            f"{where}: record has digest {found[:12]}..., expected {digest[:12]}...",
            where=where,
            expected=digest,
            found=found,
        )
    value = parse_json(data, where)
    fields = Fields(value, where)
    required = fields.items("requires")
    unknown = sorted(str(name)[:40] for name in required if not isinstance(name, str) or name not in KNOWN_FEATURES)
    if unknown:
        raise UnsupportedFormat(
            f"{where}: step {fields.integer('step')} needs {', '.join(unknown)}, which this version does not know; "
            "read it with a newer deltastore",
            where=where,
            features=unknown,
        )
    record = _parse(fields, {name: value[name] for name in value if name not in _MEMBERS})
    hidden = sorted(set(record.requires) - set(required))
    if hidden:
        raise fields.fault("requires", f"also {', '.join(hidden)}, which the record uses")
    return record


def _parse(fields: Fields, extra: dict[str, Json]) -> CommitRecord:
    kind = fields.choice("kind", (BASE, DELTA))
    parents = [_parse_ref(Fields(parent, fields.where)) for parent in fields.items("parents")]
    if len(parents) > 1 or (kind == DELTA and not parents):
        raise fields.fault("parents", "one parent (a base may have none)")
    if (
        not is_commit_id(fields.raw("id"))
        or not is_digest(fields.raw("layout"))
        or not is_write_id(fields.raw("session"))
    ):
        raise fields.fault("id", "a commit id beside a layout digest and a session id")
    predictions = parse_predictions(fields.items("predictions"), fields.where) if fields.has("predictions") else ()
    predicted = {number: prediction.kind for prediction in predictions for number in prediction.partitions}
    layers = tuple([_parse_layer(layer, predicted, fields.where) for layer in fields.items("layers")])
    arrays = [layer.arrays for layer in layers] + [prediction.arrays for prediction in predictions]
    if not are_content_digests([digest for digests in arrays for digest in digests.values()]):
        raise fields.fault("layers", "layers and predictions with the content digests of their arrays")
    if predictions and (kind == BASE or any(x.kind == FULL and x.partition in predicted for x in layers)):
        raise fields.fault("predictions", "predictions of partitions that the same commit does not store whole")
    if len({layer.partition for layer in layers}) != len(layers) or (
        kind == BASE and any(x.kind != FULL for x in layers)
    ):
        raise fields.fault("layers", "one layer for each partition, all full in a base")
    values = fields.mapping("values")
    if set(values) != ({"full"} if kind == BASE else {"patch"}) and set(values) != {"full"}:
        raise fields.fault("values", "the member full, or patch in a delta")
    if not isinstance(values.get("patch", []), list):
        raise fields.fault("values", "a list of operations as patch")
    fidelity = parse_fidelity(fields.mapping("fidelity"), fields.where)
    if kind == BASE and not fidelity.exact:
        raise fields.fault("fidelity", "an exact base")
    return CommitRecord(
        id=fields.text("id"),
        epoch=fields.integer("epoch"),
        sequence=fields.integer("sequence"),
        session=fields.text("session"),
        created=fields.text("created"),
        step=fields.integer("step"),
        kind=kind,
        parent=parents[0] if parents else None,
        lineage=tuple(_pairs(fields, "lineage")),
        layout=fields.text("layout"),
        values=values,
        layers=layers,
        predictions=predictions,
        check=_parse_check(fields) if fields.has("check") else None,
        fidelity=fidelity,
        metrics=fields.mapping("metrics"),
        extra=extra,
    )


def _parse_ref(fields: Fields) -> CommitRef:
    if not is_commit_id(fields.raw("id")) or not is_digest(fields.raw("digest")):
        raise fields.fault("id", "a commit id and a record digest")
    return CommitRef(
        fields.text("id"),
        fields.text("digest"),
        fields.integer("epoch"),
        fields.integer("sequence"),
        fields.integer("step"),
    )


def _parse_layer(value: Json, predicted: Mapping[int, str], where: str) -> LayerRecord:
    # A chain has many records and each a layer for every partition: this is most of the work of opening a commit.
    if isinstance(value, dict):
        kind, partition, arrays = value.get("kind"), value.get("partition"), value.get("arrays")
        if (
            isinstance(kind, str)
            and kind in _ARRAY_SETS
            and type(partition) is int
            and (kind == FULL or value.get("prediction") == predicted.get(partition, HOLD))
            and 0 <= partition <= MAX_PARTITION_ID
            and isinstance(arrays, dict)
            and arrays.keys() == _ARRAY_SETS[kind]
        ):
            return LayerRecord(partition, kind, arrays)
    raise _layer_fault(Fields(value, where), predicted)


def _layer_fault(fields: Fields, predicted: Mapping[int, str]) -> Corruption:
    """Return what is wrong with a layer."""
    kind = fields.choice("kind", tuple(ARRAYS_OF))
    partition = fields.integer("partition", MAX_PARTITION_ID)
    if kind != FULL:
        fields.choice("prediction", (predicted.get(partition, HOLD),))
    fields.mapping("arrays")
    return fields.fault("arrays", f"the arrays {', '.join(ARRAYS_OF[kind])}")


def _parse_check(fields: Fields) -> Check:
    inner = Fields(fields.raw("check"), fields.where)
    return Check(
        inner.integer("phase") if inner.has("phase") else None,
        dict(_pairs(inner, "crc32c")),
    )


def _pairs(fields: Fields, name: str) -> list[tuple[int, int]]:
    pairs = fields.items(name)
    if not all(
        type(pair) is list and len(pair) == 2 and type(pair[0]) is type(pair[1]) is int and pair[0] >= 0 <= pair[1]
        for pair in pairs
    ):
        raise fields.fault(name, "pairs of integers")
    return [(first, second) for first, second in pairs]
