"""What ``weights_only`` does not load becomes what it does: a deque a list, a namedtuple a tuple.

A record in the ZIP, which torch reads past, says what it was: deltastore restores it.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, BinaryIO, Final

import numpy as np

from deltastore.document import leaves as document_leaves
from deltastore.document import plain_value
from deltastore.formats.contents import Contents
from deltastore.formats.loss import Loss
from deltastore.formats.record import KEY, Found, encode_record, parse_record
from deltastore.plain import parse_key, parse_scalar
from deltastore.types import Json, Path

_ENTRY: Final = f"{KEY}.json"
"""Name of the record in the folder of the ZIP; torch reads past it."""
_MOST_BITS: Final = 2039
"""Of an integer: what takes more than 255 bytes is pickled in a way that is not loaded."""
_SIMPLER: Final[Mapping[str, tuple[str, str]]] = {
    "deque": ("list", "a deque"),
    "namedtuple": ("tuple", "a namedtuple"),
    "frozenset": ("set", "a frozenset"),
    "defaultdict": ("dict", "a defaultdict"),
}
_TEXTS: Final = frozenset({"range", "slice"})


class _Simplifier:
    """Makes the document of what torch loads, and notes what it changed."""

    def __init__(self) -> None:
        self.losses: list[Loss] = []
        self.scalars: dict[Path, np.ndarray] = {}

    def node(self, node: Json, path: Path, *, in_set: bool = False) -> Json:
        """Return a node without what is not loaded."""
        if type(node) is list:
            return [self.node(item, (*path, index)) for index, item in enumerate(node)]
        if type(node) is not dict:
            return node
        tag = node["$"]
        if tag in ("set", "frozenset"):
            inner = [self.node(item, path, in_set=True) for item in node["v"]]
        elif "k" in node:
            keys = map(parse_key, node["k"])
            inner = [self.node(item, (*path, key)) for key, item in zip(keys, node["v"], strict=True)]
        elif tag in ("tuple", "namedtuple", "deque"):
            inner = [self.node(item, (*path, index)) for index, item in enumerate(node["v"])]
        else:
            return self._leaf(node, tag, path, in_set=in_set)
        if tag not in _SIMPLER:
            return {**node, "v": inner}
        simple, name = _SIMPLER[tag]
        if tag == "frozenset" and in_set:
            simple = "tuple"
        self._note(path, name, f"a {simple}")
        kept = {"k": node["k"]} if "k" in node else {}
        return inner if simple == "list" else {"$": simple, **kept, "v": inner}

    def _leaf(self, node: Mapping[str, Json], tag: str, path: Path, *, in_set: bool) -> Json:
        if tag == "npscalar" and not in_set:
            self._note(path, "a numpy scalar", "a tensor without dimensions")
            self.scalars[path] = np.asarray(plain_value(node, None))
            return {"$": "tensor"}
        if tag == "ndarray":
            self._note(path, "a numpy array", "a tensor")
        elif tag in _TEXTS:
            self._note(path, f"a {tag}", "text")
            return json.dumps(node)
        elif tag in ("bytes", "bytearray") and not node["b"]:
            self._note(path, f"empty {tag}", "text")
            return ""
        elif tag == "int":
            value: Any = parse_scalar(node)
            if value.bit_length() > _MOST_BITS:
                self._note(path, f"an integer of {value.bit_length():,} bits", "text")
                return hex(value)
        return node

    def _note(self, path: Path, what: str, simple: str) -> None:
        self.losses.append(Loss("type", path, f"{what}, which weights_only does not load: {simple} in the file"))


def simplify(contents: Contents) -> tuple[Contents, tuple[Loss, ...]]:
    """Return contents that torch loads, with a tensor for each tensor and array, and what that loses."""
    simplifier = _Simplifier()
    document = simplifier.node(contents.document, ())
    paths = [path for path, leaf in document_leaves(document) if leaf.kind != "plain"]
    leaves = {path: simplifier.scalars[path] if path in simplifier.scalars else contents.leaves[path] for path in paths}
    return replace(contents, document=document, leaves=leaves), tuple(simplifier.losses)


def add_record(file: BinaryIO, contents: Contents) -> None:
    """Add what restores the contents to a file that holds their simple form."""
    numbers = (number for number, kind in enumerate(_tensor_kinds(contents)) if kind != "plain")
    record = encode_record(contents, list(map(str, numbers)), {})
    with zipfile.ZipFile(file, "a") as archive:
        folder = archive.namelist()[0].partition("/")[0]
        archive.writestr(f"{folder}/{_ENTRY}", record)


def _tensor_kinds(contents: Contents) -> Iterator[str]:
    """Yield what each tensor of the file is in the document: a plain one is a scalar of numpy."""
    for _path, leaf in document_leaves(contents.document):
        if leaf.kind != "plain" or (type(leaf.node) is dict and leaf.node["$"] == "npscalar"):
            yield leaf.kind


def read_record(path: str) -> bytes | None:
    """Return the record of a file, None where it has none."""
    if not zipfile.is_zipfile(path):
        return None
    with zipfile.ZipFile(path) as archive:
        found = [entry for entry in archive.infolist() if entry.filename.partition("/")[2] == _ENTRY]
        return archive.read(found[0]) if found else None


def restore(path: str, record: bytes, simple: Contents) -> Contents:
    """Return the contents of a file with a record; its tensors are numbered, for names of parameters may be lost.

    Raises
    ------
    Corruption
        The record does not fit the tensors.
    """
    tensors: dict[str, Any] = {str(number): leaf for number, leaf in enumerate(simple.leaves.values())}
    return parse_record(Found(path, tensors, record))
