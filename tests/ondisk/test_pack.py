"""Packs: written as buffers, opened from their tail."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from io import BytesIO

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltastore.errors import Corruption, Internal
from deltastore.ondisk import zarr_profile
from deltastore.ondisk.codecs import CODECS, EncodedChunk, decode_blosc
from deltastore.ondisk.index import INDEX_ENTRY, layout_entry, record_entry
from deltastore.ondisk.pack import (
    PackArray,
    PackCommit,
    PackTail,
    PackWriter,
    chunk_values,
    encode_array,
    parse_tail,
    tail_start,
)
from deltastore.ondisk.zarr_profile import ArraySpec, plan_array
from tests.forge import regions

STORE, WRITE = "5" * 32, "7" * 16
COMMIT = PackCommit("a" * 32, 3, "base", b"record", "b" * 64, {"f" * 64: b"layout"})


def write(arrays: dict[str, tuple[np.ndarray, str]], commits: list[PackCommit] | None = None) -> bytes:
    writer = PackWriter(STORE, WRITE)
    out = bytearray()
    for path, (values, codec) in arrays.items():
        spec = plan_array(values.dtype, len(values), codec)
        for buffers in writer.array(PackArray(path, spec, {"layer": "full"}, encode_array(values, spec))):
            out += b"".join(buffers)
    for buffers in writer.finish([COMMIT] if commits is None else commits):
        out += b"".join(buffers)
    return bytes(out)


def open_(data: bytes) -> PackTail:
    return parse_tail(data[tail_start(data[-100:], len(data), "here") :], len(data), "here")


@given(
    st.lists(
        st.tuples(st.integers(1, 2000), st.sampled_from(["u1", "<f4", "<c16"]), st.sampled_from(CODECS)), max_size=3
    )
)
def test_what_was_written_is_found_again(found: list[tuple[int, str, str]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zarr_profile, "CHUNK_BYTES", 4096)
        arrays = {
            f"{COMMIT.id}/p{number}.data": ((np.arange(length) % 200).astype(dtype), codec)
            for number, (length, dtype, codec) in enumerate(found)
        }
        data = write(arrays)
    tail = open_(data)
    assert (tail.index.store, tail.index.write, tail.index.commits) == (STORE, WRITE, ((COMMIT.id, COMMIT.digest),))
    assert tail.blob(record_entry(COMMIT.id)) == b"record"
    assert tail.blob(layout_entry("f" * 64)) == b"layout"
    assert list(tail.index.arrays) == list(arrays) or set(tail.index.arrays) == set(arrays)
    for path, (values, codec) in arrays.items():
        array = tail.index.arrays[path]
        parts = []
        for extent in array.chunks:
            assert extent.offset % 64 == 0
            body = data[extent.offset : extent.offset + extent.length - 4]
            chunk = np.empty(array.spec.chunk, values.dtype)
            if codec == "raw":
                chunk[:] = np.frombuffer(body, values.dtype)
            else:
                decode_blosc(body, chunk, "here")
            parts.append(chunk)
        joined = np.concatenate(parts)
        assert joined[: len(values)].tobytes() == values.tobytes()
        assert not joined[len(values) :].view(np.uint8).any()
    ends = [region.stop for region in regions(data)]
    assert ends == sorted(ends)
    assert ends[-1] == len(data)


def test_a_pack_is_a_zip_in_the_order_of_the_spec() -> None:
    data = write({f"{COMMIT.id}/p0.data": (np.arange(10, dtype="<f4"), "raw")})
    with zipfile.ZipFile(BytesIO(data)) as archive:
        assert archive.testzip() is None
        assert archive.namelist() == [
            f"{COMMIT.id}/p0.data/c/0",
            "zarr.json",
            f"{COMMIT.id}/zarr.json",
            f"{COMMIT.id}/p0.data/zarr.json",
            layout_entry("f" * 64),
            record_entry(COMMIT.id),
            INDEX_ENTRY,
        ]
        assert archive.comment[:8] == b"DSPACK01"


def test_a_pack_without_arrays_and_one_of_two_commits() -> None:
    assert open_(write({})).trailer.tail_offset == 0
    second = PackCommit("c" * 32, 4, "delta", b"other", "d" * 64)
    index = open_(write({}, [COMMIT, second])).index
    assert [commit for commit, _ in index.commits] == ["a" * 32, "c" * 32]


def test_a_raw_chunk_is_a_view_and_the_last_one_is_padded() -> None:
    values = np.arange(10, dtype="<u2")
    spec = ArraySpec("uint16", 10, 4, "raw")
    assert np.shares_memory(chunk_values(values, spec, 4), values)
    assert chunk_values(values, spec, 8).tolist() == [8, 9, 0, 0]
    assert [len(chunk.parts[0]) for chunk in encode_array(values, spec)] == [8, 8, 8]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_wrong_number_of_chunks_is_a_bug(count: int) -> None:
    values = np.zeros(8, "<u2")
    spec = ArraySpec("uint16", 8, 4, "raw")

    def chunks() -> Iterator[EncodedChunk]:
        yield from list(encode_array(np.tile(values, 2), ArraySpec("uint16", 16, 4, "raw")))[:count]

    with pytest.raises(Internal, match=f"{count} chunks were written, 2 planned"):
        list(PackWriter(STORE, WRITE).array(PackArray("x", spec, None, chunks())))


def test_every_flipped_byte_of_the_tail_is_found() -> None:
    data = write({f"{COMMIT.id}/p0.data": (np.arange(10, dtype="<f4"), "raw")})
    start = open_(data).trailer.tail_offset
    for position in range(start, len(data), 3):
        changed = bytearray(data)
        changed[position] ^= 4
        with pytest.raises(Corruption):
            open_(bytes(changed))


@pytest.mark.parametrize("cut", [1, 43, 44, 45, 200])
def test_a_pack_that_was_cut_is_refused(cut: int) -> None:
    data = write({})
    with pytest.raises(Corruption):
        open_(data[:-cut])


def test_a_tail_of_another_length_is_refused() -> None:
    data = write({f"{COMMIT.id}/p0.data": (np.arange(10, dtype="<f4"), "raw")})
    start = open_(data).trailer.tail_offset
    for begin in (start - 1, start + 1):
        with pytest.raises(Corruption, match="bytes of metadata, expected"):
            parse_tail(data[begin:], len(data), "here")


def test_a_blob_that_is_missing_or_does_not_fit_is_refused() -> None:
    tail = open_(write({}))
    with pytest.raises(Corruption, match="missing"):
        tail.blob("deltastore/other")
    extent = tail.index.blobs[record_entry(COMMIT.id)]
    tail.index.blobs["x"] = extent._replace(crc=extent.crc ^ 1)
    with pytest.raises(Corruption, match="checksum"):
        tail.blob("x")


def test_a_blob_before_the_tail_is_not_read() -> None:
    tail = open_(write({f"{COMMIT.id}/p0.data": (np.arange(10, dtype="<f4"), "raw")}))
    tail.index.blobs["x"] = tail.index.blobs[record_entry(COMMIT.id)]._replace(offset=0)
    with pytest.raises(Corruption, match="missing"):
        tail.blob("x")
