"""Stores made by a stranger: an error of ours at once and in little memory, whatever they claim; never a hang."""

from __future__ import annotations

import hashlib
import re
import shutil
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import deltastore
from deltastore.errors import Corruption, DeltaStoreError, UnsupportedFormat
from deltastore.history.verify import VerifyReport
from deltastore.ondisk import zarr_profile
from tests.forge import Pack, Raw, canonical, compress

MAX_SECONDS = 1.0
MAX_BYTES = 200 << 20
GIB = 1 << 30

FIRST, SECOND = "first", "second"
FLOATS = torch.arange(700, dtype=torch.float32)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and an overlay delta, each in a pack of its own, in several blosc chunks."""
    root = tmp_path_factory.mktemp("hostile") / "store"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zarr_profile, "CHUNK_BYTES", 1024)
        with deltastore.open(root, codec="blosc") as store:
            weights = FLOATS.clone()
            store.commit(0, {"w": weights, "b": torch.ones(3, dtype=torch.uint8), "n": list(range(40))}).wait()
            weights[5] = -1
            store.commit(1, {"w": weights, "b": torch.ones(3, dtype=torch.uint8), "n": [1]}).wait()
    shutil.rmtree(root / "cache")
    return root


@pytest.fixture
def root(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "store"))


def pack_path(root: Path, which: str) -> Path:
    return sorted((root / "packs").iterdir())[which == SECOND]


def peak_reset() -> int:
    """Start a new measurement of the peak of this process's memory, and return what it has now."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def peak_bytes() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def explore(root: Path) -> tuple[list[DeltaStoreError], VerifyReport | None]:
    """Do everything that a reader can do; return the errors and what deep verification found."""
    errors: list[DeltaStoreError] = []
    report = None
    before, started = peak_reset(), time.process_time()

    def attempt(work: Callable[[], object]) -> object:
        try:
            return work()
        except DeltaStoreError as error:
            errors.append(error)
            return None

    store = attempt(lambda: deltastore.open(root, mode="r"))
    if isinstance(store, deltastore.Store):
        with store:
            attempt(store.commits)
            for ref in (0, 1, "latest", "latest~1"):
                state = attempt(lambda ref=ref: store.at(ref))  # type: ignore[misc]
                if state is not None:
                    attempt(lambda state=state: list(state))  # type: ignore[misc]
                    attempt(state.to_state_dict)  # type: ignore[attr-defined]
                    attempt(lambda state=state: state["w"][3:5])  # type: ignore[misc]
            found = attempt(lambda: store.verify(deep=True))
            report = found if isinstance(found, VerifyReport) else None
    seconds, grown = time.process_time() - started, peak_bytes() - before
    assert seconds < MAX_SECONDS * 5, f"{seconds:.1f} s"
    assert grown < MAX_BYTES, f"{grown >> 20} MiB"
    return errors, report


def refused(root: Path, expected: str = "", kind: type[DeltaStoreError] = Corruption) -> None:
    """The store is refused for the reason that is meant, and verification says so too."""
    errors, report = explore(root)
    assert errors
    absent = ("is not in the store", "lead to the latest")  # only one pack is there
    assert all(isinstance(error, kind) or any(text in str(error) for text in absent) for error in errors), errors
    messages = [str(error) for error in errors] + [finding.message for finding in (report.findings if report else [])]
    assert any(re.search(expected, message) for message in messages), messages
    assert report is None or not report.ok


def forge(root: Path, which: str, change: Callable[[Pack], object]) -> None:
    path = pack_path(root, which)
    pack = Pack.parse(path.read_bytes())
    change(pack)
    path.write_bytes(pack.build())


def zstd_claim(size: int, body: bytes = b"\1\0\0") -> bytes:
    """Return a zstd frame that announces `size` bytes and holds none."""
    return b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", size) + body


def put(path: str, value: Any) -> Callable[[Pack], None]:
    """Return a change of the record: `layers/0/kind`."""

    def change(pack: Pack) -> None:
        *way, last = (int(key) if key.isdigit() else key for key in path.split("/"))
        target = pack.record
        for key in way:
            target = target[key]
        target[last] = value

    return change


def in_layout(path: str, value: Any) -> Callable[[Pack], None]:
    def change(pack: Pack) -> None:
        layout = pack.layout
        *way, last = (int(key) if key.isdigit() else key for key in path.split("/"))
        target = layout
        for key in way:
            target = target[key]
        target[last] = value
        pack.set_layout(layout)

    return change


