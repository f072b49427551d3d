"""Commits over time: catalog, lineage, epochs, retention, verification and recovery, on any tier."""
