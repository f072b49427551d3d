"""The writing side of a store: a claimed session, its chain, its background (spec 10, 11)."""

from __future__ import annotations

import importlib
import logging
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from deltastore.buffers import Fill, Hints, StagedState, StreamedState
from deltastore.config import Retention, WriterOptions
from deltastore.encoder import LINK_BYTES, ChainState, CommitOrder
from deltastore.errors import InvalidInput
from deltastore.handle import Commit, FurtherTiers, Handle
from deltastore.history.catalog import Catalog, CatalogEntry
from deltastore.history.chain import Chain
from deltastore.history.lineage import segments_of
from deltastore.history.packs import Packs
from deltastore.history.session import Session
from deltastore.layout import Layout
from deltastore.ondisk.names import new_commit_id
from deltastore.policy import Policy
from deltastore.types import Json
from deltastore.writer import Job, Writer, Written

if TYPE_CHECKING:
    from deltastore.staging import Stager

log = logging.getLogger("deltastore")


class Recording:
    """One claimed epoch: takes states in the caller's thread and hands them to the writer.

    Parameters
    ----------
    parent : CatalogEntry or None
        The commit that the first one follows.
    resumed : tuple, optional
        Chain and partitions of the parent, when it was read as a whole: the first commit may be a delta on it.
    acknowledge : callable
        Called in the background with each acknowledged commit and the tag that was asked for.
    find : callable
        Gives a commit by its id.
    further : FurtherTiers, optional
        What handles ask about the tiers behind the root.
    tiers : tuple of str
        What handles call the tiers, that of the root first.
    """

    def __init__(
        self,
        packs: Packs,
        session: Session,
        catalog: Catalog,
        parent: CatalogEntry | None,
        resumed: tuple[Chain, dict[int, np.ndarray]] | None,
        *,
        options: WriterOptions,
        policy: Policy | None,
        restore_cost: float,
        retention: Retention | None,
        pickle_trusted: bool,
        acknowledge: Callable[[Written, str | None], Commit],
        find: Callable[[str], Commit],
        further: FurtherTiers | None = None,
        tiers: tuple[str, ...] = (),
    ) -> None:
        self.session = session
        self._further = further
        self._tiers = tiers or (packs.tier.name,)
        self._tier = packs.tier
        self._retention = retention
        self.policy = policy
        """What the next commits store; None: every bit."""
        self._lock = threading.Lock()
        self.durable_step = None if parent is None else parent.step
        """The newest step that is known to be acknowledged: packs/ was synced when the parent was chosen."""
        self._handles: dict[int, Handle] = {}
        self._tags: dict[str, str] = {}
        self._stager = _make_stager(pickle_trusted)
        chain = ChainState()
        if parent is not None:
            chain.parent = parent.ref
            chain.earlier = segments_of(catalog, parent)
        if resumed is not None:
            _adopt(chain, *resumed)
            self._stager.adopt(resumed[0].layout)

        def acknowledged(written: Written) -> Commit:
            self.durable_step = written.entry.step
            return acknowledge(written, self._tags.pop(written.entry.id, None))

        self._writer = Writer(
            packs.tier, packs, session, chain, self._stager.pool, options, restore_cost, acknowledged, find
        )

    def commit(
        self,
        step: int,
        state: Mapping[str, Any],
        hints: Hints,
        *,
        exact: bool | None,
        tag: str | None,
        metrics: Mapping[str, Any] | None,
    ) -> Handle:
        """Take a state and return the handle of its commit; see :meth:`deltastore.store.Store.commit`."""
        with self._lock:  # threads may share a store: states are taken one after the other
            return self._commit(step, state, hints, None if exact else self.policy, tag, metrics)

    def _commit(
        self,
        step: int,
        state: Mapping[str, Any],
        hints: Hints,
        policy: Policy | None,
        tag: str | None,
        metrics: Mapping[str, Any] | None,
    ) -> Handle:
        check_step(step, self._last_step())
        flat = self._stager.flatten(state)
        described = _encode_metrics(self._stager, metrics)
        token = object()
        try:
            self._writer.reserve(token)
            staged = self._stager.take(flat, hints, replan=self._writer.base_due)
            return self._submit(step, staged, policy, hints, tag, described, token)
        finally:
            self._writer.cancel(token)

    def commit_streamed(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        tag: str | None,
        metrics: Mapping[str, Any] | None,
        open_parent: Callable[[str], Fill],
    ) -> Commit:
        """Write a state that stays where it is and return its commit; see `Store.commit_streamed`.

        Parameters
        ----------
        open_parent : callable
            Gives what reads the partitions of a commit, by its id.
        """
        with self._lock:
            check_step(step, self._last_step())
            flat = self._stager.flatten(state)
            described = _encode_metrics(self._stager, metrics)
            self._writer.flush()
            parent = None if self._writer.needs_streamed_base else self._writer.parent
            token = object()
            try:
                self._writer.reserve(token)
                placed = self._stager.place(flat, replan=parent is None)
                if parent is not None and not placed.fresh:
                    placed = replace(placed, read_parent=open_parent(parent))
                handle = self._submit(step, placed, None, Hints(), tag, described, token)
            finally:
                self._writer.cancel(token)
            return handle.wait()

    def _last_step(self) -> int:
        """Return the newest step that is acknowledged or still on its way: one that failed may be committed again."""
        pending = [step for step, handle in self._handles.items() if handle.error is None]
        return max([*pending, -1 if self.durable_step is None else self.durable_step])

    def _submit(
        self,
        step: int,
        staged: StagedState | StreamedState,
        policy: Policy | None,
        hints: Hints,
        tag: str | None,
        described: dict[str, Json],
        token: object,
    ) -> Handle:
        is_lost = self._further is not None and self._further.is_broken(self._writer.parent)
        is_base = tag is not None or self._kept(step) or is_lost
        order = CommitOrder(
            new_commit_id(),
            step,
            base=is_base,
            metrics=described,
            policy=policy,
            rules=hints.rules,
            gradients=hints.gradients,
        )
        window = staged.window if isinstance(staged, StagedState) else None
        handle = Handle(step, order.id, self._tiers, window=window, further=self._further)
        if tag is not None:
            self._tags[order.id] = tag
        self._handles = {s: h for s, h in self._handles.items() if not h.done() and h.error is None}
        self._handles[step] = handle
        self._writer.submit(Job(staged, order, handle), token)
        if window is not None:
            window.open()
        return handle

    def _kept(self, step: int) -> bool:
        return self._retention is not None and self._retention.keeps_step(step)

    @property
    def is_stopped(self) -> bool:
        """Whether the background was ended."""
        return self._writer.is_stopped

    @property
    def layout(self) -> Layout | None:
        """How the state that was taken last is laid out."""
        return self._stager.layout

    @property
    def follows(self) -> str | None:
        """Id of the commit that the next one builds upon."""
        return self._writer.parent

    def handle_of(self, step: int) -> Handle | None:
        """Return the handle of a step that is still being written, or failed."""
        return self._handles.get(step)

    def busy(self) -> bool:
        """Return whether `commit` would have to wait."""
        return self._writer.busy()

    def set_restore_cost(self, restore_cost: float) -> None:
        """Change when bases are due."""
        self._writer.restore_cost = restore_cost

    def flush(self, timeout: float | None = None) -> None:
        """Wait until everything is acknowledged."""
        self._writer.flush(timeout)

    def drain(self, timeout: float) -> None:
        """Flush at the end of the program."""
        self._writer.drain(timeout)

    def stop(self) -> None:
        """Write what was submitted and end the background; the session stays claimed."""
        self._writer.close()


