"""States as documents: what stands where, what is refused, and that no document can do harm."""

from __future__ import annotations

import base64
import contextlib
import datetime
import enum
import functools
import json
import pathlib
import random
import subprocess
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deltastore.errors import Corruption, DeltaStoreError, InvalidInput, MissingDependency, UnsupportedFormat
from deltastore.testing.compare import assert_same
from deltastore.testing.strategies import edit, states
from deltastore.torch_bridge import TORCH
from deltastore.tree import Leaf, NamedOptimizerState, build, flatten, leaves, plain_value, subtree
from deltastore.types import Json, Key, Path


class Pair(NamedTuple):
    left: Any
    right: Any


class Level(enum.IntEnum):
    LOW = 1


class Evil:
    """Leaves a mark when it is unpickled."""

    def __reduce__(self) -> Any:
        return exec, ("import builtins; builtins.deltastore_was_here = True",)


def no_tensor(path: Path, kind: str) -> Any:
    raise AssertionError(f"{path} is no tensor")


def below(tensors: dict[Path, Any], key: Key) -> Callable[[Path, str], Any]:
    return lambda path, kind: tensors[key, *path]


def to_file(document: Json) -> Json:
    """Return a document as it comes back from canonical JSON."""
    return json.loads(json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False))


def round_trip(value: Any) -> Any:
    flat = flatten(value, TORCH)
    tensors = dict(flat.tensors)
    return build(to_file(flat.document), lambda path, kind: tensors[path], TORCH)


# ---------------------------------------------------------------- the nodes, as the format says

B64 = base64.b64encode


