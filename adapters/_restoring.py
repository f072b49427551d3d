"""A commit's state goes back into the living objects of a training run."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

from deltastore.adapters._objects import EXTRA, RNG, Capture
from deltastore.adapters._random import restore_rng
from deltastore.adapters._stats import describe_bounds
from deltastore.errors import InvalidInput, NotFound
from deltastore.handle import Commit
from deltastore.loading import load_objects
from deltastore.loading.plan import keys_at, some, value_at
from deltastore.reader import Report, State
from deltastore.store import Store

log = logging.getLogger("deltastore")


class Restoring:
    """Loads states into the objects that a capture watches, and says what differs."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._has_told_left_out = False

    def load(self, state: State, extra: dict[str, Any], *, strict_exact: bool, strict: bool) -> None:
        """Load a state: the objects, the random states, and the plain values into `extra`.

        Raises
        ------
        InvalidInput
            The objects do not fit the state, or it is not exact although that is asked for; nothing was touched.
        """
        if not state.fidelity.exact:
            if strict_exact:
                raise _not_exact(state.commit)
            log.warning("step %d is not exact: %s", state.commit.step, describe_bounds(state))
        held = set(keys_at(state, ()))
        selection = self._capture.selection
        if strict and selection.keeps_object(RNG) and RNG not in held:
            raise InvalidInput(
                f"step {state.commit.step} has no random states, the run would go on with others; pass "
                f"exclude=['rng'] if that is meant, or restore(strict=False)",
                missing=[RNG],
            )
        # Read before anything is touched: damage must leave the objects as they are.
        values = {name: value_at(state, (name,)) for name in (EXTRA, RNG) if name in held}
        report = load_objects(
            state,
            self._capture.objects,
            strict=strict,
            expected=selection.keeps,
            advice="restore(strict=False) restores the rest",
        )
        self._tell_what_differs(state, report, held)
        unused = sorted(str(name) for name in held - {RNG, EXTRA} - set(self._capture.objects))
        if unused:
            log.warning("step %d also holds %s, which no object takes", state.commit.step, ", ".join(unused))
        if selection.keeps_object(EXTRA) and (strict or EXTRA in held):
            extra.clear()
            extra.update(values.get(EXTRA, {}))
        if selection.keeps_object(RNG) and RNG in held:
            restore_rng(values[RNG])

    def _tell_what_differs(self, state: State, report: Report, held: set[Any]) -> None:
        step = state.commit.step
        stays = [*report.missing, *report.mismatched]
        if self._capture.selection.keeps_object(RNG) and RNG not in held:
            stays.append(RNG)
        if stays:
            log.warning("step %d has no fitting state for what stays as it is: %s", step, some(stays))
        if report.unexpected:
            log.warning("step %d also holds, and nothing takes: %s", step, some(report.unexpected))
        if not self._has_told_left_out:
            self._has_told_left_out = True
            left_out = self._capture.left_out()
            if left_out:
                log.warning(
                    "include and exclude leave out %s: not in the store, they keep the values that they have now",
                    ", ".join(left_out),
                )


def refuse_inexact(store: Store, ref: int | str) -> None:
    """Raise InvalidInput if a commit is not exact; what does not exist is told by the restore itself."""
    with contextlib.suppress(NotFound):
        commit = store.at(ref).commit
        if not commit.exact:
            raise _not_exact(commit)


def _not_exact(commit: Commit) -> InvalidInput:
    return InvalidInput(
        f"step {commit.step} ({commit.id[:12]}) is not exact, and strict_exact=True asks for that; choose "
        "another commit (`deltastore log` shows which are exact), or leave strict_exact out",
        step=commit.step,
    )
