"""deltastore: every optimizer step a durable, addressable version of the training state.

``deltastore.open(url)`` gives a :class:`Store`; ``deltastore.adapters`` takes the state from a training loop,
``deltastore.formats`` converts to and from other files, ``deltastore.errors`` is the tree of everything that is raised.

Importing this package loads neither torch nor numpy: the public names come on first use (PEP 562), so that tools which
only look at files start quickly and run on machines without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deltastore import adapters, errors, formats
    from deltastore.handle import Handle
    from deltastore.opening import open
    from deltastore.policy import Policy
    from deltastore.pushing import push
    from deltastore.reader import LazyTensor, Report, State
    from deltastore.store import Store

__version__ = "0.1.0"

__all__ = [
    "Handle",
    "LazyTensor",
    "Policy",
    "Report",
    "State",
    "Store",
    "__version__",
    "adapters",
    "errors",
    "formats",
    "open",
    "push",
]

_HOME = {
    "Handle": "deltastore.handle",
    "LazyTensor": "deltastore.reader",
    "Policy": "deltastore.policy",
    "Report": "deltastore.reader",
    "State": "deltastore.reader",
    "Store": "deltastore.store",
    "open": "deltastore.opening",
    "push": "deltastore.pushing",
}
_SUBPACKAGES = frozenset({"adapters", "errors", "formats"})

# Hidden from type checkers: they read the imports above, and a module __getattr__ would make every misspelt name valid.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Load a public name on its first use and keep it."""
        if name in _SUBPACKAGES:
            return import_module(f"deltastore.{name}")
        if name in _HOME:
            value = getattr(import_module(_HOME[name]), name)
            globals()[name] = value
            return value
        raise AttributeError(f"module 'deltastore' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return every name, the ones not loaded yet too."""
    return sorted({*globals(), *__all__})
