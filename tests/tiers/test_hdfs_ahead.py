"""Reading ahead: the right bytes whoever reads what, and little in vain."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from deltastore.errors import Backend
from deltastore.tiers import hdfs_ahead
from deltastore.tiers.hdfs_ahead import ReadAhead

KIB = 1 << 10


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"FIRST_BYTES": 16 * KIB, "WINDOW_BYTES": 16 * KIB, "NEAR_BYTES": 64 * KIB}.items():
        monkeypatch.setattr(hdfs_ahead, name, value)


class File:
    """A file whose requests are written down; what lies behind `broken` cannot be read."""

    def __init__(self, size: int, broken: int | None = None) -> None:
        self.data = random.Random(size).randbytes(size)
        self.broken = size if broken is None else broken
        self.requests: list[tuple[int, int]] = []
        self.ahead = ReadAhead(self.fill, size)

    def fill(self, offset: int, view: memoryview) -> None:
        self.requests.append((offset, view.nbytes))
        if offset + view.nbytes > self.broken:
            raise Backend("no replica answers")
        view[:] = self.data[offset : offset + view.nbytes]

    def read(self, offset: int, length: int) -> bytes:
        """Read as a file does, in two buffers."""
        out = bytearray(length)
        views = [memoryview(out)[: length // 3], memoryview(out)[length // 3 :]]
        if not self.ahead.read(offset, views):
            self.fill(offset, memoryview(out))
        return bytes(out)


def ranges(size: int, length: int, gap: int = 100) -> Iterator[tuple[int, int]]:
    for offset in range(0, size, length + gap):
        yield offset, min(length, size - offset)


def test_who_goes_through_a_file_needs_few_requests() -> None:
    file = File(1000 * KIB)
    for offset, length in ranges(1000 * KIB, 4 * KIB):
        assert file.read(offset, length) == file.data[offset : offset + length]
    assert len(file.requests) <= 4 + 1000 // 16 + 1
    assert sum(length for _, length in file.requests) <= 1000 * KIB + 16 * KIB


def test_a_few_pieces_are_read_as_they_are() -> None:
    file = File(1000 * KIB)
    asked = [(900 * KIB, 4 * KIB), (0, 12 * KIB), (500 * KIB, 4 * KIB)]
    for offset, length in asked:
        file.read(offset, length)
    assert file.requests == asked


@pytest.mark.parametrize("broken", [None, 300 * KIB])
def test_threads_that_take_turns_get_the_right_bytes(broken: int | None) -> None:
    file = File(800 * KIB, broken)
    wanted = [*ranges(800 * KIB, 5 * KIB), *random.Random(1).sample([*ranges(800 * KIB, 9 * KIB)], 40)]

    def read(item: tuple[int, int]) -> bool:
        offset, length = item
        try:
            return file.read(offset, length) == file.data[offset : offset + length]
        except Backend:
            return offset + length > file.broken

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, wanted))


def test_a_forked_child_fetches_for_itself() -> None:
    file = File(400 * KIB)
    for offset, length in ranges(100 * KIB, 4 * KIB):
        file.read(offset, length)
    child = os.fork()
    if child == 0:
        same = all(file.read(at, count) == file.data[at : at + count] for at, count in ranges(400 * KIB, 4 * KIB))
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_all_files_together_have_so_much_memory() -> None:
    files = [File(600 * KIB) for _ in range(9)]
    held = []
    for offset, length in ranges(400 * KIB, 4 * KIB):  # a chain over several packs: all are gone through at once
        for file in files:
            assert file.read(offset, length) == file.data[offset : offset + length]
            held.append(sum(one.ahead.held for one in files))
    assert hdfs_ahead.WINDOWS <= max(held) <= hdfs_ahead.MOST_WINDOWS
    last = File(600 * KIB)
    for offset, length in ranges(600 * KIB, 4 * KIB):  # what is open, but not read any more, gives way
        assert last.read(offset, length) == last.data[offset : offset + length]
    assert len(last.requests) <= 4 + 600 // 16 + 1
    assert sum(one.ahead.held for one in (*files, last)) <= hdfs_ahead.MOST_WINDOWS
