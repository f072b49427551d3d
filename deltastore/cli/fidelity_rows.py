"""How far the tensors of a commit may be from the training state, as rows to print."""

from __future__ import annotations

from typing import Any

from deltastore.cli.leaf_paths import path_text
from deltastore.cli.output import print_table, say, size
from deltastore.reader import State

_COLUMNS = (
    *("tensor", "role", ("bound", "right"), ("threshold", "right")),
    *(("stored", "right"), ("deviation / norm", "right")),
)


def fidelity_json(state: State) -> dict[str, Any]:
    """Return the fidelity of a commit as programs get it; tensors that are not listed are exact."""
    found = state.fidelity
    tensors = [
        {
            "path": list(entry.path),
            "role": role,
            "bound": tensor.bound,
            "threshold": tensor.threshold,
            "stored_share": tensor.kept / entry.elements,
            "deviation_norm": tensor.missing,
            "norm": tensor.whole,
        }
        for entry, role, tensor in found.inexact()
    ]
    return {"exact": found.exact, "budget_bytes": found.budget, "floor_bytes": found.floor, "tensors": tensors}


def print_fidelity(state: State) -> None:
    """Print the bounds of a commit, or that it has none."""
    found = state.fidelity
    if found.exact:
        say("exact: every tensor equals the training state bit for bit")
        return
    say(
        f"no element is farther from the training state than its tensor's bound; budget {size(found.budget)}, of which "
        f"{size(found.floor)} are needed in any case; tensors that are not listed are exact"
    )
    print_table(
        _COLUMNS,
        (
            [
                path_text(entry.path),
                role,
                f"{tensor.bound:.3g}",
                f"{tensor.threshold:.3g}",
                f"{tensor.kept / entry.elements:.2%}",
                "-" if tensor.missing is None or not tensor.whole else f"{tensor.missing / tensor.whole:.2e}",
            ]
            for entry, role, tensor in found.inexact()
        ),
    )
