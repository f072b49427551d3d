"""One HDFS for all tests of this folder; a test that breaks it mends it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator

import pytest

from tests.hdfs.cluster import HdfsCluster, missing_tools


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HdfsCluster]:
    missing = missing_tools()
    if missing and not os.environ.get("CI"):
        pytest.skip(f"no HDFS here: {' and '.join(missing)} not installed (Java 17 and Maven start one)")
    with HdfsCluster(tmp_path_factory.mktemp("hdfs")) as running:
        yield running


@pytest.fixture
def url(cluster: HdfsCluster) -> str:
    """Return the URL of a folder on the HDFS that does not exist."""
    return cluster.url(f"tests/{secrets.token_hex(8)}/store")
