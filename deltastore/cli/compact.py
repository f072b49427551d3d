"""``deltastore compact``: few large files in place of many small ones."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from deltastore.cli.arguments import JsonOption, UrlArgument, open_to_read, open_to_write
from deltastore.cli.conversion import parse_size
from deltastore.cli.output import Bar, count, named, print_json, say

HELP = """Merge small files of a store into few large ones. Only says what would be done, unless --apply is given.

Every commit stays what it is. What was merged is deleted when the new file was read back; a run that is writing the
store must end first. What cannot be read stays where it is.

\b
Examples:
  deltastore compact hdfs://namenode:9870/ckpt/gpt2             what would be done
  deltastore compact hdfs://namenode:9870/ckpt/gpt2 --apply     do it
  deltastore compact runs/gpt2 --pack-size 16M --apply
"""


def compact(
    url: UrlArgument,
    pack_size: Annotated[str, typer.Option("--pack-size", metavar="SIZE", help="How large files may become.")] = "128M",
    apply: Annotated[bool, typer.Option("--apply", help="Merge; without it nothing is changed.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Merge small files, or say which."""
    limit = parse_size(pack_size, "--pack-size")
    with open_to_write(url) if apply else open_to_read(url) as store, Bar("compact") as bar:
        report = store.compact(limit, dry_run=not apply, progress=bar.show)
        place = store.url
    if as_json:
        print_json({"store": place, **asdict(report)})
        return
    if report.packs_after < report.packs_before:
        verb = "would become" if report.dry_run else "became"
        say(f"{count(report.packs_before, 'file')} {verb} {report.packs_after}")
    else:
        say(f"nothing to merge: {count(report.packs_before, 'file')}")
    if report.damaged:
        say(f"left alone, for they are damaged: {named(list(report.damaged))}; `deltastore verify` tells more", "red")
    if report.dry_run and report.packs_after < report.packs_before:
        say("nothing was changed; --apply merges")
