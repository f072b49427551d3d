"""The checksum that HDFS tells of a file, computed of the bytes that were sent: nothing is read back for it.

GETFILECHECKSUM answers MD5-of-MD5-of-CRC32C. It says that the bytes arrived; it is blind to disks that rot later, for
the DataNodes answer from the CRCs that they stored.
"""

from __future__ import annotations

import hashlib
import struct

from deltastore.checksums import crc32c_of_each
from deltastore.tiers.base import Buffer, as_bytes

BYTES_PER_CRC = 512
"""What every Hadoop since 2.0 has by default."""

_DIGEST_BYTES = 16
_FIRST_BUFFER_BYTES = 32


class HdfsChecksum:
    """Takes a file's bytes in any pieces and gives its checksum.

    Parameters
    ----------
    block_bytes : int
        The block size that the file is created with.
    bytes_per_crc : int
        What the cluster's DataNodes are set to.
    """

    def __init__(self, block_bytes: int, bytes_per_crc: int = BYTES_PER_CRC) -> None:
        self._block_bytes = block_bytes
        self._bytes_per_crc = bytes_per_crc
        self._left = block_bytes
        self._tail = b""
        self._crcs = _md5()
        self._blocks: list[bytes] = []

    def update(self, data: Buffer) -> None:
        """Add the next bytes of the file."""
        view = as_bytes(data)
        while view.nbytes:
            if not self._left:
                self._blocks.append(self._end_of_block())
                self._left, self._tail, self._crcs = self._block_bytes, b"", _md5()
            part, view = view[: self._left], view[self._left :]
            self._left -= part.nbytes
            self._add(part)

    def hexdigest(self) -> str:
        """Return the 56 digits that ``bytes`` of GETFILECHECKSUM begins with."""
        if self._left == self._block_bytes:  # an empty file
            return struct.pack(">iq", 0, 0).hex() + _md5(bytes(_FIRST_BUFFER_BYTES)).hexdigest()
        blocks = [*self._blocks, self._end_of_block()]
        size = _FIRST_BUFFER_BYTES  # the server digests the whole of a buffer that it doubles as it fills
        while size < _DIGEST_BYTES * len(blocks):
            size *= 2
        crcs_per_block = -(-self._block_bytes // self._bytes_per_crc) if len(blocks) > 1 else 0
        whole = _md5(b"".join(blocks).ljust(size, b"\0")).hexdigest()
        return struct.pack(">iq", self._bytes_per_crc, crcs_per_block).hex() + whole

    def _add(self, part: memoryview) -> None:
        if self._tail:
            missing = self._bytes_per_crc - len(self._tail)
            self._tail += bytes(part[:missing])
            part = part[missing:]
            if len(self._tail) < self._bytes_per_crc:
                return
            self._crcs.update(self._pack(self._tail))
        whole = part.nbytes - part.nbytes % self._bytes_per_crc
        self._crcs.update(self._pack(part[:whole]))
        self._tail = bytes(part[whole:])

    def _pack(self, data: Buffer) -> bytes:
        crcs = crc32c_of_each(data, self._bytes_per_crc)
        return struct.pack(f">{len(crcs)}I", *crcs)

    def _end_of_block(self) -> bytes:
        digest = self._crcs.copy()
        digest.update(self._pack(self._tail))
        return digest.digest()


def _md5(data: bytes = b"") -> hashlib._Hash:
    return hashlib.md5(data, usedforsecurity=False)
