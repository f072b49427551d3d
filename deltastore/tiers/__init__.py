"""Places that hold the files of a store: they know files, not formats."""