@pytest.mark.parametrize(
    ("value", "node"),
    [
        (None, None),
        (True, True),
        ("é", "é"),
        (0.1, 0.1),
        (-0.0, -0.0),
        (2**53, 2**53),
        (-(2**53), -(2**53)),
        (2**53 + 1, {"$": "int", "v": "0x20000000000001"}),
        (-(2**64), {"$": "int", "v": "-0x10000000000000000"}),
        (float("inf"), {"$": "float", "bits": "7ff0000000000000"}),
        (float("nan"), {"$": "float", "bits": "7ff8000000000000"}),
        (complex(1, float("-inf")), {"$": "complex", "v": [1.0, {"$": "float", "bits": "fff0000000000000"}]}),
        (b"\0\xff", {"$": "bytes", "b": "AP8="}),
        (bytearray(b"a"), {"$": "bytearray", "b": "YQ=="}),
        (range(1, 9, 2), {"$": "range", "v": [1, 9, 2]}),
        (slice(None, 2**60), {"$": "slice", "v": [None, {"$": "int", "v": hex(2**60)}, None]}),
        (np.float32(1), {"$": "npscalar", "d": "<f4", "b": "AACAPw=="}),
        (np.bool_(True), {"$": "npscalar", "d": "|b1", "b": "AQ=="}),
        ([], []),
        ((), {"$": "tuple", "v": []}),
        ([(1,)], [{"$": "tuple", "v": [1]}]),
        ({}, {"$": "dict", "k": [], "v": []}),
        ({0: 1, "0": 2, 2**70: 3}, {"$": "dict", "k": [0, "0", {"$": "int", "v": hex(2**70)}], "v": [1, 2, 3]}),
        (OrderedDict(b=1, a=2), {"$": "odict", "k": ["b", "a"], "v": [1, 2]}),
        (Counter({30: 1, 80: 2}), {"$": "counter", "k": [30, 80], "v": [1, 2]}),
        (defaultdict(list, a=[1]), {"$": "defaultdict", "factory": "list", "k": ["a"], "v": [[1]]}),
        (defaultdict(None), {"$": "defaultdict", "factory": None, "k": [], "v": []}),
        (deque([1], maxlen=3), {"$": "deque", "maxlen": 3, "v": [1]}),
        ({2, 1}, {"$": "set", "v": [1, 2]}),
        (frozenset(["b", "a"]), {"$": "frozenset", "v": ["a", "b"]}),
        (Pair(1, 2), {"$": "namedtuple", "name": "Pair", "module": __name__, "fields": ["left", "right"], "v": [1, 2]}),
        (list(range(31)), list(range(31))),
        (
            [1] * 513,
            {"$": "ints", "of": "list", "parts": [
                {"d": "u1", "n": 512, "b": B64(b"\1" * 512).decode()}, {"d": "u1", "n": 1, "b": "AQ=="}]},
        ),
        (
            (*range(31), -129),
            {"$": "ints", "of": "tuple", "parts": [
                {"d": "i2", "n": 32, "b": B64(np.array([*range(31), -129], "<i2").tobytes()).decode()}]},
        ),
        (torch.float8_e4m3fn, {"$": "torch.dtype", "v": "float8_e4m3fn"}),
        (torch.device("cuda", 1), {"$": "torch.device", "v": "cuda:1"}),
        (torch.Size([2, 0]), {"$": "torch.Size", "v": [2, 0]}),
        (torch.zeros(2), {"$": "tensor"}),
        (torch.nn.Parameter(torch.zeros(2)), {"$": "tensor"}),
        (np.zeros(2), {"$": "ndarray"}),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_the_nodes_of_version_1(value: Any, node: Json) -> None:
    document = flatten(value, TORCH).document
    assert json.dumps(document, sort_keys=True) == json.dumps(node, sort_keys=True)
    assert_same(value, round_trip(value))


@given(states())
def test_every_state_comes_back(state: Any) -> None:
    assert_same(state, round_trip(state))


@given(st.data())
def test_leaves_subtrees_and_tensors_agree(data: st.DataObject) -> None:
    state = data.draw(edit(data.draw(states())))
    flat = flatten(state, TORCH)
    document = to_file(flat.document)
    listed = list(leaves(document))
    assert [path for path, leaf in listed if leaf.kind != "plain"] == [path for path, _ in flat.tensors]
    assert len({tuple((type(key), key) for key in path) for path, _ in listed}) == len(listed)
    tensors = dict(flat.tensors)
    for path, leaf in listed:
        assert subtree(document, path) == leaf.node
        if path:
            assert_same(state[path[0]], build(subtree(document, path[:1]), below(tensors, path[0]), TORCH), path[:1])
        if leaf.kind == "plain":
            assert flatten(plain_value(leaf.node, TORCH), TORCH).document == leaf.node


def test_paths_of_leaves() -> None:
    x = torch.zeros(1)
    state = {
        "a.b": x,
        "a": {"b": x, 0: (x, {"0": None}), "empty": [], "set": {1}},
        "pair": Pair(1, [x]),
        "long": tuple(range(40)),
        "q": deque([b"x"]),
    }
    found = dict(leaves(to_file(flatten(state, TORCH).document)))
    expected: dict[Path, str] = {
        ("a.b",): "tensor",
        ("a", "b"): "tensor",
        ("a", 0, 0): "tensor",
        ("a", 0, 1, "0"): "plain",
        ("a", "set"): "plain",
        ("pair", 0): "plain",
        ("pair", 1, 0): "tensor",
        **{("long", i): "plain" for i in range(40)},
        ("q", 0): "plain",
    }
    assert [(path, leaf.kind) for path, leaf in found.items()] == list(expected.items())
    assert found[("long", 39)] == Leaf("plain", 39)


def test_a_leaf_alone_is_a_state() -> None:
    assert list(leaves({"$": "ndarray"})) == [((), Leaf("ndarray", {"$": "ndarray"}))]
    assert round_trip(5) == 5


def test_subtree_tells_keys_apart() -> None:
    document = flatten({"0": "text", 0: "number", "list": [None, {"x": 1}]}, None).document
    assert subtree(document, ("0",)) == "text"
    assert subtree(document, (0,)) == "number"
    assert subtree(document, ()) == document
    missing = object()
    for prefix in ((False,), (1,), ("list", "0"), ("list", 2), ("list", -1), ("list", True), ("list", 1, "x", "y")):
        assert subtree(document, prefix) is None
        assert subtree(document, prefix, missing) is missing
    assert subtree(document, ("list", 0), missing) is None


# ---------------------------------------------------------------- fidelity


def test_random_states_continue_their_streams() -> None:
    random.seed(1)
    random.gauss(0, 1)
    legacy = np.random.RandomState(2)
    legacy.randn()
    generator = np.random.default_rng(5)
    generator.integers(9, dtype=np.uint32)
    torch_generator = torch.Generator().manual_seed(4)

    def grab() -> dict[str, Any]:
        rng = {"py": random.getstate(), "np": legacy.get_state(), "pcg": generator.bit_generator.state}
        return {**rng, "torch": torch_generator.get_state().clone()}

    def draw() -> list[Any]:
        return [
            random.gauss(0, 1),
            legacy.randn(),
            float(generator.normal()),
            torch.randn(3, generator=torch_generator),
        ]

    state = grab()
    back = round_trip(state)
    assert_same(state, back)
    expected = draw()
    random.setstate(back["py"])
    legacy.set_state(back["np"])
    generator.bit_generator.state = back["pcg"]
    torch_generator.set_state(back["torch"])
    assert_same(expected, draw())


@pytest.mark.parametrize("bits", ["7ff8000000000001", "fff0000000000000", "7ff0000000000001", "ffffffffffffffff"])
def test_every_nan_keeps_its_payload(bits: str) -> None:
    value = np.frombuffer(bytes.fromhex(bits), ">f8").astype("<f8", copy=False).tolist()[0]
    assert flatten(value, None).document == {"$": "float", "bits": bits}
    assert flatten(round_trip(value), None).document == {"$": "float", "bits": bits}


@pytest.mark.parametrize(
    "values", [[-1, 2**63] * 20, [2**64] * 40, [-(2**63) - 1] * 40, [True] * 40, [0, False] * 20, [1.0] * 40]
)
def test_lists_that_are_not_64_bit_integers_stay_lists(values: list[Any]) -> None:
    assert isinstance(flatten(values, None).document, list)
    assert_same(values, round_trip(values))


@pytest.mark.parametrize(
    ("low", "high", "code"),
    [
        (0, 255, "u1"), (0, 256, "u2"), (0, 2**16, "u4"), (0, 2**32, "u8"), (0, 2**64 - 1, "u8"),
        (-1, 127, "i1"), (-1, 128, "i2"), (-(2**15) - 1, 0, "i4"), (-1, 2**31, "i8"), (-(2**63), 2**63 - 1, "i8"),
    ],
)  # fmt: skip
def test_integers_take_the_smallest_dtype(low: int, high: int, code: str) -> None:
    values = [low, high] * 16
    assert [part["d"] for part in flatten(values, None).document["parts"]] == [code]
    assert_same(values, round_trip(values))


def test_the_document_shares_nothing_that_can_change() -> None:
    state: dict[str, Any] = {
        "list": [1, [2]],
        "dict": {"a": {}},
        "bytes": bytearray(b"ab"),
        "set": {1},
        "size": [torch.Size([1])],
    }
    document = flatten(state, TORCH).document
    before = json.dumps(document)
    state["list"][1].append(3)
    state["list"].append(4)
    state["dict"]["a"]["b"] = 1
    state["bytes"][0] = 0
    state["set"].add(2)
    assert json.dumps(document) == before
    built = build(document, no_tensor, TORCH)
    built["list"][1].append(3)
    built["dict"]["a"]["b"] = 1
    assert json.dumps(document) == before


def test_one_container_at_two_places_is_no_cycle() -> None:
    shared = [1]
    assert round_trip({"a": shared, "b": [shared, shared]}) == {"a": [1], "b": [[1], [1]]}


def test_arrays_in_foreign_byte_order_are_leaves_too() -> None:
    flat = flatten({"x": np.arange(3, dtype=">f4")}, None)
    assert flat.document["v"] == [{"$": "ndarray"}]


# ---------------------------------------------------------------- refused, with the path


class MyDict(dict[str, int]):
    pass


CYCLE: list[Any] = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (object(), "a value of type object cannot be stored"),
        (lambda: 0, "function"),
        (len, "builtin_function_or_method"),
        (int, "a value of type type"),
        (datetime.datetime(2024, 1, 1), "datetime.datetime"),
        (pathlib.PurePosixPath("/x"), "PurePosixPath"),
        (types.SimpleNamespace(a=1), "SimpleNamespace"),
        (Level.LOW, "only int itself is kept"),
        (MyDict(a=1), "only dict itself is kept"),
        (np.float64, "a value of type type"),
        (np.array([None]), "numpy dtype object"),
        (np.array(["a"]), "numpy dtype <U1"),
        (np.datetime64("2024"), "datetime64"),
        (np.longdouble(1), "float128|longdouble"),
        (np.str_("a"), "numpy dtype <U1"),
        (np.ma.masked_array([1]), "only numpy.ndarray itself is kept"),
        ({True: 1}, "the key True is of type bool"),
        ({None: 1}, "the key None"),
        ({(1, 2): 1}, r"the key \(1, 2\)"),
        ({1.0: 1}, "the key 1.0"),
        ({np.int64(1): 1}, "of type numpy.int64"),
        ({"\ud83d\ude00": 1}, "pair of surrogates"),
        ("\ud83d\ude00", "pair of surrogates"),
        (slice(1.5), "limits that are not integers"),
        ({1, object()}, "a value of type object"),
        (frozenset([torch.zeros(1)]), "plain values only"),
        (defaultdict(lambda: 0), "the factory"),
        (functools.partial(len), "functools.partial"),
        (CYCLE, "the container contains itself"),
        (NamedOptimizerState(state={}), "param_groups"),
        (NamedOptimizerState(state={}, param_groups=[{"params": [0]}]), "list of names"),
        (torch.nn.Linear(1, 1), r"state_dict\(\)"),
        (torch.Generator(), r"get_state\(\)"),
        (torch.zeros(1).untyped_storage(), "UntypedStorage"),
        (torch.channels_last, "memory_format"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_refused_with_its_path(value: Any, reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason) as caught:
        flatten({"user": [None, {"odd": value}]}, TORCH)
    assert str(caught.value).startswith("user/[1]/odd")
    assert caught.value.path[:3] == ("user", 1, "odd")


def test_without_a_bridge_tensors_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"^w: a value of type torch\.Tensor cannot be stored"):
        flatten({"w": torch.zeros(1)}, None)


def nested(depth: int) -> Any:
    value: Any = "bottom"
    for level in range(depth):
        value = [value] if level % 2 else {"k": value}
    return value


def test_depth_is_limited_on_both_sides() -> None:
    deepest = nested(200)
    document = flatten(deepest, None).document
    assert build(to_file(document), no_tensor, None) == deepest
    assert len(next(leaves(document))[0]) == 200
    with pytest.raises(InvalidInput, match="nested more than 200 deep"):
        flatten([deepest], None)
    with pytest.raises(InvalidInput, match="nested more than 200 deep"):
        flatten(nested(100_000), None)
    for damaged in ([document], _deep_json(100_000)):
        with pytest.raises(Corruption, match="nested more than 200 deep"):
            build(damaged, no_tensor, None)
        with pytest.raises(Corruption, match="nested more than 200 deep"):
            list(leaves(damaged))
    with pytest.raises(Corruption, match="nested more than 200 deep"):
        subtree(_deep_json(300), (0,) * 300)


def _deep_json(depth: int) -> Json:
    node: Json = 1
    for _ in range(depth):
        node = [node]
    return node


def test_deep_sets_are_limited_too() -> None:
    value: Any = frozenset()
    node: Json = {"$": "frozenset", "v": []}
    for _ in range(300):
        value, node = frozenset([value]), {"$": "frozenset", "v": [node]}
    with pytest.raises(InvalidInput, match="nested more than 200"):
        flatten(value, None)
    with pytest.raises(Corruption, match="nested more than 200"):
        build(node, no_tensor, None)


def test_little_stack_left_is_no_recursion_error() -> None:
    document = flatten(nested(200), None).document

    def at_depth(calls: int) -> None:
        if calls:
            at_depth(calls - 1)
            return
        with pytest.raises(InvalidInput, match="call stack"):
            flatten(nested(200), None)
        with pytest.raises(Corruption, match="call stack"):
            build(document, no_tensor, None)

    # Frames that are there already differ from runner to runner.
    used = 0
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        used, frame = used + 1, frame.f_back
    at_depth(sys.getrecursionlimit() - used - 250)


# ---------------------------------------------------------------- untrusted documents

HUGE = "9" * 5000


@pytest.mark.parametrize(
    "node",
    [
        {},
        {"$": 1},
        {"$": None},
        {"$": ["dict"]},
        2**53 + 1,
        float("nan"),
        float("inf"),
        {"$": "int", "v": 2**60},
        {"$": "int", "v": "0x10"},
        {"$": "int", "v": HUGE},
        {"$": "int", "v": "0x" + "0" * 20 + "1"},
        {"$": "int", "v": "0x_ff"},
        {"$": "int", "v": "-"},
        {"$": "int"},
        {"$": "float", "bits": "3ff0000000000000"},
        {"$": "float", "bits": "7FF8000000000000"},
        {"$": "float", "bits": "7ff8"},
        {"$": "float", "bits": None},
        {"$": "complex", "v": [1, 2]},
        {"$": "complex", "v": [1.0]},
        {"$": "complex", "v": [1.0] * 3},
        {"$": "complex", "v": "ab"},
        {"$": "bytes", "b": "a"},
        {"$": "bytes", "b": "é==="},
        {"$": "bytes", "b": "YQ==\n"},
        {"$": "bytes", "b": None},
        {"$": "bytearray"},
        {"$": "range", "v": [0, 1, 0]},
        {"$": "range", "v": [0, True, 1]},
        {"$": "range", "v": [0, 1.0, 1]},
        {"$": "slice", "v": [0]},
        {"$": "slice", "v": ["a", None, None]},
        {"$": "npscalar", "d": "O", "b": "AAAAAAAAAAA="},
        {"$": "npscalar", "d": "<f4", "b": "AA=="},
        {"$": "npscalar", "d": ">f4", "b": "AACAPw=="},
        {"$": "npscalar", "d": "<f4,<f4", "b": "AACAPwAAgD8="},
        {"$": "npscalar", "d": 4, "b": "AACAPw=="},
        {"$": "dict", "k": ["a"], "v": []},
        {"$": "dict", "k": ["a", "a"], "v": [1, 2]},
        {"$": "dict", "k": [1, {"$": "int", "v": "0x1"}], "v": [1, 2]},
        {"$": "dict", "k": [True], "v": [1]},
        {"$": "dict", "k": [None], "v": [1]},
        {"$": "dict", "k": [1.0], "v": [1]},
        {"$": "dict", "k": [["a"]], "v": [1]},
        {"$": "dict", "k": "a", "v": [1]},
        {"$": "dict", "k": ["a"], "v": {"a": 1}},
        {"$": "dict"},
        {"$": "counter", "k": [1], "v": None},
        {"$": "defaultdict", "factory": "eval", "k": [], "v": []},
        {"$": "defaultdict", "factory": "object", "k": [], "v": []},
        {"$": "defaultdict", "factory": ["list"], "k": [], "v": []},
        {"$": "tuple"},
        {"$": "tuple", "v": "abc"},
        {"$": "deque", "maxlen": 1, "v": [1, 2]},
        {"$": "deque", "maxlen": -1, "v": []},
        {"$": "deque", "maxlen": True, "v": []},
        {"$": "deque", "maxlen": 1.5, "v": []},
        {"$": "deque", "maxlen": [], "v": []},
        {"$": "deque", "maxlen": {"$": "int", "v": "0x1" + "0" * 40}, "v": []},
        {"$": "set", "v": [[1]]},
        {"$": "set", "v": [1, 1]},
        {"$": "set", "v": [1, 1.0]},
        {"$": "set", "v": [{"$": "tensor"}]},
        {"$": "frozenset", "v": [{"$": "dict", "k": [], "v": []}]},
        {"$": "frozenset"},
        {"$": "namedtuple", "name": "P", "module": "m", "fields": ["x"], "v": []},
        {"$": "namedtuple", "name": "P", "module": "m", "fields": ["x", "x"], "v": [1, 2]},
        {"$": "namedtuple", "name": "P", "module": "m", "fields": ["x y"], "v": [1]},
        {"$": "namedtuple", "name": "P", "module": "m", "fields": ["_x"], "v": [1]},
        {"$": "namedtuple", "name": "P", "module": "m", "fields": ["class"], "v": [1]},
        {"$": "namedtuple", "name": "P", "module": "m", "fields": [1], "v": [1]},
        {"$": "namedtuple", "name": "P", "module": "m", "fields": [["x"]], "v": [1]},
        {"$": "namedtuple", "name": "P(tuple): import os #", "module": "m", "fields": ["x"], "v": [1]},
        {"$": "namedtuple", "name": "", "module": "m", "fields": ["x"], "v": [1]},
        {"$": "namedtuple", "name": "P", "module": None, "fields": ["x"], "v": [1]},
        {"$": "namedtuple", "name": "P", "module": "m", "fields": [f"f{i}" for i in range(2000)], "v": [0] * 2000},
        {"$": "ints", "of": "list"},
        {"$": "ints", "of": "set", "parts": []},
        {"$": "ints", "of": ["list"], "parts": []},
        {"$": "ints", "of": "list", "parts": [1]},
        {"$": "ints", "of": "list", "parts": [{}]},
        {"$": "ints", "of": "list", "parts": [{"d": "u1", "n": 2, "b": "AQ=="}]},
        {"$": "ints", "of": "list", "parts": [{"d": "u1", "n": 0, "b": ""}]},
        {"$": "ints", "of": "list", "parts": [{"d": "u1", "n": -1, "b": ""}]},
        {"$": "ints", "of": "list", "parts": [{"d": "u1", "n": True, "b": "AQ=="}]},
        {"$": "ints", "of": "list", "parts": [{"d": "u1", "n": 10**30, "b": "AQ=="}]},
        {"$": "ints", "of": "list", "parts": [{"d": "u1", "n": 600, "b": B64(b"\0" * 600).decode()}]},
        {"$": "ints", "of": "list", "parts": [{"d": "O8", "n": 1, "b": "AAAAAAAAAAA="}]},
        {"$": "ints", "of": "list", "parts": [{"d": "f4", "n": 1, "b": "AACAPw=="}]},
        {"$": "torch.dtype", "v": "save"},
        {"$": "torch.dtype", "v": "hub.load"},
        {"$": "torch.dtype", "v": None},
        {"$": "torch.device", "v": "banana:0"},
        {"$": "torch.device", "v": 0},
        {"$": "torch.Size", "v": [1.5]},
        {"$": "torch.Size", "v": [True]},
        {"$": "torch.Size", "v": 3},
        {"$": "quantized", "k": [], "v": []},
        {"$": "quantized", "dtype": "qint8", "scheme": "per_tensor", "k": ["int_repr"], "v": [1]},
        {"$": "quantized", "dtype": ["qint8"], "scheme": "per_tensor", "k": ["int_repr"], "v": [1]},
        {"$": "optimizer", "k": [], "v": []},
        {"$": "optimizer", "k": ["state", "param_groups"], "v": [[], []]},
        {"$": "optimizer", "k": ["state", "param_groups"], "v": [{"$": "dict", "k": [], "v": []}, [1]]},
        {
            "$": "optimizer",
            "k": ["state", "param_groups"],
            "v": [
                {"$": "dict", "k": ["w", 0], "v": [1, 2]},
                [{"$": "dict", "k": ["params"], "v": [["w"]]}],
            ],
        },
    ],
    ids=lambda node: json.dumps(node)[:60],
)
def test_damaged_nodes_are_corruption(node: Json) -> None:
    document = {"$": "dict", "k": ["user"], "v": [[None, node]]}
    with pytest.raises(Corruption, match=r"plain values at user/\[1\]") as caught:
        build(document, no_tensor, TORCH)
    assert caught.value.path[:2] == ("user", 1)
    # Walking the document looks at containers only, and finds the same or nothing.
    with contextlib.suppress(Corruption):
        list(leaves(document))
    with contextlib.suppress(Corruption):
        subtree(document, ("user", 1, "x"))


@pytest.mark.parametrize("tag", ["", "Dict", "decimal", "object", "__class__"])
def test_an_unknown_tag_is_unsupported(tag: str) -> None:
    document = [{"$": tag, "k": [], "v": []}]
    for read in (lambda: build(document, no_tensor, TORCH), lambda: list(leaves(document))):
        with pytest.raises(UnsupportedFormat, match=r"\[0\]: a value of kind"):
            read()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["$", "k", "v", "b", "d", "n", "of", "parts", "bits", "fields"]), inner, max_size=4
        )
    ),
    max_leaves=10,
)


