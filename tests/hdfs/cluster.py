"""A real HDFS on this machine: a NameNode and DataNodes as processes, from the artifacts of Maven alone.

``python -m tests.hdfs.cluster FOLDER`` (or ``make hdfs``) starts one to play with and stops it at Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from xml.sax.saxutils import escape

HADOOP = os.environ.get("DELTASTORE_HADOOP", "3.5.0")
SLF4J = "1.7.36"  # what slf4j-api resolves to in Hadoop 3.3 to 3.5
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deltastore-tests"
READY_SECONDS = 90.0

_ARTIFACTS = [
    *(("org.apache.hadoop", name) for name in ("hadoop-hdfs", "hadoop-hdfs-client", "hadoop-common", "hadoop-auth")),
    ("org.slf4j", "slf4j-reload4j"),
]
_OPENS = (
    "java.io java.lang java.lang.reflect java.math java.net java.text java.util java.util.concurrent java.util.zip "
    "sun.security.util sun.security.x509"
)
_LOG4J = """log4j.rootLogger=INFO,c
log4j.appender.c=org.apache.log4j.ConsoleAppender
log4j.appender.c.target=System.err
log4j.appender.c.layout=org.apache.log4j.PatternLayout
log4j.appender.c.layout.ConversionPattern=%d{ISO8601} %p %c{2}: %m%n
"""
# Small blocks, and failures that are noticed in seconds instead of minutes.
_SETTINGS: Mapping[str, Any] = {
    "dfs.heartbeat.interval": 1,
    "dfs.namenode.heartbeat.recheck-interval": 2000,
    "dfs.client.socket-timeout": 3000,  # of a DataNode that reads from or writes to another
    "dfs.namenode.safemode.extension": 0,
    "dfs.namenode.fs-limits.min-block-size": 65536,
    "dfs.blocksize": 1048576,
    "dfs.client.block.write.replace-datanode-on-failure.policy": "NEVER",
    "dfs.namenode.resource.du.reserved": 1048576,
    "dfs.datanode.du.reserved": 0,
    "dfs.namenode.datanode.registration.ip-hostname-check": "false",
    # Else the DataNode sleeps 400 ms at the end of many small files.
    "dfs.client.block.write.locateFollowingBlock.initial.delay.ms": 20,
}


_NAMENODE = "org.apache.hadoop.hdfs.server.namenode.NameNode"
_DATANODE = "org.apache.hadoop.hdfs.server.datanode.DataNode"
_SMALL_JVM = ("-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")

FETCH_SECONDS = 240


def require_tools() -> None:
    """Raise RuntimeError if a program that an HDFS needs is not installed."""
    missing = [tool for tool in ("java", "mvn") if shutil.which(tool) is None]
    if missing:
        raise RuntimeError(f"{' and '.join(missing)} not installed (Java 17 and Maven start one)")


def fetch_jars(version: str = HADOOP) -> Path:
    """Return the folder with Hadoop's jars; Maven fetches them the first time, and never again."""
    folder = CACHE / f"hadoop-{version}"
    if folder.exists():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    building = CACHE / f"hadoop-{version}.{os.getpid()}"  # two runs may fetch at the same time
    building.mkdir()
    dependencies = "".join(
        f"<dependency><groupId>{group}</groupId><artifactId>{name}</artifactId>"
        f"<version>{version if group.endswith('hadoop') else SLF4J}</version></dependency>"
        for group, name in _ARTIFACTS
    )
    pom = building / "pom.xml"
    pom.write_text(
        '<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion><groupId>t</groupId>'
        "<artifactId>hdfs-for-tests</artifactId><version>1</version><packaging>pom</packaging>"
        f"<dependencies>{dependencies}</dependencies></project>"
    )
    command = ["mvn", "-q", "-B", "-f", str(pom), "dependency:copy-dependencies", "-DincludeScope=runtime"]
    try:
        command = [*command, f"-DoutputDirectory={building}"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=FETCH_SECONDS)
        for second_binding in [*building.glob("slf4j-log4j12-*"), *building.glob("log4j-1.2.*")]:
            second_binding.unlink()  # Hadoop 3.3 brings another one along
        with contextlib.suppress(OSError):  # the other run was faster
            building.rename(folder)
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"Maven could not fetch Hadoop {version}: {error.stdout}{error.stderr}") from error
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"Maven did not fetch Hadoop {version} within {FETCH_SECONDS} s") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return folder


