"""The difference of two documents as a few operations, and back (spec: values, patches).

An operation is ``["set", pointer, node]``, ``["extend", pointer, nodes]`` or ``["cut", pointer, length]``; a pointer is
the list of JSON keys and indices from the top of the document. The second adds to the end of a list, the third shortens
it. Applied in order to the old document they give the new one, exactly: 1, 1.0, true, 0.0 and -0.0 are five values.
"""

from __future__ import annotations

import json
import marshal
from collections.abc import Iterator, Sequence
from math import copysign
from typing import Any

from deltastore.errors import Corruption
from deltastore.types import Json, Key

Op = list[Json]
"""One operation."""

SET = "set"
EXTEND = "extend"
CUT = "cut"

_RUN = 512
"""Elements that are compared at once: most runs are equal, and C does that fast."""
_SHORT = 8
"""Lists up to this length are compared element by element at once."""
_PATIENCE = 64
"""After so many differing elements, ask whether the list is cheaper as a whole."""
_PER_OP = 64
"""Bytes that an operation of a long series is counted beyond its own: thousands of them cost time on both sides."""


def diff(old: Json, new: Json) -> list[Op]:
    """Return the operations that turn one document into the other, none if they are the same.

    The operations share their nodes with `new`. They are meant to be short, not the shortest: where much of a container
    differs it is set as a whole.
    """
    try:
        return _diff(old, new, [])[0]
    except RecursionError:  # a document near the deepest allowed, from deep inside the caller's own calls
        return [[SET, [], new]]


def apply(document: Json, ops: Sequence[Op]) -> Json:
    """Return the document that the operations make; the argument stays as it is and shares what is unchanged.

    One call with the operations of many commits copies each list that grows only once.

    Raises
    ------
    Corruption
        An operation is not one, or does not fit the document.
    """
    patched = _Patched(document)
    if not isinstance(ops, list | tuple):
        raise Corruption("a patch of the plain values is not a list of operations")
    for index, op in enumerate(ops):
        try:
            patched.apply(op)
        except _Misfit as misfit:
            raise Corruption(f"operation {index} of a patch of the plain values: {misfit}", operation=index) from None
    return patched.document


# ---------------------------------------------------------------- diff

_Ops = tuple[list[Op], int]
"""Operations and the bytes of their JSON."""


def _diff(old: Json, new: Json, pointer: list[Key]) -> _Ops:
    kind = type(new)
    if old is new:
        return [], 0
    if kind is list and type(old) is list:
        return _diff_lists(old, new, pointer)
    if kind is dict and type(old) is dict and old.keys() == new.keys():
        ops: list[Op] = []
        cost = 0
        for key, value in new.items():
            found, spent = _diff(old[key], value, [*pointer, key])
            ops += found
            cost += spent
        return _cheaper(ops, cost, pointer, new)
    if type(old) is kind and old == new and (kind is not float or copysign(1.0, old) == copysign(1.0, new)):
        return [], 0
    return _one(SET, pointer, new)


def _diff_lists(old: list[Json], new: list[Json], pointer: list[Key]) -> _Ops:
    ops: list[Op] = []
    cost = 0
    differing = 0
    ask_at = _PATIENCE
    shared = min(len(old), len(new))
    for index in _suspects(old, new, shared):
        found, spent = _diff(old[index], new[index], [*pointer, index])
        ops += found
        cost += spent
        differing += bool(found)
        if differing == ask_at:
            if _is_shorter(new[: index + 1], cost + _PER_OP * len(ops)):
                return _one(SET, pointer, new)
            ask_at *= 2
    tail: list[Op] = []
    spent = 0
    if len(new) > shared:
        tail, spent = _one(EXTEND, pointer, new[shared:])
    elif len(old) > shared:
        tail, spent = _one(CUT, pointer, shared)
    return _cheaper(ops + tail, cost + spent, pointer, new)


def _suspects(old: list[Json], new: list[Json], count: int) -> Iterator[int]:
    """Yield the indices below `count` whose elements may differ, all of those that do."""
    if count <= _SHORT:
        yield from range(count)
        return
    for start in range(0, count, _RUN):
        stop = min(start + _RUN, count)
        if not _are_same(old[start:stop], new[start:stop]):
            yield from range(start, stop)


