"""``deltastore tag``: names for commits."""

from __future__ import annotations

from typing import Annotated

import typer

from deltastore.cli.arguments import JsonOption, UrlArgument, open_to_read, open_to_write, state_at
from deltastore.cli.output import commit_json, local_time, print_json, print_table, say
from deltastore.errors import InvalidInput

HELP = """List the tags, or name a commit. Tagged commits are never pruned.

\b
Examples:
  deltastore tag runs/gpt2                          list
  deltastore tag runs/gpt2 before-lr-drop 1200      name step 1200
  deltastore tag runs/gpt2 best latest --move       let an existing tag name another commit
  deltastore tag runs/gpt2 best --delete            remove the name, not the commit
"""


def tag(
    url: UrlArgument,
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Letters, digits, '.', '_', '-'.")] = None,
    ref: Annotated[str | None, typer.Argument(metavar="[REF]", help="The commit; the latest by default.")] = None,
    move: Annotated[bool, typer.Option("--move", help="Move the tag if it exists.")] = False,
    delete: Annotated[bool, typer.Option("--delete", "-d", help="Remove the tag.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List or make tags."""
    if name is None:
        if move or delete:
            raise InvalidInput("--move and --delete need the NAME of a tag")
        _list(url, as_json)
        return
    if delete and (move or ref is not None):
        raise InvalidInput("--delete takes neither a REF nor --move")
    with open_to_write(url) as store:
        commit = None if delete else state_at(store, ref or "latest").commit
        store.tag(name, None if commit is None else commit.id, move=move)
        if commit is not None:
            commit = store.at(commit.id).commit  # with the tag
        place = store.url
    if as_json:
        print_json({"store": place, "tag": name, "commit": None if commit is None else commit_json(commit)})
    elif commit is None:
        say(f"removed tag {name}")
    else:
        say(f"{name} -> step {commit.step} ({commit.id[:12]})")


def _list(url: str, as_json: bool) -> None:
    with open_to_read(url) as store:
        tagged = sorted((name, commit) for commit in store.commits() for name in commit.tags)
        place = store.url
    if as_json:
        print_json({"store": place, "tags": {name: commit_json(commit) for name, commit in tagged}})
    elif not tagged:
        say("no tags")
    else:
        rows = ([name, commit.id[:12], commit.step, local_time(commit.created)] for name, commit in tagged)
        print_table(["tag", "commit", ("step", "right"), "created"], rows)
