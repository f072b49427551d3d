"""``deltastore prune``: delete the commits that nothing kept needs."""

from __future__ import annotations

from typing import Annotated

import typer

from deltastore.cli.arguments import JsonOption, UrlArgument, open_to_read, open_to_write
from deltastore.cli.output import print_json, say, size
from deltastore.errors import InvalidInput

HELP = """Delete the commits that nothing kept needs. Only says what would go, unless --apply is given.

Kept are the last commits, those of round steps, tagged ones, and whatever these need to be read.

\b
Examples:
  deltastore prune runs/gpt2 --keep-last 10 --keep-every 100           what would go
  deltastore prune runs/gpt2 --keep-last 10 --keep-every 100 --apply   delete it
"""


def prune(
    url: UrlArgument,
    keep_last: Annotated[int | None, typer.Option("--keep-last", min=1, help="Keep so many; 1 by default.")] = None,
    keep_every: Annotated[int | None, typer.Option("--keep-every", min=1, help="Keep its multiples.")] = None,
    apply: Annotated[bool, typer.Option("--apply", help="Delete; without it nothing is changed.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Delete commits, or say which."""
    if apply and keep_last is None and keep_every is None:
        raise InvalidInput("--apply needs --keep-last or --keep-every: say what stays")
    with open_to_write(url) if apply else open_to_read(url) as store:
        steps = {commit.id: commit.step for commit in store.commits()}
        report = store.prune(keep_last or 1, keep_every, dry_run=not apply)
        place = store.url
    if as_json:
        commits = [{"id": commit, "step": steps.get(commit)} for commit in report.commits]
        kept = len(steps) - len(commits)
        document = {"store": place, "dry_run": report.dry_run, "commits": commits, "kept": kept, "bytes": report.bytes}
        print_json(document)
        return
    if not report.commits:
        say("nothing to delete: every commit is kept, or needed by one that is")
        return
    verb = "would delete" if report.dry_run else "deleted"
    say(f"{verb} {len(report.commits)} of {len(steps)} commits, {size(report.bytes)}")
    if report.dry_run:
        say("nothing was changed; --apply deletes")
