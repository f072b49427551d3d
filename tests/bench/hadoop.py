"""Hadoop's own client, started once: the reference for bytes on their way to and from HDFS."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.hdfs.cluster import HdfsCluster

SOURCE = Path(__file__).with_name("HadoopShell.java")


class HadoopShell:
    """``hdfs dfs`` without the start of a JVM for each command."""

    def __init__(self, cluster: HdfsCluster) -> None:
        self._log = (cluster.folder / "logs" / "shell.log").open("ab")
        self._process = subprocess.Popen(
            cluster.program(SOURCE), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )

    def run(self, *words: str) -> None:
        """Run a command, such as ``-put``, and return when it is done."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\t".join(words) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline().strip()
        if answer != "0":
            raise RuntimeError(f"hdfs dfs {' '.join(words)} answered {answer!r}, see {self._log.name}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()
        self._log.close()
