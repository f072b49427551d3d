"""Bytes to values and back: pack, records, index, names, Zarr profile, limits. No module here does I/O."""
