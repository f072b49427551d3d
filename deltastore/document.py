"""Reading the document of a state: its leaves and their paths, one sub-tree, the values themselves (spec: values).

A document is untrusted: whatever is wrong with it is Corruption, a tag that this version does not know is
UnsupportedFormat.
:mod:`deltastore.tree` writes documents and offers these functions too.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from deltastore.errors import Corruption, MissingDependency, UnsupportedFormat
from deltastore.plain import (
    PARSERS,
    Fault,
    encode_int,
    member,
    namedtuple_class,
    parse_ints,
    parse_key,
    parse_pickle,
    parse_scalar,
)
from deltastore.types import Json, Key, Path, show_path

MAX_DEPTH = 200
"""Containers inside each other: as deep as recursive readers in other languages go without care."""

FACTORIES: Mapping[str, type] = MappingProxyType(
    {kind.__name__: kind for kind in (bool, bytes, complex, dict, float, frozenset, int, list, set, str, tuple)}
)
"""The default factories that a defaultdict may have, beside None."""

TENSOR = "tensor"
NDARRAY = "ndarray"
PLAIN = "plain"
_ARRAYS = frozenset({TENSOR, NDARRAY})
_KEYED = frozenset({"dict", "odict", "counter", "defaultdict", "optimizer"})
_PARTS = frozenset({"quantized"})
_ORDERED = frozenset({"tuple", "namedtuple", "deque"})
_SETS = frozenset({"set", "frozenset"})
_FRAMEWORK = frozenset({"torch.dtype", "torch.device", "torch.Size"})
_TAGS = _ARRAYS | _KEYED | _PARTS | _ORDERED | _SETS | _FRAMEWORK | PARSERS.keys() | {"ints", "pickle"}


class Leaf(NamedTuple):
    """One leaf of a document."""

    kind: str
    """``"tensor"``, ``"ndarray"`` or ``"plain"``."""
    node: Json


class Decoder(Protocol):
    """How a framework's objects come out of a document.

    The methods get untrusted nodes and raise Corruption for what they cannot use; the caller adds the path.
    """

    def owns(self, tag: str) -> bool:
        """Return whether the tag is one of this framework."""

    def decode(self, tag: str, node: Mapping[str, Json]) -> Any:
        """Return the object of a plain node."""

    def join(self, tag: str, meta: Mapping[str, Json], parts: Mapping[Key, Any]) -> Any:
        """Return the composite object of its parts and of the other members of its node."""


class NamedOptimizerState(dict[str, Any]):
    """The state of an optimizer with parameter names where torch has integers.

    ``{"state": {name: {...}}, "param_groups": [{..., "params": [name, ...]}, ...]}``; :func:`build` turns it back into
    what torch's ``Optimizer.state_dict`` gives.
    """


def leaves(document: Json) -> Iterator[tuple[Path, Leaf]]:
    """Yield the path of each leaf and what it is, in document order.

    The integers of an ``ints`` node are leaves of their own; sets, ranges, bytes and other plain values are one leaf;
    empty containers are none. A plain leaf is not parsed: :func:`plain_value` does that.
    """
    keys: list[Key] = [""]  # one for each open iterator; the first stands for the document itself
    stack: list[Iterator[tuple[Key, Json]]] = [iter((("", document),))]
    while stack:
        for keys[-1], node in stack[-1]:
            path = tuple(keys[1:])
            inner = _open(node, path)
            if inner is not None:
                stack.append(iter(inner))
                keys.append("")
                break
            tag = node["$"] if type(node) is dict else None
            yield path, Leaf(tag if tag in _ARRAYS else PLAIN, node)
        else:
            stack.pop()
            keys.pop()


def subtree(document: Json, prefix: Path, default: Json = None) -> Json:
    """Return the node at a path, `default` where there is none.

    The node of a leaf that is None is None as well: pass a default of your own to tell them apart.
    """
    node = document
    for depth, key in enumerate(prefix):
        inner = _open(node, prefix[:depth]) or ()
        # Exact types: 0, "0" and False are three keys.
        found = [child for name, child in inner if type(name) is type(key) and name == key]
        if not found:
            return default
        node = found[0]
    return node


def build(
    document: Json,
    tensor: Callable[[Path, str], Any],
    bridge: Decoder | None,
    *,
    pickle_trusted: bool = False,
    optimizer_names: bool = False,
) -> Any:
    """Return the nested state of a document; it shares no container with the document.

    Parameters
    ----------
    document
        An untrusted document, or a sub-tree of one.
    tensor
        Gives the tensor at a path below the document; the second argument is ``"tensor"`` or ``"ndarray"``.
    bridge
        The framework's objects; without one they are UnsupportedFormat.
    pickle_trusted
        Load pickles, which runs the code that they name.
    optimizer_names
        Keep parameter names in optimizer states (:class:`NamedOptimizerState`) instead of torch's integers.
    """
    builder = _Builder(tensor, bridge, pickle_trusted, optimizer_names)
    try:
        return builder.value(document)
    except Fault as fault:
        raise _damage(builder.path, fault) from None
    except RecursionError:
        raise _damage(builder.path, Fault("nested too deep for what is left of the call stack")) from None


def plain_value(node: Json, bridge: Decoder | None, pickle_trusted: bool = False) -> Any:
    """Return the value of a plain leaf."""
    return build(node, _no_tensor, bridge, pickle_trusted=pickle_trusted)


class _UnknownTag(Fault):
    """A node of a newer version."""


def _damage(path: Iterable[Key], fault: Fault) -> Corruption | UnsupportedFormat:
    place = tuple(path)
    kind = UnsupportedFormat if isinstance(fault, _UnknownTag) else Corruption
    return kind(f"plain values at {show_path(place)}: {fault}", path=place)


def _tag(node: Mapping[str, Json]) -> str:
    tag = member(node, "$", str)
    if tag not in _TAGS:
        raise _UnknownTag(f"a value of kind {tag[:40]!r}, which this version of deltastore does not know")
    return str(tag)


def _keyed(node: Mapping[str, Json]) -> list[tuple[Key, Json]]:
    keys = [key if type(key) is str else parse_key(key) for key in member(node, "k", list)]
    nodes = member(node, "v", list)
    if len(keys) != len(nodes) or len(set(keys)) != len(keys):
        raise Fault(f"{node['$']!r} has {len(keys)} keys, {len(set(keys))} different ones, for {len(nodes)} values")
    return list(zip(keys, nodes, strict=True))


def _members(node: Json) -> Iterable[tuple[Key, Json]] | None:
    """Return the keys and nodes of a container whose elements have paths of their own, None for a leaf."""
    if type(node) is list:
        return enumerate(node)
    if type(node) is not dict:
        return None
    tag = _tag(node)
    if tag in _KEYED or tag in _PARTS:
        return _keyed(node)
    if tag in _ORDERED:
        return enumerate(member(node, "v", list))
    if tag == "ints":
        return enumerate(map(encode_int, parse_ints(node)))
    return None


def _open(node: Json, path: Path) -> Iterable[tuple[Key, Json]] | None:
    try:
        inner = _members(node)
        if inner is not None and len(path) >= MAX_DEPTH:
            raise Fault(f"containers are nested more than {MAX_DEPTH} deep")
    except Fault as fault:
        raise _damage(path, fault) from None
    return inner


def _no_tensor(path: Path, kind: str) -> Any:
    raise Fault(f"a {kind} where only plain values may stand")


class _Builder:
    """One build: the path is that of the node in work, also when an error leaves it."""

    def __init__(
        self, tensor: Callable[[Path, str], Any], bridge: Decoder | None, pickle_trusted: bool, optimizer_names: bool
    ) -> None:
        self.path: list[Key] = []
        self._tensor = tensor
        self._bridge = bridge
        self._pickle_trusted = pickle_trusted
        self._optimizer_names = optimizer_names

    def value(self, node: Json) -> Any:
        if type(node) is list:
            return self._values(enumerate(node))
        if type(node) is not dict:
            return parse_scalar(node)
        tag = _tag(node)
        if tag in _KEYED or tag in _PARTS:
            pairs = _keyed(node)
            keys = [key for key, _ in pairs]
            return self._mapping(tag, node, dict(zip(keys, self._values(pairs), strict=True)))
        if tag in _ORDERED:
            return _sequence(tag, node, self._values(enumerate(member(node, "v", list))))
        if tag in _ARRAYS:
            return self._tensor(tuple(self.path), tag)
        if tag in _SETS:
            return self._set(tag, member(node, "v", list))
        if tag == "ints":
            values = parse_ints(node)
            return values if node["of"] == "list" else tuple(values)
        if tag in PARSERS:
            return PARSERS[tag](node)
        if tag == "pickle":
            return self._pickle(node)
        return self._framework(tag, lambda bridge: bridge.decode(tag, node))

    def _values(self, members: Iterable[tuple[Key, Json]]) -> list[Any]:
        if len(self.path) >= MAX_DEPTH:
            raise Fault(f"containers are nested more than {MAX_DEPTH} deep")
        values = []
        self.path.append("")  # replaced by each key in turn
        path, value = self.path, self.value
        for key, node in members:
            path[-1] = key
            values.append(node if type(node) is str else value(node))
        self.path.pop()
        return values

    def _mapping(self, tag: str, node: Mapping[str, Json], content: dict[Key, Any]) -> Any:
        if tag == "dict":
            return content
        if tag == "optimizer":
            numbered = number_parameters(content)
            return NamedOptimizerState(content) if self._optimizer_names else numbered  # type: ignore[arg-type]
        if tag in _PARTS:
            meta = {name: value for name, value in node.items() if name not in ("$", "k", "v")}
            return self._framework(tag, lambda bridge: bridge.join(tag, meta, content))
        if tag == "odict":
            return OrderedDict(content)
        if tag == "counter":
            return Counter(content)
        factory = node.get("factory")
        if factory is not None and (type(factory) is not str or factory not in FACTORIES):
            raise Fault(f"{str(factory)[:40]!r} is not the factory of a defaultdict")
        return defaultdict(None if factory is None else FACTORIES[factory], content)

    def _set(self, tag: str, nodes: list[Json]) -> set[Any] | frozenset[Any]:
        tensor, self._tensor = self._tensor, _no_tensor
        values = self._values(enumerate(nodes))
        self._tensor = tensor
        try:
            content = frozenset(values)
        except TypeError:
            raise Fault(f"an element of a {tag} is not hashable") from None
        if len(content) != len(values):
            raise Fault(f"a {tag} holds an element twice")
        return content if tag == "frozenset" else set(content)

    def _pickle(self, node: Mapping[str, Json]) -> Any:
        where = f"the pickle at {show_path(tuple(self.path))}"
        if not self._pickle_trusted:
            raise UnsupportedFormat(
                f"{where} was not loaded: it may run any code. If you trust its writer, use pickle='trust'",
                path=tuple(self.path),
            )
        try:
            return parse_pickle(node)
        except (ImportError, AttributeError) as error:
            raise MissingDependency(f"{where} names code that is not here: {error}", path=tuple(self.path)) from error
        except Exception as error:  # whatever the code of a pickle raises
            raise Corruption(f"{where} does not load: {error}", path=tuple(self.path)) from error

    def _framework(self, tag: str, decode: Callable[[Decoder], Any]) -> Any:
        if self._bridge is None or not self._bridge.owns(tag):
            raise UnsupportedFormat(
                f"plain values at {show_path(tuple(self.path))}: a value of kind {tag!r} can only be read with torch",
                path=tuple(self.path),
            )
        try:
            return decode(self._bridge)
        except Corruption as error:
            raise Fault(error.message) from error


def _sequence(tag: str, node: Mapping[str, Json], values: list[Any]) -> Any:
    if tag == "tuple":
        return tuple(values)
    if tag == "deque":
        maxlen = parse_scalar(node.get("maxlen"))
        if maxlen is not None and (type(maxlen) is not int or not len(values) <= maxlen <= sys.maxsize):
            raise Fault(f"a deque of {len(values)} elements has the maximum length {str(maxlen)[:40]}")
        return deque(values, maxlen)
    fields = tuple(member(node, "fields", list))
    name = member(node, "name", str)
    if len(fields) != len(values) or not all(type(field) is str for field in fields):
        raise Fault(f"the namedtuple {name[:40]!r} has {len(fields)} fields for {len(values)} values")
    kind = namedtuple_class(member(node, "module", str), name, fields)
    if kind is None:
        raise Fault(f"{name[:40]!r} with these {len(fields)} fields cannot be a namedtuple")
    return tuple.__new__(kind, values)


def number_parameters(content: Mapping[Any, Any]) -> dict[str, Any]:
    """Return an optimizer state with torch's integers for the names, as ``Optimizer.state_dict`` counts them."""
    state, groups = content.get("state"), content.get("param_groups")
    if not isinstance(state, dict) or not isinstance(groups, list):
        raise Fault("an optimizer state without the dict 'state' and the list 'param_groups'")
    numbers: dict[str, int] = {}
    count = 0
    for group in groups:
        names = group.get("params") if isinstance(group, dict) else None
        if not isinstance(names, list) or not all(type(name) is str for name in names):
            raise Fault("a parameter group of an optimizer state without the list of names 'params'")
        for name in names:
            numbers.setdefault(name, count)
            count += 1
    numbered = {numbers.get(key, key): value for key, value in state.items()}
    if len(numbered) != len(state):
        raise Fault("the state of an optimizer has an entry under a name and under its number")
    new_groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in groups]
    return {**content, "state": numbered, "param_groups": new_groups}
