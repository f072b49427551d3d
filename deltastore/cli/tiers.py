"""``deltastore tiers``: what each tier of a store holds."""

from __future__ import annotations

from dataclasses import asdict

from deltastore.cli.arguments import JsonOption, TierOption, UrlArgument, open_over_tiers
from deltastore.cli.output import print_json, print_table, size
from deltastore.recovery import Reach

HELP = """Show what each tier of a store holds, and how far back it reaches.

\b
Examples:
  deltastore tiers runs/gpt2 --tier hdfs://namenode:9870/ckpt/gpt2
  DELTASTORE_TIERS=hdfs://namenode:9870/ckpt/gpt2 deltastore tiers runs/gpt2 --json
"""

COLUMNS = ("tier", ("commits", "right"), ("bytes", "right"), ("oldest", "right"), ("newest", "right"), "")


def tiers(url: UrlArgument, tier: TierOption = None, as_json: JsonOption = False) -> None:
    """Show the tiers of a store."""
    with open_over_tiers(url, tier) as store:
        found = store.reaches()
    if as_json:
        print_json({"store": url, "tiers": [asdict(reach) for reach in found]})
        return
    print_table(COLUMNS, map(reach_cells, found))


def reach_cells(reach: Reach) -> list[object]:
    """Return the cells of a tier."""
    steps = ["-" if step is None else step for step in (reach.oldest, reach.newest)]
    return [reach.url, reach.commits, size(reach.bytes), *steps, "" if reach.error is None else reach.error]
