"""The specification says what the code does: its examples parse, its tables are the constants."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deltastore
from deltastore import document, plain
from deltastore.dtypes import LOGICAL
from deltastore.errors import InvalidInput
from deltastore.history.packs import Packs
from deltastore.history.session import read_format
from deltastore.ondisk import limits, names, records, trailer, zipfile64
from deltastore.ondisk.canonical import digest_of, encode_canonical, parse_sealed
from deltastore.ondisk.codecs import digest_values
from deltastore.ondisk.index import _STORAGE_DTYPES, FORMAT_MAJOR, FORMAT_MINOR
from deltastore.ondisk.pack import parse_tail, tail_start
from deltastore.patch import CUT, EXTEND, SET, apply
from deltastore.tiers.local import LocalTier
from tests.forge import Pack, canonical, decompress, sealed

SPEC = Path(__file__).resolve().parent.parent / "spec"
BASE, DELTA = "e1-0-0-b1b1b1b1b1b1b1b1", "e1-1-1-b2b2b2b2b2b2b2b2"


def chapter(number: int) -> str:
    (path,) = SPEC.glob(f"{number:02d}-*.md")
    return path.read_text("utf-8")


def example(name: str) -> bytes:
    return bytes.fromhex("".join((SPEC / "examples" / f"{name}.hex").read_text("ascii").split()))


def cells(line: str) -> list[str]:
    return [cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]


def tables(text: str) -> list[list[list[str]]]:
    """Return the rows of each table, the heading first."""
    found: list[list[list[str]]] = []
    inside = False
    for line in text.splitlines():
        if line.startswith("|"):
            if not inside:
                found.append([])
            if not re.fullmatch(r"[|\- ]+", line):
                found[-1].append(cells(line))
        inside = line.startswith("|")
    return found


def table(number: int, *heading: str) -> list[list[str]]:
    """Return the rows of the first table of a chapter that has these first columns."""
    return next(rows[1:] for rows in tables(chapter(number)) if tuple(rows[0][: len(heading)]) == heading)


def code(text: str) -> str:
    """Return what stands in a cell as code."""
    return text.strip("`")


def fenced(text: str) -> list[str]:
    return re.findall(r"^```\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def json_examples(number: int) -> Iterator[Any]:
    """Yield the JSON values of a chapter's code blocks, lines joined."""
    for block in fenced(chapter(number)):
        text = block.replace("\n", "").replace(",  ", ",")
        if text.startswith(("{", "[")):
            yield json.loads(re.sub(r"(?<=[,{:])\s+", "", text))


# ---------------------------------------------------------------- the worked example


@pytest.mark.parametrize("name", [BASE, DELTA])
def test_the_example_packs_parse(name: str) -> None:
    data = example(name)
    tail = parse_tail(data[tail_start(data, len(data), name) :], len(data), name)
    assert tail.index.write == name.rsplit("-", maxsplit=1)[1]
    ((commit, digest),) = tail.index.commits
    record = records.parse_record(tail.blob(f"deltastore/records/{commit}.json.zst"), digest, name)
    assert record.id == commit
    assert records.encode_record(record)[1] == digest  # canonical


def test_the_example_store_reads_as_the_text_says(tmp_path: Path) -> None:
    (tmp_path / "packs").mkdir()
    (tmp_path / "FORMAT.json").write_bytes(canonical(next(json_examples(2))))
    for name in (BASE, DELTA):
        (tmp_path / "packs" / f"{name}.zip").write_bytes(example(name))
    with deltastore.open(tmp_path, mode="r") as store:
        found = [store.at(step).to_state_dict() for step in (0, 1)]
        report = store.verify(deep=True)
    assert [state["model"]["w"].tolist() for state in found] == [[1.0, -2.5, 0.5], [1.0, -2.25, 0.5]]
    assert [state["epoch"] for state in found] == [0, 1]
    assert [finding.where[-13:] for finding in report.findings] == ["epochs/1.json"]  # the example has no claim


def test_the_hex_excerpts_are_those_of_the_example() -> None:
    data = example(BASE)
    seen = 0
    for block in fenced(chapter(3)):
        for line in block.splitlines():
            match = re.match(r"([0-9a-f]{4})  ((?:[0-9a-f]{2} )*[0-9a-f]{2})(?:   |$)", line)
            if match:
                expected = bytes.fromhex(match[2])
                assert data[int(match[1], 16) :].startswith(expected), line
                seen += 1
    assert seen == 23
    text = chapter(3)
    assert f"of {len(data):,} bytes" in text
    head = trailer.parse_trailer(data, len(data), BASE)
    for value in (head.tail_offset, head.index_offset, head.index_length, head.file_size):
        assert f"{value}" in text
    assert f"{head.tail_crc:#010x}" in text


