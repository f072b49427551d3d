"""Writing a torch file tensor by tensor: first the file with room for the elements, then the elements.

torch.save writes pickle and ZIP as it always does, of tensors without elements (``torch.serialization.skip_data``); the
elements go to where the ZIP has room for them, in the order in which the pickle meets the tensors. Then the checksums
in the ZIP are put right: what torch wrote are those of nothing.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import warnings
import zipfile
import zlib
from typing import Any, BinaryIO

import numpy as np
import torch

from deltastore.document import build
from deltastore.errors import Internal
from deltastore.formats.atomic_file import atomic_file, write_at
from deltastore.formats.contents import Contents
from deltastore.formats.leaves import nbytes, stream
from deltastore.formats.registry import Options
from deltastore.formats.torch_plain import add_record
from deltastore.formats.torch_write import write_torch
from deltastore.torch_bridge import TORCH
from deltastore.types import Path

_ALIGNED = 64
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0  # mmap.MAP_NORESERVE, which Python has from 3.12 on
_LOCAL_BYTES, _ENTRY_BYTES, _CRC_IN_ENTRY = 30, 46, 16
_ENTRY, _DESCRIPTOR = b"PK\x01\x02", b"PK\x07\x08"


def can_stream(contents: Contents) -> bool:
    """Return whether torch can be told of the tensors before it has them: not of quantized ones, made of several."""
    stack = [contents.document]
    while stack:
        node = stack.pop()
        if type(node) is dict:
            if node["$"] == "quantized":
                return False
            inner = node.get("v")
            stack += inner if type(inner) is list else []
        elif type(node) is list:
            stack += node
    return True


def _hollow(contents: Contents) -> Any:
    """Return the state with tensors in memory that nobody touches: it takes none."""
    sizes = {owner: nbytes(leaf) for owner, leaf in contents.distinct.items()}
    room = mmap.mmap(-1, sum(sizes.values()) + _ALIGNED * (len(sizes) + 1), flags=mmap.MAP_PRIVATE | _NO_RESERVE)
    tensors: dict[Path, torch.Tensor] = {}
    start = 0
    for owner, leaf in contents.distinct.items():
        about = TORCH.describe(leaf)
        if sizes[owner]:
            raw = torch.frombuffer(room, dtype=torch.uint8, count=sizes[owner], offset=start)
            tensors[owner] = raw.view(TORCH.torch_dtype(about.dtype)).reshape(about.shape)
            start += -(-sizes[owner] // _ALIGNED) * _ALIGNED
        else:
            tensors[owner] = TORCH.empty(about.dtype, about.shape)
    return build(contents.document, lambda path, _kind: tensors[contents.owners[path]], TORCH)


def stream_file(contents: Contents, path: str, options: Options, record: Contents | None = None) -> int:
    """Write contents as a torch file, one tensor in memory at a time, and return its size.

    Parameters
    ----------
    record : Contents, optional
        As for :func:`~deltastore.formats.torch_write.save_file`.

    Raises
    ------
    InvalidInput
        A value that ``weights_only`` would refuse; nothing was written.
    """
    with atomic_file(path) as file:
        with torch.serialization.skip_data(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            write_torch(_hollow(contents), file, path)
        if record is not None:
            add_record(file, record)
        places = storage_places(file)
        if sorted(places) != list(range(len(contents.distinct))):
            raise Internal(f"{path}: torch made room for {len(places)} of {len(contents.distinct)} tensors")
        numbers = {owner: number for number, owner in enumerate(contents.distinct)}
        crcs: dict[int, int] = {}
        done = 0
        for owner, tensor in stream(contents.distinct):
            offset, size = places[numbers[owner]]
            content = TORCH.as_array(tensor).view(np.uint8).data
            if len(content) != size:
                raise Internal(f"{path}: torch left {size:,} bytes for a tensor of {len(content):,}")
            write_at(file, offset, content)
            crcs[numbers[owner]] = zlib.crc32(content)
            done += size
            options.progress(done, contents.nbytes)
        _set_checksums(file, places, crcs)
        return file.seek(0, os.SEEK_END)


def _number(name: str) -> int | None:
    """Return the number of the storage that an entry holds."""
    folder, _, last = name.rpartition("/")
    return int(last) if folder.endswith("/data") and last.isdigit() else None


def storage_places(file: BinaryIO) -> dict[int, tuple[int, int]]:
    """Return offset and size of the elements of each storage in the ZIP form, by its number."""
    places = {}
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
    for entry in entries:
        number = _number(entry.filename)
        if number is not None:
            header = os.pread(file.fileno(), _LOCAL_BYTES, entry.header_offset)
            name_bytes, extra_bytes = struct.unpack_from("<HH", header, 26)
            places[number] = entry.header_offset + _LOCAL_BYTES + name_bytes + extra_bytes, entry.file_size
    return places


def _set_checksums(file: BinaryIO, places: dict[int, tuple[int, int]], crcs: dict[int, int]) -> None:
    """Write the checksums behind the elements and into the directory of the ZIP."""
    for number, crc in crcs.items():
        end = sum(places[number])
        if os.pread(file.fileno(), 4, end) == _DESCRIPTOR:
            write_at(file, end + 4, struct.pack("<I", crc))
    with zipfile.ZipFile(file) as archive:
        at, count = archive.start_dir, len(archive.infolist())
    for _ in range(count):
        entry = os.pread(file.fileno(), _ENTRY_BYTES, at)
        if not entry.startswith(_ENTRY):
            raise Internal(f"no entry of the ZIP directory at {at:,}")
        name_bytes, extra_bytes, comment_bytes = struct.unpack_from("<HHH", entry, 28)
        storage = _number(os.pread(file.fileno(), name_bytes, at + _ENTRY_BYTES).decode())
        if storage is not None:
            write_at(file, at + _CRC_IN_ENTRY, struct.pack("<I", crcs[storage]))
        at += _ENTRY_BYTES + name_bytes + extra_bytes + comment_bytes
