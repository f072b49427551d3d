"""What is special about files in memory: the registry and forks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deltastore.errors import Conflict
from deltastore.tiers.memory import MemoryTier

ROOT = Path(__file__).parents[2]


def test_one_place_per_name() -> None:
    first, other = MemoryTier("registry-a"), MemoryTier("registry-b")
    first.create()
    assert MemoryTier("registry-a").exists()
    assert not other.exists()
    assert first.url == "memory://registry-a"
    with first.lock({}), pytest.raises(Conflict, match=str(os.getpid())):
        MemoryTier("registry-a").lock({})
    assert first.free_bytes() is None


FORKS = """
import os, threading
from deltastore.tiers.memory import MemoryTier
tier = MemoryTier("x")
tier.create()
tier.publish_new("packs/a", [b"abc"], "s")
lock = tier.lock({})
end = threading.Event()
def work():
    while not end.is_set():
        tier.list("packs")
threads = [threading.Thread(target=work) for _ in range(2)]
for thread in threads: thread.start()
for _ in range(50):
    pid = os.fork()
    if pid == 0:
        lock.release()
        os._exit(0 if tier.read("packs/a") == b"abc" and tier.list("packs") and not lock.held() else 1)
    assert os.waitpid(pid, 0)[1] == 0
end.set()
assert lock.held()
"""


def test_forked_children_read_and_do_not_hang() -> None:
    result = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, timeout=60, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr
