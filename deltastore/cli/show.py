"""``deltastore show``: one commit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from deltastore.cli.arguments import JsonOption, RefArgument, UrlArgument, open_to_read, state_at
from deltastore.cli.fidelity_rows import fidelity_json, print_fidelity
from deltastore.cli.inside import chain_of as chain_of_commit
from deltastore.cli.leaf_rows import Row, rows
from deltastore.cli.output import commit_json, local_time, metrics_text, print_json, print_table, say, size
from deltastore.handle import Commit
from deltastore.history.chain import Chain

HELP = """Show one commit: what it is, what it needs, what it holds.

\b
Examples:
  deltastore show runs/gpt2 latest
  deltastore show runs/gpt2 latest~3 --json
  deltastore show runs/gpt2 1234 --fidelity     how far each tensor may be from the training state
"""


@dataclass
class Part:
    """What lies below one key at the top of a state."""

    tensors: int = 0
    plain: int = 0
    bytes: int = 0
    dtypes: set[str] = field(default_factory=set)

    @property
    def names(self) -> list[str]:
        """The dtypes in order."""
        return sorted(self.dtypes)

    def add(self, row: Row) -> None:
        """Count a leaf; bytes that two paths share are counted once."""
        if row.kind == "plain":
            self.plain += 1
            return
        self.tensors += 1
        self.dtypes.add(row.dtype)
        if row.tied_to is None:
            self.bytes += row.bytes


def show(
    url: UrlArgument,
    ref: RefArgument = "latest",
    fidelity: Annotated[
        bool, typer.Option("--fidelity", help="Add the bound of every tensor that is not exact.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show one commit."""
    with open_to_read(url) as store:
        state = state_at(store, ref)
        commit = state.commit
        chain = chain_of(store.commits(), commit)
        parts = parts_of(rows(state))
        predictions = predictions_of(chain_of_commit(store, commit))
        place = store.url
    needed = {"commits": len(chain), "bytes": sum(member.bytes for member in chain), "base_step": chain[0].step}
    if as_json:
        listed = [
            {
                "key": key,
                "tensors": part.tensors,
                "plain": part.plain,
                "bytes": part.bytes,
                "dtypes": part.names,
            }
            for key, part in parts.items()
        ]
        document = {
            "store": place,
            "commit": commit_json(commit),
            "chain": needed,
            "parts": listed,
            "predictions": predictions,
        }
        print_json({**document, "fidelity": fidelity_json(state)} if fidelity else document)
        return
    print_table(["", ""], _about(commit, needed, predictions))
    say("")
    columns = ("part", ("tensors", "right"), ("plain values", "right"), ("bytes", "right"), "dtypes")
    print_table(columns, ([k, p.tensors, p.plain, size(p.bytes), " ".join(p.names)] for k, p in parts.items()))
    if fidelity:
        say("")
        print_fidelity(state)


def parts_of(found: Iterable[Row]) -> dict[str | int, Part]:
    """Return the parts of a state by their keys."""
    parts: dict[str | int, Part] = {}
    for row in found:
        parts.setdefault(row.path[0] if row.path else "(top)", Part()).add(row)
    return parts


def chain_of(commits: list[Commit], commit: Commit) -> list[Commit]:
    """Return the commits that a reader of a commit needs, its base first."""
    by_id = {other.id: other for other in commits}
    chain = [commit]
    while chain[-1].kind == "delta" and chain[-1].parent in by_id:
        chain.append(by_id[str(chain[-1].parent)])
    return chain[::-1]


def predictions_of(chain: Chain) -> list[dict[str, Any]]:
    """Return what the newest commit of a chain predicts: kinds and codes, with the number of elements of each."""
    found: dict[tuple[str, str | None], int] = {}
    for prediction in chain.record.predictions:
        elements = sum(chain.layout.by_id[number].length for number in prediction.partitions)
        key = prediction.kind, prediction.code
        found[key] = found.get(key, 0) + elements
    return [{"kind": kind, "code": code, "elements": elements} for (kind, code), elements in found.items()]


def _predicted(predictions: list[dict[str, Any]]) -> str:
    return ", ".join(
        f"{item['elements']:,} elements by {item['kind']}" + (f" with {item['code']} codes" if item["code"] else "")
        for item in predictions
    )


def _about(commit: Commit, needed: dict[str, Any], predictions: list[dict[str, Any]]) -> list[list[object]]:
    return [
        ["commit", commit.id],
        ["step", commit.step],
        ["epoch", commit.epoch],
        ["kind", commit.kind],
        ["parent", commit.parent or "none"],
        ["created", local_time(commit.created)],
        ["exact", "yes, bit for bit" if commit.exact else "no, within a bound"],
        ["predicted", _predicted(predictions) or "nothing"],
        ["bytes", size(commit.bytes)],
        ["to read it", f"{needed['commits']} commits from step {needed['base_step']} on, {size(needed['bytes'])}"],
        ["tags", " ".join(commit.tags) or "none"],
        ["metrics", metrics_text(commit.metrics) or "none"],
    ]
