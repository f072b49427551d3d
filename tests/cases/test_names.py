"""O08, O25, O33, O34: keys, wrappers' prefixes, and the odd leaves of a state."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import io
import pathlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from deltastore.errors import InvalidInput
from deltastore.loading import canonical_names
from deltastore.reader import State
from tests.cases.kit import Store, freeze, mlp, raises, same, train

# ---------------------------------------------------------------- O08: integer keys


def test_key_types_and_their_order_survive(tmp_path: Path) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[30, 80, 80])  # a Counter {30: 1, 80: 2}
    user = {0: torch.zeros(2), "0": torch.ones(2), -1: "neg", 2**70: "big", "9": {9: {"9": 9}}}
    state = {"optim": optimizer.state_dict(), "sched": scheduler.state_dict(), "user": user}
    truth = freeze(state)
    with Store(tmp_path / "store") as store:
        store.save(1, state)
        store.wait()
        back = store.read(1)
        same(truth, back)
        assert all(type(key) is int for key in back["optim"]["state"])
        assert type(back["sched"]["milestones"]) is collections.Counter
        assert back["sched"]["milestones"][80] == 2
        torch.optim.AdamW(mlp(1).parameters()).load_state_dict(back["optim"])


def test_tensors_below_keys_that_look_alike_stay_apart(tmp_path: Path) -> None:
    keys: list[Any] = [0, "0", -0, 1, "1", "01", 10**30, str(10**30), -(2**64), "[0]", "None", ""]
    state = {"model": {key: torch.full((3,), float(number)) for number, key in enumerate(dict.fromkeys(keys))}}
    with Store(tmp_path / "store") as store:
        for step in range(3):
            for number, tensor in enumerate(state["model"].values()):
                if number % 3 == step:
                    tensor += 100
            truth = freeze(state)
            store.save(step, state)
            store.wait()
            same(truth, store.read(step))
        model = store.product.at(2)["model"]
        for key, tensor in state["model"].items():
            assert torch.equal(model[key][...], tensor)


class Number(enum.IntEnum):
    ONE = 1


@pytest.mark.parametrize("key", [True, False, None, 1.0, (1, 2), b"x", np.int64(3), torch.float32, Number.ONE])
def test_other_keys_are_refused_and_named(tmp_path: Path, key: Any) -> None:
    with Store(tmp_path / "store") as store:
        error = raises(lambda: store.save(1, {"user": {"table": {key: 1}}}), InvalidInput)
        assert "user/table" in str(error)
        assert repr(key) in str(error)
        assert store.steps() == []


def test_the_order_of_keys_is_a_change_of_its_own(tmp_path: Path) -> None:
    tensors = {name: torch.randn(50) for name in "abc"}
    orders = ["abc", "cba", "bca", "abc"]
    with Store(tmp_path / "store") as store:
        for step, order in enumerate(orders):
            store.save(step, {"model": {name: tensors[name] for name in order}})
        store.wait()
        for step, order in enumerate(orders):
            assert list(store.read(step)["model"]) == list(order)
            assert [path[1] for path in store.product.at(step)] == list(order)


# ---------------------------------------------------------------- O25: prefixes of wrappers

WRAPPINGS = {
    "ddp": "module.{}",
    "compile": "_orig_mod.{}",
    "both": "module._orig_mod.{}",
    "both2": "_orig_mod.module.{}",
    "twice": "module.module.{}",
    "fsdp": "_fsdp_wrapped_module.{}",
}


def test_raw_keys_are_kept_and_a_canonical_view_is_offered(tmp_path: Path) -> None:
    core = dict(mlp().state_dict())
    with Store(tmp_path / "store") as store:
        for step, (name, pattern) in enumerate(WRAPPINGS.items()):
            raw = {pattern.format(key): tensor for key, tensor in core.items()}
            store.save(step, {"model": raw})
            store.wait()
            same({"model": raw}, store.read(step))
            assert canonical_names(list(raw)) == list(core), name


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (
            ["0._fsdp_wrapped_module.weight", "1._checkpoint_wrapped_module._orig_mod.bias"],
            ["0.weight", "1.bias"],
        ),
        # A module that is really called so.
        (["module.weight", "head.weight", "blocks.0.module.bias"],) * 2,
        (["_orig_mod"],) * 2,
        ([], []),
        # Two that would fall together stay as they are.
        (["_orig_mod.w", "w"],) * 2,
        (["module._orig_mod.a.b", "module._orig_mod.a._orig_mod.c"], ["a.b", "a.c"]),
        (["my_module.w", "modules.w"],) * 2,
    ],
)
def test_wrappers_are_stripped_and_real_names_left_alone(keys: list[str], expected: list[str]) -> None:
    assert canonical_names(keys) == expected


@pytest.mark.parametrize("pattern", WRAPPINGS.values(), ids=WRAPPINGS.keys())
def test_a_model_loads_whatever_wrapper_it_was_saved_under(tmp_path: Path, pattern: str) -> None:
    model, other = mlp(), mlp(1)
    with Store(tmp_path / "store") as store:
        store.save(1, {"model": {pattern.format(key): tensor for key, tensor in model.state_dict().items()}})
        store.wait()
        report = store.product.at(1).load_into(model=other)
        assert report.ok
        same(dict(model.state_dict()), dict(other.state_dict()))
        # A load that matches no key is an error, strict or not: never a silent fresh start.
        error = raises(lambda: store.product.at(1).load_into(model=nn.Conv2d(1, 1, 1), strict=False), InvalidInput)
        assert "no key" in str(error)


# ---------------------------------------------------------------- O33: names that flatten to the same


def filled(number: float) -> torch.Tensor:
    return torch.full((3,), float(number))


def test_paths_are_lists_of_keys_not_joined_names(tmp_path: Path) -> None:
    state = {
        "model": {
            "a.b": filled(1),
            "a": {"b": filled(2), "b.c": filled(3), "": filled(4)},
            "a.": {"b": filled(5)},
            ".a": filled(6),
            "a/b": filled(7),
            "a%2Fb": filled(8),
            "a%252Fb": filled(9),
            "/": filled(10),
            "//": filled(11),
            "": filled(12),
        },
        "model.a": {"b": filled(13)},
        "model/a": {"b": filled(14)},
    }
    truth = freeze(state)
    with Store(tmp_path / "store") as store:
        store.save(1, state)
        store.wait()
        same(truth, store.read(1))
        state["model"]["a"]["b"] += 1  # type: ignore[index]
        second = freeze(state)
        store.save(2, state)
        store.wait()
        same(truth, store.read(1))
        same(second, store.read(2))
        lazy = store.product.at(2)
        assert torch.equal(lazy["model", "a", "b"][...], filled(3))
        assert torch.equal(lazy["model", "a.b"][...], filled(1))
        assert torch.equal(lazy["model/a", "b"][...], filled(14))


def test_separators_of_our_own_format_are_ordinary_keys(tmp_path: Path) -> None:
    keys = ["$", "k", "v", "zarr.json", "c/0", "p0.data", "deltastore/index.json.zst", "sha256", "attributes", "tensor"]
    state = {key: {"$": "tensor", "k": [], "v": {"x": filled(number)}} for number, key in enumerate(keys)}
    with Store(tmp_path / "store") as store:
        store.save(1, state)
        store.save(2, dict(reversed(state.items())))
        store.wait()
        same(state, store.read(1))
        same(dict(reversed(state.items())), store.read(2))


def test_unicode_keys_are_kept_code_point_for_code_point(tmp_path: Path) -> None:
    keys = ["é", "e\u0301", "ﬁ", "fi", "\u202egnp", "a\0b", "\ud800", "🙂", "\n", "\u2028", "K", "\u212a"]
    state = {"model": {key: filled(number) for number, key in enumerate(keys)}}
    with Store(tmp_path / "store") as store:
        store.save(1, state)
        store.wait()
        back = store.read(1)
        same(state, back)
        assert list(back["model"]) == keys


# ---------------------------------------------------------------- O34: odd leaves


def test_plain_values_come_back_as_what_they_were(tmp_path: Path) -> None:
    plain: dict[str, Any] = {
        "none": None,
        "t": True,
        "i": 3,
        "big": 2**80,
        "neg": -(2**63),
        "f": 0.1,
        "nan": float("nan"),
        "inf": float("-inf"),
        "nz": -0.0,
        "c": 1 + 2j,
        "s": "a\0b\n\u2028é🙂",
        "b": b"\x00\xff",
        "ed": {},
        "el": [],
        "et": (),
        "nest": [({"k": [()]}, [None])],
        "loss": [0.5, float("inf")],
        "np": np.arange(6, dtype=np.uint32).reshape(2, 3),
    }
    with Store(tmp_path / "store") as store:
        store.save(1, {"user": plain, "log": []})
        log = [{"step": 1}, {"step": 2, "x": torch.ones(2)}]
        store.save(2, {"user": {"none": 0}, "log": log, "_extra_state": octets(b"abc")})
        store.save(3, {"log": {"as": "dict"}, "_extra_state": octets(b"longer than before")})
        store.wait()
        same({"user": plain, "log": []}, store.read(1))
        assert str(store.read(1)["user"]["nz"]) == "-0.0"
        second = store.read(2)
        assert len(second["log"]) == 2
        assert second["user"] == {"none": 0}
        same({"log": {"as": "dict"}, "_extra_state": octets(b"longer than before")}, store.read(3))


def octets(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


@dataclasses.dataclass
class Config:
    lr: float = 0.1


class Choice(enum.Enum):
    A = 1


class Words(list[str]):
    pass


class Table(dict[str, int]):
    pass


REFUSED: list[Any] = [
    Config(),
    Choice.A,
    Number.ONE,
    datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC),
    pathlib.PurePosixPath("/x"),
    lambda: 0,
    io.BytesIO(b"1"),
    object(),
    nn.Linear(1, 1),
    int,
    np.array(["a"]),
    np.array([None]),
    np.datetime64("2026"),
    np.longdouble(1),
    Words(["a"]),
    Table(a=1),
    iter([1]),
    memoryview(b"1"),
    torch.Generator(),
    torch.optim.SGD([torch.ones(1)], lr=0.1),
    NotImplemented,
    ...,
    collections.ChainMap({}),
]


@pytest.mark.parametrize("odd", REFUSED, ids=[type(odd).__name__ + str(i) for i, odd in enumerate(REFUSED)])
def test_what_has_no_plain_encoding_is_refused_with_its_path(tmp_path: Path, odd: Any) -> None:
    with Store(tmp_path / "store") as store:
        for wrapped in ({"odd": odd}, {"odd": [0, (odd,)]}, {"odd": collections.deque([odd])}):
            error = raises(partial(store.save, 9, {"user": {"cfg": wrapped}}), InvalidInput)
            assert "user/cfg/odd" in str(error), error
        store.save(9, {"user": {"cfg": 1}})
        store.wait()
        same({"user": {"cfg": 1}}, store.read(9))


Pair = collections.namedtuple("Pair", ("x", "y"))

KEPT: list[Any] = [
    torch.float32,
    torch.device("cpu"),
    torch.Size([2, 3]),
    {1, 2},
    frozenset({"a", (1, 2)}),
    bytearray(b"x"),
    range(3, 9, 2),
    slice(1, None, 2),
    collections.OrderedDict(b=1, a=2),
    collections.Counter("aab"),
    collections.defaultdict(int, a=1),
    collections.deque([1, 2], maxlen=4),
    Pair(1, torch.ones(2)),
    np.float32(0.1),
    np.bool_(True),
    np.array(7, dtype=np.int16),
    np.zeros((0, 3), dtype=np.float16),
    np.arange(6, dtype=">f8")[::-1],
]


@pytest.mark.parametrize("value", KEPT, ids=[type(value).__name__ + str(i) for i, value in enumerate(KEPT)])
def test_what_is_kept_keeps_its_type(tmp_path: Path, value: Any) -> None:
    with Store(tmp_path / "store") as store:
        store.save(1, {"user": {"kept": value, "list": [value]}})
        store.wait()
        back = store.read(1)["user"]
        for found in (back["kept"], back["list"][0]):
            assert type(found) is type(value)
            if isinstance(value, np.ndarray):
                assert found.dtype == value.dtype.newbyteorder("="), "arrays come back in the machine's byte order"
                assert np.array_equal(found, value)
            else:
                same(value, found)


def test_a_log_that_grows_costs_what_was_added(tmp_path: Path) -> None:
    log: list[Any] = [{"step": k, "loss": k / 7, "note": f"epoch {k}"} for k in range(3_000)]
    with Store(tmp_path / "store") as store:
        store.save(0, {"user": {"log": log, "seen": list(range(3_000))}})
        store.wait()
        whole = store.product.at(0).commit.bytes
        for step in range(1, 6):
            log.append({"step": step, "loss": float("nan"), "note": None})
            store.save(step, {"user": {"log": log, "seen": list(range(3_000 + step))}})
        store.wait()
        for step in range(1, 6):
            assert store.product.at(step).commit.bytes < whole / 8
        same({"user": {"log": log, "seen": list(range(3_005))}}, store.read(5))
        assert len(store.read(2)["user"]["log"]) == 3_002


def test_the_shape_of_the_tree_needs_no_template(tmp_path: Path) -> None:
    trees: list[dict[str, Any]] = [
        {"a": {"b": {"c": torch.ones(3)}}},
        {"a": [torch.ones(3)]},
        {"a": torch.ones(3)},
        {"a": {"b": None, "c": {}}},
        {"a": None},
        {"a": {"b": {"c": torch.ones(3)}}, "b": ()},
    ]
    with Store(tmp_path / "store") as store:
        for step, tree in enumerate(trees):
            store.save(step, tree)
        store.wait()
        for step, tree in enumerate(trees):
            same(tree, store.read(step))
            assert isinstance(store.product.at(step), State)
