"""Memory of staged states: aligned, zeroed, used again for the same layout only."""

from __future__ import annotations

import threading
from itertools import pairwise

import numpy as np
import pytest

from deltastore.buffers import BufferPool, allocate
from deltastore.dtypes import LOGICAL, storage_dtype
from deltastore.layout import FORWARD, Layout, LayoutInput, Partition, plan

ALL = Layout((), tuple(Partition(7 + i, dtype, 63 + i, "param", FORWARD, None) for i, dtype in enumerate(LOGICAL)))


def test_buffers_are_zero_page_aligned_and_apart() -> None:
    buffers = allocate(ALL)
    assert list(buffers) == [partition.id for partition in ALL.partitions]
    ends = []
    for partition in ALL.partitions:
        values = buffers[partition.id]
        assert (values.dtype, values.shape) == (storage_dtype(partition.dtype), (partition.length,))
        assert values.flags.c_contiguous
        assert values.flags.writeable
        assert values.ctypes.data % 4096 == 0
        assert not values.view(np.uint8).any()
        ends.append((values.ctypes.data, values.ctypes.data + values.nbytes))
    ends.sort()
    assert all(before[1] <= after[0] for before, after in pairwise(ends))


def test_a_layout_without_partitions_has_no_buffers() -> None:
    assert allocate(Layout((), ())) == {}
    pool = BufferPool()
    layout = Layout((), ())
    pool.give(layout, pool.take(layout))
    assert pool.take(layout) == {}


def test_a_set_is_used_again_as_it_was_left() -> None:
    pool = BufferPool()
    first = pool.take(ALL)
    first[7][3] = 1
    other = pool.take(ALL)
    assert other is not first
    pool.give(ALL, first)
    again = pool.take(ALL)
    assert again is first
    assert again[7][3] == 1  # every element of a tensor is written anyway; only holes are never touched


def test_a_set_of_another_layout_is_not_used_again() -> None:
    pool = BufferPool()
    first = pool.take(ALL)
    equal = Layout((), ALL.partitions)
    assert pool.take(equal) is not first
    pool.give(ALL, first)  # comes back late, from the background
    assert pool.take(equal) is not first
    pool.give(equal, pool.take(equal))
    assert pool.take(ALL) is not first


def test_an_incomplete_set_is_not_kept() -> None:
    pool = BufferPool()
    buffers = pool.take(ALL)
    del buffers[7]
    pool.give(ALL, buffers)
    assert len(pool.take(ALL)) == len(ALL.partitions)


@pytest.mark.parametrize("workers", [4])
def test_no_set_is_given_to_two_threads(workers: int) -> None:
    layout = plan([LayoutInput(("a",), "float32", (8,), None, "param", "a")])
    pool = BufferPool()
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(200):
            buffers = pool.take(layout)
            buffers[0][:] = number
            if not (buffers[0] == number).all():
                wrong.append(number)
            pool.give(layout, buffers)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
