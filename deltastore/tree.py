"""Nested states as JSON documents (spec: values): containers, plain leaves, paths of the tensors, without torch.

A **document** holds the containers and plain leaves of a state; a tensor stands in it as ``{"$": "tensor"}`` (a numpy
array as ``{"$": "ndarray"}``) and is found elsewhere by its path. What a framework adds comes through a
:class:`Bridge`. This module writes documents; the functions of :mod:`deltastore.document` that read them are offered
here too.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from typing import Any, Final, Protocol, TypeAlias

import numpy as np

from deltastore.document import (
    FACTORIES,
    MAX_DEPTH,
    NDARRAY,
    TENSOR,
    Decoder,
    Leaf,
    NamedOptimizerState,
    build,
    leaves,
    number_parameters,
    plain_value,
    subtree,
)
from deltastore.dtypes import from_numpy
from deltastore.errors import InvalidInput
from deltastore.plain import (
    ENCODERS,
    MAX_JSON_INT,
    MIN_INTS,
    Fault,
    encode_int,
    encode_ints,
    encode_npscalar,
    encode_pickle,
    encode_str,
    is_namedtuple,
    namedtuple_class,
)
from deltastore.types import Json, Key, Path, show_path

__all__ = [
    "Bridge",
    "Decoder",
    "Encoded",
    "Flat",
    "Leaf",
    "NamedOptimizerState",
    "Parts",
    "PlainNode",
    "TensorLeaf",
    "build",
    "flatten",
    "leaves",
    "plain_value",
    "subtree",
]


@dataclass(frozen=True, slots=True)
class TensorLeaf:
    """The value is a tensor: an entry of the layout."""

    value: Any


@dataclass(frozen=True, slots=True)
class PlainNode:
    """The value is one plain leaf, this node."""

    node: Json


@dataclass(frozen=True, slots=True)
class Parts:
    """The value is kept by its parts, which are encoded like the values of a dict, each at the path plus its name."""

    tag: str
    meta: dict[str, Json]
    """The other members of the node."""
    parts: dict[str, Any]


Encoded: TypeAlias = TensorLeaf | PlainNode | Parts


class Bridge(Decoder, Protocol):
    """How a framework's objects enter and leave a document."""

    def encode(self, value: Any) -> Encoded | None:
        """Return what to store for a value, None if it is not one of the framework's.

        Raises
        ------
        InvalidInput
            It is, but cannot be stored; the caller adds the path.
        """


@dataclass(frozen=True)
class Flat:
    """A state taken apart."""

    document: Json
    """Shares nothing with the state that its owner could change."""
    tensors: list[tuple[Path, Any]] = field(default_factory=list)
    """The tensors and numpy arrays themselves, in document order."""


def flatten(state: Any, bridge: Bridge | None, *, pickle_trusted: bool = False) -> Flat:
    """Return the document of a nested state and its tensors.

    Parameters
    ----------
    state
        Containers and leaves of exactly the types that the format knows; a subclass is refused rather than changed.
    bridge
        The framework's objects; without one they are refused.
    pickle_trusted
        Store what the format cannot hold as a pickle instead of refusing it.

    Raises
    ------
    InvalidInput
        A value cannot be stored, contains itself, or is nested too deep; ``path`` says where.
    """
    flattener = _Flattener(bridge, pickle_trusted)
    try:
        document = flattener.node(state)
    except InvalidInput as error:
        path = tuple(flattener.path)
        raise InvalidInput(f"{show_path(path)}: {error.message}", **{**error.fields, "path": path}) from error.__cause__
    except RecursionError:
        path = tuple(flattener.path)
        raise InvalidInput(
            f"{show_path(path[:10])}/...: nested too deep for what is left of the call stack", path=path
        ) from None
    return Flat(document, flattener.tensors)


MAX_KEY_BITS: Final = 4096
"""Size of the largest integer that may be a key."""

_KEYED: Final[dict[type, str]] = {
    dict: "dict",
    OrderedDict: "odict",
    Counter: "counter",
    defaultdict: "defaultdict",
    NamedOptimizerState: "optimizer",
}
_ORDERED: Final[dict[type, str]] = {list: "list", tuple: "tuple", deque: "deque"}
_SETS: Final[dict[type, str]] = {set: "set", frozenset: "frozenset"}


