"""Hypothesis strategies of training states: every torch dtype, every kind of plain value, and edits of a state."""

from __future__ import annotations

import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from typing import Any, Final

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from deltastore.dtypes import LOGICAL, NATIVE, storage_dtype
from deltastore.torch_bridge import TORCH
from deltastore.types import Key, Path

TORCH_DTYPES: Final = tuple(name for name in LOGICAL if hasattr(torch, name))
"""Logical dtypes that this torch has."""
MAX_DIMENSION: Final = 5

Point = namedtuple("Point", ("x", "y"))
"""A namedtuple whose class is found again by its name."""

Gone = namedtuple("Gone", ("left", "right"), module="no.such.module")
"""One whose class is not: an equal class is made."""


def shapes() -> SearchStrategy[tuple[int, ...]]:
    """Return shapes: scalars, empty ones, and a few that span more than one block of 64 elements."""
    small = st.lists(st.integers(0, MAX_DIMENSION), max_size=3).map(tuple)
    return small | st.sampled_from([(), (0,), (0, 128), (1, 1, 1), (64,), (65,), (7, 23), (300,)])


@st.composite
def tensors(draw: DrawFn, dtype: str | None = None, shape: tuple[int, ...] | None = None) -> torch.Tensor:
    """Return a tensor of any dtype, shape and bits, now and then a Parameter or one that is not contiguous."""
    name = draw(st.sampled_from(TORCH_DTYPES)) if dtype is None else dtype
    size = draw(shapes()) if shape is None else shape
    tensor = TORCH.wrap(draw(_contents(name, math.prod(size))), name, size)
    look = draw(st.sampled_from(["plain", "plain", "parameter", "transposed", "strided", "expanded"]))
    if look == "parameter" and (tensor.is_floating_point() or tensor.is_complex()):
        return torch.nn.Parameter(tensor)
    if look == "transposed" and tensor.ndim > 1:
        return tensor.transpose(0, -1)
    if look == "strided" and tensor.ndim:
        return tensor[::2]
    if look == "expanded" and shape is None:
        return tensor.expand(2, *tensor.shape)
    return tensor


@st.composite
def arrays(draw: DrawFn) -> np.ndarray:
    """Return a numpy array of any dtype that is stored, contiguous or not."""
    name = draw(st.sampled_from(sorted(NATIVE)))
    size = draw(shapes())
    array = draw(_contents(name, math.prod(size))).view(NATIVE[name]).reshape(size)
    return array[::-2] if array.ndim and draw(st.booleans()) else array


def _contents(name: str, count: int) -> SearchStrategy[np.ndarray]:
    dtype = storage_dtype(name)
    # Few different elements repeated: every bit pattern is possible, and hypothesis does not spend itself on data.
    top = 1 if name == "bool" else 255
    pattern = st.lists(st.integers(0, top), min_size=dtype.itemsize, max_size=6 * dtype.itemsize)

    def make(octets: list[int]) -> np.ndarray:
        data = np.resize(np.array(octets, np.uint8), count * dtype.itemsize)
        return data.view(dtype)

    return pattern.map(make)


def floats() -> SearchStrategy[float]:
    """Return floats of every bit pattern, the payloads of NaNs included."""
    return st.floats() | st.integers(0, 2**64 - 1).map(
        lambda bits: float(struct.unpack("<d", struct.pack("<Q", bits))[0])
    )


def text() -> SearchStrategy[str]:
    """Return strings, with separators of paths and lone surrogates as they stand in odd file names."""
    return st.text(max_size=6) | st.sampled_from(["", ".", "a.b", "a/b", "$", "0", "\udc80", "é\u2028", "a\0b"])


def keys() -> SearchStrategy[Key]:
    """Return keys of a dict: strings, and integers of any size."""
    return text() | st.integers(-3, 3) | st.integers()


def _hashable_values() -> SearchStrategy[Any]:
    scalars = (
        st.none() | st.booleans() | st.integers() | floats() | text() | st.binary(max_size=6) | st.complex_numbers()
    )
    return scalars | st.tuples(scalars, scalars) | st.frozensets(st.integers(), max_size=3)


