"""The adapter for plain PyTorch loops: every step of a training run becomes a commit.

This version takes the state inside :meth:`Checkpointer.step`: it is copied there, and written in the background while
the training goes on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self

from deltastore.adapters._objects import EXTRA, RNG, Capture
from deltastore.adapters._pending import Pending
from deltastore.adapters._random import restore_rng
from deltastore.adapters._selection import Pattern, Selection
from deltastore.adapters._signals import TerminationGate
from deltastore.adapters._stats import Meter, Stats, describe_layout
from deltastore.config import Policy, exact_restore_cost
from deltastore.errors import Conflict, InvalidInput, NotFound
from deltastore.handle import Commit, Handle
from deltastore.layout import Layout
from deltastore.loading import load_objects
from deltastore.loading.plan import keys_at, value_at
from deltastore.opening import open as open_store
from deltastore.reader import State
from deltastore.store import Store

__all__ = ["Checkpointer", "Stats"]

log = logging.getLogger("deltastore")

WAIT = "wait"
SKIP = "skip"


class Checkpointer:
    """Commits the state of a training run at every step, and restores it bit for bit.

    Parameters
    ----------
    store : Store, str or path
        An open store, or the URL of one that is opened and closed here.
    policy : Policy, optional
        What is stored per step; None: every step exactly.
    interval : int
        Commit the steps that are multiples of it; the others give a skipped handle.
    include, exclude : pattern, function, or sequence of them; optional
        Which tensors are stored, by "object/key" names: ``include="*lora_*"`` stores an adapter without its frozen
        backbone. `exclude` may also name whole objects, and "rng". What is left out is neither stored nor restored.
    on_pressure : {"wait", "skip"}
        What `step` does while the writer is behind: wait for it, or leave the step out.
    overhead : optional
        Not part of this version.
    rec_device : {"cpu"}
        Where the reconstruction lies.
    **objects
        What the state consists of, by name: modules, optimizers, random generators (torch, numpy, Python), and anything
        with ``state_dict`` and ``load_state_dict``: schedulers, scalers, stateful data loaders. The global random
        states and :attr:`extra` are always part of it.

    Attributes
    ----------
    extra : dict
        Plain values of your own, captured by `step` and filled by `restore`.

    Notes
    -----
    As a context manager it takes the last commit at a clean exit, if steps were left out since the newest, and waits
    until all are durable. An exit by exception only waits for what was submitted: the state may be half-stepped.

    From its first step (or ``with``) to its close it holds SIGTERM, in the main thread: the next `step` or `close`
    takes the last commit and waits for it, then the earlier handler runs, by default the end of the process. A second
    SIGTERM goes straight to the earlier handler.

    It belongs to one thread, and to the process that made the first step: a forked child gets Conflict. Handles may be
    waited for anywhere.
    """

    def __init__(
        self,
        store: Store | str | os.PathLike[str],
        *,
        policy: Policy | None = None,
        interval: int = 1,
        include: Pattern | Iterable[Pattern] | None = None,
        exclude: Pattern | Iterable[Pattern] | None = None,
        on_pressure: str = WAIT,
        overhead: float | None = None,
        rec_device: str = "cpu",
        **objects: Any,
    ) -> None:
        if policy is not None and not isinstance(policy, Policy):
            raise InvalidInput(f"policy is {policy!r}, expected a deltastore.Policy or None")
        restore_cost = exact_restore_cost(policy)
        if type(interval) is not int or interval < 1:
            raise InvalidInput(f"interval is {interval!r}, expected an integer of 1 or more")
        if on_pressure not in (WAIT, SKIP):
            raise InvalidInput(f"on_pressure is {on_pressure!r}, expected 'wait' or 'skip'")
        if overhead is not None:
            raise InvalidInput(f"overhead is {overhead!r}: limiting the overhead is not part of this version")
        if str(rec_device) != "cpu":
            raise InvalidInput(f"rec_device is {rec_device!r}: this version keeps the reconstruction on the 'cpu'")
        self._capture = Capture(objects, Selection(include, exclude))
        self._interval = interval
        self._on_pressure = on_pressure
        self._is_owner = not isinstance(store, Store)
        self._store = store if isinstance(store, Store) else open_store(store)
        self._store.set_restore_cost(restore_cost)
        self._gate = TerminationGate()
        self._meter = Meter()
        self._pid: int | None = None
        self._is_editing = False
        self._is_closed = False
        self._pending = Pending()
        self.extra: dict[str, Any] = {}

    @property
    def store(self) -> Store:
        """Where the commits go."""
        return self._store

    # ---------------------------------------------------------------- restoring

    def restore(self, ref: int | str = "latest", strict_exact: bool = False) -> int:
        """Bring everything back to a commit, and go on from there: the next commit follows it.

        May be called again in the middle of a run, to go back after a NaN: what was committed since stays readable, on
        a branch of its own.

        Parameters
        ----------
        ref : int or str
            A step, "latest", "latest~3", a tag or a commit id.
        strict_exact : bool
            Refuse a commit that is not exact.

        Returns
        -------
        int
            The step to go on with: 0 on a new store, else the one after the restored commit.

        Raises
        ------
        InvalidInput
            The objects do not fit the commit; they were not touched.
        NotFound
            There is no such commit.
        Conflict
            Another writer has the store.
        DeltaStoreError
            An earlier commit failed in the background and nobody was told yet.
        """
        self._require_usable("restore")
        self._pid = os.getpid()
        try:
            state = self._store.restore(ref)
        except NotFound:
            if ref == "latest" and not self._store.commits():
                return 0
            raise
        self._load(state, strict_exact=strict_exact)
        self._pending.left_out = None
        log.info("%s: restored step %d (%s)", self._store.url, state.commit.step, state.commit.id[:12])
        return state.commit.step + 1

    def _load(self, state: State, *, strict_exact: bool) -> None:
        if not state.fidelity.exact:
            if strict_exact:
                raise InvalidInput(f"step {state.commit.step} is not exact, and strict_exact=True asks for that")
            log.warning("step %d is not exact: every tensor lies within its recorded bound", state.commit.step)
        held = set(keys_at(state, ()))
        selection = self._capture.selection
        if selection.keeps_object(RNG) and RNG not in held:
            raise InvalidInput(
                f"step {state.commit.step} has no random states, the run would go on with others; pass "
                f"exclude=['rng'] if that is meant",
                missing=[RNG],
            )
        # Read before anything is touched: damage must leave the objects as they are.
        values = {name: value_at(state, (name,)) for name in (EXTRA, RNG) if name in held}
        load_objects(state, self._capture.objects, strict=True, expected=selection.keeps)
        unused = sorted(str(name) for name in held - {RNG, EXTRA} - set(self._capture.objects))
        if unused:
            log.warning("step %d also holds %s, which no object takes", state.commit.step, ", ".join(unused))
        if selection.keeps_object(EXTRA):
            self.extra.clear()
            self.extra.update(values.get(EXTRA, {}))
        if selection.keeps_object(RNG):
            restore_rng(values[RNG])

    # ---------------------------------------------------------------- committing

    def step(self, step: int, exact: bool | None = None, metrics: Mapping[str, Any] | None = None) -> Handle:
        """Commit the state after a training step; returns when it is copied, not when it is durable.

        Parameters
        ----------
        step : int
            Its number; never smaller than the one before.
        exact : bool, optional
            True: commit this step exactly, also if `interval` or `on_pressure` would leave it out.
        metrics : mapping, optional
            Numbers and strings to remember with the commit, such as the loss.

        Returns
        -------
        Handle
            Of a step that is left out: ``skipped``, and waiting for it waits for the next commit.

        Raises
        ------
        InvalidInput
            Something in the state cannot be stored; its path is named.
        Conflict
            Another writer has the store, or this is a forked child.
        DeltaStoreError
            An earlier commit failed in the background and nobody was told yet; this step was not committed.
        """
        self._require_usable("step")
        if type(step) is not int or step < 0:
            raise InvalidInput(f"step is {step!r}, expected an integer of 0 or more")
        self._pid = os.getpid()
        self._gate.install()
        self._pending.raise_failure()
        self._meter.steps += 1
        forced = exact is True or self._gate.pending
        handle = self._leave_out(step) if not forced and self._is_left_out(step) else self._commit(step, exact, metrics)
        if self._gate.pending:  # it may have come while the commit was taken
            self._terminate(step)
        return handle

    def _is_left_out(self, step: int) -> bool:
        return step % self._interval != 0 or (self._on_pressure == SKIP and self._store.busy())

    def _leave_out(self, step: int) -> Handle:
        handle = Handle(step, None, self._store.tier_names, skipped=True)
        self._pending.skipped(handle)
        self._meter.skipped += 1
        return handle

    def _commit(self, step: int, exact: bool | None, metrics: Mapping[str, Any] | None) -> Handle:
        started = time.perf_counter()
        state, hints = self._capture.take(self.extra)
        handle = self._store.commit_with_hints(step, state, hints, exact=exact, metrics=metrics)
        self._meter.watch(handle, time.perf_counter() - started)
        self._pending.submitted(handle)
        return handle

    def _terminate(self, step: int) -> None:
        if self._pending.left_out is not None:
            self._commit(step, True, None)
        log.warning("SIGTERM: step %d is the last commit", step)
        self._store.flush()
        self._gate.deliver()

    @contextlib.contextmanager
    def edit(self) -> Iterator[None]:
        """Announce a change of the state between two steps, such as a new layer or a hand-written update.

        Within it no commit is taken.
        """
        self._require_usable("edit")
        self._is_editing = True
        try:
            yield
        finally:
            self._is_editing = False

    def _require_usable(self, action: str) -> None:
        if self._is_closed:
            raise InvalidInput(f"{action}: the Checkpointer is closed")
        if self._is_editing:
            raise InvalidInput(f"{action} within edit(): the state is not whole before its end")
        if self._is_forked():
            raise Conflict(
                f"process {os.getpid()} was forked from the writer {self._pid}: only that one may commit; open the "
                f"store with mode 'r' to read here",
                pid=self._pid,
            )

    def _is_forked(self) -> bool:
        return self._pid is not None and self._pid != os.getpid()

    # ---------------------------------------------------------------- waiting and ending

    def flush(self, timeout: float | None = None) -> None:
        """Wait until everything that was committed is durable.

        Raises
        ------
        Timeout
            The time is over.
        DeltaStoreError
            A commit failed and nobody was told yet.
        """
        self._require_usable("flush")
        self._pending.raise_failure()
        self._store.flush(timeout)

    def wait(self, step: int, *, tier: str | None = None, timeout: float | None = None) -> Commit:
        """Wait until a step is durable on a tier, and return its commit; see :meth:`Store.wait`."""
        waiting = self._pending.find(step)
        return self._store.wait(step, tier=tier, timeout=timeout) if waiting is None else waiting.wait(tier, timeout)

    def close(self) -> None:
        """Take the last commit if steps were left out since the newest, wait for all, and give SIGTERM back.

        Raises
        ------
        DeltaStoreError
            A commit failed and nobody was told yet.
        """
        self._end(None)

    def __enter__(self) -> Self:
        self._gate.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        if self._is_closed or self._is_forked():
            return  # what is pending belongs to the process that made it
        failure: Exception | None = None
        try:
            try:
                self._drain(take_last=error is None)
            except Exception as found:  # whatever the objects raise while their state is taken
                failure = found
            if failure is not None and error is not None:
                log.error("while another error is on its way, the last commits failed: %s", failure)
        finally:
            self._is_closed = True
            self._gate.uninstall()
        if self._gate.pending:
            if failure is not None or error is not None:
                log.error("SIGTERM is answered, this error goes no further", exc_info=error or failure)
            self._gate.deliver()
        if failure is not None and error is None:
            raise failure

    def _drain(self, *, take_last: bool) -> None:
        try:
            if take_last:
                self._pending.raise_failure()
                if self._pending.left_out is not None:
                    self._commit(self._pending.left_out, True, None)
            self._store.flush()
        finally:
            self._pending.abandon()
            if self._is_owner:
                self._store.close()

    # ---------------------------------------------------------------- figures

    @property
    def stats(self) -> Stats:
        """What was done so far."""
        layout = self._layout()
        return self._meter.stats(0 if layout is None else layout.bytes)

    @property
    def plan(self) -> list[dict[str, Any]] | None:
        """The partitions in which the state is taken, as data to print; None before the first commit."""
        layout = self._layout()
        return None if layout is None else describe_layout(layout)

    def _layout(self) -> Layout | None:
        return self._store.layout

    def __repr__(self) -> str:
        return f"Checkpointer({self._store.url!r}, {', '.join(self._capture.objects)})"
