"""A writer is killed 200 times at random moments, each time on what the one before left."""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deltastore.config import Retention
from deltastore.tiers.local import LocalTier
from tests.crash._journal import Journal, check
from tests.crash._kills import Server, go_on

KILLS = 200
KILLS_OF_ONE_STORE = 6
COMMITS = 5
SERVERS = 2


@pytest.mark.slow
def test_two_hundred_kills(tmp_path: Path, seed: int) -> None:
    with ThreadPoolExecutor(SERVERS) as pool:
        share = -(-KILLS // SERVERS)
        found = sum(pool.map(lambda number: kill(tmp_path, seed + number, share), range(SERVERS)), Counter[str]())
    assert found["killed"] >= KILLS
    assert found["between first acknowledgement and end"] >= KILLS // 2


def kill(folder: Path, seed: int, times: int) -> Counter[str]:
    """Kill so many writers and check after each; return how many died at which time of their lives."""
    rng = random.Random(seed)
    found: Counter[str] = Counter()
    with Server() as server:
        pace = server.write(folder / f"{seed}-pace" / "store", Journal(seed, scale=8), 0, commits=COMMITS)
        while found["killed"] < times:
            number = found["stores"]
            root, journal = folder / f"{seed}-{number}" / "store", Journal(seed + number, scale=8, told_late=True)
            retention = rng.choice([None, Retention(4), Retention(6, 5)])
            for _ in range(KILLS_OF_ONE_STORE):
                since = journal.next_serial
                after_acks = rng.choice([0, *range(1, COMMITS)])
                outcome = server.write(
                    root,
                    journal,
                    rng.randrange(2**32),
                    commits=COMMITS,
                    retention=retention,
                    after_acks=after_acks,
                    delay=rng.random() * (pace.seconds if after_acks == 0 else pace.seconds / COMMITS),
                )
                found["killed"] += outcome.killed
                within = outcome.killed and outcome.acks > 0 and not outcome.done
                found["between first acknowledgement and end"] += within
                if journal.acked or LocalTier(root).exists():
                    check(LocalTier(root), journal, retention, since=since)
            go_on(root, journal, retention)
            found["stores"] += 1
    return found