def check_step(step: int, newest: int) -> None:
    """Raise InvalidInput if a step would go back on its line of history."""
    if step < newest:
        raise InvalidInput(
            f"step {step} comes after step {newest}: steps of a line of history never decrease; "
            f"call restore() to go back first",
            step=step,
            newest=newest,
        )


def _make_stager(pickle_trusted: bool) -> Stager:
    # Staging needs torch; reading the history of a store does not, so that it is loaded with the first commit.
    stager: Stager = importlib.import_module("deltastore.staging").Stager(pickle_trusted=pickle_trusted)
    return stager


def _adopt(chain: ChainState, read: Chain, buffers: dict[int, np.ndarray]) -> None:
    sizes = [link.tail.trailer.file_size // len(link.tail.index.commits) + LINK_BYTES for link in read.links]
    chain.rec_is_shared = True
    chain.rec, chain.layout, chain.document = buffers, read.layout, read.document
    chain.fidelity = read.record.fidelity
    chain.full_bytes, chain.chain_bytes = sizes[0], sum(sizes)
    chain.last_bytes = sizes[-1] if len(sizes) > 1 else 0


def _encode_metrics(stager: Stager, metrics: Mapping[str, Any] | None) -> dict[str, Json]:
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise InvalidInput(f"metrics are a {type(metrics).__name__}, expected a dict of numbers and strings by name")
    plain = {}
    for name, value in metrics.items():
        single = hasattr(value, "item") and math.prod(getattr(value, "shape", ())) == 1
        try:
            scalar = value.item() if single else value
        except RuntimeError as error:
            raise InvalidInput(f"metric {name!r} has no value: {error}") from error
        if not isinstance(name, str) or not isinstance(scalar, bool | int | float | str | None):
            raise InvalidInput(
                f"metric {name!r} is a {type(value).__name__}, expected one number, string or bool, by name"
            )
        plain[name] = scalar
    document = stager.flatten(plain).document
    return dict(zip(document["k"], document["v"], strict=True))
