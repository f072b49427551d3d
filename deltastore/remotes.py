"""The further tiers of a store: what they hold, and the movers that bring it there (spec 10.8)."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deltastore.config import TierLimits
from deltastore.errors import Backend, Corruption, Timeout
from deltastore.history.flush import PACK_BYTES
from deltastore.mover import END, FLUSH, LAG_SECONDS, STOP, Mover, failed
from deltastore.mover_process import MoverProcess
from deltastore.tiers.base import Tier

log = logging.getLogger("deltastore")

RESTARTS = 5
"""How often in a row a mover that tells nothing before it dies is started again."""
RESTART_SECONDS = 1.0
END_SECONDS = 600.0
"""How long the end of a store waits for a mover that lives in this process."""


@dataclass(frozen=True)
class RemotePlace:
    """A further tier, and what opens it in another process."""

    name: str
    """"remote", "remote:1", ..."""
    tier: Tier
    options: Mapping[str, Any] | None


class Remote:
    """One further tier: which commits it has, and its mover."""

    def __init__(self, place: RemotePlace, source: Tier, lag_seconds: float, changed: threading.Condition) -> None:
        self.name = place.name
        self.tier = place.tier
        self.present: set[str] = set()
        """Ids of the commits that it has, each with its whole chain."""
        self.broken: dict[str, str] = {}
        """What is wrong with each commit that cannot be brought there."""
        self.asked = 0
        """How often it was asked for a push."""
        self.answered = 0
        """Up to which of these everything that was at the root then is `present`, or never will be."""
        self.error: str | None = None
        """What the last attempt failed with."""
        self.is_lost = False
        """No attempt can help any more."""
        self._place = place
        self._source = source
        self._lag_seconds = lag_seconds
        self._changed = changed
        self._is_ending = False
        self._mover: Mover | None = None
        self._process: MoverProcess | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_moving(self) -> bool:
        """Whether it was begun to bring commits there: what it has is then told by the mover."""
        return self._thread is not None

    def start(self) -> None:
        """Begin to move; a second call does nothing."""
        if self.is_moving:
            return
        if _for_a_process(self._source, self._place):
            target = self._watch
        else:
            self._mover = Mover(self._source, self.tier, self._hear, lag_seconds=self._lag_seconds)
            target = self._mover.run
        self._thread = threading.Thread(target=target, name=f"deltastore-{self.name}", daemon=True)
        self._thread.start()

    def flush(self) -> int:
        """Ask for a push now, which goes on in the background; return which `answered` says that it has come."""
        with self._changed:
            self.asked += 1
            asked = self.asked
        self._tell(f"{FLUSH} {asked}")
        return asked

    def reason(self, commit: str) -> str:
        """Return why a commit cannot be brought here."""
        return self.broken.get(commit) or f"{self._source.url} holds it damaged, or not any more"

    def end(self) -> None:
        """Let the mover push what there is, then end; one of its own process does that by itself."""
        self._is_ending = True
        if self._thread is None:
            return
        if self._mover is not None:
            self._tell(END)
            self._thread.join(END_SECONDS)
            if self._thread.is_alive():
                self._tell(STOP)
                log.error("%s does not have all commits: %s", self.tier.url, self.error or "it is too slow")
            return
        if self._process is not None:
            self._process.close()

    def _tell(self, command: str) -> None:
        if self._mover is not None:
            self._mover.commands.put(command)
        if self._process is not None:
            self._process.send(command)

    def _hear(self, facts: dict[str, Any]) -> None:
        with self._changed:
            self.present.update(facts["commits"])
            if facts["answered"] is not None:
                self.answered = max(self.answered, facts["answered"])
                self.broken = facts["broken"]
            if facts["error"] is not None and facts["error"] != self.error:
                log.warning("%s does not take commits at present: %s", self.tier.url, facts["error"])
            self.error = facts["error"]
            self.is_lost = facts["is_final"]
            self._changed.notify_all()

    def _watch(self) -> None:
        """Run the mover's process, and start it again when it dies."""
        silent = 0
        while silent < RESTARTS:
            has_told = False
            with self._launch() as self._process:
                if self.asked:  # what was asked for meanwhile was told to nobody
                    self._process.send(f"{FLUSH} {self.asked}")
                if self._is_ending:
                    self._process.close()
                for report in self._process.reports():
                    has_told = True
                    self._hear(report)
            if self._is_ending or self.is_lost:
                return
            silent = 0 if has_told else silent + 1
            log.warning("the mover to %s ended with %s: it is started again", self.tier.url, self._process.returncode)
            time.sleep(RESTART_SECONDS)
        self._hear(failed(f"its mover ends before it does anything, {RESTARTS} times", is_final=True))

    def _launch(self) -> MoverProcess:
        return MoverProcess(
            {
                "source": self._source.url,
                "target": self.tier.url,
                "storage_options": self._place.options,
                "lag_seconds": self._lag_seconds,
                "pack_bytes": PACK_BYTES,
            }
        )