def test_the_json_excerpts_are_those_of_the_example() -> None:
    base, delta = Pack.parse(example(BASE)), Pack.parse(example(DELTA))
    index_and_record = list(json_examples(6))
    stored = json.loads(decompress(example(BASE)[1699 : 1699 + 353]))
    assert [canonical(value) for value in index_and_record] == [canonical(stored), canonical(base.record)]
    (record_of_delta,) = json_examples(9)
    assert canonical(record_of_delta) == canonical(delta.record)
    layout = next(json_examples(7))
    assert canonical(layout) == canonical(base.layout)
    assert digest_of(canonical(layout)) in chapter(7)
    array = json.loads(base.zarr[f"{base.commit}/p0.data/zarr.json"])
    assert next(json_examples(4)) == array
    format_file = next(json_examples(2))
    assert sealed(format_file) == canonical(format_file)
    assert f"{len(canonical(format_file))} bytes" in chapter(2)
    assert parse_sealed(canonical(format_file), "spec", 1 << 20)["store"] == base.index["store"]
    for pack in (base, delta):
        assert digest_of(canonical(pack.record)) in chapter(9) + chapter(6)


def test_the_content_digests_of_the_text() -> None:
    values = np.array([1, -2.5, 0.5], "<f4")
    crc = bytes.fromhex("7f8a8703")
    assert digest_values(values, 3) == f"3:{hashlib.sha256(b'float32:3:3:' + crc).hexdigest()}"
    assert digest_values(values, 3) in chapter(6)
    assert digest_values(values, 2) in chapter(6)
    difference = digest_values(np.frombuffer(bytes.fromhex("000000000000300000000000"), "<u4"), 3)
    assert f"{difference[:10]}...{difference[-4:]}" in chapter(9)
    for layer in Pack.parse(example(DELTA)).record["layers"]:
        for digest in layer["arrays"].values():
            assert f"{digest[:10]}...{digest[-4:]}" in chapter(9)


def test_the_example_of_values() -> None:
    before, patch = json_examples(8)
    after = apply(before, patch["patch"])
    assert document.build(after, lambda path, kind: (path, kind), None) == {
        "model": {"w": (("model", "w"), "tensor")},
        "log": [0.5, 0.25, 0.125],
        "epoch": 1,
        "done": False,
    }


# ---------------------------------------------------------------- tables


def number(text: str) -> int:
    """Return the first number of a limit: `4 GiB`, `2**20`, `64`."""
    match = re.match(r"(?:fewer than |at most )?(?:2\*\*(\d+)|(\d+))(?: (KiB|MiB|GiB))?( - \d+)?", text)
    assert match is not None, text
    value = 1 << int(match[1]) if match[1] else int(match[2])
    value <<= {None: 0, "KiB": 10, "MiB": 20, "GiB": 30}[match[3]]
    return value - int(match[4][3:] if match[4] else 0)


LIMITS = {
    "tail of a pack": limits.MAX_TAIL_BYTES,
    "index, decompressed": limits.MAX_INDEX_BYTES,
    "record, decompressed": limits.MAX_RECORD_BYTES,
    "layout, decompressed": limits.MAX_LAYOUT_BYTES,
    "sealed JSON file": limits.MAX_SEALED_BYTES,
    "chunk, decoded": limits.MAX_CHUNK_BYTES,
    "partitions of a layout": limits.MAX_PARTITIONS,
    "tensors of a layout": limits.MAX_TENSORS,
    "partition": limits.MAX_PARTITION_ELEMENTS + 1,
    "array of a pack": limits.MAX_ARRAY_ELEMENTS,
    "piece of a content digest": limits.MAX_CHUNK_BYTES,
    "dimensions of a tensor": limits.MAX_DIMENSIONS,
    "epoch, sequence, step, offset, length": limits.MAX_NUMBER,
    "nesting of a document": document.MAX_DEPTH,
    "nesting of a record": 2 * document.MAX_DEPTH + 10,
    "elements of a part of `ints`": plain.PART_INTS,
    "fields of a `namedtuple`": plain.MAX_FIELDS,
    "tag": 100,
}
NOT_CONSTANTS = {"chunk, stored", "nesting of any other JSON", "name of a ZIP entry"}


