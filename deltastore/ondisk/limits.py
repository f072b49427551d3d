"""What a reader accepts before it allocates (spec 14)."""

from __future__ import annotations

MAX_TAIL_BYTES = 4 << 30
"""All metadata of a pack."""
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
MAX_BLOSC_OVERHEAD_BYTES = 4096
"""Stored bytes of a chunk beyond its decoded ones and a 255th of them."""
MAX_DIMENSIONS = 64
"""Of a tensor."""
MAX_PARTITIONS = 1 << 20
MAX_PARTITION_ID = (1 << 31) - 1
MAX_PARTITION_ELEMENTS = (1 << 40) - 1
MAX_ARRAY_ELEMENTS = 2 * MAX_PARTITION_ELEMENTS
"""Of an array of a pack: two words for each element of a partition at most."""
MAX_TENSORS = 1 << 22
MAX_NUMBER = (1 << 62) - 1
"""Epochs, sequences, steps, offsets."""
