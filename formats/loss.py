"""The loss report: what a format cannot hold of a state, said before anything is written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from deltastore.errors import InvalidInput
from deltastore.types import Path, show_path

_MOST_NAMED = 3


@dataclass(frozen=True)
class Loss:
    """One thing that the file will not hold as the state does."""

    kind: str
    """``dtype``, ``alias``, ``plain``, ``array``, ``key``, ``nesting``, ``type``, ``cast``, ``fidelity``, ``file``."""
    path: Path
    text: str
    is_restored: bool = True
    """Importing the file again with deltastore gives it back exactly."""
    is_wanted: bool = False
    """The caller asked for it: `strict` does not refuse it."""

    def __str__(self) -> str:
        return f"{show_path(self.path)}: {self.text}"


def cast_loss(path: Path, before: torch.dtype, after: torch.dtype) -> Loss:
    """Return what a cast loses: the rounding, relative to each element."""
    old, new = torch.finfo(before), torch.finfo(after)
    names = f"{str(before).removeprefix('torch.')} becomes {str(after).removeprefix('torch.')}"
    if old.eps >= new.eps and old.max <= new.max and old.tiny >= new.tiny:
        return Loss("cast", path, f"{names}, exactly", is_restored=False, is_wanted=True)
    text = f"{names}, rounded to the nearest: off by {new.eps / 2:.3g} of an element at most"
    if old.max > new.max or old.tiny < new.tiny:
        text += f" between {new.tiny:.3g} and {new.max:.3g}; smaller ones lose more, larger ones become inf or nan"
    return Loss("cast", path, text, is_restored=False, is_wanted=True)


def summary(losses: Iterable[Loss]) -> list[str]:
    """Return a line for each kind of loss, with the first few paths."""
    by_text: dict[tuple[str, str, bool], list[Path]] = {}
    for loss in losses:
        by_text.setdefault((loss.kind, loss.text, loss.is_restored), []).append(loss.path)
    lines = []
    for (kind, text, is_restored), paths in by_text.items():
        names = ", ".join(show_path(path) for path in paths[:_MOST_NAMED])
        more = f" and {len(paths) - _MOST_NAMED} more" if len(paths) > _MOST_NAMED else ""
        back = "import restores it" if is_restored else "not restored by an import"
        lines.append(f"{kind}: {names}{more}: {text} ({back})")
    return lines


def refuse_losses(losses: Iterable[Loss], where: str) -> None:
    """Raise InvalidInput if there are losses that nobody asked for; nothing was written."""
    unwanted = [loss for loss in losses if not loss.is_wanted]
    if not unwanted:
        return
    kinds = ", ".join(f"{number} of kind {kind}" for kind, number in Counter(loss.kind for loss in unwanted).items())
    raise InvalidInput(
        f"{where} was not written: strict, and the format cannot hold everything ({kinds}; the first: {unwanted[0]}). "
        "Without strict what it lacks is recorded and restored where that is possible",
        losses=[str(loss) for loss in unwanted],
        path=where,
    )
