"""One HDFS for all tests of this folder; a test that breaks it mends it."""

from __future__ import annotations

import os
import secrets
import signal
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
