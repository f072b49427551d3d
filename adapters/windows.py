"""Windows: from a commit to the next optimizer step the state stays as it is, and is copied meanwhile (spec 10.7)."""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from deltastore.adapters._probe import Probe
from deltastore.handle import Handle

PATIENCE = 2.0
"""How many times the usual length of a forward pass the large partitions are left to the backward pass."""
SIGNALS = 2
"""Parameters of each module whose gradient says that the backward pass has begun: the last ones have theirs first."""


class Windows:
    """Says which tensors last until the next optimizer step, and closes the window before they change.

    Parameters
    ----------
    modules : sequence of Module
        The models: their backward pass is the time for large partitions.
    optimizers : mapping of str to Optimizer
        Whose parameters and state are left to the windows, once a probe has shown that nothing else changes them.
    on_torn : callable
        Called with the handle of a commit whose state was changed while it was taken.
    on_stall : callable
        Called with the seconds that an optimizer step waited.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        optimizers: Mapping[str, torch.optim.Optimizer],
        *,
        on_torn: Callable[[Handle], None],
        on_stall: Callable[[float], None],
    ) -> None:
        self._pid = os.getpid()
        self._on_torn = on_torn
        self._on_stall = on_stall
        self._probes = [Probe(name, optimizer) for name, optimizer in optimizers.items()]
        self._handle: Handle | None = None
        self._began = 0.0
        self._forward_seconds: deque[float] = deque(maxlen=16)
        self._hooks = [hook for probe in self._probes for hook in probe.watch(self._before_step)]
        for module in modules:
            self._hooks.append(_hook(module, "register_load_state_dict_pre_hook", _Gate(self.gate)))
            parameters = [p for p in module.parameters() if p.requires_grad and p.is_leaf]
            self._hooks += [
                _hook(p, "register_post_accumulate_grad_hook", self._backward) for p in parameters[-SIGNALS:]
            ]

    @property
    def patience_seconds(self) -> float:
        """How long the large partitions wait for the backward pass; 0 while none was seen."""
        return PATIENCE * statistics.median(self._forward_seconds) if self._forward_seconds else 0.0

    @property
    def states(self) -> dict[str, str]:
        """Whether each optimizer's window is open or probed, by its name; otherwise why it is closed for good."""
        return {probe.name: "open" if probe.is_open else probe.reason or "probing" for probe in self._probes}

    def lasting(self) -> frozenset[int]:
        """Return the addresses of the tensors that last until the next optimizer step."""
        return frozenset(tensor.data_ptr() for probe in self._probes if probe.is_open for tensor in probe.tensors())

    def settle(self) -> None:
        """Close the window at the next commit, and compare what is still probed."""
        self.gate()
        for probe in self._probes:
            probe.compare(stepped=False)

    def begin(self, handle: Handle) -> None:
        """A commit was taken: its window is open until the next gate."""
        self._handle = handle if handle._window is not None else None
        self._began = time.perf_counter()
        for probe in self._probes:
            probe.mark()

    def gate(self) -> None:
        """Take what is left of the state: it may change from here on."""
        handle = self._handle
        if handle is None or handle._window is None or os.getpid() != self._pid:
            return
        is_whole = handle._window.finish()
        self._handle = None  # not before: an interrupted gate leaves it to the next one
        if not is_whole:
            for probe in self._probes:
                probe.close("it was changed between step and the optimizer's step, without edit()")
            self._on_torn(handle)

    def forget(self) -> None:
        """The state is changed in an announced way: what was marked says nothing any more."""
        self.gate()
        for probe in self._probes:
            probe.forget()

    def close(self) -> None:
        """Take the hooks away."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _before_step(self, probe: Probe) -> None:
        started = time.perf_counter()
        has_window = self._handle is not None
        self.gate()
        if has_window:
            self._on_stall(time.perf_counter() - started)
        if os.getpid() == self._pid:
            probe.compare(stepped=True)

    def _backward(self, _parameter: torch.Tensor) -> None:
        handle = self._handle
        if handle is None or handle._window is None or os.getpid() != self._pid:
            return
        if self._began:
            self._forward_seconds.append(time.perf_counter() - self._began)
            self._began = 0.0
        handle._window.release()


def _hook(owner: Any, register: str, function: Callable[..., None]) -> Any:
    return getattr(owner, register)(function)


class _Gate:
    """A hook of a module that calls a function; in a copy or a pickle of the module it does nothing."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    def __call__(self, *_: Any) -> None:
        self._function()

    def __reduce__(self) -> tuple[Any, ...]:
        # A builtin that takes any arguments: who loads the module needs no deltastore.
        return getattr, ("", "format")
