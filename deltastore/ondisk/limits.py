"""What a reader accepts before it allocates (spec 14)."""

from __future__ import annotations

MAX_INDEX_BYTES = 1 << 30
"""Decompressed bytes of a pack index."""
MAX_RECORD_BYTES = 256 << 20
"""Decompressed bytes of a commit record."""
MAX_LAYOUT_BYTES = 256 << 20
"""Decompressed bytes of a layout."""
MAX_SEALED_BYTES = 1 << 20
"""Bytes of a sealed JSON file (FORMAT.json, epochs, tags)."""
MAX_CACHE_BYTES = 256 << 20
"""Bytes of the catalog cache."""
MAX_CHUNK_BYTES = 64 << 20
"""Decoded bytes of one chunk."""
MAX_PARTITIONS = 1 << 20
MAX_PARTITION_ELEMENTS = 1 << 40
MAX_TENSORS = 1 << 22
MAX_NUMBER = 1 << 62
"""Epochs, sequences, steps, offsets."""
