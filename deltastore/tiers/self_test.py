"""A test before anything is written: the place keeps the first of two files of one name, or it is refused."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable

from deltastore.errors import AlreadyExists, Backend
from deltastore.tiers.base import Tier


def require_first_wins(tier: Tier, remove: Callable[[str], None]) -> None:
    """Publish one name twice, and refuse the place where the second publisher wins.

    Such a place would let two writers replace each other's commits, each believing that its own is safe.

    Parameters
    ----------
    remove : callable
        Takes the file of this test away for good.

    Raises
    ------
    Backend
        It wins.
    """
    session = f"self-test-{secrets.token_hex(4)}"
    name = f"{session}.probe"
    refused = True
    try:
        tier.publish_new(name, [b"first"], session)
        with contextlib.suppress(AlreadyExists):
            tier.publish_new(name, [b"second"], session)
            refused = False
        found = tier.read(name)
    finally:
        with contextlib.suppress(Backend):
            remove(name)
            tier.end_session(session)
    if not refused or found != b"first":
        raise Backend(
            f"{tier.url}: of two files published under one name the second replaced the first; a store there could lose"
            " commits. Use a folder, HDFS, or an object store with conditional writes",
            expected="first",
            found=found[:16].decode("ascii", "replace"),
        )
