"""What the formats that hold named tensors and little else have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deltastore.formats.contents import Contents, take_apart
from deltastore.formats.leaves import FileTensor
from deltastore.formats.loss import Loss
from deltastore.formats.plan import Ability, Plan, bare_document, make_plan
from deltastore.formats.record import Found, parse_record
from deltastore.formats.registry import Options
from deltastore.parallel import threads
from deltastore.types import Path

MOST_PARTITION_BYTES = 32 << 20
"""A partition of a store: a thread that reads one holds a few."""


def restore(found: Found, *, nested: bool) -> Contents:
    """Return the contents of a file: as its record says, or as its names say."""
    if found.record is not None:
        return parse_record(found)
    document = bare_document(found.tensors, nested=nested)
    leaves: dict[Path, FileTensor] = {
        tuple(name.split("/")) if nested else (name,): tensor for name, tensor in found.tensors.items()
    }
    return Contents(document, leaves)


@dataclass(frozen=True)
class TensorFormat:
    """The :class:`~deltastore.formats.registry.Converter` of a format of named tensors."""

    ability: Ability
    find: Callable[[str], Found]
    """Gives what is in a file, without reading its tensors."""
    write: Callable[[Plan, Contents, str, Options], int]
    """Writes a file and returns its size in bytes."""

    def open(self, path: str) -> Contents:
        """Return the contents of a file; its tensors are read when needed."""
        return restore(self.find(path), nested=self.ability.is_nested)

    def load(self, path: str) -> Any:
        """Return the nested state that a file holds."""
        return self.open(path).state()

    def held_bytes(self, path: str) -> int:
        """Return 0: what is in memory is what is read at the time."""
        del path
        return 0

    def losses(self, state: Any) -> tuple[Loss, ...]:
        """Return what a file would not hold of a state."""
        return make_plan(take_apart(state), self.ability).losses

    def save(self, state: Any, path: str, options: Options) -> int:
        """Write a file and return its size in bytes."""
        contents = take_apart(state)
        return self.write(make_plan(contents, self.ability), contents, path, options)

    def needed_bytes(self, state: Any, options: Options) -> int:
        """Return about how much memory writing takes: the largest tensor, twice, and what the threads hold."""
        del options
        return needed_bytes(take_apart(state))


def needed_bytes(contents: Contents) -> int:
    """Return about how much memory it takes to go through contents tensor by tensor."""
    return 2 * contents.largest_bytes + 3 * threads() * MOST_PARTITION_BYTES
