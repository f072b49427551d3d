"""Elements of a partition from the chunks of its layers (spec 9). I/O on one side, arrays on the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from deltastore.dtypes import storage_dtype, word_dtype, words_per_element
from deltastore.errors import Corruption
from deltastore.history.chain import Chain, Link
from deltastore.history.packs import Packs
from deltastore.layers.checks import covered_crc
from deltastore.layers.encoded import BLOCK_ELEMENTS, array_path
from deltastore.layers.overlay import Overlay, positions
from deltastore.layers.xor import apply_xor
from deltastore.layout import Partition
from deltastore.ondisk.codecs import CHECKSUM_BYTES, RAW, bytes_of, check_stored, decode_blosc
from deltastore.ondisk.index import ArrayIndex, Extent, storage_dtype_of
from deltastore.ondisk.records import FULL, XOR, LayerRecord
from deltastore.parallel import run_reads

MAX_GAP_BYTES = 64 << 10
"""Chunks that lie this close together are fetched in one request."""
MAX_RUN_BYTES = 32 << 20
"""Bytes of one request."""
MAX_OVERLAPPED_BYTES = 4 << 20
"""Up to this many bytes of a partition, all layers are read at once."""


def read_partition(packs: Packs, chain: Chain, partition: Partition, out: np.ndarray) -> None:
    """Fill `out` with a whole partition and check it against the commit's record."""
    read_range(packs, chain, partition, 0, out)
    check = chain.record.check
    expected = None if check is None else check.crcs.get(partition.id)
    if check is not None and expected is not None:
        found = covered_crc(out, check.phase)
        if found != expected:
            raise Corruption(
                f"step {chain.record.step} (commit {chain.record.id[:12]}): the reconstruction of partition "
                f"{partition.id} has CRC-32C {found:08x}, its writer had {expected:08x}; "
                "run `deltastore verify --deep`",
                step=chain.record.step,
                partition=partition.id,
                expected=expected,
                found=found,
            )


def read_range(packs: Packs, chain: Chain, partition: Partition, start: int, out: np.ndarray) -> None:
    """Fill `out` with the elements of a partition from `start` on, reading only the chunks that they need.

    Parameters
    ----------
    out : ndarray
        1-D, contiguous, storage dtype of the partition.
    """
    layers = chain.layers(partition.id)

    def fetch(item: tuple[Link, LayerRecord]) -> _Correction:
        return _fetch(packs, partition, item, start, out)

    # Of a small piece every layer is a few small reads: their waiting times overlap. Large ones fill the disk alone.
    overlapped = len(layers) > 1 and out.nbytes <= MAX_OVERLAPPED_BYTES
    for correct in run_reads(fetch, layers) if overlapped else map(fetch, layers):
        correct(out)


_Correction = Callable[[np.ndarray], None]
"""What a layer does to the elements that the layers before it left."""


def _fetch(
    packs: Packs, partition: Partition, item: tuple[Link, LayerRecord], start: int, out: np.ndarray
) -> _Correction:
    """Read what one layer has for `out`; only a full layer, the first of all, writes to it."""
    link, layer = item
    if layer.kind == XOR:
        return _fetch_xor(packs, link, partition, layer, start, len(out))
    if layer.kind != FULL:
        return _fetch_overlay(packs, link, partition, layer, start, len(out))
    _read_layer(packs, link, partition, layer, "data", start, out)
    return _leave


def _leave(_out: np.ndarray) -> None:
    """Do nothing: a full layer is read into its place."""


def _fetch_xor(
    packs: Packs, link: Link, partition: Partition, layer: LayerRecord, start: int, count: int
) -> _Correction:
    per_element = words_per_element(partition.dtype)
    difference = np.empty(count * per_element, word_dtype(partition.dtype))
    _read_layer(packs, link, partition, layer, "xor", start * per_element, difference)

    def correct(out: np.ndarray) -> None:
        apply_xor(out, difference, partition.dtype)

    return correct


def _fetch_overlay(
    packs: Packs, link: Link, partition: Partition, layer: LayerRecord, start: int, count: int
) -> _Correction:
    first, last = start // BLOCK_ELEMENTS, -(-(start + count) // BLOCK_ELEMENTS)
    indptr = np.empty(last - first + 1, "<u4")
    _read_layer(packs, link, partition, layer, "indptr", first, indptr)
    begin, end = int(indptr[0]), int(indptr[-1])
    path = array_path(link.record.id, partition.id, "gaps")
    where = f"{link.tail.where}, {path}"
    entries = _array_of(link, partition, "gaps", path).spec.length
    if not begin <= end <= entries:  # before anything is allocated for them
        raise Corruption(
            f"{where}: indptr asks for the entries {begin} to {end} of {entries}",
            where=link.tail.where,
            entry=path,
            expected=entries,
            found=end,
        )
    gaps = np.empty(end - begin, "<u2")
    values = np.empty(len(gaps), storage_dtype(partition.dtype))
    _read_layer(packs, link, partition, layer, "gaps", begin, gaps)
    _read_layer(packs, link, partition, layer, "values", begin, values)
    places = positions(Overlay(indptr - indptr[0], gaps, values), first, partition.length, where)
    low, high = np.searchsorted(places, (start, start + count))

    def correct(out: np.ndarray) -> None:
        out[places[low:high] - start] = values[low:high]

    return correct


