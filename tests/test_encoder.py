"""A staged state becomes a commit: base or delta, which layers, which checks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deltastore.buffers import Buffers, StagedState
from deltastore.encoder import ChainState, CommitOrder, EncodedCommit, advance, encode_commit
from deltastore.layers.checks import covered_crc
from deltastore.layout import BACKWARD, FORWARD, Layout, Partition
from deltastore.ondisk.codecs import digest_values
from deltastore.ondisk.layouts import parse_layout
from deltastore.ondisk.records import CommitRecord, CommitRef, parse_record
from deltastore.types import Json

SESSION = "5" * 16
TWO = (Partition(0, "float32", 5000, "param", FORWARD, 0), Partition(1, "float32", 7000, "param", BACKWARD, 1))


class Line:
    """Commits one after the other, as the writer's background makes them."""

    def __init__(self, partitions: tuple[Partition, ...] = TWO, codec: str = "auto", cost: float = 8.0) -> None:
        self.chain = ChainState()
        self.layout = Layout((), partitions)
        self.codec = codec
        self.cost = cost
        self.free: Buffers | None = None
        self.encoded: EncodedCommit | None = None
        self.count = 0

    def commit(
        self,
        buffers: Buffers,
        document: Json = None,
        *,
        step: int | None = None,
        fresh: bool = False,
        base: bool = False,
        epoch: int = 1,
        metrics: dict[str, Json] | None = None,
    ) -> CommitRecord | None:
        self.count += 1
        order = CommitOrder(f"{self.count:032x}", self.count if step is None else step, base, metrics or {})
        staged = StagedState(document, self.layout, fresh, buffers)
        self.encoded = encode_commit(
            self.chain, staged, order, epoch=epoch, session=SESSION, restore_cost=self.cost, codec=self.codec
        )
        if self.encoded is None:
            return None
        stored = sum(chunk.stored_bytes for array in self.encoded.arrays() for chunk in array.chunks)
        assert stored <= self.encoded.largest_bytes + 8 * 100
        record, pack = self.encoded.finish()
        assert parse_record(pack.record, pack.digest, "here") == record
        self.free = advance(self.chain, staged, self.encoded, record, pack.digest, stored)
        return record


def values(seed: int = 0, partitions: tuple[Partition, ...] = TWO) -> Buffers:
    generator = np.random.default_rng(seed)
    return {p.id: generator.standard_normal(p.length).astype(p.dtype) for p in partitions}


def changed(buffers: Buffers, partition: int, count: int, by: float = 1.0) -> Buffers:
    result = {number: array.copy() for number, array in buffers.items()}
    result[partition][:count] += by
    return result


def given_back(line: Line) -> dict[int, int]:
    """Which buffers the last commit set free."""
    return {} if line.free is None else {number: id(array) for number, array in line.free.items()}


def kinds(record: CommitRecord | None) -> dict[int, str]:
    assert record is not None
    return {layer.partition: layer.kind for layer in record.layers}


# ---------------------------------------------------------------- which kind


def test_the_first_commit_is_a_base() -> None:
    line, first = Line(), values()
    record = line.commit(first, {"$": "dict"})
    assert record is not None
    assert (record.kind, record.parent, record.check, record.sequence) == ("base", None, None, 0)
    assert record.values == {"full": {"$": "dict"}}
    assert kinds(record) == {0: "full", 1: "full"}
    assert line.free is None
    assert line.encoded is not None
    specs = {array.path.split("/")[1]: array.spec.codec for array in line.encoded.arrays()}
    assert specs == {"p0.data": "raw", "p1.data": "blosc"}
    for layer in record.layers:
        (digest,) = layer.arrays.values()
        assert digest == digest_values(first[layer.partition], int(digest.partition(":")[0]))
    ((digest, blob),) = line.encoded.layouts.items()
    assert parse_layout(blob, digest, "here") == line.layout
    assert record.layout == digest


@pytest.mark.parametrize("codec", ["raw", "blosc"])
def test_a_codec_may_be_chosen_for_all(codec: str) -> None:
    line = Line(codec=codec)
    line.commit(values())
    assert line.encoded is not None
    assert {array.spec.codec for array in line.encoded.arrays()} == {codec}