@given(st.data())
def test_a_mutated_document_does_no_harm(data: st.DataObject) -> None:
    document = to_file(flatten(data.draw(states()), TORCH).document)
    containers: list[Any] = [[document]]
    for container in containers:
        inner = container.values() if isinstance(container, dict) else container
        containers += [value for value in inner if isinstance(value, dict | list) and value]
    target = data.draw(st.sampled_from(containers))
    key: Any = data.draw(st.sampled_from(sorted(target) if isinstance(target, dict) else range(len(target))))
    target[key] = data.draw(json_values)
    document = containers[0][0]
    for read in (lambda: build(document, lambda path, kind: torch.zeros(1), TORCH), lambda: list(leaves(document))):
        with contextlib.suppress(Corruption, UnsupportedFormat):
            read()


def test_members_of_a_newer_minor_version_are_ignored() -> None:
    assert build({"$": "tuple", "v": [1], "comment": {}}, no_tensor, None) == (1,)


def test_errors_of_the_tensor_source_pass_through() -> None:
    def failing(path: Path, kind: str) -> Any:
        raise Corruption(f"chunk of {path}")

    with pytest.raises(Corruption, match=r"^chunk of \('w', 0\)$"):
        build(flatten({"w": [torch.zeros(1)]}, TORCH).document, failing, TORCH)


