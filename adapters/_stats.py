"""What a run of a Checkpointer has done so far, and how its state is laid out. No torch."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, fields
from typing import Any

from deltastore.handle import Commit, Handle, Work
from deltastore.layout import Layout
from deltastore.reader import State


@dataclass(frozen=True)
class Stats:
    """Figures of one Checkpointer, from its making on."""

    steps: int
    """Calls of `step`."""
    commits: int
    """Commits that were acknowledged."""
    bases: int
    """Those of them that hold everything."""
    pending: int
    """Commits that are still being written."""
    failed: int
    """Commits that could not be written."""
    skipped: int
    """Steps that were not committed: `interval`, or a full writer with on_pressure="skip"."""
    stored_bytes: int
    """Bytes of all acknowledged commits."""
    base_bytes: int
    """Those of bases."""
    state_bytes: int
    """Bytes of the state in memory: what a full checkpoint would take."""
    interval: int
    """Steps from one commit to the next; with interval="auto" that of now."""
    last_stall_seconds: float
    """How long the last commit held the training."""
    median_stall_seconds: float
    total_stall_seconds: float
    last_bytes: int
    """Of the newest acknowledged commit, as all that follows."""
    last_work: Work | None
    """What it took in the background, and which predictions it uses; None before the first."""

    def scalars(self, prefix: str = "deltastore/") -> dict[str, float]:
        """Return the figures as TensorBoard, Weights & Biases and the like take them: one number for each name.

        ``writer.add_scalar(name, value, step)`` for each item, or ``wandb.log(ckpt.stats.scalars(), step)``.
        """
        found = {field.name: float(getattr(self, field.name)) for field in fields(self) if field.name != "last_work"}
        if self.last_work is not None:
            found |= {
                "last_queue_seconds": self.last_work.queue_seconds,
                "last_encode_seconds": self.last_work.encode_seconds,
                "last_write_seconds": self.last_work.write_seconds,
                **{f"predicted/{kind}": share for kind, share in self.last_work.predictions.items()},
            }
        return {prefix + name: value for name, value in found.items()}

    def __str__(self) -> str:
        share = self.stored_bytes / (self.commits * self.state_bytes) if self.commits and self.state_bytes else 0.0
        return (
            f"{self.steps} steps, {self.commits} commits ({self.bases} bases), {self.skipped} skipped, "
            f"{self.pending} pending, {self.failed} failed; {self.stored_bytes:,} bytes, "
            f"{share:.1%} of full checkpoints; stall {self.median_stall_seconds * 1e3:.1f} ms per commit (median)"
        )


RECENT_STALLS = 10_000
"""How many stalls the median is taken of: a long run must not remember them all."""


class Meter:
    """Gathers the figures."""

    def __init__(self) -> None:
        self.steps = 0
        self.skipped = 0
        self._stalls: deque[float] = deque(maxlen=RECENT_STALLS)
        self._total_stall = 0.0
        self._open: list[Handle] = []
        self._newest: str | None = None
        self._commits = self._bases = self._failed = self._stored = self._base = 0
        self._last_bytes = 0
        self._last_work: Work | None = None

    def watch(self, handle: Handle, stall_seconds: float) -> None:
        """Count a commit, once it is settled, and how long it held the training."""
        self._settle()
        self._open.append(handle)
        self._stalls.append(stall_seconds)
        self._total_stall += stall_seconds

    def held(self, stall_seconds: float) -> None:
        """Count what an optimizer step waited for the newest commit."""
        if self._stalls:
            self._stalls[-1] += stall_seconds
            self._total_stall += stall_seconds

    def torn(self, handle: Handle) -> None:
        """Count a commit that was changed while it was taken as a step that is left out."""
        self._open.remove(handle)
        self.skipped += 1

    def _settle(self) -> None:
        still: list[Handle] = []
        for handle in self._open:
            if handle.error is not None:
                self._failed += 1
            elif handle.done():
                self._count(handle.wait(), handle.work)
            else:
                still.append(handle)
        self._open = still

    def is_writing(self) -> bool:
        """Return whether a commit is not yet settled."""
        self._settle()
        return bool(self._open)

    def _count(self, commit: Commit, work: Work | None) -> None:
        if commit.id == self._newest:  # the step was committed again and nothing had changed
            return
        self._newest = commit.id
        self._commits += 1
        self._stored += commit.bytes
        self._last_bytes, self._last_work = commit.bytes, work
        if commit.kind == "base":
            self._bases += 1
            self._base += commit.bytes

    def stats(self, state_bytes: int, interval: int) -> Stats:
        """Return the figures of now."""
        self._settle()
        return Stats(
            steps=self.steps,
            commits=self._commits,
            bases=self._bases,
            pending=len(self._open),
            failed=self._failed,
            skipped=self.skipped,
            stored_bytes=self._stored,
            base_bytes=self._base,
            state_bytes=state_bytes,
            interval=interval,
            last_stall_seconds=self._stalls[-1] if self._stalls else 0.0,
            median_stall_seconds=statistics.median(self._stalls) if self._stalls else 0.0,
            total_stall_seconds=self._total_stall,
            last_bytes=self._last_bytes,
            last_work=self._last_work,
        )


def describe_layout(layout: Layout) -> list[dict[str, Any]]:
    """Return the partitions of a layout as data to print."""
    tensors: dict[int, list[str]] = {}
    for entry in layout.tensors:
        for piece in entry.pieces:
            tensors.setdefault(piece.partition, []).append("/".join(map(str, entry.path)))
    return [
        {
            "partition": partition.id,
            "role": partition.role,
            "dtype": partition.dtype,
            "window": partition.window,
            "group": partition.group,
            "elements": partition.length,
            "bytes": partition.bytes,
            "tensors": tensors.get(partition.id, []),
        }
        for partition in layout.partitions
    ]


def describe_bounds(state: State) -> str:
    """Return what a bounded commit promises, for the log: the largest bound of each role."""
    worst: dict[str, float] = {}
    found = state.fidelity.inexact()
    for _entry, role, tensor in found:
        worst[role] = max(worst.get(role, 0.0), tensor.bound)
    bounds = ", ".join(f"{role} by at most {bound:.3g}" for role, bound in sorted(worst.items()))
    return f"{len(found)} tensors deviate, {bounds}; state.fidelity tells each"
