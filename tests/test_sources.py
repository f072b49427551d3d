"""How tensors are read into memory that somebody has already: checked first, with little memory of its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import deltastore
from deltastore.dtypes import storage_dtype
from deltastore.errors import Corruption
from deltastore.layout import BACKWARD, Layout, Partition, Piece, TensorEntry
from deltastore.ondisk import zarr_profile
from deltastore.parallel import threads
from deltastore.sources import read_into

LENGTH = 1000
PARTITIONS = 20


class CountingSource:
    """Partitions whose element `i` is `i`; writes down where it was asked to put them."""

    def __init__(self, unit: int) -> None:
        self._unit = unit
        self.addresses: set[int] = set()
        self.reads: list[tuple[int, int, int]] = []

    def unit(self, _partition: Partition) -> int:
        return self._unit

    def tied(self, partition: int) -> int:
        return partition

    def partition(self, partition: Partition, out: np.ndarray) -> None:
        self.elements(partition, 0, out)

    def elements(self, partition: Partition, start: int, out: np.ndarray) -> None:
        self.addresses.add(out.ctypes.data)
        self.reads.append((partition.id, start, start + len(out)))
        out[:] = np.arange(start, start + len(out), dtype=out.dtype)


def layout(*pieces: tuple[int, int]) -> Layout:
    """Return partitions that each hold tensors at the given places."""
    partitions = tuple(Partition(n, "float32", LENGTH, "param", BACKWARD, None) for n in range(PARTITIONS))
    tensors = tuple(
        TensorEntry((f"{n}.{start}",), "float32", (count,), (Piece(n, start, count),))
        for n in range(PARTITIONS)
        for start, count in pieces
    )
    return Layout(tensors, partitions)


def read(source: CountingSource, where: Layout) -> list[np.ndarray]:
    arrays = [np.zeros(entry.elements, storage_dtype(entry.dtype)) for entry in where.tensors]
    read_into(source, where, zip(where.tensors, arrays, strict=True), living=True)
    for entry, array in zip(where.tensors, arrays, strict=True):
        assert (array == np.arange(entry.elements) + entry.pieces[0].offset).all()
    return arrays


@pytest.mark.parametrize("unit", [LENGTH, 300])
@pytest.mark.parametrize("pieces", [[(0, LENGTH)], [(0, 290), (290, 700)]])
def test_living_arrays_get_what_was_read_elsewhere_in_memory_used_again(
    unit: int, pieces: list[tuple[int, int]]
) -> None:
    source, where = CountingSource(unit), layout(*pieces)
    arrays = read(source, where)
    assert source.addresses.isdisjoint(array.ctypes.data for array in arrays)
    assert len(source.addresses) <= threads()
    assert len(source.reads) == PARTITIONS * -(-LENGTH // unit)


def test_only_the_units_that_hold_something_wanted_are_read() -> None:
    source = CountingSource(100)
    read(source, layout((250, 10), (395, 10)))
    assert {(low, high) for _, low, high in source.reads} == {(200, 300), (300, 400), (400, 500)}


def test_of_a_partition_that_is_checked_as_a_whole_little_is_read_for_little() -> None:
    source = CountingSource(LENGTH)
    read(source, layout((250, 10), (395, 10)))
    assert {(low, high) for _, low, high in source.reads} == {(250, 260), (395, 405)}


def test_what_needs_no_check_goes_straight_to_its_place() -> None:
    source = CountingSource(0)
    arrays = read(source, layout((0, 290), (290, 700)))
    assert source.addresses == {array.ctypes.data for array in arrays}


@pytest.mark.parametrize("codec", ["raw", "blosc"])
def test_living_tensors_never_get_damaged_elements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str) -> None:
    monkeypatch.setattr(zarr_profile, "CHUNK_BYTES", 4096)
    weights = {"a": torch.randn(5000), "b": torch.randn(100, 100)}
    with deltastore.open(tmp_path, codec=codec) as store:
        store.commit(0, {"model": weights}).wait()
    (pack,) = (tmp_path / "packs").iterdir()
    damaged = bytearray(pack.read_bytes())
    damaged[len(damaged) // 3] ^= 1
    pack.write_bytes(damaged)
    old = {"a": torch.zeros(5000), "b": torch.zeros(100, 100)}
    with deltastore.open(tmp_path, mode="r") as store:
        state = store.at(0)["model"]
        with pytest.raises(Corruption):
            state.fill({(name,): [tensor] for name, tensor in old.items()})
    assert any(not tensor.all() for tensor in old.values())
    for name, tensor in old.items():
        assert ((tensor == 0) | (tensor == weights[name])).all()