def test_a_tensor_is_not_a_plain_value() -> None:
    with pytest.raises(Corruption, match="only plain values"):
        plain_value({"$": "tensor"}, TORCH)


@pytest.mark.parametrize("node", [{"$": "torch.Size", "v": [1]}, {"$": "quantized", "k": [], "v": []}])
def test_torch_values_without_torch_say_so(node: Json) -> None:
    with pytest.raises(UnsupportedFormat, match="only be read with torch"):
        build(node, no_tensor, None)


# ---------------------------------------------------------------- namedtuples


def test_a_namedtuple_takes_its_class_if_that_is_loaded() -> None:
    assert type(round_trip(Pair(1, 2))) is Pair


def test_a_namedtuple_whose_class_is_gone_gets_an_equal_one() -> None:
    local = namedtuple("local", ("x", "_1"), rename=True)
    back = round_trip([local(1, 2), local(3, 4)])
    assert back == [(1, 2), (3, 4)]
    assert type(back[0]) is type(back[1]) is not local
    assert (type(back[0]).__name__, type(back[0])._fields, type(back[0]).__module__) == ("local", ("x", "_1"), __name__)


def node_of(name: str, module: str, fields: list[str]) -> Json:
    return {"$": "namedtuple", "name": name, "module": module, "fields": fields, "v": [0] * len(fields)}


