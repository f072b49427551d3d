"""Plain values as JSON nodes and back: numbers, bytes, numpy scalars, long integer lists, namedtuples (spec: values).

``encode_x`` turns a value into a node and raises InvalidInput without a path, ``parse_x`` turns an untrusted node into
a value and raises :class:`Fault`; :mod:`deltastore.tree` knows the path and adds it. Nothing is imported or executed
for a node, except the pickles that the user trusts. The members of every node stand in sorted order, as they come back
from canonical JSON.
"""

from __future__ import annotations

import base64
import binascii
import math
import pickle
import re
import struct
import sys
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from keyword import iskeyword
from types import ModuleType
from typing import Any, Final

import numpy as np

from deltastore.dtypes import NATIVE, from_numpy
from deltastore.errors import InvalidInput
from deltastore.types import Json, Key

MAX_JSON_INT = 1 << 53
"""Larger integers are hexadecimal strings: many JSON readers turn numbers into binary64."""
MIN_INTS = 32
"""Shorter lists of integers are ordinary lists."""
PART_INTS = 512
"""Integers in one part: a list that grows changes only its last part."""
MAX_FIELDS = 1024
"""Fields of a namedtuple; a class with more is slow to make."""

_INT_CODES = ("u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8")
_INT_RANGES = tuple((code, int(np.iinfo(code).min), int(np.iinfo(code).max)) for code in _INT_CODES)
_SCALAR_CODES = frozenset(dtype.str for dtype in NATIVE.values())
_HEX_INT = re.compile(r"-?0x[1-9a-f][0-9a-f]*")
_HEX_FLOAT = re.compile(r"[0-9a-f]{16}")
_SURROGATE_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")


class Fault(Exception):
    """Why a node is damaged, without its place: becomes Corruption where the path is known, no caller sees it."""


def member(node: Mapping[str, Json], name: str, kind: type) -> Any:
    """Return a member of a node, of exactly the kind that the format promises."""
    value = node.get(name)
    if type(value) is not kind:
        raise Fault(f"member {name!r} of {node.get('$')!r} is {type(value).__name__}, expected {kind.__name__}")
    return value


def encode_str(value: str) -> Json:
    """Return the node of a string."""
    # JSON cannot tell the two halves of a pair from the one character that they encode; a lone half is safe.
    if not value.isascii() and _SURROGATE_PAIR.search(value):
        raise InvalidInput(f"the string {value!r} holds a pair of surrogates, which JSON would turn into one character")
    return value


def encode_int(value: int) -> Json:
    """Return the node of an integer of any size."""
    return value if -MAX_JSON_INT <= value <= MAX_JSON_INT else {"$": "int", "v": hex(value)}


def encode_float(value: float) -> Json:
    """Return the node of a float, bit for bit: -0.0 and the payload of a NaN are kept."""
    return value if math.isfinite(value) else {"$": "float", "bits": struct.pack(">d", value).hex()}


def _encode_complex(value: complex) -> Json:
    return {"$": "complex", "v": [encode_float(value.real), encode_float(value.imag)]}


def _encode_range(value: range) -> Json:
    return {"$": "range", "v": [encode_int(number) for number in (value.start, value.stop, value.step)]}


def _encode_slice(value: slice) -> Json:
    limits = (value.start, value.stop, value.step)
    if not all(limit is None or type(limit) is int for limit in limits):
        raise InvalidInput(f"{value!r} has limits that are not integers")
    return {"$": "slice", "v": [None if limit is None else encode_int(limit) for limit in limits]}


def _encode_bytes(value: bytes | bytearray) -> Json:
    return {"$": type(value).__name__, "b": base64.b64encode(value).decode("ascii")}


def _as_it_is(value: Any) -> Json:
    return value


ENCODERS: Final[dict[type, Callable[[Any], Json]]] = {
    type(None): _as_it_is,
    bool: _as_it_is,
    str: encode_str,
    int: encode_int,
    float: encode_float,
    complex: _encode_complex,
    bytes: _encode_bytes,
    bytearray: _encode_bytes,
    range: _encode_range,
    slice: _encode_slice,
}
"""The encoder of every exact type that is one plain leaf."""


