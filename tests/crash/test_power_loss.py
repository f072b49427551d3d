"""Power loss on a disk that forgets and reorders: what was acknowledged stays, and no sync is needless."""

from __future__ import annotations

import random

import pytest

from deltastore.errors import DeltaStoreError
from tests.crash._journal import Journal
from tests.crash._power import SiteDisk, after_a_kill, check_disk, live, lives, while_retention_deletes

LIVES = 120
KILLS = 24
RETENTIONS = 12

SITES = {
    "parent of root, of one that exists": "parent of root: fsync_folder(os.path.dirname(path)) in create from claim",
    "parent of root, of one that is made": "parent of root: fsync_folder(os.path.dirname(folder)) in create from claim",
    "root folder, at each start": "root folder: fsync_folder(self.root) in create from claim",
    "FORMAT file": "FORMAT file: fsync(fd) in publish_new from _ensure_format",
    "root folder, after FORMAT": "root folder: fsync_folder(folder) in publish_new from _ensure_format",
    "epoch file": "epoch file: fsync(fd) in publish_new from next_epoch",
    "epochs folder": "epochs folder: fsync_folder(folder) in publish_new from next_epoch",
    "packs folder, before a parent is chosen": "packs folder: fsync_folder(path) in sync from next_epoch",
    "pack file": "pack file: fsync(fd) in stage from _attempt",
    "packs folder, after a pack": "packs folder: fsync_folder(folder) in publish from _attempt",
    "packs folder, between deletions": "packs folder: fsync_folder(path) in sync from delete_commits",
    "tag file": "tag file: fsync(fd) in publish_new from write_tag",
    "folder of a tag": "tag folder: fsync_folder(folder) in publish_new from write_tag",
    "tags folder": "tags folder: fsync_folder(folder) in publish_new from write_tag",
}
"""Every sync of a writer, with the line that does it."""


@pytest.mark.slow
def test_three_lives_of_a_store(seed: int) -> None:
    """Processes that are killed, or lose power, at any call: commits, tags, retention, restores and new epochs."""
    struck = sum(lives(seed + number) for number in range(LIVES))
    assert struck > 2 * LIVES  # of three per store: the test looks at deaths, not at runs that end


@pytest.mark.slow
def test_what_a_killed_process_left_unsynced_is_not_relied_on(seed: int) -> None:
    for number in range(KILLS):
        after_a_kill(KILLS * seed + number)


@pytest.mark.slow
def test_while_retention_deletes(seed: int) -> None:
    for number in range(RETENTIONS):
        while_retention_deletes(seed + number)


def test_every_sync_is_known() -> None:
    """A sync that is added to the code gets its line in the table, and thereby its mutation check."""
    sites: set[str] = set()
    for number in range(12):
        lives(number, sites=sites)
    disposable = {site for site in sites if "write_cache" in site}
    assert sites - disposable == set(SITES.values())


@pytest.mark.slow
@pytest.mark.parametrize("what", SITES)
def test_no_sync_can_be_left_out(what: str) -> None:
    """Without it, one of the tests above fails."""
    skipped = {SITES[what]}
    for number in range(60):
        for scenario in (after_a_kill, while_retention_deletes, lives):
            try:
                scenario(number, skipped)
            except (AssertionError, DeltaStoreError):
                return
    pytest.fail(f"nothing is lost without the sync of {what}: it is needless, or the tests do not see what it is for")


def test_a_store_that_was_never_closed_survives_every_crash(seed: int) -> None:
    """Many ways to lose power at one moment, the last: a run has ended, its process lives."""
    rng = random.Random(seed)
    disk, journal = SiteDisk(), Journal(seed)
    left = live(disk, journal, 0, rng, commits=6)[-1]
    for number in range(20):
        check_disk(disk.again(random.Random(number)), left.journal, None)
