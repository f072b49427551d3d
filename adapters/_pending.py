"""The handles that a Checkpointer gave out and that are not settled yet. No torch."""

from __future__ import annotations

from deltastore.errors import NotFound
from deltastore.handle import Failure, Handle


class Pending:
    """Follows commits to their end, so that no failure of the background is swallowed.

    Attributes
    ----------
    left_out : int or None
        The newest step, if it was not committed.
    """

    def __init__(self) -> None:
        self.left_out: int | None = None
        self._submitted: list[Handle] = []
        self._waiting: list[Handle] = []

    def submitted(self, handle: Handle) -> None:
        """Note a commit; the steps that were left out before it wait for it from here on."""
        self._submitted.append(handle)
        for waiting in self._waiting:
            waiting._follow(handle)
        self._waiting.clear()
        self.left_out = None

    def skipped(self, handle: Handle) -> None:
        """Note a step that is left out."""
        self._waiting.append(handle)
        self.left_out = handle.step

    def torn(self, handle: Handle) -> None:
        """Note a commit whose state was changed while it was taken: it will not come."""
        self._submitted.remove(handle)
        handle._skip()
        self.skipped(handle)

    def find(self, step: int) -> Handle | None:
        """Return the handle of a step that was left out and is not followed by a commit yet."""
        return next((handle for handle in self._waiting if handle.step == step), None)

    def raise_failure(self) -> None:
        """Raise the error of an earlier commit that nobody was told yet; the store is only asked by commits."""
        failures = [handle._failure for handle in self._submitted]
        self._submitted = [h for h, f in zip(self._submitted, failures, strict=True) if f is None and not h.done()]
        for failure in failures:
            if failure is not None and not failure.seen:
                failure.seen = True
                raise failure.error

    def abandon(self) -> None:
        """Tell who waits for a step that was left out that no commit follows."""
        lost = Failure(NotFound("the step was left out, and no commit followed it"))
        for handle in self._waiting:
            handle._fail(lost)
        self._waiting.clear()
