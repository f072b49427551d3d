"""``deltastore pull``: give a folder the commits that another place has."""

from __future__ import annotations

from typing import Annotated

import typer

from deltastore.cli.arguments import JsonOption, UrlArgument
from deltastore.cli.push import push

HELP = """Give a folder the commits and tags that another place has and it lacks; `deltastore push` the other way round.

\b
Examples:
  deltastore pull runs/gpt2 hdfs://namenode:9870/ckpt/gpt2
"""


def pull(
    url: UrlArgument,
    source: Annotated[str, typer.Argument(metavar="FROM", help="The other place: a folder or a URL.")],
    as_json: JsonOption = False,
) -> None:
    """Pull a store."""
    push(source, url, as_json)
