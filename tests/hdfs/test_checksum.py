"""The checksum that we compute is the one that a real HDFS tells."""

from __future__ import annotations

import random
import secrets

import pyhdfs
import pytest

from deltastore.tiers.hdfs_checksum import HdfsChecksum
from tests.hdfs.cluster import HdfsCluster

BLOCK = 64 << 10
SIZES = [
    *(0, 1, 511, 512, 513, 1024, 5000),
    *(count * BLOCK + more for count in (1, 2, 3, 4, 5) for more in (-1, 0, 1)),
    *(count * BLOCK for count in (8, 9)),
]


def in_pieces(data: bytes, block_bytes: int, draw: random.Random) -> str:
    checksum = HdfsChecksum(block_bytes)
    at = 0
    while at < len(data):
        size = draw.choice((1, 100, 511, 512, 513, 70_000))
        checksum.update(memoryview(data)[at : at + size])
        at += size
    return checksum.hexdigest()


@pytest.fixture(scope="module")
def client(cluster: HdfsCluster) -> pyhdfs.HdfsClient:
    return pyhdfs.HdfsClient(cluster.host, max_tries=1)


@pytest.mark.parametrize("size", SIZES)
def test_as_the_cluster_tells(client: pyhdfs.HdfsClient, size: int, seed: int) -> None:
    data = random.Random(seed).randbytes(size)
    path = f"/tests/{secrets.token_hex(8)}"
    client.create(path, data, blocksize=BLOCK)
    told = client.get_file_checksum(path).bytes
    assert told[56:] == "0" * 8
    assert in_pieces(data, BLOCK, random.Random(seed)) == told[:56]


def test_one_bit_tells(seed: int) -> None:
    data = bytearray(random.Random(seed).randbytes(3 * BLOCK + 7))
    whole = in_pieces(bytes(data), BLOCK, random.Random(seed))
    assert in_pieces(bytes(data), BLOCK, random.Random(seed + 1)) == whole
    data[2 * BLOCK] ^= 1
    assert in_pieces(bytes(data), BLOCK, random.Random(seed)) != whole
