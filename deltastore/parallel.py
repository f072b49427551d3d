"""Threads for work that releases the interpreter lock: decoding, encoding, copying."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

MAX_THREADS = 8
READ_THREADS = 8
"""Small reads that wait for a disk at the same time, whatever the number of cores."""
TAKEN_AHEAD = 2
"""Large things that are made while the one before them is used; each takes memory, so they are few."""

_thread = threading.local()
_lock = threading.Lock()
_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}
"""Process and kind of work -> its threads. Work of one kind may wait for that of a higher one."""

_TAKES, _WORK, _READS, _BESIDE, _BACKGROUND, _PARTS = range(6)


def threads() -> int:
    """Return how many threads decode and encode: the cores of this process, at most 8."""
    return min(MAX_THREADS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def _pool(kind: int) -> ThreadPoolExecutor:
    # Pools for each process: a forked child inherits the objects, but not their threads.
    key = os.getpid(), kind
    with _lock:
        if key not in _pools:
            for other in [other for other in _pools if other[0] != key[0]]:
                del _pools[other]
            sizes = {
                _TAKES: TAKEN_AHEAD,
                _WORK: threads(),
                _READS: READ_THREADS,
                _BESIDE: 1,
                _BACKGROUND: max(threads() - 1, 1),
                _PARTS: READ_THREADS,
            }
            _pools[key] = ThreadPoolExecutor(sizes[kind], thread_name_prefix="deltastore")
        return _pools[key]


def leave_a_core(leave: bool) -> None:
    """Say whether what this thread has run by :func:`run_all` and :func:`run_ahead` leaves one core to others."""
    _thread.kind = _BACKGROUND if leave else _WORK


def _kind() -> int:
    kind: int = getattr(_thread, "kind", _WORK)
    return kind


def run_all(function: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Return `function` of each item, computed in threads, in order; the first error is raised.

    Not to be called from `function` itself. At the end of the interpreter, when no thread can be started any more,
    the work is done in the calling thread.
    """
    work, kind = list(items), _kind()
    if len(work) < 2 or threads() < (3 if kind == _BACKGROUND else 2):
        return [function(item) for item in work]
    try:
        futures = [_pool(kind).submit(function, item) for item in work]
    except RuntimeError:  # the interpreter is ending
        return [function(item) for item in work]
    return [future.result() for future in futures]


def run_ahead(function: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
    """Yield `function` of each item in order, while the next few are computed in threads."""
    return _ahead(_kind(), 2 * threads(), function, items)


def run_reads(function: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
    """Yield `function` of each item in order, while several more wait for a disk or a network.

    May be called from the work of :func:`run_all` and :func:`run_ahead`, but not from `function` itself.
    """
    return _ahead(_READS, 2 * READ_THREADS, function, items)


def run_parts(function: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Return `function` of each part of one read, all of which wait for a network at the same time.

    May be called from all other work of this module, but not from `function` itself.
    """
    return list(_ahead(_PARTS, len(items), function, items))


def begin_part(function: Callable[..., R], *arguments: object) -> Future[R]:
    """Begin what :func:`run_parts` does for one part, and return what waits for it."""
    try:
        return _pool(_PARTS).submit(function, *arguments)
    except RuntimeError:  # the interpreter is ending
        done: Future[R] = Future()
        done.set_result(function(*arguments))
        return done


def run_before(function: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
    """Yield `function` of each item in order; while one is used, the next :data:`TAKEN_AHEAD` are made in threads.

    `function` may call all other functions of this module, but not this one.
    """
    return _ahead(_TAKES, TAKEN_AHEAD - 1, function, items)


def run_beside(function: Callable[[], object]) -> None:
    """Run a function in a thread of its own, after those that were given before; its errors are its own business."""
    try:
        _pool(_BESIDE).submit(function)
    except RuntimeError:  # the interpreter is ending
        function()


def _ahead(kind: int, ahead: int, function: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
    futures: deque[Future[R]] = deque()
    try:
        for number, item in enumerate(items):
            try:
                futures.append(_pool(kind).submit(function, item))
            except RuntimeError:  # the interpreter is ending
                yield from (future.result() for future in futures)
                yield from (function(rest) for rest in items[number:])
                futures.clear()
                return
            if len(futures) > ahead:
                yield futures.popleft().result()
        while futures:
            yield futures.popleft().result()
    finally:
        for future in futures:
            future.cancel()


def _forget_pools() -> None:
    global _lock  # noqa: PLW0603 - the parent may have held it while it forked
    _lock = threading.Lock()
    _pools.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pools)
