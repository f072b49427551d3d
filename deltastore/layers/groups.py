"""Which partitions are predicted together, and by which rules (spec 9.9). Pure planning."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from deltastore.layers.blocks import Blocks, blocks_of
from deltastore.layers.importance import MIN_ELEMENTS
from deltastore.layers.rules import Rule
from deltastore.layout import Layout
from deltastore.ondisk.predictions import MEMBERS, REPLAYS
from deltastore.policy import FILTER, Policy
from deltastore.types import Path


@dataclass(frozen=True)
class Slot:
    """One parameter of a group: the tensors that belong together, by their index in the layout, and who has a rule."""

    tensors: tuple[int, ...]
    owner: Path
    """Where the optimizer has the parameter's buffers."""
    elements: int


@dataclass(frozen=True)
class Group:
    """Partitions of weights and of what an optimizer remembers of them: element i belongs to element i."""

    kind: str
    partitions: tuple[int, ...]
    blocks: Blocks
    slots: tuple[Slot, ...]


Sets = tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, int, int], ...]]
"""Sets of constants, and the ranges of elements for which each holds."""


@dataclass(frozen=True)
class RuledGroup:
    """A group with the rules of one commit.

    Attributes
    ----------
    rules : tuple of Rule or None
        For each slot; None: it is held.
    """

    group: Group
    rules: tuple[Rule | None, ...]

    @property
    def elements(self) -> int:
        """How many elements of each partition are predicted."""
        return sum(slot.elements for slot, rule in zip(self.group.slots, self.rules, strict=True) if rule is not None)

    @property
    def tensors(self) -> set[int]:
        """The tensors that are predicted, by their index in the layout."""
        pairs = zip(self.group.slots, self.rules, strict=True)
        return {tensor for slot, rule in pairs if rule is not None for tensor in slot.tensors}

    def sets(self, unit: float) -> Sets:
        """Return the constants of a prediction by codes."""
        return self._sets(lambda rule: rule.constants(unit))

    def replay_sets(self) -> Sets:
        """Return the constants of a replay."""
        return self._sets(lambda rule: rule.replayed())

    def _sets(self, constants: Callable[[Rule], tuple[int, ...]]) -> Sets:
        numbers: dict[tuple[int, ...], int] = {}
        ranges: list[tuple[int, int, int]] = []
        blocks = self.group.blocks
        edges = [*blocks.starts[blocks.heads].tolist(), int(blocks.ends[-1])]
        for index, rule in enumerate(self.rules):
            if rule is None:
                continue
            number = numbers.setdefault(constants(rule), len(numbers))
            first, last = edges[index], edges[index + 1]
            if ranges and ranges[-1][1:] == (first, number):
                first = ranges.pop()[0]
            ranges.append((first, last, number))
        return tuple(numbers), tuple(ranges)


def find_groups(layout: Layout) -> list[Group]:
    """Return what could be predicted if its rules were known."""
    by_group: dict[int, dict[str, int]] = {}
    for partition in layout.partitions:
        if partition.group is not None and partition.dtype == "float32":
            by_group.setdefault(partition.group, {})[partition.role] = partition.id
    counts: dict[int, int] = {}
    for partition in layout.partitions:
        if partition.group is not None:
            counts[partition.group] = counts.get(partition.group, 0) + 1
    found = []
    for number, roles in by_group.items():
        for kind in REPLAYS:
            members = MEMBERS[kind]
            if set(members) == set(roles) and counts[number] == len(members):
                group = _group(layout, kind, [roles[role] for role in members])
                if group is not None:
                    found.append(group)
    return found


def _group(layout: Layout, kind: str, partitions: Sequence[int]) -> Group | None:
    at: list[dict[int, int]] = [{} for _ in partitions]
    for index, entry in enumerate(layout.tensors):
        for piece in entry.pieces:
            if piece.partition in partitions:
                at[partitions.index(piece.partition)][piece.offset] = index
    blocks = blocks_of(layout, partitions[0])
    if not len(blocks) or any(places.keys() != at[0].keys() for places in at):
        return None
    slots = []
    for first in blocks.starts[blocks.heads].tolist():
        tensors = tuple(places[first] for places in at)
        owner = layout.tensors[tensors[1]].path[:-1]
        slots.append(Slot(tensors, owner, layout.tensors[tensors[0]].elements))
    return Group(kind, tuple(partitions), blocks, tuple(slots))


def replayable(
    groups: Sequence[Group], rules: Mapping[Path, Rule], gradients: Mapping[Path, object]
) -> list[RuledGroup]:
    """Return the groups of which something can be replayed: one step, with its gradient."""
    return _ruled(groups, rules, lambda slot, rule: len(rule.steps) == 1 and slot.owner in gradients)


def apply_rules(
    groups: Sequence[Group], rules: Mapping[Path, Rule], layout: Layout, policy: Policy
) -> list[RuledGroup]:
    """Return the groups of which something is predicted.

    Small tensors are exact anyway, and what the user gave a rule of its own is filtered as it says.
    """

    def allows(slot: Slot, rule: Rule) -> bool:
        roles = zip(MEMBERS[rule.kind], slot.tensors, strict=True)
        return slot.elements >= MIN_ELEMENTS and all(
            policy.rule(layout.tensors[tensor].path, role) == FILTER for role, tensor in roles
        )

    return _ruled(groups, rules, allows)


def _ruled(
    groups: Sequence[Group], rules: Mapping[Path, Rule], allows: Callable[[Slot, Rule], bool]
) -> list[RuledGroup]:
    """Return the groups of which a slot has a rule of their kind that is allowed."""
    found = []
    for group in groups:
        chosen: list[Rule | None] = []
        for slot in group.slots:
            rule = rules.get(slot.owner)
            chosen.append(rule if rule is not None and rule.kind == group.kind and allows(slot, rule) else None)
        if any(rule is not None for rule in chosen):
            found.append(RuledGroup(group, tuple(chosen)))
    return found