def test_no_module_is_imported_and_no_hook_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "this" not in sys.modules
    build(node_of("P", "this", ["x"]), no_tensor, None)
    assert "this" not in sys.modules
    hooked = types.ModuleType("hooked")
    hooked.__getattr__ = lambda name: pytest.fail(f"asked for {name}")  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "hooked", hooked)
    assert type(build(node_of("P.Q", "hooked", ["x"]), no_tensor, None)).__name__ == "Q"


class Careful(Pair):
    def __new__(cls, *args: Any) -> Careful:
        pytest.fail("code of the class ran")


def test_no_code_of_the_class_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Meta(type):
        def __getattribute__(cls, name: str) -> Any:
            pytest.fail(f"a metaclass was asked for {name}")

    # In a module of its own: pytest looks closely at the classes of this one.
    home = types.ModuleType("home")
    vars(home)["Hostile"] = Meta("Hostile", (tuple,), {"_fields": ("x",)})
    monkeypatch.setitem(sys.modules, "home", home)
    assert type(type(build(node_of("Hostile", "home", ["x"]), no_tensor, None))) is type
    assert type(build(node_of("Careful", __name__, ["left", "right"]), no_tensor, None)) is Careful
    assert type(build(node_of("Pair", __name__, ["left"]), no_tensor, None)) is not Pair
    assert type(build(node_of("Level", __name__, ["left"]), no_tensor, None)).__mro__[1] is tuple


