"""The packs of one tier: their verified tails and open files."""

from __future__ import annotations

import threading
from collections import OrderedDict

from deltastore.errors import Corruption
from deltastore.ondisk.names import parse_pack_name
from deltastore.ondisk.pack import TAIL_GUESS_BYTES, PackTail, parse_tail, tail_start
from deltastore.tiers.base import RandomFile, Tier

OPEN_FILES = 64
KEPT_TAIL_BYTES = 8 << 20
"""As they are stored; what is parsed of them takes a few times as much."""


class Packs:
    """Opens packs once and keeps them: a reader goes on reading what is deleted meanwhile.

    Thread safe. Files stay open until many newer ones were opened, or :meth:`close`.
    """

    def __init__(self, tier: Tier, store: str | None = None) -> None:
        self.tier = tier
        self.store = store
        """Id of the store that the packs must belong to; None until it is known."""
        self._lock = threading.Lock()
        self._files: OrderedDict[str, RandomFile] = OrderedDict()
        self._tails: OrderedDict[str, PackTail] = OrderedDict()
        self._tail_bytes = 0

    def file(self, name: str) -> RandomFile:
        """Return an open pack.

        Raises
        ------
        NotFound
            There is no such file.
        """
        with self._lock:
            found = self._files.get(name)
            if found is None:
                found = self._files[name] = self.tier.open(name)
                if len(self._files) > OPEN_FILES:
                    # Not closed here: another thread may still read it. It closes when the last user drops it.
                    self._files.popitem(last=False)
            self._files.move_to_end(name)
            return found

    def tail(self, name: str) -> PackTail:
        """Return the verified metadata of a pack: one suffix read, a second one where the metadata is long.

        Raises
        ------
        NotFound, Corruption, UnsupportedFormat
        """
        with self._lock:
            found = self._tails.get(name)
        if found is None:
            found = self._read_tail(name)
            with self._lock:
                self._drop_tail(name)
                self._tails[name] = found
                self._tail_bytes += len(found.tail)
                while len(self._tails) > 1 and self._tail_bytes > KEPT_TAIL_BYTES:
                    self._drop_tail(next(iter(self._tails)))
        return found

    def _drop_tail(self, name: str) -> None:
        dropped = self._tails.pop(name, None)
        self._tail_bytes -= 0 if dropped is None else len(dropped.tail)

    def _read_tail(self, name: str) -> PackTail:
        file = self.file(name)
        where = f"{self.tier.url}/{name}"
        begin = max(0, file.size - TAIL_GUESS_BYTES)
        end = file.read(begin, file.size - begin)
        start = tail_start(end, file.size, where)
        tail = end[start - begin :] if start >= begin else file.read(start, begin - start) + end
        parsed = parse_tail(tail, file.size, where)
        if self.store is not None and parsed.index.store != self.store:
            raise Corruption(
                f"{where}: belongs to store {parsed.index.store[:8]}, this is store {self.store[:8]}",
                where=where,
                expected=self.store,
                found=parsed.index.store,
            )
        about = parse_pack_name(name)
        if about is not None and about.write != parsed.index.write:
            raise Corruption(
                f"{where}: the pack has write id {parsed.index.write}, its name says {about.write}",
                where=where,
                expected=about.write,
                found=parsed.index.write,
            )
        return parsed

    def forget(self, name: str) -> None:
        """Drop what is kept of a pack that was deleted."""
        with self._lock:
            self._files.pop(name, None)
            self._drop_tail(name)

    def unlock(self) -> None:
        """Make the lock usable in a forked child, whatever the parent was doing."""
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            for file in self._files.values():
                file.close()
            self._files.clear()
            self._tails.clear()
            self._tail_bytes = 0