def test_a_delta_lists_only_what_changed() -> None:
    line, first = Line(), values()
    base = line.commit(first, {"a": 1, "b": 2})
    record = line.commit(changed(first, 1, 3), {"a": 1, "b": 3})
    assert base is not None
    assert record is not None
    assert (record.kind, record.sequence, record.lineage) == ("delta", 1, ())
    assert record.parent is not None
    assert (record.parent.id, record.parent.step) == (base.id, base.step)
    assert kinds(record) == {1: "overlay"}
    assert record.values == {"patch": [["set", ["b"], 3]]}
    assert record.layout == base.layout
    assert line.encoded is not None
    assert line.encoded.layouts == {}
    assert given_back(line) == {number: id(array) for number, array in first.items()}


def test_what_is_asked_for_is_a_base() -> None:
    line, first = Line(), values()
    line.commit(first)
    asked: tuple[dict[str, Any], ...] = ({"base": True}, {"fresh": True})
    for arguments in asked:
        record = line.commit(changed(first, 0, 1), **arguments)
        assert record is not None
        assert record.kind == "base"
        assert record.parent is not None


def test_a_base_is_written_even_where_nothing_changed() -> None:
    line, first = Line(), values()
    line.commit(first, step=5)
    record = line.commit(first, step=5, base=True)
    assert record is not None
    assert record.kind == "base"


@pytest.mark.parametrize(
    ("chain", "last", "cost", "due"),
    [(800, 0, 8.0, False), (700, 100, 8.0, False), (700, 101, 8.0, True), (100, 0, 1.0, False), (100, 1, 1.0, True)],
)
def test_a_base_is_due_when_the_next_delta_would_cost_too_much(chain: int, last: int, cost: float, due: bool) -> None:
    state = ChainState(rec={}, full_bytes=100, chain_bytes=chain, last_bytes=last)
    assert state.base_due(cost) is due
    assert ChainState().base_due(1e9)


def test_bases_come_by_the_restore_cost() -> None:
    line, first = Line(cost=1.5), values()
    found: list[str] = []
    state = first
    for number in range(12):
        state = {n: a + np.float32(0.01 * number) for n, a in state.items()}
        before = (line.chain.chain_bytes + line.chain.last_bytes, line.chain.full_bytes)
        record = line.commit(state)
        assert record is not None
        found.append(record.kind)
        assert (
            number == 0
            or (record.kind == "base") == (before[0] > 1.5 * before[1])
            or set(kinds(record).values()) == {"full"}
        )
    assert found.count("base") > 2


def test_a_chain_of_patches_alone_ends_too() -> None:
    """Each commit of a chain is a pack to open, whatever it holds."""
    line, first = Line(partitions=(TWO[0],)), values()
    found = set()
    for number in range(300):
        record = line.commit({0: first[0]}, {"n": number})
        assert record is not None
        found.add((number > 0, record.kind))
    assert (True, "base") in found


def test_where_every_partition_is_new_the_commit_is_a_base() -> None:
    line = Line()
    line.commit(values())
    line.layout = Layout((), (Partition(2, "float32", 5000, "param", FORWARD, 0),))
    record = line.commit({2: np.ones(5000, "<f4")})
    assert record is not None
    assert (record.kind, record.lineage, record.check) == ("base", (), None)
    assert record.parent is not None


def test_a_delta_of_nothing_but_full_layers_is_a_base() -> None:
    line = Line(partitions=(TWO[0],))
    line.commit({0: np.frombuffer(np.random.default_rng(0).bytes(20_000), "<f4")})
    record = line.commit({0: np.zeros(5000, "<f4")})
    assert record is not None
    assert kinds(record) == {0: "full"}
    assert record.kind == "base"


def test_a_layout_with_new_partitions_is_a_delta_with_full_layers() -> None:
    line, first = Line(), values()
    line.commit(first)
    new = Partition(2, "int64", 10, "step", FORWARD, None)
    line.layout = Layout((), (TWO[0], TWO[1], new))
    record = line.commit({**changed(first, 0, 2), 2: np.arange(10)})
    assert record is not None
    assert record.kind == "delta"
    assert kinds(record) == {0: "overlay", 2: "full"}
    assert line.encoded is not None
    assert list(line.encoded.layouts) == [record.layout]
    assert line.free is None  # buffers of another layout
    line.layout = Layout((), (TWO[1], new))
    record = line.commit({1: first[1], 2: np.arange(10)})
    assert kinds(record) == {}
    assert record is not None
    assert set(record.check.crcs if record.check else ()) == {1, 2}


# ---------------------------------------------------------------- nothing changed


