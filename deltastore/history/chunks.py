"""Values of a pack's arrays, every chunk checked (spec 4.3). What lies side by side is fetched in one request."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from deltastore.errors import Corruption
from deltastore.history.chain import Link
from deltastore.history.packs import Packs
from deltastore.ondisk.codecs import CHECKSUM_BYTES, RAW, bytes_of, check_stored, decode_blosc, decode_blosc_part
from deltastore.ondisk.index import ArrayIndex, Extent, storage_dtype_of
from deltastore.tiers.base import RandomFile

MAX_GAP_BYTES = 64 << 10
"""Chunks that lie this close together are fetched in one request."""
MAX_RUN_BYTES = 32 << 20
"""Bytes of one request."""


class Wanted(NamedTuple):
    """Values of one array that are asked for: from `start` on, as many as `out` takes."""

    path: str
    array: ArrayIndex
    start: int
    out: np.ndarray
    """1-D, contiguous, the dtype of the array."""


def read_arrays(packs: Packs, link: Link, asked: Sequence[Wanted]) -> None:
    """Fill the `out` of everything that is asked of one pack.

    Raises
    ------
    Corruption
        A chunk is missing, short or damaged: never a value that was not written.
    """
    for path, array, start, out in asked:
        if start + len(out) > array.spec.length:
            raise Corruption(
                f"{link.tail.where}, {path}: {array.spec.length} values, {start + len(out)} are needed", entry=path
            )
    file = packs.file(link.pack)
    for run in _runs(place for wanted in asked for place in _places(wanted)):
        _read_run(file, link, run)


class _Place(NamedTuple):
    """A chunk, and where its elements belong in the array that is filled."""

    wanted: Wanted
    number: int
    extent: Extent
    begin: int
    end: int

    @property
    def whole(self) -> bool:
        """Whether all of the chunk's elements are wanted."""
        return self.begin >= 0 and self.end <= len(self.wanted.out)

    @property
    def end_offset(self) -> int:
        """Where the chunk ends in the file."""
        return self.extent.offset + self.extent.length


def _places(wanted: Wanted) -> Iterator[_Place]:
    """Yield the chunks that hold the elements that are wanted."""
    chunk = wanted.array.spec.chunk
    stop = wanted.start + len(wanted.out)
    for number in range(wanted.start // chunk, -(-stop // chunk) if len(wanted.out) else 0):
        begin = number * chunk - wanted.start
        yield _Place(wanted, number, wanted.array.chunks[number], begin, begin + chunk)


def _runs(places: Iterable[_Place]) -> Iterator[list[_Place]]:
    """Yield chunks gathered into requests."""
    run: list[_Place] = []
    for place in places:
        if run and not (
            0 <= place.extent.offset - run[-1].end_offset <= MAX_GAP_BYTES
            and place.end_offset - run[0].extent.offset <= MAX_RUN_BYTES
        ):
            yield run
            run = []
        run.append(place)
    if run:
        yield run


def _read_run(file: RandomFile, link: Link, run: list[_Place]) -> None:
    """Fetch neighbouring chunks in one request and decode each into its place."""
    stored: list[tuple[memoryview, memoryview]] = []
    buffers: list[memoryview] = []
    end = run[0].extent.offset
    for place in run:
        if place.extent.offset > end:
            buffers.append(memoryview(bytearray(place.extent.offset - end)))
        direct = place.wanted.array.spec.codec == RAW and place.whole
        body = (
            bytes_of(place.wanted.out[place.begin : place.end])
            if direct
            else _scratch(place.extent.length - CHECKSUM_BYTES)
        )
        stored.append((body, _scratch(CHECKSUM_BYTES)))
        buffers += stored[-1]
        end = place.end_offset
    with _named(link, run[0].wanted.path):
        file.readinto(run[0].extent.offset, buffers)
    for place, (body, appended) in zip(run, stored, strict=True):
        with _named(link, place.wanted.path):
            here = f"{link.tail.where}, {place.wanted.path}/c/{place.number}"
            check_stored(body, appended, place.extent.crc, here)
            _decode(place, body, here)


@contextlib.contextmanager
def _named(link: Link, path: str) -> Iterator[None]:
    """Say of damage which step and which array it is in."""
    try:
        yield
    except Corruption as error:
        raise Corruption(
            f"step {link.record.step} (commit {link.record.id[:12]}): {error}",
            **{**error.fields, "step": link.record.step, "where": link.tail.where, "entry": path},
        ) from error


def _decode(place: _Place, body: memoryview, where: str) -> None:
    spec = place.wanted.array.spec
    low, high = max(place.begin, 0), min(place.end, len(place.wanted.out))
    out = place.wanted.out[low:high]
    first = low - place.begin
    if spec.codec != RAW and place.whole:
        decode_blosc(body, out, where)
    elif spec.codec != RAW:
        decode_blosc_part(body, spec.chunk * spec.itemsize, first * spec.itemsize, out, where)
    elif not place.whole:
        out[:] = np.frombuffer(body, storage_dtype_of(spec))[first : first + len(out)]


def _scratch(length: int) -> memoryview:
    return memoryview(np.empty(length, np.uint8).data)
