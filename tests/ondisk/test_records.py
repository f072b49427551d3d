"""Commit records: round trip, and one test for each reason to refuse one (others: tests/test_hostile.py)."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltastore.errors import Corruption, UnsupportedFormat
from deltastore.ondisk.canonical import decompress, digest_of, parse_json
from deltastore.ondisk.fidelity import CommitFidelity, TensorFidelity
from deltastore.ondisk.limits import MAX_NUMBER, MAX_PARTITION_ID
from deltastore.ondisk.records import (
    ARRAYS_OF,
    Check,
    CommitRecord,
    CommitRef,
    LayerRecord,
    encode_record,
    now,
    parse_record,
)
from tests.forge import canonical, compress

numbers = st.integers(0, MAX_NUMBER)
ids = st.binary(min_size=16, max_size=16).map(bytes.hex)
digests = st.binary(min_size=32, max_size=32).map(bytes.hex)
contents = st.builds(lambda piece, digest: f"{piece}:{digest}", st.integers(1, 2**40), digests)
refs = st.builds(CommitRef, ids, digests, numbers, numbers, numbers)
json_objects = st.dictionaries(st.text(max_size=3), st.none() | st.integers() | st.text(max_size=3), max_size=3)


@st.composite
def records(draw: st.DrawFn) -> CommitRecord:
    kind = draw(st.sampled_from(["base", "delta"]))
    layers = []
    for partition in draw(st.sets(st.integers(0, MAX_PARTITION_ID), max_size=4)):
        layer = "full" if kind == "base" else draw(st.sampled_from(sorted(ARRAYS_OF)))
        layers.append(LayerRecord(partition, layer, {name: draw(contents) for name in ARRAYS_OF[layer]}))
    check = Check(draw(st.none() | numbers), draw(st.dictionaries(numbers, st.integers(0, 2**32 - 1), max_size=3)))
    return CommitRecord(
        id=draw(ids),
        epoch=draw(numbers),
        sequence=draw(numbers),
        session=draw(ids)[:16],
        created=draw(st.text(max_size=5)),
        step=draw(numbers),
        kind=kind,
        parent=draw(refs if kind == "delta" else st.none() | refs),
        lineage=tuple(draw(st.lists(st.tuples(numbers, numbers), max_size=2))),
        layout=draw(digests),
        values={"full": draw(json_objects)} if kind == "base" else {"patch": draw(st.lists(st.integers(), max_size=2))},
        layers=tuple(layers),
        check=draw(st.none() | st.just(check)),
        fidelity=CommitFidelity() if kind == "base" else draw(fidelities()),
        metrics=draw(json_objects),
        extra={f"x-{name}": value for name, value in draw(json_objects).items()},
    )


@st.composite
def fidelities(draw: st.DrawFn) -> CommitFidelity:
    binary32 = st.floats(0, width=32, allow_infinity=False)
    norms = st.none() | st.floats(0, 1e300).map(lambda norm: float(f"{norm:.4g}"))
    tensors = [
        TensorFidelity(index, draw(binary32.filter(bool)), draw(binary32), draw(numbers), draw(norms), draw(norms))
        for index in sorted(draw(st.sets(st.integers(0, 9), max_size=3)))
    ]
    return CommitFidelity(tuple(tensors), draw(numbers), draw(numbers)) if tensors else CommitFidelity()


@given(records())
def test_a_record_comes_back(record: CommitRecord) -> None:
    blob, digest = encode_record(record)
    assert parse_record(blob, digest, "here") == record
    assert digest_of(decompress(blob, 1 << 20, "here")) == digest
    assert encode_record(parse_record(blob, digest, "here"))[1] == digest  # members of a newer minor version included


def member(value: Any) -> Any:
    data = canonical(value)
    return parse_record(compress(data), digest_of(data), "here")


def good(kind: str = "base") -> dict[str, Any]:
    parent = CommitRef("a" * 32, "b" * 64, 1, 2, 3)
    layer = LayerRecord(5, "full" if kind == "base" else "xor", {"data" if kind == "base" else "xor": f"64:{'c' * 64}"})
    record = CommitRecord(
        id="d" * 32, epoch=1, sequence=3, session="e" * 16, created=now(), step=4, kind=kind, parent=parent, lineage=(),
        layout="f" * 64, values={"full": {}} if kind == "base" else {"patch": []}, layers=(layer,),
        check=Check(3, {5: 6}), fidelity=CommitFidelity(),
    )  # fmt: skip
    value: dict[str, Any] = parse_json(decompress(encode_record(record)[0], 10_000, "here"), "here")
    return value


def test_what_a_record_asks_of_its_reader() -> None:
    assert good()["requires"] == ["full"]
    assert good("delta")["requires"] == ["hold", "xor"]
    assert good("delta")["layers"][0]["prediction"] == "hold"
    assert "prediction" not in good()["layers"][0]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", good()["created"])


def test_a_delta_may_hold_a_whole_document() -> None:
    value = good("delta")
    value["values"] = {"full": {}}
    assert member(value).values == {"full": {}}


def put(path: str, new: Any) -> Callable[[dict[str, Any]], None]:
    def change(value: Any) -> None:
        *way, last = (int(key) if key.isdigit() else key for key in path.split("/"))
        for key in way:
            value = value[key]
        value[last] = new

    return change


BAD: dict[str, tuple[str, Any, str]] = {
    "epoch": ("epoch", -1, "epoch"),
    "sequence": ("sequence", "1", "sequence"),
    "created": ("created", 5, "created"),
    "session": ("session", "x", "session id"),
    "two parents": ("parents", [good()["parents"][0]] * 2, "parents"),
    "parents of text": ("parents", ["a"], "object"),
    "parent without a digest": ("parents/0/digest", None, "record digest"),
    "parent with a path": ("parents/0/id", "../x", "commit id"),
    "parent without a step": ("parents/0/step", None, "step"),
    "parent with a negative epoch": ("parents/0/epoch", -1, "epoch"),
    "lineage of triples": ("lineage", [[1, 2, 3]], "pairs"),
    "lineage of truth": ("lineage", [[True, 1]], "pairs"),
    "layers of numbers": ("layers", [1], "object"),
    "an unknown layer": ("layers/0/kind", "tree", "kind"),
    "a layer of another kind's arrays": ("layers/0/arrays", {"xor": f"64:{'c' * 64}"}, "arrays"),
    "a layer without arrays": ("layers/0/arrays", {}, "arrays"),
    "a content digest without its piece": ("layers/0/arrays/data", "c" * 64, "arrays"),
    "a negative partition": ("layers/0/partition", -1, "partition"),
    "check without sums": ("check", {"phase": 1}, "crc32c"),
    "check of a list": ("check", [], "object"),
    "fidelity": ("fidelity", True, "fidelity"),
    "fidelity of numbers": ("fidelity/exact", 1, "exact"),
    "fidelity without tensors": ("fidelity", {"exact": False, "tensors": [], "budget": 1, "floor": 1}, "tensors"),
    "fidelity of a base": (
        "fidelity",
        {"exact": False, "tensors": [[0, 1, 1, 1, 1, 1]], "budget": 1, "floor": 1},
        "base",
    ),
    "fidelity without a budget": ("fidelity", {"exact": False, "tensors": [[0, 1, 1, 1, 1, 1]], "floor": 1}, "budget"),
    **{
        f"fidelity with {what}": ("fidelity", {"exact": False, "tensors": tensors, "budget": 1, "floor": 1}, "tensors")
        for what, tensors in {
            "a short tensor": [[0, 1, 1, 1, 1]],
            "tensors out of order": [[1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1]],
            "a tensor twice": [[0, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1]],
            "a bound of 0": [[0, 0, 1, 1, 1, 1]],
            "an infinite bound": [[0, 0x7F800000, 1, 1, 1, 1]],
            "a bound that is no number": [[0, 0x7FC00000, 1, 1, 1, 1]],
            "a negative threshold": [[0, 1, 0x80000001, 1, 1, 1]],
            "a negative norm": [[0, 1, 1, 1, -1.0, 1]],
            "a norm of text": [[0, 1, 1, 1, 1, "1"]],
        }.items()
    },
    "metrics": ("metrics", [], "metrics"),
    "patch in a base": ("values", {"patch": []}, "values"),
    "both values": ("values", {"patch": [], "full": {}}, "values"),
    "requires of text": ("requires", "full", "requires"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_record_that_does_not_follow_the_spec_is_refused(case: str) -> None:
    path, new, problem = BAD[case]
    value = good()
    put(path, new)(value)
    with pytest.raises(Corruption, match=problem) as caught:
        member(value)
    assert caught.value.where == "here"


@pytest.mark.parametrize("name", sorted(set(good()) - {"check"}))
def test_no_member_may_be_missing(name: str) -> None:
    value = good()
    del value[name]
    with pytest.raises(Corruption, match="here: member"):
        member(value)


def test_a_base_has_full_layers_only() -> None:
    value = good("delta")
    value.update(kind="base", values={"full": {}})
    with pytest.raises(Corruption, match="all full in a base"):
        member(value)


def test_a_correction_names_its_prediction() -> None:
    value = good("delta")
    del value["layers"][0]["prediction"]
    with pytest.raises(Corruption, match="prediction"):
        member(value)


def test_unknown_features_are_refused_by_name() -> None:
    value = good()
    value["requires"] = ["full", "tree", "bounded"]
    with pytest.raises(UnsupportedFormat, match="step 4 needs bounded, tree") as caught:
        member(value)
    assert caught.value.features == ["bounded", "tree"]


@pytest.mark.parametrize("kind", ["base", "delta"])
def test_no_feature_may_be_used_and_not_required(kind: str) -> None:
    for name in good(kind)["requires"]:
        value = good(kind)
        value["requires"].remove(name)
        with pytest.raises(Corruption, match=f"requires.*also {name}, which the record uses"):
            member(value)


def test_features_that_are_no_text_are_refused() -> None:
    value = good()
    value["requires"] = [["full"]]
    with pytest.raises((Corruption, UnsupportedFormat)):
        member(value)


def test_another_digest_is_refused() -> None:
    data = canonical(good())
    with pytest.raises(Corruption, match="record has digest"):
        parse_record(compress(data), "0" * 64, "here")