def encode_npscalar(value: np.generic) -> Json:
    """Return the node of a numpy scalar, its own bits."""
    from_numpy(value.dtype)
    if value.dtype.type is not type(value):
        raise InvalidInput(f"{type(value).__qualname__} is a subclass of a numpy scalar; only the exact types are kept")
    return {"$": "npscalar", "b": base64.b64encode(value.tobytes()).decode("ascii"), "d": value.dtype.str}


def encode_ints(kind: str, values: Sequence[int]) -> Json | None:
    """Return the binary node of a long ``"list"`` or ``"tuple"`` of integers, None where 64 bits do not hold a part."""
    parts: list[Json] = []
    for start in range(0, len(values), PART_INTS):
        part = values[start : start + PART_INTS]
        low, high = min(part), max(part)
        code = next((code for code, least, most in _INT_RANGES if least <= low and high <= most), None)
        if code is None:
            return None
        data = np.array(part, dtype=f"<{code}").tobytes()
        parts.append({"b": base64.b64encode(data).decode("ascii"), "d": code, "n": len(part)})
    return {"$": "ints", "of": kind, "parts": parts}


def encode_pickle(value: object) -> Json:
    """Return the node of an object that only a reader with ``pickle="trust"`` takes."""
    try:
        data = pickle.dumps(value, protocol=5)
    except Exception as error:  # whatever a foreign __reduce__ raises
        raise InvalidInput(f"{type(value).__qualname__} cannot be pickled: {error}") from error
    return {"$": "pickle", "b": base64.b64encode(data).decode("ascii")}


def parse_bytes(node: Mapping[str, Json]) -> bytes:
    """Return the content of the member ``b``."""
    try:
        return base64.b64decode(member(node, "b", str), validate=True)
    except (binascii.Error, ValueError) as error:
        raise Fault(f"member 'b' of {node.get('$')!r} is not base64: {error}") from error


def parse_scalar(node: Json) -> bool | int | float | str | None:
    """Return the value of a node that is a scalar: a JSON one, a large integer, NaN or infinity."""
    kind = type(node)
    if node is None or kind is bool or kind is str:
        return node  # type: ignore[no-any-return] # one of the three
    if kind is int and -MAX_JSON_INT <= node <= MAX_JSON_INT:
        return int(node)
    if kind is float and math.isfinite(node):
        return float(node)
    if kind is dict and node.get("$") == "int":
        text = member(node, "v", str)
        value = int(text, 16) if _HEX_INT.fullmatch(text) else 0
        if -MAX_JSON_INT <= value <= MAX_JSON_INT:
            raise Fault(f"{text[:40]!r} is not the hexadecimal form of an integer beyond 2**53")
        return value
    if kind is dict and node.get("$") == "float":
        bits = member(node, "bits", str)
        number = struct.unpack(">d", bytes.fromhex(bits))[0] if _HEX_FLOAT.fullmatch(bits) else 0.0
        if math.isfinite(number):
            raise Fault(f"{bits[:40]!r} is not the bits of a NaN or an infinity")
        return float(number)
    raise Fault(f"{str(node)[:40]} is not a number or a string that the format allows")


def _parse_scalars(node: Mapping[str, Json], kind: type | tuple[type, ...], count: int) -> list[Any]:
    values = [parse_scalar(item) for item in member(node, "v", list)[: count + 1]]
    if len(values) != count or not all(type(value) is not bool and isinstance(value, kind) for value in values):
        raise Fault(f"{node.get('$')!r} does not hold {count} values of its kind")
    return values


def _parse_range(node: Mapping[str, Json]) -> range:
    start, stop, step = _parse_scalars(node, int, 3)
    if step == 0:
        raise Fault("the step of a range is 0")
    return range(start, stop, step)


