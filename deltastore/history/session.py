"""A writer's claim on a store: lock, epoch, fencing (spec 11.1)."""

from __future__ import annotations

import logging
import os
import socket
from dataclasses import dataclass

from deltastore.errors import AlreadyExists, Conflict, Corruption, NotFound, UnsupportedFormat
from deltastore.ondisk.canonical import parse_sealed, seal
from deltastore.ondisk.fields import Fields
from deltastore.ondisk.index import FORMAT_MAJOR, FORMAT_MINOR
from deltastore.ondisk.limits import MAX_NUMBER, MAX_SEALED_BYTES
from deltastore.ondisk.names import (
    EPOCHS,
    FORMAT_FILE,
    PACKS,
    epoch_name,
    is_commit_id,
    new_commit_id,
    new_write_id,
    parse_epoch_name,
    parse_pack_name,
)
from deltastore.ondisk.records import now
from deltastore.tiers.base import Lock, Tier

log = logging.getLogger("deltastore")


@dataclass(frozen=True, slots=True)
class StoreFormat:
    """What FORMAT.json says."""

    store: str
    major: int
    minor: int


def read_format(tier: Tier) -> StoreFormat:
    """Return what FORMAT.json says.

    Raises
    ------
    NotFound
        There is no such file.
    UnsupportedFormat
        The store needs a newer reader.
    Corruption
        The file is damaged; the packs can still be read, for each repeats what a reader needs.
    """
    where = f"{tier.url}/{FORMAT_FILE}"
    fields = Fields(parse_sealed(tier.read(FORMAT_FILE), where, MAX_SEALED_BYTES), where)
    if fields.text("format") != "deltastore" or not is_commit_id(fields.raw("store")):
        raise fields.fault("format", "'deltastore' beside a store id")
    minimum = tuple(fields.numbers("min_reader", 2))
    if minimum > (FORMAT_MAJOR, FORMAT_MINOR):
        raise UnsupportedFormat(
            f"{where}: the store needs a reader of format {minimum[0]}.{minimum[1]}, this one reads "
            f"{FORMAT_MAJOR}.{FORMAT_MINOR}; read it with a newer deltastore",
            where=where,
            expected=minimum,
            found=(FORMAT_MAJOR, FORMAT_MINOR),
        )
    if fields.integer("major") != FORMAT_MAJOR:
        raise UnsupportedFormat(
            f"{where}: a store of format {fields.integer('major')}, this version reads {FORMAT_MAJOR}; "
            "read it with a newer deltastore",
            where=where,
            expected=FORMAT_MAJOR,
            found=fields.integer("major"),
        )
    return StoreFormat(fields.text("store"), fields.integer("major"), fields.integer("minor"))


class Session:
    """The right to write to one root, from :meth:`claim` to :meth:`close`.

    Attributes
    ----------
    store : str
        Id of the store.
    epoch : int
        Number of the present epoch; a new one is taken by :meth:`next_epoch`.
    """

    def __init__(self, tier: Tier, session: str) -> None:
        self.tier = tier
        self.id = session
        self.store = ""
        self.epoch = 0
        self._lock: Lock | None = None

    def claim(self) -> None:
        """Take the store for writing: folders, lock, FORMAT.json, leftovers, epoch, in this order.

        Raises
        ------
        Conflict
            Another writer lives.
        """
        self.tier.create()
        self._lock = self.tier.lock({"session": self.id, "host": socket.gethostname(), "pid": os.getpid()})
        try:
            self.store = self._ensure_format().store
            removed = self.tier.clean(self.id)
            if removed:
                log.info("removed what dead writers left under tmp/: %s", ", ".join(removed))
            self.next_epoch()
        except BaseException:
            self.close()
            raise

    def next_epoch(self) -> None:
        """Publish the claim of the next free epoch; must come before packs are listed to choose a parent."""
        while True:
            number = 1 + highest_epoch(self.tier)
            if number > MAX_NUMBER:
                raise Corruption(
                    f"{self.tier.url}: epoch {number - 1} is claimed, and there is no higher number; "
                    "a name below epochs/ or packs/ is wrong: remove that file",
                    found=number - 1,
                )
            claim = {
                "epoch": number,
                "session": self.id,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "claimed": now(),
                "write": new_write_id(),
            }
            try:
                self.tier.publish_new(epoch_name(number), [seal(claim)], self.id)
            except AlreadyExists:
                continue  # somebody else was faster: the loser takes the next number
            self.epoch = number
            # What is seen from here on is what the next commit builds upon: make sure that it stays.
            self.tier.sync(PACKS)
            return

    def check_fence(self) -> None:
        """Raise Conflict if a newer epoch was claimed: what was published meanwhile is not acknowledged."""
        claimed = claimed_epochs(self.tier)
        highest = max(claimed, default=0)
        if highest > self.epoch:
            raise Conflict(
                f"{self.tier.url}: epoch {highest} was claimed by another writer, this one has epoch {self.epoch}; "
                "commits that were not acknowledged may stand on a side branch; open the store again to go on",
                expected=self.epoch,
                found=highest,
            )
        if self.epoch not in claimed:
            raise Conflict(
                f"{self.tier.url}: the claim of epoch {self.epoch} is gone: somebody removed or replaced the store "
                "while it was written; open it again to go on",
                expected=self.epoch,
            )

    def _ensure_format(self) -> StoreFormat:
        try:
            return read_format(self.tier)
        except NotFound:
            if self.tier.list(PACKS):
                raise Corruption(
                    f"{self.tier.url}: packs, but no {FORMAT_FILE}: the store can be read, not written; "
                    "export what you need with `deltastore export`, or put the file back from a copy"
                ) from None
        body = {
            "format": "deltastore",
            "major": FORMAT_MAJOR,
            "minor": FORMAT_MINOR,
            "min_reader": [1, 0],
            "store": new_commit_id(),
            "created": now(),
            "write": new_write_id(),
        }
        try:
            self.tier.publish_new(FORMAT_FILE, [seal(body)], self.id)
        except AlreadyExists:
            log.debug("%s appeared meanwhile", FORMAT_FILE)
        return read_format(self.tier)

    def close(self) -> None:
        """Give the lock back; the epoch stays claimed for ever."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def read_claim(tier: Tier, number: int) -> str:
    """Return the session that claimed an epoch.

    Raises
    ------
    NotFound, Corruption
        There is no such claim, or it is damaged; it counts as a claim of its number all the same.
    """
    name = epoch_name(number)
    where = f"{tier.url}/{name}"
    try:
        fields = Fields(parse_sealed(tier.read(name), where, MAX_SEALED_BYTES), where)
    except NotFound as error:
        raise NotFound(f"{where}: commits of epoch {number}, but no claim of it", where=where) from error
    if fields.integer("epoch") != number:
        raise fields.fault("epoch", str(number))
    return fields.text("session")


def claimed_epochs(tier: Tier) -> set[int]:
    """Return the numbers of all claimed epochs."""
    numbers = (parse_epoch_name(info.name) for info in tier.list(EPOCHS))
    return {number for number in numbers if number is not None}


def highest_epoch(tier: Tier) -> int:
    """Return the highest epoch that was claimed or stands in the name of a pack; 0 on a new store."""
    packs = (parse_pack_name(info.name) for info in tier.list(PACKS))
    return max(claimed_epochs(tier) | {pack.epoch for pack in packs if pack is not None}, default=0)