def test_attributes_beside_the_fields_are_refused() -> None:
    value = tuple.__new__(Careful, (1, 2))
    vars(value)["note"] = 1
    with pytest.raises(InvalidInput, match="attributes beside its fields: note"):
        flatten(value, None)


# ---------------------------------------------------------------- optimizers


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2), torch.nn.Linear(2, 1))
    groups: list[dict[str, Any]] = [{"params": model[i].parameters()} for i in (1, 0)]
    groups[0]["lr"] = 0.1
    groups.append({"params": model[2].bias})
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def named_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> NamedOptimizerState:
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    groups = [{**group, "params": [names[p] for p in group["params"]]} for group in optimizer.param_groups]
    state = {names[parameter]: dict(content) for parameter, content in optimizer.state.items()}
    return NamedOptimizerState(state=state, param_groups=groups)


def test_named_optimizer_state_becomes_torchs_own() -> None:
    model, optimizer = trained()
    named = named_state(model, optimizer)
    flat = flatten({"optimizer": named}, TORCH)
    tensors = dict(flat.tensors)
    assert ("optimizer", "state", "1.weight", "exp_avg") in tensors
    document = to_file(flat.document)
    back = build(document, lambda path, kind: tensors[path], TORCH)["optimizer"]
    expected = optimizer.state_dict()
    assert set(back) == set(expected)
    assert_same(expected["state"], back["state"])
    for mine, theirs in zip(back["param_groups"], expected["param_groups"], strict=True):
        assert mine["params"] == theirs["params"]
        assert_same({**theirs, "params": 0}, {key: mine[key] for key in theirs} | {"params": 0})
    trained()[1].load_state_dict(back)
    kept = build(document, lambda path, kind: tensors[path], TORCH, optimizer_names=True)["optimizer"]
    assert_same(named, kept)


