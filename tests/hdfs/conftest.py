"""One HDFS for all tests of this folder; a test that breaks it mends it."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Iterator

import pytest

from tests.hdfs.cluster import HdfsCluster, fetch_jars, require_tools

REQUIRED = "DELTASTORE_REQUIRE_HDFS"
"""Where this is set, a machine without Java, Maven or Hadoop's jars fails the tests in place of leaving them out."""


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HdfsCluster]:
    try:
        require_tools()
        fetch_jars()
    except RuntimeError as error:
        if os.environ.get(REQUIRED):
            raise
        pytest.skip(f"no HDFS here: {error}")
    with HdfsCluster(tmp_path_factory.mktemp("hdfs")) as running:
        yield running


@pytest.fixture
def url(cluster: HdfsCluster) -> str:
    """Return the URL of a folder on the HDFS that does not exist."""
    return cluster.url(f"tests/{secrets.token_hex(8)}/store")


@pytest.fixture
def whole(cluster: HdfsCluster) -> Iterator[HdfsCluster]:
    """Give a cluster to break, and mend it afterwards."""
    yield cluster
    for who, process in list(cluster.processes.items()):
        process.send_signal(signal.SIGCONT)
        if process.poll() is not None:
            cluster.kill(who)
    if "nn" not in cluster.processes:
        cluster.start_namenode()
    for number in range(cluster.datanodes):
        if f"dn{number}" not in cluster.processes:
            cluster.start_datanode(number)
    cluster.wait()