def _are_same(old: list[Json], new: list[Json]) -> bool:
    """Return whether the lists are the same, exactly; False may also mean that it was not worth finding out."""
    # Equality in Python is not enough, 1 == 1.0 == True and 0.0 == -0.0; marshal tells them apart at C speed. Equal
    # bytes are equal values in every version; version 4 is several times faster but also depends on which objects are
    # shared, so that unequal bytes say nothing: version 2 does not.
    try:
        if marshal.dumps(old, 4) == marshal.dumps(new, 4):
            return True
        return old == new and marshal.dumps(old, 2) == marshal.dumps(new, 2)
    except ValueError:  # nested deeper than marshal goes
        return False


def _one(name: str, pointer: list[Key], argument: Json) -> _Ops:
    op = [name, pointer, argument]
    return [op], len(json.dumps(op, separators=(",", ":")))


def _cheaper(ops: list[Op], cost: int, pointer: list[Key], new: Json) -> _Ops:
    """Return the operations, or the one that sets the whole container if that is shorter."""
    if len(ops) > 1 and _is_shorter(new, cost - len(json.dumps(pointer)) - len(SET) - 6):
        return _one(SET, pointer, new)
    return ops, cost


def _is_shorter(node: Json, limit: int) -> bool:
    """Return whether the JSON of a node has less than about `limit` bytes; looks at no more of it than that takes."""
    size = 0
    stack = [node]
    while stack:
        node = stack.pop()
        if type(node) is list:
            size += 1 + len(node)
        elif type(node) is dict:
            size += 1 + sum(map(len, node)) + 4 * len(node)
        else:
            size += len(node) + 2 if type(node) is str else len(repr(node))
        if size >= limit:
            return False
        if type(node) is list:
            stack += node
        elif type(node) is dict:
            stack += node.values()
    return True


# ---------------------------------------------------------------- apply


class _Misfit(Exception):
    """Why an operation cannot be applied."""


class _Patched:
    """A document that is being patched: containers on the way to a change are copied, once."""

    def __init__(self, document: Json) -> None:
        self.document = document
        self._own: dict[int, Json] = {}  # keeps the copies alive: an id stays that of one container

    def apply(self, op: Op) -> None:
        if type(op) is not list or len(op) != 3 or type(op[1]) is not list:
            raise _Misfit("not a list of name, pointer and argument")
        name, pointer, argument = op
        if name == SET:
            self._set(pointer, argument)
        elif name == EXTEND:
            target = self._container(pointer)
            if type(target) is not list or type(argument) is not list:
                raise _Misfit("extends what is not a list, or by what is not a list")
            target += argument
        elif name == CUT:
            target = self._container(pointer)
            if type(target) is not list or type(argument) is not int or not 0 <= argument <= len(target):
                raise _Misfit("cuts what is not a list, or to a length that it does not have")
            del target[argument:]
        else:
            raise _Misfit(f"unknown operation {str(name)[:40]!r}")

    def _set(self, pointer: list[Key], node: Json) -> None:
        if not pointer:
            self.document = node
            return
        parent = self._container(pointer[:-1])
        _child(parent, pointer[-1])
        parent[pointer[-1]] = node

    def _container(self, pointer: list[Key]) -> Any:
        """Return a container of the new document that may be changed."""
        node = self.document = self._writable(self.document)
        for key in pointer:
            child = self._writable(_child(node, key))
            node[key] = child
            node = child
        return node

    def _writable(self, node: Json) -> Any:
        if type(node) is not list and type(node) is not dict:
            raise _Misfit("points into a scalar")
        if id(node) in self._own:
            return node
        copy = node.copy()
        self._own[id(copy)] = copy
        return copy


def _child(node: Any, key: Json) -> Json:
    if type(node) is dict and type(key) is str and key in node:
        return node[key]
    if type(node) is list and type(key) is int and 0 <= key < len(node):
        return node[key]
    raise _Misfit(f"points to {str(key)[:40]!r}, which is not there")
