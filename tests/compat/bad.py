"""Makes the malformed packs of bad_data/ and says what is wrong with each; run by datagen only."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.compat.kit import BAD
from tests.forge import Pack, Raw, canonical, compress, regions

Change = Callable[[Pack], Any]


def record(name: str, value: Any) -> Change:
    """Return a change of one member of the record."""
    return lambda pack: pack.record.update({name: value})


def index(change: Callable[[Any], Any]) -> Change:
    """Return a change of the index."""

    def with_index(pack: Pack) -> None:
        def changed(value: Any) -> Any:
            result = change(value)
            return result if isinstance(result, bytes) else value

        pack.change_index = changed

    return with_index


def array(change: Callable[[Any], Any]) -> Change:
    """Return a change of the index entry of the only array."""
    return index(lambda value: change(next(iter(value["arrays"].values()))))


def layout(change: Callable[[Any], Any]) -> Change:
    """Return a change of the layout."""

    def with_layout(pack: Pack) -> None:
        value = pack.layout
        change(value)
        pack.set_layout(value)

    return with_layout


def another_record(pack: Pack) -> None:
    """Store a record under the digest of another."""
    (name,) = (name for name in pack.blobs if "/records/" in name)
    digest = "0" * 64
    pack.blobs[name] = Raw(compress(canonical(pack.blobs[name])), digest)


def trailer(pack: Pack) -> None:
    """Let the trailer point behind the end."""
    pack.change_trailer = lambda trailer: replace(trailer, index_offset=1 << 40)


BAD_PACKS: dict[str, tuple[Change, str, str, str]] = {
    # name: (change, what is wrong, error, what it says)
    "trailer-bounds": (trailer, "the trailer's index_offset is 2**40", "Corruption", "outside of the file"),
    "index-bomb": (
        index(lambda value: b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 1 << 40) + b"\1\0\0"),
        "the zstd frame of the index announces 1 TiB",
        "Corruption",
        "at most",
    ),
    "index-major-2": (
        index(lambda value: value.update(format=[2, 0])),
        "the pack is of major version 2",
        "UnsupportedFormat",
        "format 2",
    ),
    "index-codec": (array(lambda entry: entry.update(codec="lzma")), "the codec is `lzma`", "Corruption", "codec"),
    "index-overlap": (
        array(lambda entry: entry.update(length=6, chunks=entry["chunks"] * 2)),
        "one chunk is listed twice for an array of six elements",
        "Corruption",
        "overlap",
    ),
    "index-length": (
        array(lambda entry: entry.update(length=2)),
        "the array has two elements, its partition three",
        "Corruption",
        "asks for",
    ),
    "record-digest": (another_record, "the index lists another digest for the record", "Corruption", "digest"),
    "record-requires": (
        record("requires", ["adam", "full"]),
        "the record requires the feature `adam`",
        "UnsupportedFormat",
        "needs adam",
    ),
    "record-step": (record("step", -1), "the step is -1", "Corruption", "step"),
    "record-no-layer": (record("layers", []), "a base without layers", "Corruption", "full layer"),
    "document-tag": (
        record("values", {"full": {"$": "dict", "k": ["model"], "v": [{"$": "tree"}]}}),
        "the document has a node with the tag `tree`",
        "UnsupportedFormat",
        "tree",
    ),
    "document-tensor": (
        lambda pack: pack.record["values"]["full"]["v"].__setitem__(1, {"$": "tensor"}),
        "the document has a tensor `epoch`, which the layout does not list",
        "Corruption",
        "layout",
    ),
    "layout-piece": (
        layout(lambda value: value["tensors"][0].update(pieces=[[0, 64, 3]])),
        "a piece lies behind the end of its partition",
        "Corruption",
        "inside of partition",
    ),
    "layout-dtype": (
        layout(lambda value: value["partitions"][0].update(dtype="float2")),
        "a partition is of the dtype `float2`",
        "UnsupportedFormat",
        "float2",
    ),
}


def make_bad(original: bytes) -> None:
    """Write all malformed packs, made from a good one of a single base."""
    BAD.mkdir(exist_ok=True)
    for name, (change, *_) in BAD_PACKS.items():
        pack = Pack.parse(original)
        change(pack)
        (BAD / f"{name}.zip").write_bytes(pack.build())
    damaged = bytearray(original)
    damaged[next(region.start for region in regions(original) if region.kind == "chunk body")] ^= 0x80
    (BAD / "chunk-bit.zip").write_bytes(damaged)
    (BAD / "cut-off.zip").write_bytes(original[:-20])
    rows = [(name, wrong, error, text) for name, (_, wrong, error, text) in BAD_PACKS.items()]
    rows.append(("chunk-bit", "one bit of a chunk is flipped", "Corruption", "CRC-32C"))
    rows.append(("cut-off", "the last 20 bytes are missing", "Corruption", "does not end with"))
    lines = [
        "# Malformed packs",
        "",
        "Made by `tests/compat/datagen.py` from the base of spec chapter 3. Each has true",
    ]
    lines += [
        "checksums but for what is said here.",
        "",
        "| file | what is wrong | error | it says |",
        "|---|---|---|---|",
    ]
    lines += [f"| {name}.zip | {wrong} | {error} | {text} |" for name, wrong, error, text in rows]
    Path(BAD / "README.md").write_text("\n".join(lines) + "\n", "ascii")
