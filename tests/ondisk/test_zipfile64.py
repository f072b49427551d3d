"""ZIP framing: what the standard library reads from it, alignment, and offsets beyond 4 GiB."""

from __future__ import annotations

import struct
import zipfile
from io import BytesIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltastore.ondisk.codecs import crc32
from deltastore.ondisk.zipfile64 import (
    ALIGNMENT,
    DIRECTORY_ENTRY_BYTES,
    END_BYTES,
    END_SIGNATURE,
    PADDING_ID,
    ZipEntry,
    central_record,
    end_records,
    local_header,
)

names = st.from_regex(r"[a-z0-9/._]{1,80}", fullmatch=True)


@given(st.dictionaries(names, st.tuples(st.binary(max_size=100), st.booleans()), max_size=6), st.binary(max_size=50))
def test_a_zip_reader_finds_every_entry(contents: dict[str, tuple[bytes, bool]], comment: bytes) -> None:
    out = bytearray()
    entries: list[ZipEntry] = []
    for name, (data, align) in contents.items():
        header, entry = local_header(name, len(out), len(data), crc32(data), align=align)
        out += header
        assert entry.data_offset == len(out)
        assert not align or entry.data_offset % ALIGNMENT == 0
        out += data
        entries.append(entry)
    offset = len(out)
    out += b"".join(map(central_record, entries))
    ends = end_records(len(entries), offset, len(out) - offset, len(comment))
    assert len(ends) == END_BYTES
    comment = comment.replace(END_SIGNATURE, bytes(4))
    with zipfile.ZipFile(BytesIO(bytes(out + ends + comment))) as archive:
        assert archive.testzip() is None
        assert archive.comment == comment
        assert archive.namelist() == list(contents)
        for name, (data, _) in contents.items():
            info = archive.getinfo(name)
            assert archive.read(name) == data
            assert (info.compress_type, info.date_time, info.flag_bits) == (0, (1980, 1, 1, 0, 0, 0), 0)


@given(st.integers(0, 10**6), names, st.sampled_from([0, 64, 128]))
def test_an_aligned_header_holds_one_field_of_zeros_or_none(offset: int, name: str, spare: int) -> None:
    header, entry = local_header(name, offset, 5, 7, align=True, spare=spare)
    extra = header[30 + len(name) :]
    assert entry.data_offset == offset + len(header)
    assert entry.data_offset % ALIGNMENT == 0
    if extra:
        kind, size = struct.unpack_from("<HH", extra)
        assert (kind, size) == (PADDING_ID, len(extra) - 4)
        assert size > 0
        assert not any(extra[4:])
    else:
        assert not spare


def test_an_entry_behind_four_gibibytes_has_a_zip64_field() -> None:
    near, far = (ZipEntry("a", offset, 0, 1, 2) for offset in (0xFFFFFFFE, 0xFFFFFFFF))
    assert len(central_record(near)) == DIRECTORY_ENTRY_BYTES + 1
    record = central_record(far)
    assert len(record) == DIRECTORY_ENTRY_BYTES + 1 + 12
    assert struct.unpack("<HHQ", record[-12:]) == (1, 8, 0xFFFFFFFF)
    assert struct.unpack_from("<I", record, 42) == (0xFFFFFFFF,)
    assert struct.unpack_from("<HH", record, 4) == (45, 45)


@pytest.mark.parametrize(("count", "offset", "size"), [(70_000, 5, 6), (3, 1 << 40, 6), (3, 5, 1 << 33)])
def test_end_records_beyond_the_old_limits(count: int, offset: int, size: int) -> None:
    ends = end_records(count, offset, size, 44)
    assert struct.unpack_from("<QQQQ", ends, 24) == (count, count, size, offset)
    assert struct.unpack_from("<IIQI", ends, 56) == (0x07064B50, 0, offset + size, 1)
    few, found_size, found_offset, comment = struct.unpack_from("<HIIH", ends, 76 + 10)
    assert (few, comment) == (min(count, 0xFFFF), 44)
    assert (found_size, found_offset) == (min(size, 0xFFFFFFFF), min(offset, 0xFFFFFFFF))