def plain_values() -> SearchStrategy[Any]:
    """Return plain leaves of every kind that the format knows."""
    codes = st.sampled_from([dtype.str for dtype in NATIVE.values()])
    integers = st.integers(-(2**63), 2**63) | st.integers(0, 300)
    return st.one_of(
        _hashable_values(),
        st.integers(-(2**80), 2**80),
        st.binary(max_size=6).map(bytearray),
        st.sets(_hashable_values(), max_size=4),
        st.builds(range, st.integers(), st.integers(), st.integers(1, 2**70)),
        st.builds(slice, st.none() | st.integers(), st.integers(), st.none()),
        st.builds(lambda code, data: np.frombuffer(data, code)[0], codes, st.binary(min_size=16, max_size=16)),
        st.sampled_from(
            [torch.float32, torch.bfloat16, torch.device("cpu"), torch.device("cuda:1"), torch.Size([2, 0])]
        ),
        st.builds(lambda base, count: [base + i for i in range(count)], integers, st.integers(30, 40)),
        st.builds(lambda base, count: tuple(base - i for i in range(count)), integers, st.sampled_from([31, 32, 600])),
    )


def _containers(children: SearchStrategy[Any]) -> SearchStrategy[Any]:
    lists = st.lists(children, max_size=4)
    dicts = st.dictionaries(keys(), children, max_size=4)
    return st.one_of(
        dicts,
        lists,
        lists.map(tuple),
        dicts.map(OrderedDict),
        dicts.map(Counter),
        dicts.map(lambda content: defaultdict(list, content)),
        lists.map(lambda values: deque(values, maxlen=8)),
        st.builds(Point, children, children),
        st.builds(Gone, children, children),
    )


def leaves() -> SearchStrategy[Any]:
    """Return tensors, numpy arrays and plain values."""
    return tensors() | arrays() | plain_values()


def states() -> SearchStrategy[dict[Key, Any]]:
    """Return nested states; some list one tensor twice."""
    nested = st.recursive(leaves(), _containers, max_leaves=12)
    return st.dictionaries(keys(), nested, max_size=5).flatmap(_with_alias)


@st.composite
def _with_alias(draw: DrawFn, state: dict[Key, Any]) -> dict[Key, Any]:
    found: list[tuple[Path, torch.Tensor]] = _tensors_of(state)
    if not found or not draw(st.booleans()):
        return state
    return {**state, "alias": draw(st.sampled_from(found))[1]}


@st.composite
def edit(draw: DrawFn, state: dict[Key, Any]) -> dict[Key, Any]:
    """Return a state that differs from another in a few places, as the next step of a training does.

    Values, shapes and dtypes change, keys come and go, aliases are made and broken. The argument stays as it is;
    what is unchanged is shared with it.
    """
    edited = dict(state)
    for _ in range(draw(st.integers(0, 3))):
        action = draw(st.sampled_from(["add", "remove", "replace", "bits", "grow", "alias", "untie", "reorder"]))
        edited = draw(_edits(edited, action))
    return edited


@st.composite
def _edits(draw: DrawFn, state: dict[Key, Any], action: str) -> dict[Key, Any]:
    names = list(state)
    if action == "add" or not names:
        return {**state, draw(keys()): draw(st.recursive(leaves(), _containers, max_leaves=4))}
    if action == "reorder":
        return {key: state[key] for key in reversed(names)}
    name = draw(st.sampled_from(names))
    if action == "remove":
        return {key: value for key, value in state.items() if key != name}
    if action == "replace":
        return {**state, name: draw(leaves())}
    if action == "grow":
        value = state[name]
        return {**state, name: [*value, draw(leaves())] if type(value) is list else [value]}
    found = _tensors_of(state)
    if not found:
        return state
    path, tensor = draw(st.sampled_from(found))
    if action == "alias":
        return {**state, name: tensor}
    if action == "untie":
        return _put(state, path, tensor.detach().clone())
    return _put(state, path, draw(tensors(dtype=TORCH.describe(tensor).dtype, shape=tuple(tensor.shape))))


def _put(state: dict[Key, Any], path: Path, value: Any) -> dict[Key, Any]:
    key, *rest = path
    return {**state, key: {**state[key], rest[0]: value} if rest else value}


def _tensors_of(state: dict[Key, Any]) -> list[tuple[Path, torch.Tensor]]:
    """Return the tensors that stand directly in a state or in a dict of it."""
    found: list[tuple[Path, torch.Tensor]] = []
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            found.append(((key,), value))
        elif type(value) is dict:
            found += [((key, inner), leaf) for inner, leaf in value.items() if isinstance(leaf, torch.Tensor)]
    return found
