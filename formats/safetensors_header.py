"""The header of a safetensors file: written, and read as what a stranger may have written.

Layout: the length of the header (8 bytes, little endian), the header (JSON), the elements. The format asks of a reader
that it checks everything before it allocates; the length goes first, then each tensor against its dtype and its
neighbours.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from deltastore.dtypes import storage_dtype
from deltastore.errors import Corruption, UnsupportedFormat
from deltastore.formats.open_file import OpenFile
from deltastore.formats.plan import Item

DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
"""Name in the file -> logical dtype. F4 is left out: two elements share a byte, and no reader of torch has it."""
_UNREAD = frozenset({"F8_E8M0"})
"""Not written: the library's reader for torch does not know it."""
_NAMES = {logical: name for name, logical in DTYPES.items() if name not in _UNREAD}
WRITTEN = frozenset(_NAMES)
"""The logical dtypes that are written as themselves."""
LONGEST = 100_000_000
"""Bytes that a header may have, as in the library."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    """First byte in the file."""
    end: int


@dataclass(frozen=True)
class Header:
    """What a header says."""

    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]


def encode_header(items: Iterable[Item], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int], int]:
    """Return length and header, where each tensor begins in the file, and the size of the file.

    Tensors with large elements come first, so that every one is aligned; their names keep the order of the items.
    """
    items = list(items)
    offsets = {}
    end = 0
    for item in sorted(items, key=lambda item: -storage_dtype(item.stored).itemsize):
        offsets[item.name] = end
        end += item.nbytes
    table: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    for item in items:
        begin = offsets[item.name]
        table[item.name] = {
            "dtype": _NAMES[item.stored],
            "shape": item.stored_shape,
            "data_offsets": [begin, begin + item.nbytes],
        }
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    return struct.pack("<Q", len(text)) + text, {name: start + begin for name, begin in offsets.items()}, start + end


def read_header(file: OpenFile) -> Header:
    """Return the header of a file, checked against the file.

    Raises
    ------
    Corruption
        The header is not what the format promises; the text says what was found.
    UnsupportedFormat
        A dtype that torch has no tensors of.
    """
    path, size = file.path, file.size
    if size < 8:
        raise _bad(path, f"it has {size} bytes, a header needs 8 at least")
    (length,) = struct.unpack("<Q", file.read(0, 8))
    if length > LONGEST or length > size - 8:
        raise _bad(
            path, f"its header says that it has {length:,} bytes; the file has {size:,}, the limit is {LONGEST:,}"
        )
    try:
        table = json.loads(file.read(8, length).decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise _bad(path, f"its header is no JSON ({str(error)[:200]})") from None
    if not isinstance(table, dict):
        raise _bad(path, "its header is not an object")
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _bad(path, "its metadata are not text by name")
    entries = {name: _entry(path, name, value, 8 + length) for name, value in table.items()}
    _check_cover(path, entries, 8 + length, size)
    return Header(entries, metadata)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands in it twice")
    return found


def _entry(path: str, name: str, value: object, start: int) -> Entry:
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise _bad(path, f"tensor {name[:200]!r} lacks dtype, shape or data_offsets")
    code, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if code not in DTYPES:
        raise UnsupportedFormat(
            f"{path}: tensor {name[:200]!r} has the dtype {str(code)[:40]!r}; known are {', '.join(DTYPES)}",
            path=path,
        )
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise _bad(path, f"tensor {name[:200]!r} has the shape {shape!r:.100} and the offsets {offsets!r:.100}")
    wanted = math.prod(shape) * storage_dtype(DTYPES[code]).itemsize
    if offsets[1] - offsets[0] != wanted:
        raise _bad(path, f"tensor {name[:200]!r} needs {wanted:,} bytes and has {offsets[1] - offsets[0]:,}")
    return Entry(DTYPES[code], tuple(shape), start + offsets[0], start + offsets[1])


def _are_sizes(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 63 for value in values)


def _check_cover(path: str, entries: Mapping[str, Entry], start: int, size: int) -> None:
    """Check that the tensors follow each other without holes, from the header to the end of the file."""
    at = start
    for name, entry in sorted(entries.items(), key=lambda pair: (pair[1].begin, pair[1].end)):
        if entry.begin != at:
            raise _bad(path, f"tensor {name[:200]!r} begins at byte {entry.begin:,}, expected {at:,}")
        at = entry.end
    if at != size:
        raise _bad(path, f"its tensors end at byte {at:,}, the file at {size:,}")


def _bad(path: str, reason: str) -> Corruption:
    return Corruption(f"{path} is damaged or no safetensors file: {reason}", path=path, where=path)
