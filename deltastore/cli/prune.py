"""``deltastore prune``: delete the commits that nothing kept needs."""

from __future__ import annotations

from typing import Annotated

import typer

from deltastore.cli.arguments import JsonOption, UrlArgument, open_to_read, open_to_write
from deltastore.cli.output import count, named, print_json, say, size
from deltastore.cli.show import chain_of
from deltastore.errors import InvalidInput
from deltastore.handle import Commit

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
        commits = store.commits()
        report = store.prune(keep_last or 1, keep_every, dry_run=not apply)
        left = store.commits()  # it looked at the packs themselves
        place = store.url
    held = report.held_back
    if as_json:
        steps = {commit.id: commit.step for commit in commits}
        document = {
            "store": place,
            "dry_run": report.dry_run,
            "commits": [{"id": commit, "step": steps.get(commit)} for commit in report.commits],
            "kept": len(commits) - len(report.commits),
            "bytes": report.bytes,
            "held_back": list(held),
        }
        print_json(document)
        return
    if report.commits:
        verb = "would delete" if report.dry_run else "deleted"
        say(f"{verb} {len(report.commits)} of {len(commits)} commits, {size(report.bytes)}")
    elif not held:
        say(f"nothing to delete: {_why(left, keep_last or 1)}")
    if held:
        begin = "" if report.commits else "nothing to delete: "
        packs = count(len(held), "pack")
        say(f"{begin}{packs} cannot be opened and may need what is older, which stays: {named(held)}")
        say("`deltastore verify` tells what is wrong")
    if report.commits and report.dry_run:
        say("nothing was changed; --apply deletes")


def _why(commits: list[Commit], keep_last: int) -> str:
    """Return why all of some commits stay, and what would help."""
    if not commits:
        return "there are no commits"
    if len(commits) <= keep_last:
        return f"of {count(len(commits), 'commit')} the last {keep_last} are kept"
    chain = chain_of(commits, commits[-1])
    if len(chain) == len(commits):
        return (
            f"the latest commit is read from all {len(chain)}, from the base of step {chain[0].step} on. A newer base "
            "would let them go: the run writes one from time to time, and whenever it commits with a tag"
        )
    return "every commit is kept, or needed by one that is"
