"""Arguments and options that several verbs share, and what they mean."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated

import typer

import deltastore
from deltastore.cli.wording import no_store
from deltastore.errors import AlreadyExists, NotFound
from deltastore.reader import State
from deltastore.store import Store


@dataclass
class Mode:
    """How the running command answers."""

    json: bool = False
    traceback: bool = False


def _remember_json(ctx: typer.Context, value: bool) -> bool:
    # Errors are printed far from the verb, which alone knows its options.
    if isinstance(ctx.obj, Mode):
        ctx.obj.json = value
    return value


UrlArgument = Annotated[str, typer.Argument(metavar="URL", help="The store: a folder or a URL, such as hdfs://.")]
RefArgument = Annotated[str, typer.Argument(metavar="REF", help="Step, latest, latest~N, tag or commit id.")]
JsonOption = Annotated[
    bool, typer.Option("--json", callback=_remember_json, help="Print one JSON document and nothing else.")
]
TierOption = Annotated[
    list[str] | None,
    typer.Option("--tier", help="A further tier, as often as there are some; else what DELTASTORE_TIERS names."),
]
ForceOption = Annotated[bool, typer.Option("--force", "-f", help="Overwrite a file that is there.")]


def open_to_read(url: str) -> Store:
    """Return an existing store that nothing is written to."""
    try:
        return deltastore.open(url, "r")
    except NotFound as error:
        if "url" in error.fields:
            raise no_store(url) from error
        raise


def open_over_tiers(url: str, tiers: list[str] | None, mode: str = "r") -> Store:
    """Return a store with its further tiers."""
    try:
        return deltastore.open(url, mode, tiers=tiers or ())
    except NotFound as error:
        if "url" in error.fields:
            raise no_store(url) from error
        raise


def open_to_write(url: str) -> Store:
    """Return an existing store for a change; commands never make one by a mistyped name."""
    open_to_read(url).close()
    return deltastore.open(url)


def state_at(store: Store, ref: str) -> State:
    """Return the state of a commit as it is named on the command line.

    Digits are a step; where there is no such step and they are long enough, the beginning of a commit id.
    """
    if not (ref.isascii() and ref.isdigit()):
        return store.at(ref)
    try:
        return store.at(int(ref))
    except NotFound:
        if len(ref) < 8:
            raise
        try:
            return store.at(ref)
        except NotFound:
            return store.at(int(ref))


def require_absent(path: str, *, force: bool) -> None:
    """Raise AlreadyExists where a file would be overwritten without `force`."""
    if not force and os.path.lexists(path):
        raise AlreadyExists(f"{path} exists; --force overwrites it", path=path)
