"""Loading a state into living objects: modules, optimizers, schedulers, generators, in place and with flat memory.

A load is planned first and touches nothing until the plan is known to fit; then tensors are copied partition by
partition straight to where they belong, and plain values follow.
"""

from __future__ import annotations

from deltastore.loading.load import load_into, load_objects
from deltastore.loading.names import canonical_names

__all__ = ["canonical_names", "load_into", "load_objects"]