@dataclass(frozen=True, slots=True)
class Held:
    """What kept a commit waiting before it was taken."""

    limit: str
    seconds: float


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A commit that is only local."""

    since: float
    due: Mapping[str, int]
    """By tier: the first push that is asked for after it became durable."""


class Remotes:
    """All further tiers of a store, and the limits of what they may lack.

    Parameters
    ----------
    is_known : callable
        Says whether the store's own root has a commit.
    """

    def __init__(
        self, places: Sequence[RemotePlace], source: Tier, limits: TierLimits, is_known: Callable[[str], bool]
    ) -> None:
        self._changed = threading.Condition()
        self._limits = limits
        self._is_known = is_known
        lag = LAG_SECONDS if limits.max_lag_seconds is None else limits.max_lag_seconds / 2
        self.all = [Remote(place, source, lag, self._changed) for place in places]
        self._waiting: OrderedDict[str, _Waiting] = OrderedDict()
        """Commits of this session that a tier lacks."""
        self._lost: set[str] = set()
        """Commits of this session that a tier will never have."""

    @property
    def names(self) -> tuple[str, ...]:
        """What `wait` and `durable` know them by."""
        return tuple(remote.name for remote in self.all)

    def start(self) -> None:
        """Begin to move."""
        for remote in self.all:
            remote.start()

    def end(self) -> None:
        """Let the movers push what there is, then end."""
        for remote in self.all:
            remote.end()

    def named(self, name: str) -> Remote:
        """Return a tier by its name."""
        return next(remote for remote in self.all if remote.name == name)

    def everywhere(self) -> frozenset[str]:
        """Return the commits that every one of them has."""
        with self._changed:
            return frozenset(set.intersection(*(remote.present for remote in self.all))) if self.all else frozenset()

    def added(self, commit: str) -> None:
        """Remember a commit that is durable here."""
        if self.all:
            with self._changed:
                due = {remote.name: remote.asked + 1 for remote in self.all}
                self._waiting[commit] = _Waiting(time.monotonic(), due)

    def has(self, tier: str, commit: str | None) -> bool:
        """Return whether a tier has a commit and its chain."""
        with self._changed:
            return commit in self.named(tier).present

    def is_broken(self, commit: str | None) -> bool:
        """Return whether a commit cannot be moved, since it is damaged or gone here, or what it needs is."""
        with self._changed:
            return commit in self._lost or any(commit in remote.broken for remote in self.all)

    def wait(self, tier: str, commit: str, timeout: float | None) -> None:
        """Wait until a tier has a commit; it is pushed at once.

        Raises
        ------
        Timeout
            The time is over; it goes on.
        Backend
            The tier will never have it: it holds another store, or retention has deleted the commit here before.
        Corruption
            Nor here: it is damaged at the root, or its chain is.
        """
        remote = self.named(tier)
        end = None if timeout is None else time.monotonic() + timeout
        remote.start()
        asked = remote.flush()
        while not self._arrives(remote, commit, end, timeout):
            # Not while the condition is held: the writer takes it while it holds the lock of the view.
            if not self._is_known(commit) and not self.has(tier, commit):
                raise Backend(
                    f"commit {commit[:12]} was deleted by retention before {remote.tier.url} had it; keep more "
                    "commits (retention), or wait earlier",
                    url=remote.tier.url,
                )
            if remote.answered >= asked and not self.has(tier, commit):
                raise Corruption(
                    f"{remote.tier.url} cannot have commit {commit[:12]}: {remote.reason(commit)}; the next commit "
                    "stores the whole state again",
                    commit=commit,
                    url=remote.tier.url,
                )

    def _arrives(self, remote: Remote, commit: str, end: float | None, timeout: float | None) -> bool:
        """Return whether a tier has a commit, after a while."""
        with self._changed:
            if commit in remote.present:
                return True
            if remote.is_lost:
                raise Backend(f"{remote.tier.url}: {remote.error}", url=remote.tier.url)
            left = 1.0 if end is None else min(1.0, end - time.monotonic())
            if left <= 0:
                raise Timeout(
                    f"{remote.tier.url}: commit {commit[:12]} is not there after {timeout} s"
                    f"{'' if remote.error is None else ': ' + remote.error}; it goes on",
                    timeout=timeout,
                )
            self._changed.wait(left)
            return commit in remote.present

    def excess(self, local_bytes: int) -> tuple[str, str] | None:
        """Return which of the user's limits is passed, and how; None where all are kept."""
        limits = self._limits
        with self._changed:
            waiting = list(self._waiting)
        pruned = [commit for commit in waiting if not self._is_known(commit)]
        with self._changed:
            for commit in pruned:
                self._waiting.pop(commit, None)
            self._settle()
            count = len(self._waiting)
            age = max((time.monotonic() - waiting.since for waiting in self._waiting.values()), default=0.0)
        if limits.max_lag_steps is not None and count >= limits.max_lag_steps:
            return "max_lag_steps", f"{count} commits are only local, max_lag_steps is {limits.max_lag_steps}"
        if limits.max_lag_seconds is not None and age > limits.max_lag_seconds:
            return (
                "max_lag_seconds",
                f"a commit has been only local for {age:.0f} s, max_lag_seconds is {limits.max_lag_seconds}",
            )
        # Where all is pushed, what is left here is the newest chain: waiting would not make it smaller.
        if count and limits.max_local_bytes is not None and local_bytes > limits.max_local_bytes:
            return (
                "max_local_bytes",
                f"the local packs take {local_bytes:,} bytes, max_local_bytes is {limits.max_local_bytes:,}",
            )
        return None

    def _settle(self) -> None:
        """Count no more what every tier has, or never will; the caller holds the condition."""
        for commit, waiting in list(self._waiting.items()):
            lacking = [remote for remote in self.all if commit not in remote.present]
            if all(remote.answered >= waiting.due[remote.name] for remote in lacking):
                del self._waiting[commit]
                for remote in lacking:
                    log.error("%s cannot have commit %s: %s", remote.tier.url, commit[:12], remote.reason(commit))
                    self._lost.add(commit)

    def admit(self, local_bytes: Callable[[], int]) -> Held | None:
        """Let a commit come in while the limits are kept; else wait for the movers, or fail, as the user chose.

        Returns
        -------
        Held or None
            What kept it waiting.

        Raises
        ------
        Backend
            A limit is passed, and on_limit is "fail", or waiting cannot help.
        """
        held: Held | None = None
        begun = time.monotonic()
        while (excess := self.excess(local_bytes())) is not None:
            limit, problem = excess
            for remote in self.all:
                if remote.answered >= remote.asked:
                    remote.flush()
            errors = "; ".join(f"{remote.tier.url}: {remote.error}" for remote in self.all if remote.error)
            fault = f"{problem}{'; ' + errors if errors else ''}"
            if not self._limits.wait or any(remote.is_lost for remote in self.all):
                raise Backend(f"{fault}; make the limit larger, or see why the remote tier is slow", transient=True)
            if held is None:
                log.warning("the training waits for its remote tier: %s", fault)
            with self._changed:
                self._changed.wait(0.5)
            held = Held(limit, time.monotonic() - begun)
        return held


def _for_a_process(source: Tier, place: RemotePlace) -> bool:
    """Return whether another process can open both ends."""
    try:
        json.dumps(place.options)
    except TypeError:
        return False  # such as a session of requests
    return not any(tier.url.startswith("memory://") for tier in (source, place.tier))
