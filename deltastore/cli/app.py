"""The command as a whole: its verbs, its errors, its exit codes."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import deltastore
from deltastore.cli.arguments import Mode
from deltastore.cli.demo import demo
from deltastore.cli.export import export
from deltastore.cli.get import get
from deltastore.cli.log import log
from deltastore.cli.ls import ls
from deltastore.cli.output import logging_to_stderr, print_error
from deltastore.cli.prune import prune
from deltastore.cli.show import show
from deltastore.cli.tag import tag
from deltastore.cli.verify import verify
from deltastore.errors import DeltaStoreError

HELP = """Every training step a durable, addressable version: look at a store, read from it, check it.

\b
A store is a folder or a URL. A commit is named by REF:
  1200          the newest commit of this step
  latest        the newest commit; latest~3 the third before it
  best          a tag
  3f9a2c71      the beginning of a commit id, 8 or more digits

\b
Examples:
  deltastore demo                                     train, kill, resume, read one old step
  deltastore log runs/gpt2 --stats                    what there is, and what a step costs
  deltastore get runs/gpt2 1200 model/wte.weight --slice 0:4
  deltastore export runs/gpt2 best model.pt --part model

\b
Exit codes: 0 done, 1 failed, 2 wrong usage or input, 3 not found, 4 another writer, 5 exists already, 6 read only,
7 damaged, 8 needs a newer version, 9 timed out, 10 storage refused, 11 outcome unknown, 12 package missing, 70 a bug.
With --json an error is a document too: {"error": {"kind", "message", "exit_code"}}.
"""

INTERRUPTED = 130


class ErrorGroup(TyperGroup):
    """Turns the errors of deltastore into one block on stderr and the exit code of their kind."""

    def invoke(self, ctx: Any) -> Any:
        """Run the verb that the command line names."""
        mode = ctx.obj = Mode()
        try:
            with logging_to_stderr():
                return super().invoke(ctx)
        except DeltaStoreError as error:
            print_error(error, as_json=mode.json)
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None


app = typer.Typer(
    name="deltastore",
    cls=ErrorGroup,
    help=HELP,
    no_args_is_help=True,
    rich_markup_mode=None,  # help texts hold brackets, which are no markup
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"deltastore {deltastore.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Take the options that stand before the verb."""


for _verb in (demo, log, show, ls, get, export, verify, tag, prune):
    app.command(help=sys.modules[_verb.__module__].HELP)(_verb)


def main() -> None:
    """Run the command line of this process and exit."""
    for stream in (sys.stdout, sys.stderr):
        # A name in another alphabet must not end the command on a terminal that cannot show it.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    app()