def test_the_limits() -> None:
    rows = {row[0]: row[1] for row in table(14, "what", "limit")}
    assert rows.keys() == LIMITS.keys() | NOT_CONSTANTS
    assert {name: number(rows[name]) for name in LIMITS} == LIMITS
    assert number(rows["partition"].split("number ")[1]) == limits.MAX_PARTITION_ID
    assert f"255 + {limits.MAX_BLOSC_OVERHEAD_BYTES} + 4 bytes" in rows["chunk, stored"]
    with pytest.raises(InvalidInput):
        names.check_tag("g" * (LIMITS["tag"] + 1))
    names.check_tag("g" * LIMITS["tag"])
    largest = f"{'0' * 32}/p{limits.MAX_PARTITION_ID}.indptr/c/{limits.MAX_ARRAY_ELEMENTS}"
    assert len(largest) <= number(rows["name of a ZIP entry"])
    assert len(f"deltastore/layouts/{'0' * 64}.json.zst") <= number(rows["name of a ZIP entry"])


def test_every_limit_stands_in_the_chapter() -> None:
    of_the_format = {name for name in vars(limits) if name.startswith("MAX_")} - {"MAX_CACHE_BYTES"}
    elsewhere = {"MAX_PARTITION_ID", "MAX_BLOSC_OVERHEAD_BYTES"}
    said = {
        name for name in of_the_format if getattr(limits, name) in {*LIMITS.values(), *(v - 1 for v in LIMITS.values())}
    }
    assert said | elsewhere == of_the_format


def test_the_names() -> None:
    def plain_pattern(pattern: str) -> str:
        return re.sub(r"\(([^()|]*)\)", r"\1", pattern)  # groups that only take a part out

    rows = {row[0]: code(row[1]) for row in table(2, "file", "regular expression")}
    of_the_code = {
        "format file": re.escape(names.FORMAT_FILE),
        "pack": names._PACK.pattern,
        "epoch claim": names._EPOCH.pattern,
        "tag entry": names._TAG_ENTRY.pattern,
        "commit id, store id": names._COMMIT.pattern,
        "digest": names._DIGEST.pattern,
        "write id, session id": names._WRITE.pattern,
    }
    assert rows.pop("temporary") == "tmp/[0-9a-f]{16}/.*"
    assert rows == {name: plain_pattern(pattern) for name, pattern in of_the_code.items()}
    assert f"`{names._TAG.pattern}`" in chapter(2)
    assert f"`{names._COMMIT_PREFIX.pattern}`" in chapter(2)
    assert f"`{plain_pattern(names._CONTENT.pattern)}`" in chapter(6)


def test_the_features() -> None:
    rows = table(12, "name", "since")
    known = {code(row[0]) for row in rows if row[1] != "reserved"}
    assert known == records.KNOWN_FEATURES
    assert {code(row[0]) for row in rows if row[1] == "reserved"} == {"shards"}
    assert {
        code(row[0]): tuple(re.findall(r"`(\w+)`", row[1])) for row in table(4, "layer", "arrays")
    } == records.ARRAYS_OF


def test_the_dtypes() -> None:
    found: dict[str, tuple[str, int]] = {}
    for logical, storage, sizes, _ in table(5, "logical dtype", "storage dtype"):
        of_row = re.findall(r"`(\w+)`", logical)
        each = [int(size) for size in sizes.split(", ")]
        for name, size in zip(of_row, each * len(of_row) if len(each) == 1 else each, strict=False):
            found[name] = (name if storage == "the same" else code(storage), size)
    assert found == {name: (dtype.name, dtype.itemsize) for name, dtype in LOGICAL.items()}
    assert {dtype.name for dtype in LOGICAL.values()} == set(_STORAGE_DTYPES)


def test_the_tags_and_operations() -> None:
    tags = {
        tag
        for rows in tables(chapter(8))
        if rows[0][0] == "`$`"
        for row in rows[1:]
        for tag in re.findall(r"`([\w.]+)`", row[0])
    }
    assert tags == set(document._TAGS)
    assert set(re.findall(r'^\| `\["(\w+)"', chapter(8), re.MULTILINE)) == {SET, EXTEND, CUT}
    (factories,) = re.findall(r"null or the name of one of `([a-z ]+)`", chapter(8))
    assert set(factories.split()) == set(document.FACTORIES)


