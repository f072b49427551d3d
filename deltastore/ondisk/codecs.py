"""Chunks: values <-> stored bytes (spec 4.3). The door to numcodecs, crc32c and isal."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

import numpy as np
from crc32c import crc32c as _crc32c
from isal import isal_zlib
from numcodecs import blosc

from deltastore.errors import Corruption

Buffer: TypeAlias = bytes | memoryview

RAW = "raw"
BLOSC = "blosc"
CODECS = (RAW, BLOSC)

BLOSC_BLOCKSIZE = 1 << 20
CHECKSUM_BYTES = 4

_BLOSC_HEADER = struct.Struct("<BBBBIII")


def crc32c(data: Buffer, crc: int = 0) -> int:
    """Return the CRC-32C of `data`, continuing `crc`."""
    return int(_crc32c(data, crc))


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
    if len(body) < _BLOSC_HEADER.size:
        raise Corruption(f"{where}: {len(body)} bytes are too short for a blosc buffer", where=where)
    _version, _lz, _flags, _typesize, nbytes, _blocksize, cbytes = _BLOSC_HEADER.unpack_from(body)
    if nbytes != out.nbytes or cbytes != len(body):
        raise Corruption(
            f"{where}: blosc header announces {nbytes} bytes from {cbytes}, expected {out.nbytes} from {len(body)}",
            where=where,
            expected=out.nbytes,
            found=nbytes,
        )
    try:
        blosc.decompress(body, out)
    except (RuntimeError, ValueError) as error:
        raise Corruption(f"{where}: blosc cannot decode the chunk ({error})", where=where) from error


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
