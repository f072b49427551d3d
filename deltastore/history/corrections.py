"""Corrections of a commit: overlays, xors and whole partitions, read and made ready to be applied (spec 9)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from deltastore.dtypes import storage_dtype, word_dtype, words_per_element
from deltastore.errors import Corruption
from deltastore.history.chain import Link
from deltastore.history.chunks import Wanted, read_arrays
from deltastore.history.packs import Packs
from deltastore.layers.encoded import BLOCK_ELEMENTS, array_path
from deltastore.layers.overlay import Overlay, positions
from deltastore.layers.xor import apply_xor
from deltastore.layout import Partition
from deltastore.ondisk.index import ArrayIndex, storage_dtype_of
from deltastore.ondisk.records import ARRAYS_OF, FULL, OVERLAY, XOR, LayerRecord

Correction = Callable[[int, np.ndarray], None]
"""What a layer does to elements that the layers before it left: the number of the first one of these, and they."""


def fetch_layer(
    packs: Packs, partition: Partition, item: tuple[Link, LayerRecord], start: int, out: np.ndarray
) -> Correction:
    """Read what one layer has for `out`, which begins at `start`; only a full layer, the first of all, writes to it.

    The numbers of elements that the correction is called with count from `start`.
    """
    link, layer = item
    if layer.kind == XOR:
        return _fetch_xor(packs, link, partition, start, len(out))
    if layer.kind != FULL:
        return _fetch_overlay(packs, link, partition, start, len(out))
    read_arrays(packs, link, [Wanted(*array_of(link, partition, "data"), start, out)])
    return _leave


def _leave(_first: int, _out: np.ndarray) -> None:
    """Do nothing: a full layer is read into its place."""


def _fetch_xor(packs: Packs, link: Link, partition: Partition, start: int, count: int) -> Correction:
    per_element = words_per_element(partition.dtype)
    difference = np.empty(count * per_element, word_dtype(partition.dtype))
    read_arrays(packs, link, [Wanted(*array_of(link, partition, "xor"), start * per_element, difference)])

    def correct(first: int, out: np.ndarray) -> None:
        apply_xor(out, difference[first * per_element : (first + len(out)) * per_element], partition.dtype)

    return correct


def _fetch_overlay(packs: Packs, link: Link, partition: Partition, start: int, count: int) -> Correction:
    first, last = start // BLOCK_ELEMENTS, -(-(start + count) // BLOCK_ELEMENTS)
    overlay = _read_overlay(packs, link, partition, first, last)
    where = f"{link.tail.where}, {array_path(link.record.id, partition.id, 'gaps')}"
    places = positions(overlay, first, partition.length, where)

    def correct(first: int, out: np.ndarray) -> None:
        begin = start + first
        low, high = np.searchsorted(places, (begin, begin + len(out)))
        out[places[low:high] - begin] = overlay.values[low:high]

    return correct


def _read_overlay(packs: Packs, link: Link, partition: Partition, first: int, last: int) -> Overlay:
    """Return the blocks first..last of an overlay."""
    arrays = [array_of(link, partition, name) for name in ARRAYS_OF[OVERLAY]]
    if all(len(array.chunks) == 1 for _path, array in arrays):
        # All of them are needed, and they lie side by side: one request.
        indptr, gaps, values = read_values(packs, link, [(*array, 0, array[1].spec.length) for array in arrays])
        indptr = indptr[first : last + 1]
        begin, end = _entries(link, *arrays[1], indptr)
        gaps, values = gaps[begin:end], values[begin:end]
    else:
        (indptr,) = read_values(packs, link, [(*arrays[0], first, last + 1)])
        begin, end = _entries(link, *arrays[1], indptr)
        gaps, values = read_values(packs, link, [(*array, begin, end) for array in arrays[1:]])
    return Overlay(indptr - indptr[0], gaps, values)


def read_values(packs: Packs, link: Link, parts: list[tuple[str, ArrayIndex, int, int]]) -> list[np.ndarray]:
    """Return the values start..stop of some arrays."""
    asked = [
        Wanted(path, array, start, np.empty(stop - start, storage_dtype_of(array.spec)))
        for path, array, start, stop in parts
    ]
    read_arrays(packs, link, asked)
    return [wanted.out for wanted in asked]


def _entries(link: Link, path: str, gaps: ArrayIndex, indptr: np.ndarray) -> tuple[int, int]:
    """Return which entries of an overlay belong to the blocks, before anything is allocated for them."""
    begin, end = int(indptr[0]), int(indptr[-1])
    if not begin <= end <= gaps.spec.length:
        raise Corruption(
            f"{link.tail.where}, {path}: indptr asks for the entries {begin} to {end} of {gaps.spec.length}",
            where=link.tail.where,
            entry=path,
            expected=gaps.spec.length,
            found=end,
        )
    return begin, end


def array_of(link: Link, partition: Partition, name: str) -> tuple[str, ArrayIndex]:
    """Return path and place of one of a layer's arrays, which fits the partition."""
    path = array_path(link.record.id, partition.id, name)
    array = link.tail.index.arrays.get(path)
    if array is None:
        raise Corruption(f"{link.tail.where}: array {path} of step {link.record.step} is missing", entry=path)
    length = {
        "data": partition.length,
        "xor": partition.length * words_per_element(partition.dtype),
        "indptr": -(-partition.length // BLOCK_ELEMENTS) + 1,
    }.get(name, array.spec.length)
    return path, checked_array(link, path, _dtype_of(partition.dtype, name), length)


def checked_array(link: Link, path: str, dtype: str, length: int) -> ArrayIndex:
    """Return the place of an array, which has the dtype and the length that the layout asks for."""
    array = link.tail.index.arrays.get(path)
    if array is None:
        raise Corruption(f"{link.tail.where}: array {path} of step {link.record.step} is missing", entry=path)
    if (array.spec.dtype, array.spec.length) != (dtype, length):
        raise Corruption(
            f"{link.tail.where}, {path}: {array.spec.length} values of {array.spec.dtype}, the layout asks for "
            f"{length} of {dtype}",
            entry=path,
        )
    return array


@cache
def _dtype_of(dtype: str, name: str) -> str:
    """Return the storage dtype of a layer's array, from the logical dtype of the partition."""
    if name == "xor":
        return word_dtype(dtype).name
    return {"indptr": "uint32", "gaps": "uint16"}.get(name, storage_dtype(dtype).name)
