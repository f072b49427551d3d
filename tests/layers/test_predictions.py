"""Predictions: kernels against the arithmetic of the spec, blocks, codes, and a writer that equals its readers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from deltastore.errors import Corruption
from deltastore.layers import arithmetic, coding_kernels, packing_kernels, prediction_kernels, replay_kernels, self_test
from deltastore.layers.blocks import BLOCK_ELEMENTS, MIN_ROW, blocks_of
from deltastore.layers.codes import CODES, FACTORS, LANE_BYTES, SCALES, pack, unpack
from deltastore.layers.rules import AdamRule, AdamStep, Rule, SgdRule, as_floats, padded
from deltastore.layout import BACKWARD, Layout, Partition, Piece, TensorEntry
from deltastore.ondisk.predictions import ADAM, MEMBERS, REPLAYS, SGD

SPEC = Path(__file__).parents[2] / "spec" / "09-layers.md"
SPECIALS = np.array([0, 1 << 31, 1, 0x7F80_0000, 0xFF80_0000, 0x7FC0_0001, 0xFFC0_0000, 0x7F7F_FFFF], np.uint32)
"""Zeros, a subnormal, infinities, NaNs of several bits, the largest."""


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    return bool((one.view(np.uint32) == other.view(np.uint32)).all())


@st.composite
def rules(draw: DrawFn) -> Rule:
    rates = st.sampled_from([0.0, 1e-9, 1e-3, 0.1])
    count = draw(st.integers(1, 3))
    if draw(st.booleans()):
        first = draw(st.sampled_from([1, 2, 1000]))
        steps = tuple(AdamStep(draw(rates), 1 - draw(rates) * 0.1, first + n) for n in range(count))
        return AdamRule(draw(st.sampled_from([0.0, 0.9])), draw(st.sampled_from([0.95, 0.999])), 1e-8, steps)
    return SgdRule(
        draw(st.sampled_from([0.0, 0.9])), draw(st.booleans()), tuple((draw(rates), 1.0) for _ in range(count))
    )


def group_of(kind: str, length: int, seed: int, *, specials: bool = False) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    arrays = [generator.standard_normal(length).astype(np.float32) for _ in MEMBERS[kind]]
    arrays[1] *= np.float32(1e-3)
    if kind == ADAM:
        arrays[2] = (arrays[2] * np.float32(1e-3)) ** 2
        arrays[2][generator.random(length) < 0.1] = 0
    if specials:
        for array in arrays:
            places = generator.integers(0, length, 4)
            array.view(np.uint32)[places] = generator.choice(SPECIALS, 4)
    return arrays


def cut(length: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    starts = np.arange(0, length, size)
    return starts, np.minimum(starts + size, length)


# ---------------------------------------------------------------- arithmetic


@given(rule=rules(), data=st.data())
def test_kernels_equal_the_arithmetic_of_the_spec(rule: Rule, data: st.DataObject) -> None:
    length, size = data.draw(st.integers(1, 700)), data.draw(st.integers(1, BLOCK_ELEMENTS))
    seed = data.draw(st.integers(0, 1000))
    code = CODES[data.draw(st.sampled_from(sorted(CODES)))]
    generator = np.random.default_rng(seed)
    starts, ends = cut(length, size)
    integers = generator.choice(np.array(code.values, np.int8), length)
    scales = SCALES[generator.integers(0, 256, len(starts))]
    scales[generator.random(len(starts)) < 0.2] = 0
    constants = padded([rule.constants(2.0**-12)])
    fast = group_of(rule.kind, length, seed, specials=data.draw(st.booleans()))
    slow = [array.copy() for array in fast]
    run = prediction_kernels.adam_blocks if rule.kind == ADAM else prediction_kernels.sgd_blocks
    zeros = np.zeros(len(starts), np.int64)
    run(*fast, starts, ends, zeros, zeros[:1], integers, scales, constants, np.array([len(rule.steps)]))
    for start, end, scale in zip(starts, ends, scales, strict=True):
        block = [array[start:end] for array in slow]
        arithmetic.predict_block(rule.kind, block, integers[start:end], scale, constants[0])
    assert all(same_bits(one, other) for one, other in zip(fast, slow, strict=True))


@given(seed=st.integers(0, 1000), length=st.integers(1, 600), size=st.integers(1, BLOCK_ELEMENTS))
def test_refinement_equals_the_arithmetic_of_the_spec(seed: int, length: int, size: int) -> None:
    generator = np.random.default_rng(seed)
    fast = group_of(ADAM, length, seed, specials=True)[2]
    slow = fast.copy()
    starts, ends = cut(length, size)
    signs = generator.choice(np.array([-1, 1], np.int8), length)
    factors = generator.integers(0, 256, len(starts)).astype(np.uint8)
    prediction_kernels.refine_blocks(fast, starts, ends, signs, factors, FACTORS)
    for start, end, factor in zip(starts, ends, factors, strict=True):
        arithmetic.refine_block(slow[start:end], signs[start:end], int(factor))
    assert same_bits(fast, slow)


@given(data=st.data(), seed=st.integers(0, 1000), length=st.integers(1, 9000))
def test_replays_equal_the_arithmetic_of_the_spec(data: st.DataObject, seed: int, length: int) -> None:
    sign, decay = data.draw(st.sampled_from([1.0, -1.0])), data.draw(st.sampled_from([0.0, 0.01]))
    rule: Rule = (
        AdamRule(0.9, 0.999, 1e-8, (AdamStep(1e-3, 0.9999, 7),), decay, sign)
        if data.draw(st.booleans())
        else SgdRule(0.9, data.draw(st.booleans()), ((0.1, 1.0),), 0.1, decay, sign)
    )
    constants = as_floats(rule.replayed())
    fast = group_of(rule.kind, length, seed, specials=data.draw(st.booleans()))
    slow = [array.copy() for array in fast]
    gradient = group_of(SGD, length, seed + 1, specials=data.draw(st.booleans()))[0]
    run = replay_kernels.replay_adam if rule.kind == ADAM else replay_kernels.replay_sgd
    run(*fast, gradient, constants)
    arithmetic.replay(REPLAYS[rule.kind], slow, gradient, constants)
    assert all(same_bits(one, other) for one, other in zip(fast, slow, strict=True))


def test_the_self_test_passes_here_and_finds_another_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    assert self_test.kernels_agree()
    changed = prediction_kernels.sgd_blocks
    monkeypatch.setattr(prediction_kernels, "sgd_blocks", lambda *a: changed(*a[:7], a[7] * np.float32(1.001), *a[8:]))
    assert not self_test._predicts(SgdRule(0.9, True, ((0.1, 1.0),)))


def test_a_block_without_a_rule_stays_as_it_is() -> None:
    arrays = group_of(ADAM, 100, 0)
    before = [array.copy() for array in arrays]
    constants = padded([AdamRule(0.9, 0.95, 1e-8, (AdamStep(0.1, 0.9, 1),)).constants(1.0)])
    starts, ends = cut(100, 50)
    ones = np.ones(100, np.int8)
    sets = np.array([-1, 0])
    prediction_kernels.adam_blocks(
        *arrays, starts, ends, np.arange(2), sets, ones, SCALES[[120, 120]], constants, np.array([1])
    )
    for one, other in zip(arrays, before, strict=True):
        assert same_bits(one[:50], other[:50])
        assert not same_bits(one[50:], other[50:])


def test_the_example_of_the_spec() -> None:
    text = SPEC.read_text("utf-8").split("A prediction: `adam`")[1].split("```")[1]
    words = {
        name: re.findall(r"\b[0-9a-f]{8}\b", row) for name, row in re.findall(r"^(\w+)\b(.*)$", text, re.MULTILINE)
    }
    lines = text.splitlines()
    constants = [int(word, 16) for line in lines[1:3] for word in re.findall(r"\b[0-9a-f]{8}\b", line)]
    rule = AdamRule(0.9, 0.95, 1e-8, (AdamStep(1e-3, 1 - 1e-3 * 0.1, 5),))
    assert tuple(constants) == rule.constants(2.0**-12)
    before, after = (
        [np.array([int(word, 16) for word in words[name][part]], np.uint32).view(np.float32) for name in "wmv"]
        for part in (slice(0, 4), slice(4, 8))
    )
    integers = np.array([1, -1, 0, 1], np.int8)
    assert pack("ternary", integers).tolist() == [1, 2, 0, 1] + [0] * 60
    arithmetic.predict_block(ADAM, before, integers, SCALES[125], as_floats(constants))
    assert all(same_bits(one, other) for one, other in zip(before, after, strict=True))


def test_scales_and_factors_are_powers_of_two() -> None:
    assert SCALES[0] == 0
    assert np.allclose(np.log2(SCALES[1:].astype(np.float64)), np.arange(255) / 8 - 16, atol=1e-7)
    assert np.allclose(np.log2(FACTORS.astype(np.float64)), np.arange(-255, 256) / 64, atol=1e-7)
    mantissas = re.findall(r"^(?:[0-9A-F]{6} ?){16}$", SPEC.read_text("utf-8"), re.MULTILINE)
    words = np.array([int(word, 16) for line in mantissas for word in line.split()], np.uint32) + np.uint32(0x3F80_0000)
    assert same_bits(words.view(np.float32), FACTORS[255 : 255 + 64])


# ---------------------------------------------------------------- codes


@given(name=st.sampled_from(sorted(CODES)), length=st.integers(0, 3000), seed=st.integers(0, 1000))
def test_codes_come_back(name: str, length: int, seed: int) -> None:
    code = CODES[name]
    integers = np.random.default_rng(seed).choice(np.array(code.values, np.int8), length)
    packed = pack(name, integers)
    assert len(packed) == code.packed_length(length)
    assert (unpack(name, packed, "here")[:length] == integers).all()
    fast = np.zeros_like(packed)
    packing_kernels.pack(len(code.values), integers, fast)
    assert fast.tobytes() == packed.tobytes()
    out = np.empty(len(packed) * code.digits, np.int8)
    assert packing_kernels.unpack(len(code.values), packed, out)
    assert (out == unpack(name, packed, "here")).all()


def test_a_byte_of_no_code_is_refused() -> None:
    packed = np.full(LANE_BYTES, 243, np.uint8)
    assert not packing_kernels.unpack(3, packed, np.empty(5 * LANE_BYTES, np.int8))
    with pytest.raises(Corruption, match="243"):
        unpack("ternary", packed, "here")


# ---------------------------------------------------------------- blocks


def layout_of(shapes: Sequence[tuple[int, ...]]) -> Layout:
    tensors, at = [], 0
    for number, shape in enumerate(shapes):
        count = int(np.prod(shape))
        tensors.append(TensorEntry((str(number),), "float32", shape, (Piece(0, at, count),)))
        at = -(-(at + count) // 64) * 64
    return Layout(tuple(tensors), (Partition(0, "float32", at, "param", BACKWARD, 0),))


@given(st.lists(st.sampled_from([(5,), (300,), (3, 700), (7, 64), (9, 63), (2, 256), (4, 5, 100), (1, 1)]), min_size=1))
def test_blocks_cover_each_tensor_and_cross_no_long_row(shapes: list[tuple[int, ...]]) -> None:
    layout = layout_of(shapes)
    blocks = blocks_of(layout, 0)
    for index, entry in enumerate(layout.tensors):
        mine = blocks.tensors == index
        starts, ends = blocks.starts[mine] - entry.pieces[0].offset, blocks.ends[mine] - entry.pieces[0].offset
        assert starts[0] == 0
        assert ends[-1] == entry.elements
        assert (starts[1:] == ends[:-1]).all()
        assert ((ends - starts > 0) & (ends - starts <= BLOCK_ELEMENTS)).all()
        row = int(np.prod(entry.shape[1:]))
        if row >= MIN_ROW:
            assert (starts // row == (ends - 1) // row).all()
    assert blocks.covering(0, layout.partitions[0].length) == (0, len(blocks))


def test_a_tensor_cut_inside_a_row_starts_a_block_there() -> None:
    tensors = (TensorEntry(("w",), "float32", (2, 300), (Piece(0, 0, 400), Piece(1, 0, 200))),)
    layout = Layout(tensors, tuple(Partition(n, "float32", 400, "param", BACKWARD, n) for n in (0, 1)))
    assert blocks_of(layout, 0).starts.tolist() == [0, 150, 300]
    assert blocks_of(layout, 1).starts.tolist() == [0, 50]


# ---------------------------------------------------------------- the writer


@pytest.mark.parametrize("kind", [ADAM, SGD])
@pytest.mark.parametrize("name", sorted(CODES))
@pytest.mark.parametrize("steps", [1, 3])
def test_the_writer_has_what_its_readers_get(kind: str, name: str, steps: int, seed: int) -> None:
    length = 3000
    rec = group_of(kind, length, seed)
    gradients = np.random.default_rng(seed + 1).standard_normal(length).astype(np.float32)
    gradients *= np.sqrt(rec[2]) if kind == ADAM else np.float32(1e-3)
    truth = [array.copy() for array in rec]
    kept = 0.9**steps
    truth[1] = np.float32(kept) * rec[1] + np.float32(1 - kept if kind == ADAM else 1) * gradients
    truth[0][7], truth[1][300] = np.nan, np.inf
    rule: Any = (
        AdamRule(0.9, 0.95, 1e-8, tuple(AdamStep(1e-3, 0.999, 9 + n) for n in range(steps)))
        if kind == ADAM
        else SgdRule(0.9, True, ((0.1, 1.0),) * steps)
    )
    constants, counts = padded([rule.constants(2.0**-12)]), np.array([steps])
    starts, ends = cut(length, 256)
    slots, sets = np.zeros(len(starts), np.int64), np.zeros(1, np.int64)
    read = [array.copy() for array in rec]
    blind = [array.copy() for array in rec]
    integers, scales = np.zeros(length, np.int8), np.zeros(len(starts), np.uint8)
    code = coding_kernels.code_adam if kind == ADAM else coding_kernels.code_sgd
    code(
        truth[0], truth[1], *rec, starts, ends, slots, sets, constants, counts, np.ones(1, np.float32),
        np.zeros(1, np.float32), len(CODES[name].values), 1.0, integers, scales, SCALES,
    )  # fmt: skip
    run = prediction_kernels.adam_blocks if kind == ADAM else prediction_kernels.sgd_blocks
    run(*read, starts, ends, slots, sets, integers, SCALES[scales], constants, counts)
    assert all(same_bits(one, other) for one, other in zip(rec, read, strict=True))
    run(*blind, starts, ends, slots, sets, integers, np.zeros(len(starts), np.float32), constants, counts)
    others = np.isfinite(truth[1]) & (np.arange(length) // 256 != 300 // 256)
    coded, uncoded = (np.abs(arrays[1] - truth[1])[others].mean() for arrays in (rec, blind))
    assert coded < 0.8 * uncoded