class _Flattener:
    """One flatten: the path is that of the value in work, also when an error leaves it."""

    def __init__(self, bridge: Bridge | None, pickle_trusted: bool) -> None:
        self.path: list[Key] = []
        self.tensors: list[tuple[Path, Any]] = []
        self._bridge = bridge
        self._pickle_trusted = pickle_trusted
        self._open: set[int] = set()

    def node(self, value: Any) -> Json:
        # Two frames per level (node, _nodes): the deepest state that is allowed must fit Python's default stack.
        kind = type(value)
        encode = ENCODERS.get(kind)
        if encode is not None:
            return encode(value)
        if kind in _KEYED:
            items = dict(value)  # a copy: another thread may add a key
            keys = [key if type(key) is str and key.isascii() else _encode_key(key) for key in items]
            return _keyed_node(_KEYED[kind], keys, self._nodes(value, items.items()), value)
        if kind in _ORDERED:
            values = list(value)
            return _long_ints(kind, values) or _ordered_node(kind, self._nodes(value, enumerate(values)), value)
        if kind in _SETS:
            before = len(self.tensors)
            nodes = self._nodes(value, enumerate(list(value)))
            if len(self.tensors) != before:
                raise InvalidInput(f"a {kind.__name__} can hold plain values only, no tensors")
            return {"$": _SETS[kind], "v": sorted(nodes, key=_order)}
        if is_namedtuple(kind):
            values = list(tuple.__iter__(value))
            return _namedtuple_node(value, self._nodes(value, enumerate(values)))
        encoded = self._leaf(value)
        if isinstance(encoded, TensorLeaf):
            self.tensors.append((tuple(self.path), encoded.value))
            return {"$": NDARRAY if type(encoded.value) is np.ndarray else TENSOR}
        if isinstance(encoded, PlainNode):
            return encoded.node
        nodes = self._nodes(value, encoded.parts.items())
        return {"$": encoded.tag, **encoded.meta, "k": list(encoded.parts), "v": nodes}

    def _nodes(self, container: Any, items: Iterable[tuple[Key, Any]]) -> list[Json]:
        """Return the nodes of a container's elements."""
        if id(container) in self._open:
            raise InvalidInput("the container contains itself")
        if len(self.path) >= MAX_DEPTH:
            raise InvalidInput(f"containers are nested more than {MAX_DEPTH} deep")
        self._open.add(id(container))
        nodes = []
        self.path.append("")  # replaced by each key in turn
        path, node = self.path, self.node
        for key, item in items:
            path[-1] = key
            kind = type(item)
            # Nodes that are the value itself, without a call: a long history is mostly those.
            if (
                (kind is float and -inf < item < inf)
                or (kind is int and -MAX_JSON_INT <= item <= MAX_JSON_INT)
                or (kind is str and item.isascii())
            ):
                nodes.append(item)
            else:
                nodes.append(node(item))
        self.path.pop()
        self._open.remove(id(container))
        return nodes

    def _leaf(self, value: Any) -> Encoded:
        """Return what to store for a value that is no container of Python's own."""
        try:
            if type(value) is np.ndarray:
                from_numpy(value.dtype)
                return TensorLeaf(value)
            if isinstance(value, np.generic):
                return PlainNode(encode_npscalar(value))
            encoded = None if self._bridge is None else self._bridge.encode(value)
            if encoded is None:
                raise InvalidInput(_refusal(value))
        except InvalidInput:
            if not self._pickle_trusted:
                raise
            return PlainNode(encode_pickle(value))
        return encoded


def _encode_key(key: Any) -> Json:
    if type(key) is str:
        return encode_str(key)
    if type(key) is int:
        if key.bit_length() > MAX_KEY_BITS:  # a layout writes it in decimal, which Python refuses from 4300 digits on
            raise InvalidInput(f"a key is an integer of {key.bit_length()} bits; at most {MAX_KEY_BITS} are allowed")
        return encode_int(key)
    raise InvalidInput(f"the key {key!r} is of type {_name(type(key))}; keys must be str or int, exactly")


def _keyed_node(tag: str, keys: list[Json], nodes: list[Json], value: Any) -> Json:
    if tag == "defaultdict":
        factory = value.default_factory
        name = next((name for name, kind in FACTORIES.items() if kind is factory), None)
        if name is None and factory is not None:
            raise InvalidInput(f"the factory {factory!r} of a defaultdict is not one of {', '.join(FACTORIES)}")
        return {"$": tag, "factory": name, "k": keys, "v": nodes}
    if tag == "optimizer":
        try:
            number_parameters(value)
        except Fault as fault:
            raise InvalidInput(str(fault)) from None
    return {"$": tag, "k": keys, "v": nodes}


def _long_ints(kind: type, values: list[Any]) -> Json | None:
    if len(values) < MIN_INTS or kind is deque or set(map(type, values)) != {int}:
        return None
    return encode_ints(_ORDERED[kind], values)


def _ordered_node(kind: type, nodes: list[Json], value: Any) -> Json:
    if kind is list:
        return nodes
    if kind is tuple:
        return {"$": "tuple", "v": nodes}
    return {"$": "deque", "maxlen": None if value.maxlen is None else encode_int(value.maxlen), "v": nodes}


def _namedtuple_node(value: Any, nodes: list[Json]) -> Json:
    kind = type(value)
    fields = kind._fields
    if len(fields) != len(nodes) or namedtuple_class(kind.__module__, kind.__qualname__, fields) is None:
        raise InvalidInput(f"{_name(kind)} is not a namedtuple that can be made again from its name and fields")
    if getattr(value, "__dict__", None):
        raise InvalidInput(f"this {_name(kind)} has attributes beside its fields: {', '.join(vars(value))}")
    return {"$": "namedtuple", "fields": list(fields), "module": kind.__module__, "name": kind.__qualname__, "v": nodes}


def _order(node: Json) -> str:
    return json.dumps(node, sort_keys=True)


def _name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _refusal(value: Any) -> str:
    known = [*ENCODERS, *_KEYED, *_ORDERED, *_SETS, np.ndarray]
    base = next((kind for kind in type(value).__mro__[1:] if kind in known), None)
    hint = (
        "store plain values instead (numbers, strings, lists, dicts, tensors)"
        if base is None
        else f"only {_name(base)} itself is kept, not its subclasses: convert it with {base.__name__}(...)"
    )
    return f"a value of type {_name(type(value))} cannot be stored; {hint}, or allow pickles with pickle='trust'"