def test_state_under_keys_that_are_no_parameters_keeps_them() -> None:
    named = NamedOptimizerState(state={"w": 1, "func_evals": 2}, param_groups=[{"params": ["v", "w", "v"]}], extra=3)
    assert round_trip(named) == {
        "state": {1: 1, "func_evals": 2},
        "param_groups": [{"params": [0, 1, 0]}],
        "extra": 3,
    }


# ---------------------------------------------------------------- pickles


def test_pickles_need_trust_on_both_sides() -> None:
    value = {"cfg": datetime.date(2024, 5, 1), "level": Level.LOW, "plain": [1]}
    with pytest.raises(InvalidInput, match="pickle='trust'"):
        flatten(value, TORCH)
    document = to_file(flatten(value, TORCH, pickle_trusted=True).document)
    assert list(leaves(document))[2] == (("plain", 0), Leaf("plain", 1))
    with pytest.raises(UnsupportedFormat, match="the pickle at cfg was not loaded"):
        build(document, no_tensor, TORCH)
    back = build(document, no_tensor, TORCH, pickle_trusted=True)
    assert back == value
    assert type(back["level"]) is Level


def test_an_untrusted_pickle_does_not_run() -> None:
    node = flatten(Evil(), None, pickle_trusted=True).document
    with pytest.raises(UnsupportedFormat):
        plain_value(node, TORCH)
    assert not hasattr(sys.modules["builtins"], "deltastore_was_here")


def test_what_cannot_be_pickled_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"^f: function cannot be pickled"):
        flatten({"f": lambda: 0}, None, pickle_trusted=True)


@pytest.mark.parametrize(
    ("data", "error"),
    [(b"cno.such.module\nX\n.", MissingDependency), (b"cbuiltins\nnothing\n.", MissingDependency), (b"?", Corruption)],
)
def test_a_pickle_that_does_not_load(data: bytes, error: type[DeltaStoreError]) -> None:
    with pytest.raises(error, match="the pickle at x"):
        build(
            {"$": "dict", "k": ["x"], "v": [{"$": "pickle", "b": B64(data).decode()}]},
            no_tensor,
            None,
            pickle_trusted=True,
        )


def test_reading_documents_needs_no_torch() -> None:
    program = "import sys, deltastore.tree, deltastore.patch; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=pathlib.Path(__file__).parent.parent)
