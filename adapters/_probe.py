"""Whether an optimizer's tensors change only within its step: what windows are built upon (spec 10.7)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

from deltastore.checksums import crc32c
from deltastore.torch_bridge import TORCH

log = logging.getLogger("deltastore")


class Probe:
    """Compares all bytes of an optimizer's tensors at a commit with those before the next step.

    Parameters
    ----------
    name : str
        The optimizer's name in the state.
    """

    def __init__(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        self.name = name
        self._optimizer = optimizer
        self.is_open = False
        """Whether its tensors may be read until its next step."""
        self.reason = ""
        """Why not, for good."""
        self._marks: list[tuple[torch.Tensor, int]] | None = None
        if not hasattr(optimizer, "_optimizer_step_pre_hooks"):  # wrappers have the method, and nothing for it
            self.close(f"{type(optimizer).__qualname__} has no hook before its step")

    def watch(self, before_step: Callable[[Probe], None]) -> list[Any]:
        """Register what is called before the optimizer changes anything; the hooks, to be removed, are returned.

        Its ``load_state_dict`` needs none: it puts other tensors in their place.
        """
        return [] if self.reason else [self._optimizer.register_step_pre_hook(lambda *_: before_step(self))]

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the parameters and what the optimizer has of them: plain tensors of the CPU."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                slots = self._optimizer.state.get(parameter)
                for value in (parameter, *(slots.values() if isinstance(slots, dict) else ())):
                    is_plain = type(value) in (torch.Tensor, torch.nn.Parameter)
                    if is_plain and value.is_cpu and not value.is_inference():
                        yield value

    def mark(self) -> None:
        """Remember the present state, unless everything is known."""
        if not self.is_open and not self.reason:
            self._marks = [(tensor, _crc(tensor)) for tensor in self.tensors() if TORCH.is_plain(tensor)]

    def compare(self, *, stepped: bool) -> None:
        """Compare with what was remembered.

        Parameters
        ----------
        stepped : bool
            The optimizer is about to step. Otherwise this is the next commit, and no step was seen: then nothing may
            have changed, and nothing is shown.
        """
        marks, self._marks = self._marks, None
        if marks is None or self.reason:
            return
        changed = sum(not TORCH.is_plain(tensor) or _crc(tensor) != crc for tensor, crc in marks)
        if changed and stepped:
            self.close(f"{changed} of its {len(marks)} tensors changed between step and the optimizer's step")
        elif changed:
            self.close(f"{changed} of its {len(marks)} tensors changed, but no step of the optimizer was seen")
        else:
            self.is_open = stepped

    def forget(self) -> None:
        """Remember nothing: the next commit marks anew."""
        self._marks = None

    def close(self, reason: str) -> None:
        """Give the windows up for good."""
        if self.reason:
            return
        self.is_open, self.reason = False, reason
        log.warning(
            "%s: %s; its state is copied within step from now on. Changes of your own between steps belong into "
            "`with ckpt.edit():`",
            self.name,
            reason,
        )


def _crc(tensor: torch.Tensor) -> int:
    return crc32c(TORCH.as_array(tensor.detach()).data)
