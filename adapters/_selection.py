"""Which parts of the state are stored: `include` and `exclude` of a Checkpointer. No torch."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from deltastore.errors import InvalidInput

Pattern: TypeAlias = str | Callable[[str], bool]
"""A shell pattern such as ``"*lora_*"``, or a function of a name."""


class Selection:
    """A choice among "object/key" names.

    Parameters
    ----------
    include : pattern, sequence of patterns, or None
        Tensors of modules that are stored, and the optimizer's state of those parameters; None: all. Whole objects
        other than modules and optimizers, random states and `extra` are not concerned.
    exclude : pattern, sequence of patterns, or None
        Tensors and optimizer states that are not stored; a pattern without "/" may name a whole object, such as "ema"
        or "rng".
    """

    def __init__(
        self, include: Pattern | Iterable[Pattern] | None = None, exclude: Pattern | Iterable[Pattern] | None = None
    ) -> None:
        self._include = None if include is None else _patterns("include", include)
        self._exclude = () if exclude is None else _patterns("exclude", exclude)

    def keeps(self, name: str, *others: str) -> bool:
        """Return whether something is stored.

        Parameters
        ----------
        name
            Its own name: "model/wte.weight", or "optimizer/wte.weight" for the state of a parameter.
        others
            What else includes it: the name of that parameter.
        """
        if any(_matches(pattern, name) for pattern in self._exclude):
            return False
        return self._include is None or any(
            _matches(pattern, each) for pattern in self._include for each in (name, *others)
        )

    def keeps_object(self, name: str) -> bool:
        """Return whether anything of an object is stored."""
        return not any(_matches(pattern, name) for pattern in self._exclude)

    @property
    def is_all(self) -> bool:
        """Whether nothing is left out."""
        return self._include is None and not self._exclude

    def check(self, tensors: Iterable[str], others: Iterable[str]) -> None:
        """Raise for a pattern that means nothing: it is a slip, and what it should have done is not done.

        Parameters
        ----------
        tensors
            The "object/key" names of modules and optimizers.
        others
            All other names that `exclude` may have, such as those of whole objects.

        Raises
        ------
        InvalidInput
            A pattern matches none of them. A function is free to.
        """
        names = list(dict.fromkeys(tensors))
        for argument, patterns, known in (
            ("include", self._include or (), names),
            ("exclude", self._exclude, [*names, *dict.fromkeys(others)]),
        ):
            for pattern in patterns:
                if isinstance(pattern, str) and not any(_matches(pattern, name) for name in known):
                    near = ", ".join(_near(pattern, known))
                    raise InvalidInput(
                        f"{argument}: nothing has a name like {pattern!r}; there are {near}", pattern=pattern
                    )


NEAR = 4
"""How many names an error text offers."""


def _near(pattern: str, names: Sequence[str]) -> list[str]:
    """Return the names that a pattern may have meant, or else some of them."""
    parts = {name: name for name in names}
    for name in names:
        for part in re.split("[/.]", name):
            parts.setdefault(part, name)
    close: list[str] = []
    for wanted in (re.sub(r"[*?\[\]]", "", pattern), *re.split(r"[/.*?\[\]]", pattern)):
        close += difflib.get_close_matches(wanted, parts, n=NEAR, cutoff=0.6) if wanted else []
    found = list(dict.fromkeys(parts[part] for part in close)) or list(names)
    return [*found[:NEAR], *(["..."] if len(names) > NEAR else [])]


def _patterns(argument: str, value: Any) -> Sequence[Pattern]:
    patterns = [value] if isinstance(value, str) or callable(value) else value
    if not isinstance(patterns, Iterable):
        raise InvalidInput(f"{argument} is {value!r}, expected patterns such as '*lora_*', or functions of a name")
    patterns = tuple(patterns)
    if not patterns or not all(isinstance(pattern, str) or callable(pattern) for pattern in patterns):
        raise InvalidInput(f"{argument} is {value!r}, expected patterns such as '*lora_*', or functions of a name")
    return patterns


def _matches(pattern: Pattern, name: str) -> bool:
    return fnmatchcase(name, pattern) if isinstance(pattern, str) else bool(pattern(name))
