"""The adapter for plain PyTorch loops: every step of a training run becomes a commit.

The state is copied while the next forward and backward pass run, as far as a probe has shown that it does not change
there, and within :meth:`Checkpointer.step` otherwise; it is written in the background.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from deltastore.adapters._interval import make_interval
from deltastore.adapters._objects import Capture
from deltastore.adapters._pending import Pending
from deltastore.adapters._restoring import Restoring, refuse_inexact
from deltastore.adapters._selection import Pattern, Selection
from deltastore.adapters._signals import TerminationGate
from deltastore.adapters._stats import Meter, Stats, describe_layout
from deltastore.adapters.windows import Windows
from deltastore.errors import Conflict, InvalidInput, NotFound, ReadOnly
from deltastore.handle import Commit, Handle
from deltastore.layout import Layout
from deltastore.ondisk.predictions import HOLD
from deltastore.opening import open as open_store
from deltastore.policy import Policy, check_policy
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
        What is stored per step; None: every step exactly. With a byte budget the commits are bounded: each records how
        far any element may be from the training state, and a restore logs that.
    interval : int or "auto"
        Commit the steps that are multiples of it; the others give a skipped handle. "auto": commit as often as
        `overhead` allows, measured all the time; the interval in use stands in :attr:`stats`.
    include, exclude : pattern, function, or sequence of them; optional
        Which tensors are stored, by "object/key" names: ``include="*lora_*"`` stores an adapter without its frozen
        backbone. `exclude` may also name whole objects, and "rng". What is left out is neither stored nor restored;
        `restore` says how much that is. A pattern that matches nothing is an error of the first `step` or `restore`.
    on_pressure : {"wait", "skip"}
        What `step` does while the writer is behind: wait for it, or leave the step out.
    overhead : float, optional
        With ``interval="auto"``: the share of the training's time that commits may take, 0.035 by default.
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
    As a context manager it takes the last commit at a clean exit, if steps were left out since the newest or that one
    is not exact, and waits until all are durable. An exit by exception only waits for what was submitted: the state may
    be half-stepped.

    From its first step (or ``with``) to its close it holds SIGTERM, in the main thread: the next `step` or `close`
    takes the last commit and waits for it, then the earlier handler runs, by default the end of the process. A second
    SIGTERM goes straight to the earlier handler, also while the last commit is being written. Where the first step (or
    ``with``) is in another thread, SIGTERM is not watched.

    It has no lock: its calls must come one after the other, from whichever thread, and while nothing changes the
    objects. Handles may be waited for in any thread at any time. It belongs to the process that made the first step or
    restore: a forked child gets Conflict.

    After the close `step`, `restore`, `edit` and `flush` are refused and nothing brings it back; handles, `wait` for
    what was committed, `stats`, `plan` and :attr:`extra` still answer. A store that was given stays open and may be
    used on, one that was opened here is closed.
    """

    def __init__(
        self,
        store: Store | str | os.PathLike[str],
        *,
        policy: Policy | None = None,
        interval: int | str = 1,
        include: Pattern | Iterable[Pattern] | None = None,
        exclude: Pattern | Iterable[Pattern] | None = None,
        on_pressure: str = WAIT,
        overhead: float | None = None,
        rec_device: str = "cpu",
        **objects: Any,
    ) -> None:
        check_policy(policy)
        if isinstance(store, Store) and not store.is_writable:
            raise ReadOnly(
                f"{store.url} was opened with mode 'r', and a Checkpointer writes: open it with mode 'a', or load a "
                f"state without a Checkpointer, store.at(ref).load_into(model=model)",
                url=store.url,
            )
        if on_pressure not in (WAIT, SKIP):
            raise InvalidInput(f"on_pressure is {on_pressure!r}, expected 'wait' or 'skip'")
        if str(rec_device) != "cpu":
            raise InvalidInput(f"rec_device is {rec_device!r}: this version keeps the reconstruction on the 'cpu'")
        self._interval = make_interval(interval, overhead)
        self._capture = Capture(objects, Selection(include, exclude))
        self._on_pressure = on_pressure
        self._is_owner = not isinstance(store, Store)
        self._store = store if isinstance(store, Store) else open_store(store)
        self._store.set_policy(policy)
        self._gate = TerminationGate()
        self._meter = Meter()
        self._windows = Windows(
            self._capture.modules, self._capture.optimizers, on_torn=self._drop, on_stall=self._meter.held
        )
        self._pid: int | None = None
        self._is_editing = False
        self._is_closed = False
        self._restoring = Restoring(self._capture)
        self._has_announced = False
        self._newest: int | None = None
        self._newest_handle: Handle | None = None
        self._is_lossless = policy is None or policy.exact
        # Gradients of one step replay one step: with an interval they would only take memory.
        if self._is_lossless and interval == 1 and (policy is None or policy.prediction != HOLD):
            self._capture.keep_gradients()
        unpredicted = [] if policy is None or policy.exact or policy.prediction == HOLD else self._capture.unpredicted()
        if unpredicted:
            log.warning(
                "%s: no prediction is known (of Adam, AdamW and SGD there is); each step stores what changed most",
                ", ".join(unpredicted),
            )
        self._pending = Pending()
        self.extra: dict[str, Any] = {}

    @property
    def store(self) -> Store:
        """Where the commits go."""
        return self._store

    # ---------------------------------------------------------------- restoring

    def restore(self, ref: int | str = "latest", strict_exact: bool = False, strict: bool = True) -> int:
        """Bring everything back to a commit, and go on from there: the next commit follows it.

        May be called again in the middle of a run, to go back after a NaN: what was committed since stays readable, on
        a branch of its own.

        Parameters
        ----------
        ref : int or str
            A step, "latest", "latest~3", a tag or a commit id.
        strict_exact : bool
            Refuse a commit that is not exact.
        strict : bool
            False: restore what fits, and leave as it is what the commit does not hold or holds in another form, such as
            a new object or an optimizer of another class; a warning names it. Random states are restored all the same.

        Returns
        -------
        int
            The step to go on with: 0 on a new store, else the one after the restored commit.

        Raises
        ------
        InvalidInput
            The objects do not fit the commit, or none of them does although `strict` is false; they were not touched.
        NotFound
            There is no such commit.
        Conflict
            Another writer has the store.
        DeltaStoreError
            An earlier commit failed in the background and nobody was told yet.
        """
        self._require_usable("restore")
        self._windows.forget()
        self._pid = os.getpid()
        if strict_exact:
            refuse_inexact(self._store, ref)
        try:
            state = self._store.restore(ref)
        except NotFound:
            if ref == "latest" and not self._store.commits():
                self._capture.check_selection()
                return 0
            raise
        self._capture.check_selection(state)
        self._restoring.load(state, self.extra, strict_exact=strict_exact, strict=strict)
        self._capture.mark(taken=False)
        self._pending.left_out = None
        self._newest_handle = None
        log.info("%s: restored step %d (%s)", self._store.url, state.commit.step, state.commit.id[:12])
        return state.commit.step + 1

    # ---------------------------------------------------------------- committing

    def step(self, step: int, exact: bool | None = None, metrics: Mapping[str, Any] | None = None) -> Handle:
        """Commit the state after a training step; returns when it is taken, not when it is durable.

        What only the optimizer changes may still be read until its next step (see :attr:`windows`): announce changes of
        your own with :meth:`edit`.

        Parameters
        ----------
        step : int
            Its number, also as a numpy or torch integer; never smaller than the one before.
        exact : bool, optional
            True: commit this step bit for bit whatever the policy says, also if `interval` or `on_pressure` would leave
            it out.
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
        step = _as_step(step)
        self._capture.check_selection()
        self._pid = os.getpid()
        self._gate.install()
        self._windows.settle()
        self._pending.raise_failure()
        self._meter.steps += 1
        self._interval.begin(time.perf_counter())
        forced = exact is True or self._gate.pending
        if self._gate.pending:
            self._announce_last(step)
        is_left_out = not forced and self._is_left_out(step)
        handle = self._leave_out(step) if is_left_out else self._commit(step, forced, metrics)
        self._interval.end(time.perf_counter(), committed=not is_left_out, is_writing=self._meter.is_writing())
        if self._gate.pending:  # it may have come while the commit was taken
            self._terminate(step)
        return handle

    def _is_left_out(self, step: int) -> bool:
        return not self._interval.is_due(step) or (self._on_pressure == SKIP and self._store.busy())

    def _leave_out(self, step: int) -> Handle:
        handle = Handle(step, None, self._store.tier_names, skipped=True)
        self._pending.skipped(handle)
        self._meter.skipped += 1
        return handle

    def _commit(self, step: int, exact: bool, metrics: Mapping[str, Any] | None) -> Handle:
        started = time.perf_counter()
        state, hints = self._capture.take(self.extra)
        hints = replace(hints, lasting=self._windows.lasting(), patience_seconds=self._windows.patience_seconds)
        handle = self._store.commit_with_hints(step, state, hints, exact=exact, metrics=metrics)
        self._windows.begin(handle)
        self._capture.mark(taken=True)
        self._meter.watch(handle, time.perf_counter() - started)
        self._pending.submitted(handle)
        self._newest = step
        self._newest_handle = handle
        return handle

    def _drop(self, handle: Handle) -> None:
        if handle.error is not None:
            return  # it failed beside that, and is told as such
        log.warning("step %d was changed while it was taken, and is left out: the next commit has it", handle.step)
        self._pending.torn(handle)
        self._meter.torn(handle)
        self._newest_handle = None

    def _commit_last(self, step: int) -> None:
        """Commit the newest step, exactly, unless it was."""
        newest = self._newest_handle
        is_inexact = newest is not None and not self._is_lossless and not newest.wait().exact
        if self._pending.left_out is not None or is_inexact:
            self._commit(step, True, None)

    def _terminate(self, step: int) -> None:
        self._announce_last(step)
        self._commit_last(step)
        self._store.flush()
        log.warning("SIGTERM: step %d is durable", step)
        self._gate.deliver()

    def _announce_last(self, step: int) -> None:
        if not self._has_announced:
            self._has_announced = True
            log.warning("SIGTERM: writing step %d as the last commit", step)

    @contextlib.contextmanager
    def edit(self) -> Iterator[None]:
        """Announce a change of the state between two steps, such as a new layer or a hand-written update.

        Within it no commit is taken.
        """
        self._require_usable("edit")
        self._windows.forget()
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
        self._windows.gate()
        self._pending.raise_failure()
        self._store.flush(timeout)

    def wait(self, step: int, *, tier: str | None = None, timeout: float | None = None) -> Commit:
        """Wait until a step is durable on a tier, and return its commit; see :meth:`Store.wait`."""
        step = _as_step(step)
        waiting = self._pending.find(step)
        return self._store.wait(step, tier=tier, timeout=timeout) if waiting is None else waiting.wait(tier, timeout)

    def close(self) -> None:
        """Take the last commit if steps were left out since the newest or it is not exact; wait; give SIGTERM back.

        Raises
        ------
        DeltaStoreError
            A commit failed and nobody was told yet.
        """
        self._end(None)

    def __enter__(self) -> Self:
        self._require_usable("with")
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
            self._windows.gate()
            try:
                self._drain(take_last=error is None)
            except Exception as found:  # whatever the objects raise while their state is taken
                failure = found
            if failure is not None and error is not None:
                log.error("while another error is on its way, the last commits failed: %s", failure)
        finally:
            self._is_closed = True
            self._windows.close()
            self._capture.close()
            self._gate.uninstall()
        if self._gate.pending:
            if failure is not None or error is not None:
                log.error("SIGTERM is answered, this error goes no further", exc_info=error or failure)
            self._gate.deliver()
        if failure is not None and error is None:
            raise failure

    def _drain(self, *, take_last: bool) -> None:
        try:
            left_out = self._pending.left_out if take_last else None
            last = self._newest if left_out is None else left_out
            ends = last is not None and self._gate.pending
            if last is not None and ends:
                self._announce_last(last)
            if take_last:
                self._pending.raise_failure()
            if take_last and last is not None:
                self._commit_last(last)
            self._store.flush()
            if ends:
                log.warning("SIGTERM: step %d is durable", last)
        finally:
            self._pending.abandon()
            if self._is_owner:
                self._store.close()

    # ---------------------------------------------------------------- figures

    @property
    def stats(self) -> Stats:
        """What was done so far."""
        layout = self._layout()
        return self._meter.stats(0 if layout is None else layout.bytes, self._interval.interval)

    @property
    def windows(self) -> dict[str, str]:
        """How the state of each optimizer is taken, by its name.

        "open": beside the training; "probing": within `step`, until a probe has shown that the former is safe;
        otherwise the reason why it stays within `step`.
        """
        return self._windows.states

    @property
    def plan(self) -> list[dict[str, Any]] | None:
        """The partitions in which the state is taken, as data to print; None before the first commit."""
        layout = self._layout()
        return None if layout is None else describe_layout(layout)

    def _layout(self) -> Layout | None:
        return self._store.layout

    def __repr__(self) -> str:
        return f"Checkpointer({self._store.url!r}, {', '.join(self._capture.objects)})"


def _as_step(value: Any) -> int:
    """Return a step as an integer of Python; numpy and torch count with their own."""
    try:
        if getattr(value, "ndim", 0) != 0 or "bool" in str(getattr(value, "dtype", type(value))):
            raise TypeError
        step = operator.index(value)
    except (TypeError, RuntimeError):
        step = -1
    if step < 0:
        raise InvalidInput(f"step is {value!r}, expected an integer of 0 or more")
    return step
