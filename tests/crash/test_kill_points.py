"""A writer is killed at every named point of its work."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from deltastore.config import Retention
from deltastore.tiers.local import LocalTier
from tests.crash._journal import Journal, check
from tests.crash._kills import Outcome, Server, go_on

COMMITS = 5
RETENTION = Retention(2, 4)

POINTS = {
    ("open_write_new", "tmp FORMAT"),
    ("writev", "tmp packs"),
    ("writev:after", "tmp packs"),
    ("fsync", "tmp packs"),
    ("fsync:after", "tmp packs"),
    ("link", "packs"),
    ("link:after", "packs"),
    ("fsync_folder", "packs"),
    ("fsync_folder:after", "packs"),
    ("unlink", "tmp packs"),
    ("unlink:after", "tmp packs"),
    ("unlink", "packs"),
    ("unlink:after", "packs"),
    ("link", "epochs"),
    ("link:after", "epochs"),
    ("fsync_folder", "epochs"),
    ("link", "FORMAT.json"),
    ("link:after", "FORMAT.json"),
    ("fsync_folder", "root"),
    ("fsync_folder", "outside"),
    ("link", "tags"),
    ("link:after", "tags"),
    ("fsync_folder", "tags"),
    ("link", "cache"),
    ("link:after", "cache"),
    ("mkdir", "packs"),
    ("pwrite", "LOCK"),
}
"""Some that must be among those that a run reaches; all that it reaches are tried."""


@pytest.mark.slow
def test_every_point_of_a_run(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    missed = []
    with Server() as server:
        which, counted = _run_with_everything(server, tmp_path, seed)
        assert counted.reached.keys() >= POINTS
        for number, ((point, kind), times) in enumerate(sorted(counted.reached.items())):
            for nth in sorted({1, rng.randrange(1, times + 1)} if kind in ("packs", "tmp packs") else {1}):
                root, journal = tmp_path / f"p{number}-{nth}" / "store", Journal(seed, told_late=True)
                outcome = server.write(
                    root, journal, which, commits=COMMITS, retention=RETENTION, point=(point, kind, nth)
                )
                if not outcome.killed:  # Threads took turns in another way.
                    missed.append((point, kind, nth))
                if journal.acked or LocalTier(root).exists():
                    check(LocalTier(root), journal, RETENTION)
                go_on(root, journal, RETENTION)
    assert not [point for point in missed if point[2] == 1]


def _run_with_everything(server: Server, folder: Path, seed: int) -> tuple[int, Outcome]:
    """Return a run that is not killed and meets the most; its number gives the same run again."""
    for which in range(1000):
        root = folder / str(which) / "store"
        counted = server.write(root, Journal(seed), which, commits=COMMITS, retention=RETENTION, count=True)
        if {("unlink", "packs"), ("link", "tags")} <= counted.reached.keys():
            return which, counted
    raise AssertionError("no run has both tags and deletions")
