"""All commits of a chain reconstructed one after the other: each layer is read once, not once for every commit."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from deltastore.dtypes import storage_dtype
from deltastore.errors import DeltaStoreError
from deltastore.history.chain import Chain, Link
from deltastore.history.corrections import fetch_layer
from deltastore.history.decode import check_partition
from deltastore.history.packs import Packs
from deltastore.history.tied import Arrays, advance_tied
from deltastore.ondisk.records import FULL


def first_fault(packs: Packs, chain: Chain) -> tuple[int, DeltaStoreError] | None:
    """Return the first commit of a chain whose reconstruction is not what its record says, by its place, and why.

    Takes the memory of the partitions that are predicted together, as they are decoded.
    """
    end, fault = len(chain.links), None
    for numbers in _groups(chain):
        reached = 0
        try:
            for link, arrays in _states(packs, chain, numbers):
                if reached == end:
                    break
                by_id = chain.layout_at(link).by_id
                for number, array in arrays.items():
                    if number in by_id:
                        check_partition(link.record, by_id[number], array)
                reached += 1
        except DeltaStoreError as error:
            end, fault = reached, error
    return None if fault is None else (end, fault)


def _groups(chain: Chain) -> list[tuple[int, ...]]:
    """Return what is decoded together, of everything that any commit of the chain has a layer of."""
    numbers = {layer.partition for link in chain.links for layer in link.record.layers}
    return sorted({chain.ties.get(number, (number,)) for number in numbers | chain.ties.keys()})


def _states(packs: Packs, chain: Chain, numbers: tuple[int, ...]) -> Iterator[tuple[Link, Arrays]]:
    """Yield each commit with the partitions of a group as it left them; the next one changes them in place."""
    if numbers[0] in chain.ties:
        yield from advance_tied(packs, chain, numbers)
        return
    arrays: Arrays = {}
    for link in chain.links:
        _advance(packs, chain, link, numbers[0], arrays)
        yield link, arrays


def _advance(packs: Packs, chain: Chain, link: Link, number: int, arrays: Arrays) -> None:
    layer = chain.layer_of(link, number)
    partition = chain.layout_at(link).by_id.get(number)
    if partition is None:
        arrays.clear()  # the state has it no more
    elif layer is not None:
        if layer.kind == FULL:
            arrays[number] = np.empty(partition.length, storage_dtype(partition.dtype))
        out = arrays[number]
        fetch_layer(packs, partition, (link, layer), 0, out)(0, out)
