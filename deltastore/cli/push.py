"""``deltastore push``: give another place the commits that it lacks."""

from __future__ import annotations

from typing import Annotated

import typer

import deltastore
from deltastore.cli.arguments import JsonOption, UrlArgument, open_to_read
from deltastore.cli.output import Bar, count, named, print_json, say, size

HELP = """Give another place the commits and tags that it lacks; it becomes a store that opens by itself.

Small commits are merged into files of up to 128 MiB. A run may be pushed while it is written; what was broken off is
continued by the next push. From a remote place to a folder works the same.

\b
Examples:
  deltastore push runs/gpt2 hdfs://namenode:9870/ckpt/gpt2
  deltastore push hdfs://namenode:9870/ckpt/gpt2 runs/gpt2-back
"""


def push(
    url: UrlArgument,
    target: Annotated[str, typer.Argument(metavar="TO", help="The other place: a folder or a URL.")],
    as_json: JsonOption = False,
) -> None:
    """Push a store."""
    open_to_read(url).close()
    with Bar("push") as bar:
        report = deltastore.push(url, target, progress=bar.show)
    if as_json:
        print_json(
            {
                "store": url,
                "target": target,
                "commits": report.commits,
                "packs": report.packs,
                "bytes": report.bytes,
                "held_back": list(report.held_back),
                "newest": report.newest,
            }
        )
        return
    if report.packs:
        say(f"pushed {count(report.commits, 'commit')} in {count(report.packs, 'file')}, {size(report.bytes)}")
    else:
        say("nothing to push: every commit is there")
    if report.newest is not None:
        say(f"the newest step there is {report.newest}")
    if report.held_back:
        steps = named([str(step) for step in report.held_back])
        say(f"not pushed, for they or what they need are damaged: steps {steps}; `deltastore verify` tells more", "red")