def _parse_npscalar(node: Mapping[str, Json]) -> np.generic:
    code, data = member(node, "d", str), parse_bytes(node)
    if code not in _SCALAR_CODES or len(data) != np.dtype(code).itemsize:
        raise Fault(f"{len(data)} bytes are not a numpy scalar of dtype {code[:40]!r}")
    value: np.generic = np.frombuffer(data, dtype=code)[0]
    return value


PARSERS: Final[dict[str, Callable[[Mapping[str, Json]], Any]]] = {
    "int": parse_scalar,
    "float": parse_scalar,
    "complex": lambda node: complex(*_parse_scalars(node, float, 2)),
    "bytes": parse_bytes,
    "bytearray": lambda node: bytearray(parse_bytes(node)),
    "range": _parse_range,
    "slice": lambda node: slice(*_parse_scalars(node, (int, type(None)), 3)),
    "npscalar": _parse_npscalar,
}
"""The parser of every tag that is one plain leaf and needs nothing else."""


def parse_key(node: Json) -> Key:
    """Return a key of a dict."""
    key = parse_scalar(node)
    if type(key) is str or type(key) is int:
        return key
    raise Fault(f"a key of a dict is {type(key).__name__}, expected str or int")


def parse_ints(node: Mapping[str, Json]) -> list[int]:
    """Return the integers of an ``ints`` node."""
    if node.get("of") not in ("list", "tuple"):
        raise Fault(f"member 'of' of 'ints' is {str(node.get('of'))[:40]}, expected list or tuple")
    values: list[int] = []
    for part in member(node, "parts", list):
        if type(part) is not dict:
            raise Fault("a part of 'ints' is not an object")
        code, count, data = member(part, "d", str), member(part, "n", int), parse_bytes(part)
        if code not in _INT_CODES or not 1 <= count <= PART_INTS or len(data) != count * int(code[1]):
            raise Fault(f"a part of 'ints' has {len(data)} bytes for {count} values of {code[:40]!r}")
        values += np.frombuffer(data, dtype=f"<{code}").tolist()
    return values


def parse_pickle(node: Mapping[str, Json]) -> Any:
    """Return the object of a pickle. Runs whatever code it names: only for a store that the user trusts."""
    return pickle.loads(parse_bytes(node))  # noqa: S301 - behind pickle="trust" on both sides


def namedtuple_class(module: str, name: str, fields: tuple[str, ...]) -> type[tuple[Any, ...]] | None:
    """Return the class of a stored namedtuple, None where its name or fields cannot be those of one.

    The class of that name is taken if its module is already loaded and it fits, else a fresh one is made. No import, no
    attribute hook and no code of the class runs.
    """
    home: object = sys.modules.get(module)
    scope: Mapping[str, Any] = object.__getattribute__(home, "__dict__") if isinstance(home, ModuleType) else {}
    found: Any = None
    for part in name.split("."):
        found = scope.get(part)
        scope = type.__getattribute__(found, "__dict__") if type(found) is type else {}
    # A metaclass of its own could run code in the two questions below.
    if type(found) is type and issubclass(found, tuple) and _fields_of(found) == fields:
        return found
    return _fresh_namedtuple(module, name.rpartition(".")[2], fields)


def is_namedtuple(kind: type) -> bool:
    """Return whether a type is a tuple with named fields, as collections or typing make it."""
    return issubclass(kind, tuple) and _fields_of(kind) is not None


def _fields_of(kind: type) -> tuple[str, ...] | None:
    fields = next((vars(base)["_fields"] for base in kind.__mro__ if "_fields" in vars(base)), None)
    return fields if type(fields) is tuple and all(type(field) is str for field in fields) else None


@lru_cache(maxsize=256)
def _fresh_namedtuple(module: str, name: str, fields: tuple[str, ...]) -> type[tuple[Any, ...]] | None:
    if len(fields) > MAX_FIELDS or not name.isidentifier() or iskeyword(name):
        return None
    # rename: a class that was made with it has fields like _1, which are refused without.
    made: Any = namedtuple(name, fields, rename=True, module=module)  # type: ignore[misc]
    return made if made._fields == fields else None