def in_index(change: Callable[[Any], object]) -> Callable[[Pack], None]:
    def with_index(pack: Pack) -> None:
        def made(index: Any) -> Any:
            changed = change(index)
            return changed if isinstance(changed, bytes) else index

        pack.change_index = made

    return with_index


def in_array(member: str, value: Any) -> Callable[[Pack], None]:
    def change(index: Any) -> None:
        name = next(name for name in index["arrays"] if name.endswith("p0.data"))
        index["arrays"][name][member] = value(index["arrays"][name]) if callable(value) else value

    return in_index(change)


def raw_record(data: bytes) -> Callable[[Pack], None]:
    def change(pack: Pack) -> None:
        (name,) = (name for name in pack.blobs if "/records/" in name)
        pack.blobs[name] = Raw(data)

    return change


def record_text(edit: Callable[[str], str]) -> Callable[[Pack], None]:
    """Return a change of the record's JSON text."""

    def change(pack: Pack) -> None:
        (name,) = (name for name in pack.blobs if "/records/" in name)
        text = edit(canonical(pack.blobs[name]).decode())
        pack.blobs[name] = Raw(compress(text.encode()), hashlib.sha256(text.encode()).hexdigest())

    return change


def in_trailer(**members: int) -> Callable[[Pack], None]:
    def change(pack: Pack) -> None:
        pack.change_trailer = lambda trailer: replace(trailer, **members)

    return change


def metrics(text: str) -> Callable[[Pack], None]:
    return record_text(lambda record: record.replace('"metrics":{}', f'"metrics":{text}'))


def all_chunks(extent: Any) -> Callable[[Pack], None]:
    return in_array("chunks", lambda array: [extent] * len(array["chunks"]))


def nested(depth: int) -> Any:
    """Return lists in lists."""
    value: Any = []
    for _ in range(depth - 1):
        value = [value]
    return value


def _long_chunk(pack: Pack) -> None:
    pack.chunks.extend(bytes(10_000))
    all_chunks([len(pack.chunks) - 9000, 9000, 0])(pack)


DEEP = "[" * 100_000 + "]" * 100_000

