"""Asking WebHDFS: bounded waits, new tries, other DataNodes, one kind of error. The door to pyhdfs.

What pyhdfs leaves to its caller is mended here: the DataNode's part of a request has no time limit and is never tried
again, and errors arrive as classes of four packages.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies

from deltastore.errors import Backend, MissingDependency
from deltastore.tiers.hdfs_errors import PASSING, UNANSWERED, Trouble, read_trouble

T = TypeVar("T")

Request: TypeAlias = Callable[[Any, dict[str, str]], T]
"""Gets a pyhdfs client and further parameters for the DataNode's step: which ones not to choose again."""

_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class HdfsOptions:
    """How an HDFS is asked."""

    user_name: str | None = None
    """Who we are where security is off; HADOOP_USER_NAME or the user of this process by default."""
    requests_session: Any = None
    """A ``requests`` session with what the cluster asks for: Kerberos, certificates, proxies. All threads use it."""
    connect_seconds: float = 20.0
    """Limit for connecting and for each single send: a DataNode may stall for less."""
    read_seconds: float = 60.0
    """Limit for each wait for an answer."""
    patience_seconds: float = 60.0
    """How long a request that failed is tried again: a NameNode starts, a DataNode is replaced."""
    block_bytes: int = 128 << 20
    replication: int | None = None
    """Copies of each file; the cluster's own number by default."""


class HdfsConnection:
    """One HDFS, asked through any of its NameNodes. Thread safe; a forked child makes connections of its own."""

    def __init__(self, hosts: Sequence[str], scheme: str, options: HdfsOptions) -> None:
        try:
            self._pyhdfs = importlib.import_module("pyhdfs")
        except ImportError as error:
            raise MissingDependency(
                "hdfs:// needs the package pyhdfs: install deltastore-checkpoint[hdfs]", name="pyhdfs"
            ) from error
        pyhdfs_log = logging.getLogger("pyhdfs")
        if pyhdfs_log.level == logging.NOTSET:
            pyhdfs_log.setLevel(logging.ERROR)  # else each NameNode that is not there is logged with a stack trace
        self._hosts = list(hosts)
        self._scheme = scheme
        self.options = options
        self.where = ",".join(hosts)
        self._local = threading.local()

    @property
    def failures(self) -> int:
        """How many requests of this thread got no answer until now."""
        return self._session().failures

    def ask_or_none(self, doing: str, path: str, request: Request[T]) -> T | None:
        """Ask, and return None if the path is not there."""
        try:
            return self.ask(doing, path, request)
        except Backend as error:
            if error.errno == errno.ENOENT:
                return None
            raise

    def ask(self, doing: str, path: str, request: Request[T], *, once: bool = False) -> T:
        """Return what ``request`` returns, asking again while the trouble may pass and patience lasts.

        Errors that are not of pyhdfs and what it stands on pass as they are.

        Raises
        ------
        Backend
            With the errno that :mod:`deltastore.tiers.hdfs_errors` gives.
        """
        end: float | None = None
        pause = _FIRST_PAUSE_SECONDS
        excluded: list[str] = []
        while True:
            session = self._session()
            session.begin()
            try:
                return request(self._client(), {"excludedatanodes": ",".join(excluded)} if excluded else {})
            except Exception as error:
                trouble = read_trouble(error)
                if trouble is None:
                    raise
                if trouble.errno == UNANSWERED and session.reason:
                    trouble = Trouble(UNANSWERED, session.reason)
                end = end or time.monotonic() + self.options.patience_seconds
                if once or trouble.errno not in PASSING or time.monotonic() + pause > end:
                    raise self.error(doing, path, trouble) from error
            if trouble.errno == UNANSWERED and session.data_node is not None:
                excluded.append(self._transfer_address(session.data_node))
            else:
                excluded.clear()  # perhaps there was no other one left
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _transfer_address(self, address: str) -> str:
        """Return the only name of a DataNode that ``excludedatanodes`` takes: its IP and data transfer port."""
        host, _, port = address.rpartition(":")
        with contextlib.suppress(OSError):
            host = socket.gethostbyname(host)
        with contextlib.suppress(Exception):  # the page may be closed to us: then the IP alone, and all that run there
            page = f"{self._scheme}://{self._client().hosts[0]}/jmx?qry=Hadoop:service=NameNode,name=NameNodeInfo"
            nodes = json.loads(self._session().request("get", page).json()["beans"][0]["LiveNodes"])
            for node in nodes.values():
                if f"{host}:{port}" in (node["infoAddr"], node["infoSecureAddr"]):
                    return str(node["xferaddr"])
        return host

    def error(self, doing: str, path: str, trouble: Trouble) -> Backend:
        """Return the error for a request that failed."""
        transient = trouble.errno in (*PASSING, errno.ENOSPC, errno.EDQUOT)
        return Backend(
            f"HDFS {self.where}: {doing} {path}: {trouble.text}", errno=trouble.errno, transient=transient, file=path
        )

    def _session(self) -> TimedSession:
        return self._of_this_thread()[1]

    def _client(self) -> Any:
        return self._of_this_thread()[0]

    def _of_this_thread(self) -> tuple[Any, TimedSession]:
        # A session of requests is not made for several threads, and a forked child must not write into our sockets.
        pid = os.getpid()
        if getattr(self._local, "pid", None) != pid:
            options = self.options
            inner = options.requests_session or _new_session()
            self._local.session = TimedSession(inner, self._hosts, (options.connect_seconds, options.read_seconds))
            self._local.client = self._pyhdfs.HdfsClient(
                self._hosts,
                randomize_hosts=False,
                user_name=options.user_name,
                timeout=options.read_seconds,
                max_tries=1,
                scheme=self._scheme,
                requests_session=self._local.session,
            )
            self._local.pid = pid
        return self._local.client, self._local.session


