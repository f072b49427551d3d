"""Long ranges are read by several requests, none of which is for a rest of a few bytes."""

from __future__ import annotations

import pytest

from deltastore.tiers.hdfs_file import _parts

MIB = 1 << 20


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([4 * MIB, 4], [4 * MIB + 4]),
        ([8 * MIB, 4], [4 * MIB + 2, 4 * MIB + 2]),
        ([MIB] * 9, [4.5 * MIB, 4.5 * MIB]),
        ([32 * MIB], [8 * MIB] * 4),
        ([5], [5]),
    ],
)
def test_parts_of_a_range(sizes: list[int], expected: list[float]) -> None:
    parts = list(_parts(7, [memoryview(bytes(size)) for size in sizes]))
    assert [sum(view.nbytes for view in views) for _, views in parts] == expected
    assert [offset for offset, _ in parts] == [7 + sum(expected[:number]) for number in range(len(expected))]