HOSTILE: dict[str, tuple[Callable[[Pack], object], str]] = {
    # zstd
    "record: a frame of 1 TiB": (raw_record(zstd_claim(1 << 40)), "at most"),
    "record: a frame of 200 MiB that is empty": (raw_record(zstd_claim(200 << 20)), "zstd"),
    "record: a frame without a size": (raw_record(b"\x28\xb5\x2f\xfd\x00\x58\x01\0\0"), "at most|zstd"),
    "record: data behind the frame": (lambda pack: raw_record(compress(canonical(pack.record)) + b"x")(pack), "zstd"),
    "record: not zstd": (raw_record(b"{}"), "zstd"),
    "index: a frame of 1 TiB": (in_index(lambda index: zstd_claim(1 << 40)), "at most"),
    "index: a frame of 900 MiB that is empty": (in_index(lambda index: zstd_claim(900 << 20)), "zstd"),
    "index: a bomb of 2 GiB": (in_index(lambda index: zstd_claim(2 * GIB, b"\x03\0\0" * 16000)), "at most"),
    # JSON
    "record: nested deep": (metrics(DEEP), "JSON"),
    "record: nested 900 deep": (put("metrics", {"x": nested(80)}), ""),
    "record: a key twice": (record_text(lambda text: text[:-1] + ',"step":7}'), "twice"),
    "record: NaN": (record_text(lambda text: text.replace('"step":0', '"step":NaN')), "NaN"),
    "record: Infinity": (metrics('{"x":-Infinity}'), "Infinity"),
    "record: a number too large": (metrics('{"x":1e999}'), "too large"),
    "record: a million digits": (record_text(lambda text: text.replace('"step":0', '"step":' + "9" * 10**6)), "JSON"),
    "record: not ASCII": (metrics('{"é":1}'), "JSON"),
    "record: a list": (record_text(lambda text: "[]"), "object"),
    "record: cut off": (record_text(lambda text: text[:-1]), "JSON"),
    # record
    "record: negative step": (put("step", -1), "step"),
    "record: step too large": (put("step", 2**62), "step"),
    "record: step is true": (put("step", True), "step"),
    "record: step is a float": (put("step", 0.0), "step"),
    "record: kind unknown": (put("kind", "tree"), "kind"),
    "record: kind deeply nested": (put("kind", nested(90)), "kind"),
    "record: a delta without parent": (put("kind", "delta"), "parent"),
    "record: another id": (put("id", "0" * 32), "holds the record of"),
    "record: path as id": (put("id", "../../../../etc/passwd"), "id"),
    "record: layout with a path": (put("layout", "../" * 10), "id"),
    "record: layout that is not there": (put("layout", "0" * 64), "in no pack of the chain"),
    "record: one partition twice": (lambda pack: pack.record["layers"].append(pack.record["layers"][0]), "layers"),
    "record: an array too many": (put("layers/0/arrays/xor", "1:" + "0" * 64), "arrays"),
    "record: no layers": (put("layers", []), "no commit of the chain has a full layer"),
    "record: partition too large": (put("layers/0/partition", 2**40), "partition"),
    "record: huge pieces of a digest": (put("layers/0/arrays/data", f"{10**18}:" + "0" * 64), "pieces"),
    "record: a patch that is no list": (put("values", {"patch": 5}), "values"),
    "record: no values": (put("values", {}), "values"),
    "record: values of a list": (put("values", []), "values"),
    "record: lineage of text": (put("lineage", ["ab"]), "lineage"),
    "record: lineage of negative numbers": (put("lineage", [[-1, 5]]), "pairs"),
    "record: check of text": (put("check", {"phase": "x", "crc32c": []}), "phase"),
    "record: check of triples": (put("check", {"phase": 1, "crc32c": [[1, 2, 3]]}), "pairs"),
    "record: requires numbers": (put("requires", [1]), "needs 1"),
    # document
    "document: nested 300 deep": (put("values/full", nested(300)), "nested"),
    "document: no tag": (put("values/full", {"a": 1}), "plain values"),
    "document: a tensor that no layout has": (put("values/full/v/2", {"$": "tensor"}), "lacks it"),
    "document: keys that do not fit": (put("values/full/k", ["w"]), "keys"),
    "document: ints that lie": (
        put("values/full/v/2", {"$": "ints", "of": "list", "parts": [{"d": "u1", "n": 10**12, "b": "AAAA"}]}),
        "plain values",
    ),
    # layout
    "layout: a partition of a terabyte": (in_layout("partitions/0/length", 2**40 - 1), "asks for"),
    "layout: a partition beyond the limit": (in_layout("partitions/0/length", 2**40), "length"),
    "layout: a negative partition": (in_layout("partitions/0/length", -1), "length"),
    "layout: an empty partition": (in_layout("partitions/0/length", 0), "element"),
    "layout: a partition twice": (in_layout("partitions/1/id", 0), "different numbers"),
    "layout: an unknown dtype": (in_layout("partitions/0/dtype", "object"), "dtype"),
    "layout: a huge tensor": (in_layout("tensors/0/shape", [2**39]), "pieces"),
    "layout: a huge tensor without elements": (
        lambda pack: _both(pack, "tensors/0", {"shape": [0, 2**62 - 1, 2**62 - 1], "pieces": []}),
        "shape",
    ),
    "layout: 65 dimensions": (in_layout("tensors/0/shape", [1] * 65), "dimensions"),
    "layout: a negative dimension": (in_layout("tensors/0/shape", [-700]), "shape"),
    "layout: two negative dimensions": (in_layout("tensors/0/shape", [-7, -100]), "shape"),
    "layout: a piece outside": (in_layout("tensors/0/pieces/0", [0, 64, 700]), "inside"),
    "layout: a negative piece": (in_layout("tensors/0/pieces/0", [0, -64, 700]), "inside"),
    "layout: a piece of nothing": (in_layout("tensors/0/pieces", [[0, 0, 700], [0, 0, 0]]), "inside"),
    "layout: a piece of another partition": (in_layout("tensors/0/pieces/0/0", 1), "inside"),
    "layout: a piece of no partition": (in_layout("tensors/0/pieces/0/0", 9), "inside"),
    "layout: one partition given out a thousand times": (
        lambda pack: _both(pack, "tensors/0", {"shape": [1000, 700], "pieces": [[0, 0, 700]] * 1000}),
        "share",
    ),
    "layout: alias of itself": (lambda pack: _both(pack, "tensors/0", {"alias": 0, "pieces": None}), "alias"),
    "layout: alias of a later one": (lambda pack: _both(pack, "tensors/0", {"alias": 1, "pieces": None}), "alias"),
    "layout: a path of floats": (in_layout("tensors/0/path", [1.5]), "path"),
    "layout: a path twice": (in_layout("tensors/1/path", ["w"]), "different paths"),
    "layout: tensors of text": (in_layout("tensors", "abc"), "tensors"),
    # index
    "index: the same chunk again and again": (lambda pack: _many_chunks(pack, lambda chunk, number: chunk), "overlap"),
    "index: chunks that overlap": (
        lambda pack: _many_chunks(pack, lambda chunk, number: [chunk[0] + number, chunk[1], chunk[2]]),
        "overlap|outside",
    ),
    "index: an array of a terabyte": (in_array("length", 2**40), "chunks"),
    "index: an array of no element": (in_array("length", 0), "chunks"),
    "index: a negative array": (in_array("length", -5), "length"),
    "index: chunks of no element": (in_array("chunk", 0), "chunks"),
    "index: chunks of a gigabyte": (in_array("chunk", 2**28), "chunks"),
    "index: negative chunks": (in_array("chunk", -256), "chunk"),
    "index: an unknown codec": (in_array("codec", "lzma"), "codec"),
    "index: objects": (in_array("dtype", "object"), "dtype"),
    "index: a chunk outside": (all_chunks([2**60, 100, 0]), "outside"),
    "index: a chunk at a negative offset": (all_chunks([-4, 100, 0]), "extent"),
    "index: a chunk of nothing": (all_chunks([0, 4, 0]), "overlap|length"),
    "index: a chunk far longer than its values": (_long_chunk, "overlap|length"),
    "index: a chunk that is text": (all_chunks("abc"), "extent"),
    "index: a chunk too few": (in_array("chunks", lambda array: array["chunks"][1:]), "chunks"),
    "index: arrays of a list": (in_index(lambda index: index.update(arrays=[])), "arrays"),
    "index: no format": (in_index(lambda index: index.pop("format")), "format"),
    "index: a record that is missing": (in_index(lambda index: index.update(blobs={})), "missing"),
    "index: a commit twice": (in_index(lambda index: index["commits"].append(index["commits"][0])), "different ids"),
    "index: a path as commit": (in_index(lambda index: index["commits"][0].update(id="../../x")), "id"),
    "index: blobs outside": (in_index(lambda index: index.update(blobs={"x": [2**61, 2**61, 1]})), "outside"),
    "index: a write id of another pack": (in_index(lambda index: index.update(write="0" * 16)), "write id"),
    "index: a store id of another store": (in_index(lambda index: index.update(store="0" * 32)), "belongs to store"),
    # trailer
    "trailer: the index behind the end": (in_trailer(index_length=2**32 - 1), "trailer|outside"),
    "trailer: the index before the tail": (in_trailer(index_offset=0), "trailer|outside"),
    "trailer: the tail behind the index": (in_trailer(tail_offset=2**63), "trailer|outside"),
    "trailer: the tail is everything": (in_trailer(tail_offset=0), "CRC-32C"),
}