def test_the_same_step_with_the_same_content_is_not_written() -> None:
    line, first = Line(), values()
    line.commit(first, {"a": 1}, step=3)
    before = line.chain.sequence
    assert line.commit({n: a.copy() for n, a in first.items()}, {"a": 1}, step=3) is None
    assert line.chain.sequence == before


@pytest.mark.parametrize("what", ["document", "values", "layout", "step", "epoch"])
def test_it_is_written_if_anything_differs(what: str) -> None:
    line, first = Line(), values()
    line.commit(first, {"a": 1}, step=3)
    if what == "layout":
        line.layout = Layout((), TWO)
    arguments: dict[str, Any] = {"step": 4 if what == "step" else 3, "epoch": 2 if what == "epoch" else 1}
    record = line.commit(
        changed(first, 0, 1) if what == "values" else first, {"a": 2 if what == "document" else 1}, **arguments
    )
    assert record is not None
    assert record.kind == "delta"


def test_signs_of_zero_and_payloads_of_nans_are_changes() -> None:
    line, first = Line(), values()
    first[0][0] = 0.0
    line.commit(first, step=3)
    second = {number: array.copy() for number, array in first.items()}
    second[0][0] = -0.0
    assert kinds(line.commit(second, step=3)) == {0: "overlay"}


# ---------------------------------------------------------------- checks, lineage, chain


def test_the_check_covers_another_share_with_each_commit() -> None:
    big = (Partition(0, "uint8", 20 * 65_536, "param", FORWARD, None), TWO[1])
    line = Line(partitions=big)
    state: Buffers = {0: np.zeros(big[0].length, np.uint8), 1: np.zeros(7000, "<f4")}
    line.commit(state)
    for sequence in range(1, 4):
        state = changed(state, 1, sequence)
        record = line.commit(state)
        assert record is not None
        assert record.check is not None
        assert record.check.phase == record.sequence == sequence
        assert record.check.crcs == {number: covered_crc(array, sequence) for number, array in state.items()}


def test_bases_carry_the_line_of_history_and_deltas_do_not() -> None:
    line, first = Line(), values()
    line.chain.earlier = ((1, 7), (0, 2))
    base = line.commit(first, epoch=2)
    delta = line.commit(changed(first, 0, 1), epoch=2)
    again = line.commit(first, epoch=2, base=True)
    assert base is not None
    assert delta is not None
    assert again is not None
    assert (base.lineage, delta.lineage, again.lineage) == (((1, 7), (0, 2)), (), ((1, 7), (0, 2)))


def test_what_is_not_published_does_not_change_the_chain() -> None:
    line, first = Line(), values()
    line.commit(first)
    before = dict(vars(line.chain))
    staged = StagedState({"x": 1}, line.layout, False, changed(first, 0, 9))
    order = CommitOrder("f" * 32, 9, False, {})
    for _ in range(2):
        encoded = encode_commit(line.chain, staged, order, epoch=1, session=SESSION, restore_cost=8.0, codec="auto")
        assert encoded is not None
        assert [len(list(array.chunks)) for array in encoded.arrays()]
    assert {**vars(line.chain), "_encoded": None} == {**before, "_encoded": None}


def test_a_commit_can_be_encoded_for_several_attempts() -> None:
    line = Line(codec="auto")
    line.commit(values())
    assert line.encoded is not None
    once = [[bytes(part) for part in chunk.parts] for array in line.encoded.arrays() for chunk in array.chunks]
    twice = [[bytes(part) for part in chunk.parts] for array in line.encoded.arrays() for chunk in array.chunks]
    assert once == twice
    assert line.encoded.finish()[1].digest == line.encoded.finish()[1].digest


def test_buffers_of_a_restored_state_are_never_used_again() -> None:
    line, first = Line(), values()
    line.chain.rec, line.chain.layout, line.chain.rec_is_shared = values(1), line.layout, True
    line.chain.full_bytes = line.chain.chain_bytes = 1 << 20
    line.chain.parent = CommitRef("a" * 32, "b" * 64, 1, 0, 0)
    line.commit(first)
    assert line.free is None
    line.commit(changed(first, 0, 1))
    assert given_back(line) == {number: id(array) for number, array in first.items()}


def test_metrics_and_fidelity_stand_in_the_record() -> None:
    record = Line().commit(values(), metrics={"n": 1})
    assert record is not None
    assert (record.metrics, record.exact, record.session) == ({"n": 1}, True, SESSION)
