"""``deltastore log``: the commits of a store."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from deltastore.cli.arguments import JsonOption, TierOption, UrlArgument, open_over_tiers
from deltastore.cli.inside import unreadable_packs
from deltastore.cli.leaf_rows import layout_of
from deltastore.cli.output import (
    cell,
    commit_json,
    count,
    local_time,
    metrics_text,
    print_json,
    print_table,
    say,
    size,
)
from deltastore.errors import DeltaStoreError
from deltastore.handle import HELD_BY, HELD_SECONDS, Commit
from deltastore.recovery import Reach
from deltastore.store import Store

HELP = """List the commits, newest first (as git does).

\b
kind   base: complete in itself; delta: needs the commits before it, back to a base
bytes  what the commit takes in the store, everything included
exact  whether it restores bit for bit
line   ~ for a commit that was left behind: the run went back to an older one, and the latest does not build on it
tiers  which tiers have it with all that it needs, where the store has several

\b
Examples:
  deltastore log runs/gpt2 -n 20
  deltastore log runs/gpt2 --stats          bytes per step, with and without bases
  deltastore log runs/gpt2 --stats --tier hdfs://namenode:9870/ckpt/gpt2    how far that is behind
  deltastore log runs/gpt2 --json | jq '.commits[] | [.step, .metrics.loss]'
