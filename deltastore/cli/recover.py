"""``deltastore recover``: the newest commit that some tier has whole, and where a run would go on."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from deltastore.cli.arguments import JsonOption, TierOption, UrlArgument, open_over_tiers
from deltastore.cli.output import commit_json, print_json, print_table, say
from deltastore.cli.tiers import COLUMNS, reach_cells
from deltastore.errors import NotFound

HELP = """Find the newest commit whose whole chain is right, over all tiers; say what is newer and why it was not taken.

Every byte of the chain is read. With --fetch the commit and its chain are brought to URL, which must be a folder, where
no run writes; a training that restores does that by itself.

\b
Examples:
  deltastore recover runs/gpt2 --tier hdfs://namenode:9870/ckpt/gpt2
  deltastore recover runs/gpt2 --tier hdfs://namenode:9870/ckpt/gpt2 --fetch
"""


def recover(
    url: UrlArgument,
    tier: TierOption = None,
    fetch: Annotated[bool, typer.Option("--fetch", help="Bring the commit and its chain to URL.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Find what can be recovered."""
    with open_over_tiers(url, tier) as store:
        found = store.recoverable()
    if found.commit is not None and fetch:
        with open_over_tiers(url, tier, mode="a") as store:
            store.fetch(found.commit.id)
    if as_json:
        print_json(
            {
                "store": url,
                "commit": None if found.commit is None else commit_json(found.commit),
                "from": found.url,
                "rejected": [asdict(rejected) for rejected in found.rejected],
                "tiers": [asdict(reach) for reach in found.tiers],
            }
        )
    else:
        for rejected in found.rejected:
            say(f"step {rejected.step} ({rejected.id[:12]}) is not whole at {rejected.url}: {rejected.reason}", "red")
        print_table(COLUMNS, map(reach_cells, found.tiers))
    if found.commit is None:
        raise NotFound(f"{url}: no tier has a commit that is whole", url=url)
    if not as_json:
        say(f"step {found.commit.step} ({found.commit.id[:12]}) is whole at {found.url}", "green")