def _both(pack: Pack, path: str, members: dict[str, Any]) -> None:
    """Change several members of an entry of the layout; None removes one."""
    layout = pack.layout
    kind, number = path.split("/")
    entry = {**layout[kind][int(number)], **members}
    layout[kind][int(number)] = {name: value for name, value in entry.items() if value is not None}
    pack.set_layout(layout)


def _many_chunks(pack: Pack, extent: Callable[[list[int], int], list[int]]) -> None:
    """Let a partition of 2**30 elements consist of one small chunk, given over and over."""
    layout = pack.layout
    layout["partitions"][0]["length"] = 2**30
    pack.set_layout(layout)

    def change(index: Any) -> Any:
        array = next(array for name, array in index["arrays"].items() if name.endswith("p0.data"))
        array.update(length=2**30, chunk=2**24)
        array["chunks"] = [extent(array["chunks"][0], number) for number in range(2**6)]
        return index

    pack.change_index = change


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_pack(root: Path, case: str) -> None:
    change, expected = HOSTILE[case]
    pack_path(root, SECOND).unlink()
    forge(root, FIRST, change)
    if case == "record: nested 900 deep":
        explore(root)  # metrics are the caller's: whatever they are, nothing else suffers
        return
    newer = case in ("record: requires numbers", "layout: an unknown dtype")
    refused(root, expected, UnsupportedFormat if newer else Corruption)
