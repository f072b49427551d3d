"""Which tensor lies where: plans and revisions as data, no bytes."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltastore import layout as planner
from deltastore.dtypes import LOGICAL, storage_dtype
from deltastore.layout import (
    ALIGN_ELEMENTS,
    BACKWARD,
    BACKWARD_BYTES,
    FORWARD,
    FORWARD_BYTES,
    Layout,
    LayoutInput,
    Piece,
    plan,
    revise,
)
from deltastore.types import Path

MIB = 1 << 20


def tensor(
    name: str,
    *shape: int,
    dtype: str = "float32",
    identity: Hashable = None,
    role: str = "param",
    owner: Hashable = None,
) -> LayoutInput:
    return LayoutInput((name,), dtype, shape, identity, role, owner if owner is not None else name)


def with_moments(name: str, *shape: int, dtype: str = "bfloat16") -> list[LayoutInput]:
    """A parameter and its two moments, in the order in which a state lists them."""
    return [
        tensor(name, *shape, dtype=dtype, owner=name),
        tensor(f"{name}.m", *shape, role="exp_avg", owner=name),
        tensor(f"{name}.v", *shape, role="exp_avg_sq", owner=name),
    ]


def check_places(layout: Layout) -> None:
    """Every element of every tensor that is no alias lies in exactly one place of a partition of its dtype."""
    taken: dict[int, list[tuple[int, int]]] = {}
    assert len(layout.by_id) == len(layout.partitions)
    for entry in layout.tensors:
        if entry.alias is not None:
            target = layout.tensors[entry.alias]
            assert layout.tensors.index(target) < layout.tensors.index(entry)
            assert (target.alias, entry.pieces) == (None, ())
            assert (target.dtype, target.shape) == (entry.dtype, entry.shape)
            continue
        assert sum(piece.count for piece in entry.pieces) == math.prod(entry.shape)
        for piece in entry.pieces:
            partition = layout.by_id[piece.partition]
            assert partition.dtype == entry.dtype
            assert piece.count > 0
            assert piece.offset % ALIGN_ELEMENTS == 0
            assert piece.offset + piece.count <= partition.length
            taken.setdefault(piece.partition, []).append((piece.offset, piece.offset + piece.count))
    assert set(taken) == set(layout.by_id)  # no partition without a tensor
    for runs in taken.values():
        runs.sort()
        assert all(before[1] <= after[0] for before, after in pairwise(runs))


def pieces_of(layout: Layout, name: str) -> tuple[Piece, ...]:
    return layout.by_path[(name,)].pieces


# ---------------------------------------------------------------- plan


def test_partitions_are_small_in_the_forward_window_and_large_in_the_backward_one() -> None:
    layout = plan([tensor(f"t{number}", 1024, 1024) for number in range(60)])  # 4 MiB each
    check_places(layout)
    windows = [partition.window for partition in layout.partitions]
    assert windows == sorted(windows, key=[FORWARD, BACKWARD].index)
    sizes = {window: {p.bytes for p in layout.partitions if p.window == window} for window in (FORWARD, BACKWARD)}
    assert max(sizes[FORWARD]) == FORWARD_BYTES
    assert max(sizes[BACKWARD]) == BACKWARD_BYTES
    forward = sum(partition.bytes for partition in layout.partitions if partition.window == FORWARD)
    assert forward == pytest.approx(layout.bytes / 3, abs=FORWARD_BYTES)


def test_a_small_state_is_all_forward() -> None:
    layout = plan([tensor("a", 1000), tensor("b", 7)])
    assert [(p.id, p.window, p.length) for p in layout.partitions] == [(0, FORWARD, 1024 + 7)]
    assert pieces_of(layout, "b") == (Piece(0, 1024, 7),)


def test_a_parameter_and_its_moments_are_a_group_cut_at_the_same_elements() -> None:
    layout = plan([item for number in range(5) for item in with_moments(f"p{number}", 1000, 1024)])
    check_places(layout)
    groups: dict[int | None, list[str]] = {}
    for partition in layout.partitions:
        groups.setdefault(partition.group, []).append(partition.role)
    assert len(groups) > 1
    assert all(roles == ["param", "exp_avg", "exp_avg_sq"] for roles in groups.values())
    for number in range(5):
        places = [
            [(layout.by_id[piece.partition].group, piece.offset, piece.count) for piece in pieces_of(layout, name)]
            for name in (f"p{number}", f"p{number}.m", f"p{number}.v")
        ]
        assert places[0] == places[1] == places[2]
    # The widest role decides: no partition is larger than its window allows, the narrow ones are smaller.
    assert all(p.bytes <= (FORWARD_BYTES if p.window == FORWARD else BACKWARD_BYTES) for p in layout.partitions)


def test_a_parameter_comes_first_in_its_group_wherever_the_state_lists_it() -> None:
    parameter, first, second = with_moments("p", 64)
    layout = plan([first, second, parameter])
    assert [partition.role for partition in layout.partitions] == ["param", "exp_avg", "exp_avg_sq"]


def test_tensors_of_one_owner_with_another_shape_are_no_part_of_the_group() -> None:
    layout = plan([*with_moments("p", 64), tensor("p.step", role="step", owner="p")])
    groups = {partition.role: partition.group for partition in layout.partitions}
    assert groups["param"] == groups["exp_avg"] != groups["step"]


def test_a_tensor_larger_than_a_partition_is_cut_between_rows() -> None:
    layout = plan([tensor("a", 30_000, 1000)])
    check_places(layout)
    pieces = pieces_of(layout, "a")
    assert len(pieces) > 3
    assert all(piece.count % 1000 == 0 for piece in pieces)
    assert all(piece.offset == 0 for piece in pieces)


def test_a_row_larger_than_a_partition_is_cut_too() -> None:
    layout = plan([tensor("a", 2, 3 * MIB)])  # rows of 12 MiB
    check_places(layout)
    assert all(p.bytes <= BACKWARD_BYTES for p in layout.partitions)
    assert pieces_of(layout, "a")[0].count == FORWARD_BYTES // 4


def test_tensors_begin_at_multiples_of_64_elements() -> None:
    layout = plan([tensor(f"t{size}", size) for size in (1, 63, 64, 65)])
    assert [pieces_of(layout, f"t{size}")[0].offset for size in (1, 63, 64, 65)] == [0, 64, 128, 192]
    assert layout.partitions[0].length == 192 + 65


def test_tensors_of_one_memory_are_stored_once() -> None:
    items = [tensor("a", 5, identity="x"), tensor("b", 5), tensor("c", 5, identity="x"), tensor("d", 5, identity="x")]
    layout = plan(items)
    assert [entry.alias for entry in layout.tensors] == [None, None, 0, 0]
    assert layout.by_path[("d",)] == replace(layout.tensors[0], path=("d",))
    assert layout.partitions[0].length == 64 + 5


def test_empty_tensors_and_scalars() -> None:
    layout = plan([tensor("e", 0, 5), tensor("s"), tensor("f", 3, 0, dtype="int8")])
    check_places(layout)
    assert pieces_of(layout, "e") == pieces_of(layout, "f") == ()
    assert pieces_of(layout, "s") == (Piece(0, 0, 1),)
    assert len(layout.partitions) == 1


def test_a_state_without_tensors() -> None:
    layout = plan([])
    assert (layout, layout.bytes) == (Layout((), ()), 0)
    assert revise(layout, []) is layout


# ---------------------------------------------------------------- revise

STATE = [tensor("a", 100_000), tensor("b", 50_000), tensor("c", 200), tensor("d", 10)]


def test_an_unchanged_state_has_the_very_same_layout() -> None:
    layout = plan(STATE)
    assert revise(layout, list(STATE)) is layout
    # Where a tensor lies in memory, and what it is for, is no part of a layout.
    assert revise(layout, [replace(item, identity=item.path, role="other") for item in STATE]) is layout


def test_new_tensors_get_partitions_of_their_own() -> None:
    layout = plan(STATE)
    revised = revise(layout, [tensor("new", 70), *STATE])
    assert revised is not None
    check_places(revised)
    assert revised.partitions[: len(layout.partitions)] == layout.partitions
    assert all(pieces_of(revised, item.path[0]) == pieces_of(layout, item.path[0]) for item in STATE)  # type: ignore[arg-type]
    (fresh,) = revised.partitions[len(layout.partitions) :]
    assert fresh.id == 1 + max(partition.id for partition in layout.partitions)
    assert fresh.group not in {partition.group for partition in layout.partitions}


@pytest.mark.parametrize("change", [{"shape": (300,)}, {"dtype": "bfloat16"}, {"shape": (20, 10)}])
def test_a_changed_tensor_moves_and_leaves_a_hole(change: dict[str, object]) -> None:
    layout = plan(STATE)
    revised = revise(layout, [replace(item, **change) if item.path == ("c",) else item for item in STATE])  # type: ignore[arg-type]
    assert revised is not None
    check_places(revised)
    assert pieces_of(revised, "d") == pieces_of(layout, "d")
    assert pieces_of(revised, "c")[0].partition not in layout.by_id
    assert revised.partitions[0] == layout.partitions[0]


def test_ids_are_never_used_again() -> None:
    layout = plan([*STATE, tensor("e", 300, dtype="int8")])
    (last,) = (partition.id for partition in layout.partitions if partition.dtype == "int8")
    without = revise(layout, STATE)
    assert without is not None
    assert last not in without.by_id
    grown = revise(layout, [*STATE, tensor("e", 400, dtype="int8")])
    assert grown is not None
    assert pieces_of(grown, "e")[0].partition == last + 1


def test_a_removed_tensor_leaves_a_hole_and_an_order_may_change() -> None:
    layout = plan(STATE)
    removed = revise(layout, [STATE[0], STATE[1], STATE[3]])
    assert removed is not None
    assert removed.partitions == layout.partitions
    assert pieces_of(removed, "d") == pieces_of(layout, "d")
    turned = revise(layout, STATE[::-1])
    assert turned is not None
    assert turned is not layout
    assert [entry.path for entry in turned.tensors] == [item.path for item in STATE[::-1]]
    assert turned.by_path == layout.by_path


def test_an_alias_is_made_and_broken() -> None:
    layout = plan(STATE)
    tied = revise(layout, [*STATE[:3], tensor("d", 200, identity="x"), tensor("e", 200, identity="x")])
    assert tied is not None
    assert [entry.alias for entry in tied.tensors] == [None, None, None, None, 3]
    untied = revise(tied, [*STATE[:3], tensor("d", 200, identity="x"), tensor("e", 200, identity="y")])
    assert untied is not None
    check_places(untied)
    assert pieces_of(untied, "d") == pieces_of(tied, "d")
    assert pieces_of(untied, "e")[0].partition not in tied.by_id
    again = revise(untied, [*STATE[:3], tensor("d", 200, identity="x"), tensor("e", 200, identity="x")])
    assert again is not None
    check_places(again)
    assert again.tensors[4].alias == 3


def test_the_first_of_two_aliases_goes() -> None:
    layout = plan([*STATE, tensor("x", 30, identity=1), tensor("y", 30, identity=1)])
    revised = revise(layout, [*STATE, tensor("y", 30, identity=1)])
    assert revised is not None
    check_places(revised)


def test_much_that_is_new_or_unused_asks_for_a_new_plan() -> None:
    layout = plan(STATE)
    assert revise(layout, [*STATE, tensor("n", 100_000)]) is None
    assert revise(layout, STATE[1:]) is None
    assert revise(plan([tensor("a", 10)]), [tensor("a", 11)]) is None


# ---------------------------------------------------------------- properties


@st.composite
def inputs(draw: st.DrawFn) -> list[LayoutInput]:
    """Tensors of few owners, shapes and memories, so that they meet; sizes around the (lowered) limits."""
    found: dict[Path, LayoutInput] = {}
    for _ in range(draw(st.integers(0, 12))):
        shape = draw(st.sampled_from([(), (0,), (1,), (64,), (65,), (300, 7), (3, 500), (2, 5000)]))
        dtype = draw(st.sampled_from(["float32", "bfloat16", "complex128", "bool"]))
        owner = draw(st.integers(0, 3))
        role = draw(st.sampled_from(["param", "exp_avg", "exp_avg_sq"]))
        number = draw(st.none() | st.integers(0, 3))
        memory = None if number is None else (number, shape, dtype)
        path: Path = (draw(st.sampled_from("abcdefgh")), draw(st.integers(0, 1)))
        found[path] = LayoutInput(path, dtype, shape, memory, role, owner)
    return list(found.values())


@given(st.data())
def test_every_element_lies_in_exactly_one_place(data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "FORWARD_BYTES", 4096)
        patch.setattr(planner, "BACKWARD_BYTES", 16384)
        first, second = data.draw(inputs()), data.draw(inputs())
        layout = plan(first)
        check_places(layout)
        assert all(partition.bytes <= 16384 for partition in layout.partitions)
        revised = revise(layout, second)
        if revised is not None:
            check_places(revised)
            assert [(e.path, e.dtype, e.shape) for e in revised.tensors] == [(i.path, i.dtype, i.shape) for i in second]
            kept = {p.id: p for p in revised.partitions if p.id in layout.by_id}
            assert all(layout.by_id[number] == partition for number, partition in kept.items())


@given(st.lists(st.sampled_from(sorted(LOGICAL)), min_size=2, max_size=4), st.integers(1, 3000))
def test_groups_are_aligned_whatever_the_item_sizes(dtypes: list[str], rows: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "FORWARD_BYTES", 4096)
        patch.setattr(planner, "BACKWARD_BYTES", 16384)
        items = [tensor(f"{i}", rows, 7, dtype=dtype, role=f"r{i}", owner="o") for i, dtype in enumerate(dtypes)]
        layout = plan(items)
    check_places(layout)
    cuts = [[(piece.offset, piece.count) for piece in entry.pieces] for entry in layout.tensors]
    assert all(cut == cuts[0] for cut in cuts)
    widest = max(storage_dtype(dtype).itemsize for dtype in dtypes)
    assert all(p.length * widest <= 16384 for p in layout.partitions)
