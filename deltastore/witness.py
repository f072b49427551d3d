"""Whether tensors stayed as they were while they were copied (spec 10.7)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

SAMPLE_BYTES = 4096
"""What is compared of each copied run of elements; another part of it each time."""

_bytes_at = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)


@dataclass(frozen=True, slots=True)
class _Sample:
    tensor: Any
    address: int
    version: int
    live: int
    copied: int
    count: int
    before: bytes

    def is_unchanged(self) -> bool:
        tensor = self.tensor
        return bool(
            tensor._version == self.version
            and tensor.data_ptr() == self.address
            and self.before == _bytes_at(self.live, self.count) == _bytes_at(self.copied, self.count)
        )


class Witness:
    """Remembers a sample of each run of elements that is to be copied, and the versions of the tensors.

    A sample sees an edit of all elements, always, and the version one by torch's own operations; what changes a few
    elements behind torch's back (``.data``, numpy, a fused kernel) may escape both.

    Parameters
    ----------
    phase : int
        Which part of each run is looked at: another one for each state.
    runs : sequence of (tensor, array, start)
        A contiguous tensor of the CPU, where its elements from `start` on are copied to.
    """

    def __init__(self, phase: int, runs: Sequence[tuple[Any, np.ndarray, int]]) -> None:
        self._samples = [_sample(phase, *run) for run in runs]

    def is_unchanged(self) -> bool:
        """Return whether the tensors are what they were, and their copies too."""
        return all(sample.is_unchanged() for sample in self._samples)


def _sample(phase: int, tensor: Any, copied: np.ndarray, start: int) -> _Sample:
    count = min(SAMPLE_BYTES, copied.nbytes)
    skipped = phase * SAMPLE_BYTES % (copied.nbytes - count + 1)
    address = tensor.data_ptr()
    live = address + start * copied.itemsize + skipped
    return _Sample(tensor, address, tensor._version, live, copied.ctypes.data + skipped, count, _bytes_at(live, count))
