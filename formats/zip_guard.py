"""ZIP files from strangers: what would fill the memory is refused before it is unpacked."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable

from deltastore.errors import InvalidInput

MOST_EXPANSION = 200
"""Tensors of zeros shrink more than this, but no checkpoint consists of them alone."""
UNSUSPICIOUS_BYTES = 256 << 20


def check_expansion(entries: Iterable[zipfile.ZipInfo], path: str) -> None:
    """Raise InvalidInput for a file that would unpack to many times its size."""
    entries = list(entries)
    packed, unpacked = sum(entry.compress_size for entry in entries), sum(entry.file_size for entry in entries)
    if unpacked > UNSUSPICIOUS_BYTES and unpacked > MOST_EXPANSION * packed:
        raise InvalidInput(
            f"{path}: {packed:,} bytes would unpack to {unpacked:,}, as a ZIP bomb does; nothing was unpacked. "
            "If you trust its writer, unpack it and save it again without compression",
            path=path,
            found=unpacked,
        )