def _new_session() -> Any:
    """Return a session of requests that asks the environment now, for certificates, proxies and passwords.

    Only where there are proxies or passwords it goes on asking at each request, which takes it milliseconds.
    """
    session = importlib.import_module("requests").Session()
    session.verify = os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE") or True
    passwords = [os.environ.get("NETRC"), "~/.netrc", "~/_netrc"]
    has_passwords = any(path and Path(path).expanduser().exists() for path in passwords)
    session.trust_env = has_passwords or bool(getproxies())
    return session


class TimedSession:
    """A session of requests whose every request has a time limit, and that knows what failed."""

    def __init__(self, inner: Any, name_nodes: Sequence[str], limits: tuple[float, float]) -> None:
        self._inner = inner
        self._name_nodes = name_nodes
        self._limits = limits
        self.failures = 0
        """Requests that got no answer."""
        self.reason = ""
        """What was wrong with the last request, if it got no answer."""
        self.data_node: str | None = None
        """The DataNode that was asked last."""

    def begin(self) -> None:
        """Forget what was asked before."""
        self.data_node, self.reason = None, ""

    def request(self, method: str, url: str, **arguments: Any) -> Any:
        """Send a request, as requests does."""
        address = urlsplit(url).netloc
        is_name_node = address in self._name_nodes
        if not is_name_node:
            self.data_node = address
        try:
            return self._inner.request(method, url, **{**arguments, "timeout": self._limits})
        except Exception as error:
            self.failures += 1
            who = (
                f"NameNode {address}"
                if is_name_node
                else f"DataNode {address}, to which the NameNode sent us (does its host name resolve here?),"
            )
            self.reason = f"{who} did not answer: {type(error).__name__}: {error}"[:500]
            raise

    def get(self, url: str, **arguments: Any) -> Any:
        """Send a GET."""
        return self.request("get", url, **arguments)

    def put(self, url: str, **arguments: Any) -> Any:
        """Send a PUT."""
        return self.request("put", url, **arguments)