"""

_COLUMNS = (
    *("id", ("step", "right"), ("epoch", "right"), "kind", ("bytes", "right")),
    *("exact", "created", "tags", "metrics"),
)


def log(
    url: UrlArgument,
    limit: Annotated[int | None, typer.Option("--limit", "-n", min=1, help="Only so many.")] = None,
    reverse: Annotated[bool, typer.Option("--reverse", help="Oldest first.")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Add what a step costs.")] = False,
    tier: TierOption = None,
    as_json: JsonOption = False,
) -> None:
    """List commits."""
    with open_over_tiers(url, tier) as store:
        commits = store.commits()
        line = {commit.id for commit in store.lineage()}
        unreadable = unreadable_packs(store)
        placement = store.placement() if len(store.tier_names) > 1 else None
        summary = statistics(store, commits) if stats else None
        place = store.url
    shown = commits[::-1][: limit if limit is not None else len(commits)]
    shown = shown[::-1] if reverse else shown
    if as_json:
        listed = [
            {
                **commit_json(commit),
                "on_line": commit.id in line,
                **({} if placement is None else {"tiers": placement.get(commit.id, ())}),
            }
            for commit in shown
        ]
        document: dict[str, Any] = {"store": place, "commits": listed, "unreadable_packs": unreadable}
        print_json(document if summary is None else {**document, "stats": summary})
        return
    if commits:
        _print_commits(shown, line, placement)
    else:
        say("no commit can be read" if unreadable else "no commits yet")
    if unreadable:
        say(f"{count(len(unreadable), 'pack')} cannot be opened: run `deltastore verify`", "red")
    if summary is not None and commits:
        say("")
        print_table(["", ""], _summary_lines(summary))


def _print_commits(commits: list[Commit], line: set[str], placement: dict[str, tuple[str, ...]] | None) -> None:
    columns: list[str | tuple[str, str]] = [*_COLUMNS]
    rows = [_cells(commit) for commit in commits]
    if placement is not None:
        at = columns.index("created")
        columns.insert(at, "tiers")
        for commit, cells in zip(commits, rows, strict=True):
            cells.insert(at, cell(" ".join(placement.get(commit.id, ())) or "none has it whole"))
    left = [commit.id not in line for commit in commits]
    if any(left):
        at = columns.index("kind")
        columns.insert(at, "line")
        for is_left, cells in zip(left, rows, strict=True):
            cells.insert(at, "~" if is_left else "")
        rows = [
            [cell(value, "dim") for value in cells] if is_left else cells
            for is_left, cells in zip(left, rows, strict=True)
        ]
    print_table(columns, rows)
    if any(left):
        say("~ left behind: the latest commit does not build on it")


def _cells(commit: Commit) -> list[object]:
    return [
        cell(commit.id[:12], "yellow"),
        commit.step,
        commit.epoch,
        commit.kind,
        size(commit.bytes),
        "yes" if commit.exact else "no",
        local_time(commit.created),
        cell(" ".join(commit.tags), "green"),
        metrics_text(commit.metrics),
    ]


def statistics(store: Store, commits: list[Commit]) -> dict[str, Any]:
    """Return what the commits take, with and without bases, how long the chains are, and how far the tiers are."""
    deltas = [commit for commit in commits if commit.kind == "delta"]
    chains = chain_lengths(commits)
    costs = restore_costs(commits)
    full = _full_bytes(store)
    with_bases = sum(commit.bytes for commit in commits) / len(commits) if commits else None
    without = sum(commit.bytes for commit in deltas) / len(deltas) if deltas else None
    return {
        "commits": len(commits),
        "bases": len(commits) - len(deltas),
        "deltas": len(deltas),
        "bytes": sum(commit.bytes for commit in commits),
        "full_state_bytes": full,
        "bytes_per_step_with_bases": with_bases,
        "bytes_per_step_without_bases": without,
        "share_with_bases": with_bases / full if with_bases and full else None,
        "share_without_bases": without / full if without and full else None,
        "mean_chain": sum(chains) / len(chains) if chains else None,
        "longest_chain": max(chains, default=None),
        "mean_restore_cost": sum(costs) / len(costs) if costs else None,
        "largest_restore_cost": max(costs, default=None),
        "inexact": sum(not commit.exact for commit in commits),
        "held": held_up(commits),
        "tiers": [behind(reach, commits) for reach in store.reaches()] if len(store.tier_names) > 1 else [],
    }


def held_up(commits: list[Commit]) -> dict[str, Any]:
    """Return how many commits waited before they were taken, since a further tier was too far behind, and how long."""
    limits: dict[str, float] = {}
    for commit in commits:
        limit, seconds = commit.metrics.get(HELD_BY), commit.metrics.get(HELD_SECONDS)
        if isinstance(limit, str) and isinstance(seconds, int | float):
            limits[limit] = limits.get(limit, 0.0) + seconds
    return {"commits": sum(HELD_BY in commit.metrics for commit in commits), "seconds_by_limit": limits}


def behind(reach: Reach, commits: list[Commit]) -> dict[str, Any]:
    """Return how far a tier is behind the newest commit of all."""
    newer = [commit for commit in commits if reach.newest is None or commit.step > reach.newest]
    return {
        "url": reach.url,
        "error": reach.error,
        "commits": reach.commits,
        "newest": reach.newest,
        "commits_behind": len(newer),
        "bytes_behind": sum(commit.bytes for commit in newer),
    }


def chain_lengths(commits: list[Commit]) -> list[int]:
    """Return for each commit how many commits a reader of it needs; parents come before their children."""
    length: dict[str, int] = {}
    for commit in commits:
        length[commit.id] = 1 if commit.kind == "base" else 1 + length.get(commit.parent or "", 0)
    return list(length.values())


def restore_costs(commits: list[Commit]) -> list[float]:
    """Return for each commit the bytes that reading it takes, over those of its base; parents come first."""
    read: dict[str, tuple[int, int]] = {}
    for commit in commits:
        base, before = (commit.bytes, 0) if commit.kind == "base" else read.get(commit.parent or "", (0, 0))
        read[commit.id] = base, before + commit.bytes
    return [total / base for base, total in read.values() if base]


def _full_bytes(store: Store) -> int | None:
    try:
        return layout_of(store.at("latest")).bytes
    except DeltaStoreError:
        return None  # damaged: the other figures can still be given


def _summary_lines(summary: dict[str, Any]) -> list[list[object]]:
    def per_step(name: str) -> str:
        taken, share = summary[f"bytes_per_step_{name}"], summary[f"share_{name}"]
        if taken is None:
            return "-"
        return size(taken) if share is None else f"{size(taken)} ({share:.1%} of the full state)"

    cost, largest = summary["mean_restore_cost"], summary["largest_restore_cost"]
    mean, longest = summary["mean_chain"], summary["longest_chain"]
    lines: list[list[object]] = [
        ["commits", f"{summary['commits']} ({summary['bases']} bases, {summary['deltas']} deltas)"],
        ["bytes", size(summary["bytes"])],
        ["bytes per step, with bases", per_step("with_bases")],
        ["bytes per step, without bases", per_step("without_bases")],
        ["chain length", "-" if mean is None else f"{mean:.1f} on average, {longest} at most"],
        ["to restore one", "-" if cost is None else f"{cost:.2f} full loads on average, {largest:.2f} at most"],
        ["within a bound", count(summary["inexact"], "commit")],
    ]
    if summary["held"]["commits"]:
        lines.append(["held up by limits", _held_text(summary["held"])])
    return lines + [[cell(tier["url"]), _behind_text(tier)] for tier in summary["tiers"]]


def _held_text(held: dict[str, Any]) -> str:
    limits = ", ".join(f"{seconds:.1f} s by {name}" for name, seconds in held["seconds_by_limit"].items())
    return f"{count(held['commits'], 'commit')}: {limits}"


def _behind_text(tier: dict[str, Any]) -> str:
    if tier["error"] is not None:
        return f"does not answer: {tier['error']}"
    if not tier["commits_behind"]:
        return f"{count(tier['commits'], 'commit')}, up to the newest"
    return (
        f"{count(tier['commits'], 'commit')}, {count(tier['commits_behind'], 'commit')} "
        f"({size(tier['bytes_behind'])}) behind"
    )
