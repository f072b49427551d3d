"""Reading ahead: who goes through a file gets it in few long requests, each of which costs as much as its first MiB."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from deltastore.errors import DeltaStoreError
from deltastore.parallel import begin_part

FIRST_BYTES = 16 << 20
"""Who has read so much in a row is expected to go on: no more is read in vain than was read."""
WINDOW_BYTES = 16 << 20
WINDOWS = 4
"""On their way, or waiting to be taken."""
MOST_WINDOWS = 3 * WINDOWS
"""Of all files together."""
TAKEN_SHARE = 0.9
"""Of a window: the rest are the gaps between chunks, which nobody asks for."""
NEAR_BYTES = 64 << 20
"""Several threads take turns: a read so close to the furthest one belongs to the row."""

Fetch = Callable[[int, memoryview], None]


@dataclass(slots=True)
class _Window:
    """A long range of the file, on its way."""

    offset: int
    memory: memoryview
    data: memoryview
    """As much of the memory as the file still fills."""
    arrived: Future[None]
    users: int = 0
    taken: int = 0

    @property
    def end(self) -> int:
        """Where it ends in the file."""
        return self.offset + self.data.nbytes


class ReadAhead:
    """The next bytes of one file, fetched while the ones before are used. Thread safe.

    Parameters
    ----------
    fetch : callable
        Fills a buffer with the bytes from an offset on.
    size : int
        Bytes of the file.
    """

    def __init__(self, fetch: Fetch, size: int) -> None:
        self._fetch = fetch
        self._size = size
        self._windows: list[_Window] = []
        self._end = self._row = 0
        self._turn = 0
        """When it was read last."""

    def read(self, offset: int, views: Sequence[memoryview]) -> bool:
        """Fill flat buffers from what was fetched ahead; False if that does not hold all of it."""
        end = offset + sum(view.nbytes for view in views)
        with _shared.lock:
            self._note(offset, end)
            if self._row >= FIRST_BYTES:
                self._go_on(offset, end)
            windows = [window for window in self._windows if window.offset < end and window.end > offset]
            if not windows or windows[0].offset > offset or windows[-1].end < end:
                return False
            for window in windows:
                window.users += 1
        try:
            for window in windows:
                window.arrived.result()
            _copy(windows, offset, views)
        except DeltaStoreError:  # a request of its own says what is wrong with these bytes
            return False
        finally:
            with _shared.lock:
                for window in windows:
                    window.users -= 1
                    window.taken += min(end, window.end) - max(offset, window.offset)
                self._drop_taken()
        return True

    def close(self) -> None:
        """Forget what was fetched; what is on its way ends by itself."""
        with _shared.lock:
            self.drop()

    @property
    def held(self) -> int:
        """How many windows are kept for it."""
        return len(self._windows)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is on its way, and nobody is taking anything."""
        return not any(window.users or not window.arrived.done() for window in self._windows)

    @property
    def turn(self) -> int:
        """When it was read last, counted in reads of all files."""
        return self._turn

    def drop(self) -> None:
        """Forget what was fetched; the caller holds the lock."""
        self._windows.clear()
        self._end = self._row = 0

    def _note(self, offset: int, end: int) -> None:
        self._turn = _shared.next_turn(self)
        if not -NEAR_BYTES <= offset - self._end <= NEAR_BYTES:
            self._row, self._end = 0, 0
            self._windows.clear()
        self._row += end - offset
        self._end = max(self._end, end)

    def _go_on(self, offset: int, end: int) -> None:
        """Begin to fetch what comes next."""
        frontier = self._windows[-1].end if self._windows else offset
        if frontier < offset:
            self._windows.clear()
            frontier = offset
        ahead = sum(window.offset >= self._end for window in self._windows)
        while frontier < self._size and (frontier < end or ahead < WINDOWS):
            size = min(WINDOW_BYTES, self._size - frontier)
            memory = _shared.memory(self)
            if memory is None:
                break
            data = memory[:size]
            self._windows.append(_Window(frontier, memory, data, begin_part(self._fetch, frontier, data)))
            frontier += size
            ahead += 1
        del self._windows[: max(0, len(self._windows) - 2 * WINDOWS)]

    def _drop_taken(self) -> None:
        """Use the memory of windows again that all have passed."""
        for window in list(self._windows):
            is_passed = window.end <= self._end and window.taken >= TAKEN_SHARE * window.data.nbytes
            if is_passed and not window.users:
                self._windows.remove(window)
                if window.arrived.done():  # else it is still being filled, for an earlier one failed
                    _shared.spare = [window.memory]


class _Shared:
    """What the files that are read ahead share: a lock, and the memory, of which those read longest ago give way."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.spare: list[memoryview] = []
        """At most one window's, to be filled again."""
        self._turns = 0
        self._readers: weakref.WeakSet[ReadAhead] = weakref.WeakSet()

    def next_turn(self, reader: ReadAhead) -> int:
        """Count a read."""
        self._readers.add(reader)
        self._turns += 1
        return self._turns

    def memory(self, reader: ReadAhead) -> memoryview | None:
        """Return the memory of one more window, None where all of it is in use."""
        others = sorted((one for one in self._readers if one is not reader and one.held), key=lambda one: one.turn)
        while sum(one.held for one in self._readers) >= MOST_WINDOWS:
            idle = next((one for one in others if one.held and one.is_idle), None)
            if idle is None:
                return None
            idle.drop()
        return self.spare.pop() if self.spare else memoryview(bytearray(WINDOW_BYTES))

    def begin_in_child(self) -> None:
        """Forget everything: the threads that fetch stayed with the parent."""
        readers = list(self._readers)
        self.lock = threading.Lock()
        for reader in readers:
            reader.drop()


_shared = _Shared()
os.register_at_fork(after_in_child=_shared.begin_in_child)


def _copy(windows: Sequence[_Window], offset: int, views: Sequence[memoryview]) -> None:
    for view in views:
        for window in windows:
            low, high = max(offset, window.offset), min(offset + view.nbytes, window.end)
            if low < high:
                view[low - offset : high - offset] = window.data[low - window.offset : high - window.offset]
        offset += view.nbytes