def test_the_members_of_the_json_files(tmp_path: Path) -> None:
    """Every member that a writer writes stands in its table, and no other."""
    with deltastore.open(tmp_path) as store:
        store.commit(0, {"x": 1}).wait()
        store.tag("good")
        packs = Packs(LocalTier(str(tmp_path)))
        (name,) = (f"packs/{path.name}" for path in (tmp_path / "packs").iterdir())
        pack = Pack.parse((tmp_path / name).read_bytes())
        packs.close()
    member_tables = [{code(row[0]) for row in rows[1:]} for rows in tables(chapter(2)) if rows[0][0] == "member"]
    files = ["FORMAT.json", "epochs/1.json", "tags/good/0.json"]
    assert [set(json.loads((tmp_path / file).read_bytes())) for file in files] == member_tables
    assert read_format(LocalTier(str(tmp_path))).minor == FORMAT_MINOR
    assert f"Format version | {FORMAT_MAJOR}.{FORMAT_MINOR} " in (SPEC / "README.md").read_text("utf-8")
    six = [{code(row[0]) for row in rows[1:]} for rows in tables(chapter(6))]
    assert set(pack.record) | {"predictions"} == six[0] == set(records._MEMBERS)
    assert set(pack.index) | {"substitutes"} == six[3]
    base = Pack.parse(example(BASE))
    assert set(base.index["arrays"][f"{base.commit}/p0.data"]) == six[4]
    seven = [{code(row[0]) for row in rows[1:]} for rows in tables(chapter(7))]
    assert [set(base.layout), set(base.layout["tensors"][0]), set(base.layout["partitions"][0])] == [
        seven[0],
        seven[1],
        seven[3],
    ]


STRUCTS: list[tuple[str, struct.Struct]] = [
    ("0x04034B50", zipfile64._LOCAL),
    ("0x02014B50", zipfile64._CENTRAL),
    ("0x06064B50", zipfile64._END64),
    ("0x07064B50", zipfile64._LOCATOR),
    ("0x06054B50", zipfile64._END),
    ("DSPACK01", trailer._TRAILER),
]


@pytest.mark.parametrize(("signature", "layout"), STRUCTS)
def test_the_tables_of_bytes(signature: str, layout: struct.Struct) -> None:
    """Fixed fields follow each other without gaps, and have the sizes that the code packs."""
    (rows,) = (rows for rows in tables(chapter(3)) if signature in " ".join(rows[1]))
    at, widths = 0, []
    for offset, size, kind, *_ in rows[1:]:
        if not offset.isdigit() or (kind == "bytes" and "DSPACK01" not in " ".join(_)):
            break  # names and data follow
        assert int(offset) == at
        assert kind == {"2": "u16", "4": "u32", "8": "u64"}[size] or "DSPACK01" in " ".join(_)
        widths.append(int(size))
        at += int(size)
    assert at == layout.size
    codes = re.findall(r"8s|[HIQ]", layout.format)
    assert widths == [{"8s": 8, "H": 2, "I": 4, "Q": 8}[item] for item in codes]


def test_the_padding_field() -> None:
    for length in range(1, 130):
        header, entry = zipfile64.local_header("n" * length, 0, 5, 0, align=True)
        gap = -(30 + length) % zipfile64.ALIGNMENT
        field = header[30 + length :]
        assert len(field) == (0 if gap == 0 else gap + 64 if gap <= 4 else gap)
        assert entry.data_offset == len(header)
        assert entry.data_offset % zipfile64.ALIGNMENT == 0
        if field:
            assert struct.unpack_from("<HH", field) == (zipfile64.PADDING_ID, len(field) - 4)
            assert not any(field[4:])


def test_canonical_json_as_the_text_says() -> None:
    value = {"b": [1, 1.0, -0.0, 1e-5, 1e16, None, True], "a": '"\\\b\t\n\f\r\x01\x7f/é😀'}
    text = r'{"a":"\"\\\b\t\n\f\r\u0001\u007f/\u00e9\ud83d\ude00","b":[1,1.0,-0.0,1e-05,1e+16,null,true]}'
    assert encode_canonical(value).decode() == text


# ---------------------------------------------------------------- the pages


def test_every_link_leads_somewhere() -> None:
    for path in SPEC.rglob("*.md"):
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text("utf-8")):
            assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_every_section_that_is_named_exists() -> None:
    heads = {
        match
        for path in SPEC.glob("*.md")
        for match in re.findall(r"^#+ (\d+(?:\.\d+)*)\.? ", path.read_text("utf-8"), re.M)
    }
    for path in SPEC.glob("[0-9]*.md"):
        for named in re.findall(r"\((\d+\.\d+(?:\.\d+)?)(?: [a-z][^)]*| C\d+)?\)", path.read_text("utf-8")):
            assert named in heads, f"{path.name} names {named}"
