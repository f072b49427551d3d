"""Elements of a partition from its layers (spec 9)."""

from __future__ import annotations

import numpy as np

from deltastore.errors import Corruption
from deltastore.history.chain import Chain, Link
from deltastore.history.corrections import Correction, fetch_layer
from deltastore.history.packs import Packs
from deltastore.history.tied import read_tied
from deltastore.layers.checks import covered_crc
from deltastore.layout import Partition
from deltastore.ondisk.records import CommitRecord, LayerRecord
from deltastore.parallel import run_reads

MAX_OVERLAPPED_BYTES = 4 << 20
"""Up to this many bytes of a partition, all layers are read at once."""


def check_partition(record: CommitRecord, partition: Partition, out: np.ndarray) -> None:
    """Raise Corruption if a whole partition is not what the commit's record says."""
    check = record.check
    expected = None if check is None else check.crcs.get(partition.id)
    if check is not None and expected is not None:
        found = covered_crc(out, check.phase)
        if found != expected:
            raise Corruption(
                f"step {record.step} (commit {record.id[:12]}): the reconstruction of partition "
                f"{partition.id} has CRC-32C {found:08x}, its writer had {expected:08x}; "
                "run `deltastore verify --deep`",
                step=record.step,
                partition=partition.id,
                expected=expected,
                found=found,
            )


def read_partition(packs: Packs, chain: Chain, partition: Partition, out: np.ndarray) -> None:
    """Fill `out` with a whole partition and check it against the commit's record."""
    read_range(packs, chain, partition, 0, out)
    check_partition(chain.record, partition, out)


def read_range(packs: Packs, chain: Chain, partition: Partition, start: int, out: np.ndarray) -> None:
    """Fill `out` with the elements of a partition from `start` on, reading only the chunks that they need.

    Parameters
    ----------
    out : ndarray
        1-D, contiguous, storage dtype of the partition.
    """
    if partition.id in chain.ties:
        out[:] = read_tied(packs, chain, partition, start, start + len(out))[partition.id]
        return
    layers = chain.layers(partition.id)

    def fetch(item: tuple[Link, LayerRecord]) -> Correction:
        return fetch_layer(packs, partition, item, start, out)

    # Of a small piece every layer is a few small reads: their waiting times overlap. Large ones fill the disk alone.
    overlapped = len(layers) > 1 and out.nbytes <= MAX_OVERLAPPED_BYTES
    for correct in run_reads(fetch, layers) if overlapped else map(fetch, layers):
        correct(0, out)