def free_ports() -> Iterator[int]:
    """Yield free ports below those that the kernel hands out, so that a restarted server finds its own again."""
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    start = 10000 + (os.getpid() * 7919) % max(1, low - 12000)
    for port in itertools.chain(range(start, low), range(10000, start)):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            yield port


class HdfsCluster:
    """One NameNode ("nn") and some DataNodes ("dn0", "dn1", ...); a context manager that starts and stops them.

    Start them from the main thread: they end with the thread that started them, so that none is left behind.
    """

    def __init__(
        self,
        folder: Path,
        version: str = HADOOP,
        datanodes: int = 2,
        settings: Mapping[str, Any] = {},
        jvm: Sequence[str] = _SMALL_JVM,
    ) -> None:
        self.folder = folder.absolute()
        self.datanodes = datanodes
        self._settings = settings
        self._jvm = jvm
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._jars = fetch_jars(version)
        ports = free_ports()
        self.rpc_port, self._http = next(ports), next(ports)
        self._datanode_ports = [[next(ports) for _ in range(3)] for _ in range(datanodes)]
        self.host = f"127.0.0.1:{self._http}"
        """Where the NameNode answers HTTP: what stands in a URL of deltastore."""
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)

    def url(self, path: str) -> str:
        """Return the URL of a folder, as users of deltastore write it."""
        return f"hdfs://{self.host}/{path}"

    def start(self) -> Self:
        """Format, start everything, and return when files can be written."""
        for old in ("nn", "tmp", *(f"dn{number}" for number in range(self.datanodes))):
            shutil.rmtree(self.folder / old, ignore_errors=True)
        format_ = [*self._command("nn", {}, _NAMENODE), "-format", "-force", "-nonInteractive"]
        done = subprocess.run(format_, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the NameNode could not be formatted: {done.stderr[-2000:]}")
        try:
            self.start_namenode()
            for number in range(self.datanodes):
                self.start_datanode(number)
            self.wait()
        except BaseException:
            self.stop()
            raise
        return self

    def start_namenode(self) -> None:
        """Start the NameNode, or start it again."""
        self._spawn("nn", self._command("nn", {}, _NAMENODE))

    def start_datanode(self, number: int) -> None:
        """Start a DataNode, or start it again."""
        data, http, ipc = self._datanode_ports[number]
        who = f"dn{number}"
        settings = {
            "dfs.datanode.address": f"127.0.0.1:{data}",
            "dfs.datanode.http.address": f"127.0.0.1:{http}",
            "dfs.datanode.ipc.address": f"127.0.0.1:{ipc}",
            "dfs.datanode.hostname": "127.0.0.1",
            "dfs.datanode.data.dir": f"file://{self.folder}/{who}",
        }
        self._spawn(who, self._command(who, settings, _DATANODE))

    def who_serves(self, address: str) -> str:
        """Return which DataNode answers HTTP at ``127.0.0.1:port``."""
        ports = [http for _, http, _ in self._datanode_ports]
        return f"dn{ports.index(int(address.rpartition(':')[2]))}"

    def wait(self, live: int | None = None, *, writable: bool = True) -> None:
        """Wait until so many DataNodes (default: all) are live, and safe mode is off unless `writable` is false."""
        expected = self.datanodes if live is None else live
        end = time.monotonic() + READY_SECONDS
        while True:
            for who, process in self.processes.items():
                if process.poll() is not None:
                    raise RuntimeError(f"{who} ended ({process.returncode}), see {self.folder}/logs/{who}.log")
            with contextlib.suppress(OSError, ValueError, LookupError):
                off = self.jmx("NameNodeInfo")["Safemode"] == ""
                live_now = self.jmx("FSNamesystemState")["NumLiveDataNodes"]
                if live_now == expected and (off or not writable) and all(map(self._is_registered, self.processes)):
                    return
            if time.monotonic() > end:
                raise TimeoutError(f"HDFS is not ready after {READY_SECONDS} s, see {self.folder}/logs")
            time.sleep(0.1)

    def _is_registered(self, who: str) -> bool:
        """Tell whether the NameNode has heard of a DataNode since it was started."""
        if who == "nn":
            return True
        host = f"127.0.0.1:{self._datanode_ports[int(who[2:])][1]}"
        actors = json.loads(self.jmx("DataNodeInfo", "DataNode", host)["BPServiceActorInfo"])
        return all(actor["ActorState"] == "RUNNING" for actor in actors)

    def jmx(self, name: str, service: str = "NameNode", host: str | None = None) -> dict[str, Any]:
        """Return one bean of a server."""
        address = f"http://{host or self.host}/jmx?qry=Hadoop:service={service},name={name}"
        with urllib.request.urlopen(address, timeout=5) as answer:
            bean: dict[str, Any] = json.load(answer)["beans"][0]
            return bean

    def admin(self, *arguments: str) -> None:
        """Run ``hdfs dfsadmin``."""
        command = [*self._command("nn", {}, "org.apache.hadoop.hdfs.tools.DFSAdmin"), *arguments]
        subprocess.run(command, check=True, capture_output=True)

    def program(self, source: Path) -> list[str]:
        """Return the command that runs a Java source file as a client of this cluster."""
        return self._command("client", {}, str(source))

    def signal(self, who: str, number: int) -> None:
        """Send a signal: SIGSTOP stalls a server, SIGCONT lets it go on."""
        self.processes[who].send_signal(number)

    def kill(self, who: str) -> None:
        """End a server at once, as a machine that loses its power."""
        process = self.processes.pop(who)
        process.kill()
        process.wait()

    def stop(self) -> None:
        """End everything."""
        for who in list(self.processes):
            self.kill(who)

    def _command(self, who: str, settings: Mapping[str, Any], main: str) -> list[str]:
        conf = self.folder / f"conf-{who}"
        for app in ("hdfs", "datanode"):  # its HTTP servers look for these folders, which the jars do not hold
            (conf / "webapps" / app).mkdir(parents=True, exist_ok=True)
        core = {"fs.defaultFS": f"hdfs://127.0.0.1:{self.rpc_port}", "hadoop.tmp.dir": f"{self.folder}/tmp"}
        hdfs = {
            "dfs.namenode.rpc-address": f"127.0.0.1:{self.rpc_port}",
            "dfs.namenode.http-address": self.host,
            "dfs.namenode.name.dir": f"file://{self.folder}/nn",
            "dfs.replication": min(self.datanodes, 2),
            **_SETTINGS,
            **self._settings,
            **settings,
        }
        (conf / "log4j.properties").write_text(_LOG4J)
        for name, values in (("core-site.xml", core), ("hdfs-site.xml", hdfs)):
            rows = (
                f"<property><name>{k}</name><value>{escape(str(v))}</value></property>\n" for k, v in values.items()
            )
            (conf / name).write_text(f"<configuration>\n{''.join(rows)}</configuration>\n")
        return [
            *(["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []),  # gone with the tests, however
            *("java", "-XX:+IgnoreUnrecognizedVMOptions", *self._jvm),
            *(f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in _OPENS.split()),
            "-Djava.net.preferIPv4Stack=true",
            f"-Dhadoop.log.dir={self.folder}/logs",
            f"-Dhadoop.home.dir={self.folder}",
            *("-cp", f"{conf}:{self._jars}/*", main),
        ]

    def _spawn(self, who: str, command: list[str]) -> None:
        with (self.folder / "logs" / f"{who}.log").open("ab") as log:
            self.processes[who] = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def main() -> None:
    """Start an HDFS to play with."""
    parser = argparse.ArgumentParser(prog="python -m tests.hdfs.cluster", description=main.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hadoop", default=HADOOP)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with HdfsCluster(arguments.folder, arguments.hadoop) as cluster, contextlib.suppress(KeyboardInterrupt):
        print(f"A store there: deltastore.open({cluster.url('run')!r}); Ctrl-C stops the cluster.", flush=True)
        signal.pause()


if __name__ == "__main__":
    main()
