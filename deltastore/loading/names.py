"""Names of tensors without what wrappers put in, and matching the names of two states. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Names that torch.compile, FSDP and activation checkpointing give to the module inside; no user picks them."""
DATA_PARALLEL = "module."
"""What DataParallel and DDP put in front: a name that users give to modules of their own, too."""


def canonical_names(keys: Sequence[str]) -> list[str]:
    """Return the names that the keys would have without wrappers, in the same order and still all different.

    The segments of :data:`WRAPPERS` go wherever and however often they are nested; ``module.`` goes only where every
    key begins with it, for it may be the name of a real module.
    """
    names = [_unwrapped(key) for key in keys]
    while names and all(name.startswith(DATA_PARALLEL) for name in names):
        names = [name.removeprefix(DATA_PARALLEL) for name in names]
    counts = Counter(names)
    return [key if counts[name] > 1 else name for key, name in zip(keys, names, strict=True)]


def _unwrapped(key: str) -> str:
    *modules, leaf = key.split(".")
    return ".".join([*(module for module in modules if module not in WRAPPERS), leaf])


def match_names(live: Sequence[str], stored: Iterable[str]) -> dict[str, str]:
    """Return the stored name for each name of an object that has one: as they are first, then without wrappers."""
    left = dict.fromkeys(stored)
    canonical = dict(zip(canonical_names(list(left)), left, strict=True))
    found: dict[str, str] = {}
    for name in live:
        if name in left:
            found[name] = name
            del left[name]
    for name, short in zip(live, canonical_names(live), strict=True):
        if name in found:
            continue
        # Both spellings: of a part of a model, all keys may begin with a real "module.".
        match = next((other for other in (short, canonical.get(short)) if other in left), None)
        if match is not None:
            found[name] = match
            del left[match]
    return found