def _read_layer(
    packs: Packs, link: Link, partition: Partition, layer: LayerRecord, name: str, start: int, out: np.ndarray
) -> None:
    """Fill `out` with the values of one of a layer's arrays from `start` on."""
    if len(out):
        path = array_path(link.record.id, partition.id, name)
        read_array(packs, link, _array_of(link, partition, name, path), path, start, out)


def read_array(packs: Packs, link: Link, array: ArrayIndex, path: str, start: int, out: np.ndarray) -> None:
    """Fill `out` with the values of an array of a pack from `start` on, every chunk checked.

    Raises
    ------
    Corruption
        A chunk is missing, short or damaged: never a value that was not written.
    """
    where = f"{link.tail.where}, {path}"
    if start + len(out) > array.spec.length:
        raise Corruption(f"{where}: {array.spec.length} values, {start + len(out)} are needed", entry=path)
    file = packs.file(link.pack)
    try:
        for run in _runs(array, start, start + len(out)):
            _read_run(file.readinto, array, run, start, out, where)
    except Corruption as error:
        raise Corruption(
            f"step {link.record.step} (commit {link.record.id[:12]}): {error}",
            **{**error.fields, "step": link.record.step, "where": link.tail.where, "entry": path},
        ) from error


def _array_of(link: Link, partition: Partition, name: str, path: str) -> ArrayIndex:
    array = link.tail.index.arrays.get(path)
    if array is None:
        raise Corruption(f"{link.tail.where}: array {path} of step {link.record.step} is missing", entry=path)
    blocks = -(-partition.length // BLOCK_ELEMENTS)
    dtype = storage_dtype(partition.dtype)
    expected: tuple[np.dtype, int | None] = {
        "data": (dtype, partition.length),
        "xor": (word_dtype(partition.dtype), partition.length * words_per_element(partition.dtype)),
        "indptr": (np.dtype("<u4"), blocks + 1),
        "gaps": (np.dtype("<u2"), None),
        "values": (dtype, None),
    }[name]
    if array.spec.dtype != expected[0].name or expected[1] not in (None, array.spec.length):
        raise Corruption(
            f"{link.tail.where}, {path}: {array.spec.length} values of {array.spec.dtype}, the layout asks for "
            f"{expected[1] if expected[1] is not None else 'some'} of {expected[0].name}",
            entry=path,
        )
    return array


@dataclass(frozen=True, slots=True)
class _Place:
    """A chunk, and where its elements belong in the array that is filled."""

    number: int
    extent: Extent
    begin: int
    end: int
    whole: bool
    """All of the chunk's elements are wanted."""

    @classmethod
    def of(cls, array: ArrayIndex, number: int, start: int, wanted: int) -> _Place:
        begin = number * array.spec.chunk - start
        end = begin + array.spec.chunk
        return cls(number, array.chunks[number], begin, end, begin >= 0 and end <= wanted)


def _runs(array: ArrayIndex, start: int, stop: int) -> Iterator[list[int]]:
    """Yield the numbers of the chunks that hold elements start..stop, gathered into requests."""
    run: list[int] = []
    for number in range(start // array.spec.chunk, -(-stop // array.spec.chunk)):
        extent = array.chunks[number]
        if run:
            first, last = array.chunks[run[0]], array.chunks[run[-1]]
            gap = extent.offset - (last.offset + last.length)
            if not 0 <= gap <= MAX_GAP_BYTES or extent.offset + extent.length - first.offset > MAX_RUN_BYTES:
                yield run
                run = []
        run.append(number)
    if run:
        yield run


def _read_run(
    readinto: Callable[[int, Sequence[memoryview]], None],
    array: ArrayIndex,
    run: list[int],
    start: int,
    out: np.ndarray,
    where: str,
) -> None:
    """Fetch neighbouring chunks in one request and decode each into its place of `out`."""
    places = [_Place.of(array, number, start, len(out)) for number in run]
    bodies: list[memoryview] = []
    sums: list[memoryview] = []
    buffers: list[memoryview] = []
    end = places[0].extent.offset
    for place in places:
        if place.extent.offset > end:
            buffers.append(memoryview(bytearray(place.extent.offset - end)))
        direct = array.spec.codec == RAW and place.whole
        body = bytes_of(out[place.begin : place.end]) if direct else _scratch(place.extent.length - CHECKSUM_BYTES)
        bodies.append(body)
        sums.append(_scratch(CHECKSUM_BYTES))
        buffers += [body, sums[-1]]
        end = place.extent.offset + place.extent.length
    readinto(places[0].extent.offset, buffers)
    for place, body, appended in zip(places, bodies, sums, strict=True):
        here = f"{where}/c/{place.number}"
        check_stored(body, appended, place.extent.crc, here)
        _decode(array, place, body, out, here)


def _decode(array: ArrayIndex, place: _Place, body: memoryview, out: np.ndarray, where: str) -> None:
    if array.spec.codec == RAW:
        if place.whole:
            return
        decoded = np.frombuffer(body, storage_dtype_of(array.spec))
    elif place.whole:
        decode_blosc(body, out[place.begin : place.end], where)
        return
    else:
        decoded = np.empty(array.spec.chunk, storage_dtype_of(array.spec))
        decode_blosc(body, decoded, where)
    low, high = max(place.begin, 0), min(place.end, len(out))
    out[low:high] = decoded[low - place.begin : high - place.begin]


def _scratch(length: int) -> memoryview:
    return memoryview(np.empty(length, np.uint8).data)
