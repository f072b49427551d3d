"""Chunks: values <-> stored bytes (spec 4.3). The door to numcodecs and isal."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

import numpy as np
from isal import isal_zlib
from numcodecs import blosc

from deltastore.checksums import crc32c
from deltastore.errors import Corruption

Buffer: TypeAlias = bytes | memoryview

RAW = "raw"
BLOSC = "blosc"
CODECS = (RAW, BLOSC)

BLOSC_BLOCKSIZE = 1 << 20
CHECKSUM_BYTES = 4

_BLOSC_HEADER = struct.Struct("<BBBBIII")
_BLOSC_COPIED = 2
"""Flag of a buffer whose values were not compressed: no blocks, the bytes follow the header."""


def crc32(data: Buffer, crc: int = 0) -> int:
    """Return the CRC-32 of `data` as ZIP has it, continuing `crc`."""
    return int(isal_zlib.crc32(data, crc))


def bytes_of(values: np.ndarray) -> memoryview:
    """Return the bytes of a contiguous array without copying them."""
    return memoryview(values.reshape(-1).view(np.uint8).data)


class EncodedChunk(NamedTuple):
    """A chunk as it is stored, with the checksums that a pack needs."""

    parts: list[Buffer]
    """The encoded values and the 4 bytes of the crc32c codec."""
    crc32c: int
    """What the crc32c codec appended."""
    crc32: int
    """Of all parts, for the ZIP."""
    content_crc: int
    """CRC-32C of the decoded bytes, for the content digest."""

    @property
    def stored_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(len(part) for part in self.parts)


def encode_chunk(values: np.ndarray, codec: str) -> EncodedChunk:
    """Return one chunk as it is stored.

    Parameters
    ----------
    values : ndarray
        One whole chunk, 1-D, contiguous, little-endian. A raw chunk's part is a view of it, not a copy.
    codec : {"raw", "blosc"}
        Which chain of the profile.
    """
    if codec == RAW:
        body: Buffer = bytes_of(values)
    else:
        body = blosc.compress(
            values, b"zstd", 1, blosc.SHUFFLE, blocksize=BLOSC_BLOCKSIZE, typesize=values.dtype.itemsize
        )
    crc = crc32c(body)
    appended = struct.pack("<I", crc)
    content = crc if codec == RAW else crc32c(bytes_of(values))
    return EncodedChunk([body, appended], crc, crc32(appended, crc32(body)), content)


def check_stored(body: Buffer, appended: Buffer, expected: int, where: str) -> None:
    """Raise Corruption unless the bytes of a chunk fit its appended and its listed checksum."""
    found = crc32c(body)
    (stored,) = struct.unpack("<I", appended)
    if not found == stored == expected:
        raise Corruption(
            f"{where}: CRC-32C of the bytes is {found:08x}, the chunk says {stored:08x}, the index {expected:08x}",
            where=where,
            expected=expected,
            found=found,
        )


def decode_blosc(body: Buffer, out: np.ndarray, where: str) -> None:
    """Decode a chunk's blosc buffer into `out`, which it must fill exactly.

    Raises
    ------
    Corruption
        The header does not announce exactly `out` (checked before anything is allocated), or decoding fails.
    """
    _check_blosc(body, out.nbytes, where)
    try:
        blosc.decompress(body, out)
    except (RuntimeError, ValueError) as error:
        raise Corruption(f"{where}: blosc cannot decode the chunk ({error})", where=where) from error


def decode_blosc_part(body: Buffer, decoded_bytes: int, first: int, out: np.ndarray, where: str) -> None:
    """Decode the values from byte `first` of a chunk on into `out`: only the blocks of its blosc buffer that hold them.

    Blosc has blocks that decode alone. Those that are needed are put together as a buffer of their own.

    Raises
    ------
    Corruption
        As :func:`decode_blosc`.
    """
    _check_blosc(body, decoded_bytes, where)
    version, lz, flags, typesize, _nbytes, blocksize, _cbytes = _BLOSC_HEADER.unpack_from(body)
    last = first + out.nbytes
    if flags & _BLOSC_COPIED or not 0 < blocksize < decoded_bytes:
        whole = np.empty(decoded_bytes, np.uint8)
        decode_blosc(body, whole, where)
        bytes_of(out)[:] = whole[first:last].data
        return
    high = -(-last // blocksize)
    # The last block may be shorter, and blosc takes no buffer that is shorter than a block.
    low = min(first // blocksize, decoded_bytes // blocksize - 1)
    blocks = _blosc_blocks(body, -(-decoded_bytes // blocksize), where)[low:high]
    start = low * blocksize
    decoded = np.empty(min(high * blocksize, decoded_bytes) - start, np.uint8)
    table = _BLOSC_HEADER.size + 4 * len(blocks)
    offsets = table + np.cumsum([0, *map(len, blocks)])
    header = _BLOSC_HEADER.pack(version, lz, flags, typesize, len(decoded), blocksize, int(offsets[-1]))
    decode_blosc(b"".join([header, offsets[:-1].astype("<i4").tobytes(), *blocks]), decoded, where)
    bytes_of(out)[:] = decoded[first - start : last - start].data


def _blosc_blocks(body: Buffer, count: int, where: str) -> list[Buffer]:
    """Return the stored bytes of each block; they may lie in any order."""
    table = _BLOSC_HEADER.size + 4 * count
    starts = np.frombuffer(body, "<i4", count, _BLOSC_HEADER.size) if table <= len(body) else np.zeros(1, "<i4")
    if starts.min() < table or starts.max() > len(body):
        raise Corruption(f"{where}: the blocks of a blosc buffer lie outside of it", where=where)
    ordered = np.unique(starts)
    ends = dict(zip(ordered.tolist(), [*ordered[1:].tolist(), len(body)], strict=True))
    return [body[start : ends[start]] for start in starts.tolist()]


def _check_blosc(body: Buffer, decoded_bytes: int, where: str) -> None:
    if len(body) < _BLOSC_HEADER.size:
        raise Corruption(f"{where}: {len(body)} bytes are too short for a blosc buffer", where=where)
    _version, _lz, _flags, _typesize, nbytes, _blocksize, cbytes = _BLOSC_HEADER.unpack_from(body)
    if nbytes != decoded_bytes or cbytes != len(body):
        raise Corruption(
            f"{where}: blosc header announces {nbytes} bytes from {cbytes}, expected {decoded_bytes} from {len(body)}",
            where=where,
            expected=decoded_bytes,
            found=nbytes,
        )


def content_digest(dtype: str, length: int, piece: int, crcs: Iterable[int]) -> str:
    """Return the content digest of an array (spec 6.4).

    Parameters
    ----------
    piece : int
        Elements of a piece; the last piece is padded with zeros to this length.
    crcs : iterable of int
        CRC-32C of the decoded bytes of each piece. Where pieces are raw chunks, these are known already.
    """
    sha = hashlib.sha256(f"{dtype}:{length}:{piece}:".encode("ascii"))
    for crc in crcs:
        sha.update(struct.pack("<I", crc))
    return f"{piece}:{sha.hexdigest()}"


def digest_values(values: np.ndarray, piece: int) -> str:
    """Return the content digest of an array that is in memory."""
    crcs = []
    for start in range(0, len(values), piece):
        part = values[start : start + piece]
        missing = (piece - len(part)) * values.dtype.itemsize
        crcs.append(crc32c(bytes(missing), crc32c(bytes_of(part))))
    return content_digest(values.dtype.name, len(values), piece, crcs)
