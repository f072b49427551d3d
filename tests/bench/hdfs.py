"""A real HDFS on this machine: flush and restore against Hadoop's own client, one tensor over the wire."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import requests
import torch

import deltastore
from deltastore.history.flush import PACK_BYTES
from deltastore.history.push import STREAMS
from deltastore.ondisk.names import PACKS
from deltastore.store import Store
from deltastore.tiers.local import LocalTier
from tests.bench.counting import UnsyncedOps
from tests.bench.hadoop import HadoopShell
from tests.bench.measure import Clock, Figure, alternate, at_least, at_most, median, ratio, shown
from tests.hdfs.cluster import HdfsCluster

MIB = 1 << 20
CHUNK_BYTES = 4 * MIB
COMMITS = 8
SERVERS = ("-Xmx1g",)
"""Of each JVM, the client's too: with all that it does to become fast."""
MEMORY = Path("/dev/shm")


def hdfs(folder: Path, quick: bool) -> list[Figure]:
    """1 GiB of random weights to HDFS and back, both clients in turns, each block on two DataNodes."""
    size = (256 if quick else 1024) * MIB
    settings = {"dfs.blocksize": PACK_BYTES, "dfs.datanode.synconclose": "true"}  # Hadoop's client asks for no sync
    with HdfsCluster(folder / "hdfs", settings=settings, jvm=SERVERS) as cluster, HadoopShell(cluster) as shell:
        many, one = folder / "many", folder / "one"
        _fill(many, size // COMMITS, COMMITS)
        _fill(one, size, 1)
        rounds = 2 if quick else 3
        figures = _flush(cluster, shell, many, rounds)
        figures += _restore(cluster, shell, many, f"{COMMITS} commits", rounds)
        figures += _restore(cluster, shell, one, "one base", rounds)
        return figures + _one_tensor(cluster, one, rounds)


def _fill(root: Path, size: int, commits: int) -> None:
    """Commit new random weights at each step: every commit is a base."""
    with Store(LocalTier(root, UnsyncedOps()), writable=True) as store:
        for step in range(commits):
            generator = torch.Generator().manual_seed(step)
            model = {
                f"{step}.w{number}": torch.randn(512, 512, generator=generator).mul_(0.02)
                for number in range(size // MIB)
            }
            store.commit(step, {"model": model}).wait()


def _flush(cluster: HdfsCluster, shell: HadoopShell, root: Path, rounds: int) -> list[Figure]:
    packs = sorted((root / PACKS).iterdir())
    size = sum(pack.stat().st_size for pack in packs)
    shell.run("-mkdir", "-p", "/theirs")

    def ours() -> Mapping[str, float]:
        url = cluster.url(f"flush/{secrets.token_hex(4)}")
        with Clock() as clock:
            report = deltastore.push(root, url)
        assert report.commits == COMMITS
        shell.run("-rm", "-r", "-skipTrash", "/flush")
        return {"wall": clock.wall, "cpu": clock.cpu}

    def theirs() -> Mapping[str, float]:
        with Clock() as clock:
            shell.run("-put", "-t", str(STREAMS), *map(str, packs), "/theirs")
        shell.run("-rm", "-r", "-skipTrash", *(f"/theirs/{pack.name}" for pack in packs))
        return {"wall": clock.wall}

    return [_compared("flush, local to HDFS", "-put", {"ours": ours, "theirs": theirs}, size, rounds)]


def _restore(cluster: HdfsCluster, shell: HadoopShell, root: Path, name: str, rounds: int) -> list[Figure]:
    place = f"restore/{root.name}"
    url = cluster.url(place)
    deltastore.push(root, url)
    packs = _packs_of(url, place)
    size = sum(info.size for info in LocalTier(root).list(PACKS))
    steps = len(packs)

    def ours() -> Mapping[str, float]:
        with Clock() as clock:
            for step in range(steps):
                with deltastore.open(url, "r") as store:
                    kept = store.at(step).to_state_dict()
                del kept
        return {"wall": clock.wall, "cpu": clock.cpu}

    def theirs() -> Mapping[str, float]:
        target = tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else root.parent)
        with Clock() as clock:
            shell.run("-get", "-t", str(STREAMS), *packs, target)
        shutil.rmtree(target)
        return {"wall": clock.wall}

    return [_compared(f"restore from HDFS, {name}", "-get", {"ours": ours, "theirs": theirs}, size, rounds)]


def _packs_of(url: str, place: str) -> list[str]:
    with deltastore.open(url, "r") as store:
        return sorted({f"/{place}/{entry.pack}" for entry in store._view.catalog.by_id.values()})


def _compared(title: str, command: str, both: Mapping[str, Any], size: int, rounds: int) -> Figure:
    for run in both.values():
        run()  # the JVMs compile what is used often
    found = alternate(both, rounds)
    value, spread = ratio(found["theirs"]["wall"], found["ours"]["wall"])
    rates: dict[str, Any] = {
        "rounds": spread,
        "MiB/s": size / median(found["ours"]["wall"]) / MIB,
        f"{command} MiB/s": size / median(found["theirs"]["wall"]) / MIB,
        "cpu s": median(found["ours"]["cpu"]),
    }
    return at_least(f"{title} / {command} with {STREAMS} streams", value, 1.2, "x", **rates)


class WireSession(requests.Session):
    """A session that counts the bytes of all answers."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.answers = 0

    def request(self, *arguments: Any, **named: Any) -> requests.Response:
        """Send a request, and count what comes back."""
        answer = super().request(*arguments, **named)
        for part in (*answer.history, answer):
            self.answers += 1
            self.bytes += int(part.headers.get("Content-Length", 0))
        return answer


def _one_tensor(cluster: HdfsCluster, root: Path, rounds: int) -> list[Figure]:
    url = cluster.url(f"restore/{root.name}")

    def read() -> Mapping[str, float]:
        with WireSession() as session:
            with deltastore.open(url, "r", storage_options={"requests_session": session}) as store:
                with Clock() as opening:
                    state = store.at("latest")
                opened, answers = session.bytes, session.answers
                with Clock() as clock:
                    tensor = state["model", "0.w100"][...]
            assert tensor.nbytes == MIB
            return {
                "wall": clock.wall, "opening": opening.wall, "opened": opened, "bytes": session.bytes - opened,
                "answers": session.answers - answers,
            }  # fmt: skip

    read()
    one = {key: median(values) for key, values in alternate({"one": read}, 3 * rounds)["one"].items()}
    detail = {"answers": one["answers"], "ms": 1e3 * one["wall"]}
    return [
        at_most(
            "one tensor of 1 MiB, over the wire", one["bytes"] / MIB, (2 * MIB + CHUNK_BYTES) / MIB, "MiB", **detail
        ),
        shown("  opening the store for it", 1e3 * one["opening"], "ms", MiB=one["opened"] / MIB),
    ]
