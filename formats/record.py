"""The record beside the tensors: JSON in the file, that says what its format cannot and restores the state exactly."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deltastore.document import leaves
from deltastore.dtypes import LOGICAL, storage_dtype
from deltastore.errors import Corruption, UnsupportedFormat
from deltastore.formats.contents import Contents
from deltastore.formats.leaves import FileTensor
from deltastore.types import Json, Path

if TYPE_CHECKING:
    from collections.abc import Sequence

KEY = "deltastore"
"""The name under which a format keeps the record."""
VERSION = 1


@dataclass(frozen=True)
class Found:
    """What a reader found in a file; nothing of the tensors is read yet."""

    path: str
    tensors: Mapping[str, FileTensor]
    """By name, in the order of the file; an alias is another name of the same identity."""
    record: str | bytes | None = None


def encode_record(contents: Contents, names: Sequence[str], dtypes: Mapping[str, str]) -> str:
    """Return the record of some contents.

    Parameters
    ----------
    names : sequence of str
        For each tensor of the document, in its order, the name of the tensor in the file.
    dtypes : mapping
        Logical dtypes, by name, of tensors that are stored as another.
    """
    bounds = [[list(path), bound] for path, bound in contents.bounds.items()]
    record = {"version": VERSION, "document": contents.document, "names": names, "dtypes": dtypes, "bounds": bounds}
    return json.dumps(record, ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def parse_record(found: Found) -> Contents:
    """Return the contents that a record describes.

    Raises
    ------
    Corruption
        The record is damaged, or does not fit the tensors of the file.
    UnsupportedFormat
        A newer deltastore wrote it.
    """
    try:
        record = json.loads(found.record or "")
    except (ValueError, RecursionError) as error:
        raise _bad(found, f"is no JSON ({error})") from None
    if not isinstance(record, dict) or record.get("version") != VERSION:
        version = record.get("version") if isinstance(record, dict) else None
        if isinstance(version, int) and version > VERSION:
            raise UnsupportedFormat(
                f"{found.path}: its deltastore record has version {version}, this deltastore reads {VERSION}; "
                "use a newer one",
                path=found.path,
            )
        raise _bad(found, f"has version {version!r}, expected {VERSION}")
    names, dtypes, document = record.get("names"), record.get("dtypes"), record.get("document")
    paths = [path for path, leaf in leaves(document) if leaf.kind != "plain"]
    if not isinstance(names, list) or len(names) != len(paths) or not isinstance(dtypes, dict):
        raise _bad(found, f"does not name the {len(paths)} tensors of its document")
    tensors = {}
    for path, name in zip(paths, names, strict=True):
        if not isinstance(name, str) or name not in found.tensors:
            raise _bad(found, f"names the tensor {str(name)[:200]!r}, which the file lacks")
        tensors[path] = _restored(found, name, dtypes.get(name))
    return Contents(document, tensors, dict(_bounds(record.get("bounds"))))


def _restored(found: Found, name: str, dtype: Json) -> FileTensor:
    tensor = found.tensors[name]
    if dtype is None or dtype == tensor.logical:
        return tensor
    if not isinstance(dtype, str) or dtype not in LOGICAL:
        raise _bad(found, f"gives {name!r} the unknown dtype {str(dtype)[:40]!r}")
    size, stored = storage_dtype(dtype).itemsize, storage_dtype(tensor.logical).itemsize
    shape = tensor.shape
    if size == 2 * stored and shape[-1:] == (2,):
        shape = shape[:-1]
    elif size != stored:
        raise _bad(found, f"gives {name!r} the dtype {dtype}, which does not fit {tensor.logical} {shape}")
    return tensor.viewed(dtype, shape)


def _bounds(recorded: Json) -> Iterable[tuple[Path, float]]:
    for pair in recorded if isinstance(recorded, list) else ():
        if isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], list) and isinstance(pair[1], float):
            yield tuple(pair[0]), pair[1]


def _bad(found: Found, reason: str) -> Corruption:
    return Corruption(
        f"{found.path}: the deltastore record in it {reason}; another tool changed the file: remove the record to load "
        "its tensors by their names",
        path=found.path,
        where=found.path,
    )
