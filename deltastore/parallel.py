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

_lock = threading.Lock()
_pools: dict[int, ThreadPoolExecutor] = {}


def threads() -> int:
    """Return how many threads decode and encode: the cores of this process, at most 8."""
    return min(MAX_THREADS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def _pool() -> ThreadPoolExecutor:
    # One pool for each process: a forked child inherits the object, but not its threads.
    with _lock:
        pool = _pools.get(os.getpid())
        if pool is None:
            _pools.clear()
            pool = _pools[os.getpid()] = ThreadPoolExecutor(threads(), thread_name_prefix="deltastore")
        return pool


def run_all(function: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Return `function` of each item, computed in threads, in order; the first error is raised.

    Not to be called from `function` itself. At the end of the interpreter, when no thread can be started any more,
    the work is done in the calling thread.
    """
    work = list(items)
    if len(work) < 2 or threads() < 2:
        return [function(item) for item in work]
    try:
        futures = [_pool().submit(function, item) for item in work]
    except RuntimeError:  # the interpreter is ending
        return [function(item) for item in work]
    return [future.result() for future in futures]


def run_ahead(function: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
    """Yield `function` of each item in order, while the next few are computed in threads."""
    ahead = 2 * threads()
    futures: deque[Future[R]] = deque()
    try:
        for number, item in enumerate(items):
            try:
                futures.append(_pool().submit(function, item))
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
