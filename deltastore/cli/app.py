"""The command as a whole: its verbs, its errors, its exit codes."""

from __future__ import annotations

import errno
import re
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import deltastore
from deltastore.cli.arguments import Mode
from deltastore.cli.compact import compact
from deltastore.cli.demo import demo
from deltastore.cli.export import export
from deltastore.cli.get import get
from deltastore.cli.import_ import import_
from deltastore.cli.log import log
from deltastore.cli.ls import ls
from deltastore.cli.output import logging_to_stderr, print_error, print_json, print_traceback, shorten
from deltastore.cli.prune import prune
from deltastore.cli.pull import pull
from deltastore.cli.push import push
from deltastore.cli.recover import recover
from deltastore.cli.show import show
from deltastore.cli.tag import tag
from deltastore.cli.tiers import tiers
from deltastore.cli.verify import verify
from deltastore.cli.wording import translate
from deltastore.errors import Backend, DeltaStoreError, Internal

HELP = """Every training step a durable, addressable version: look at a store, read from it, check it.

\b
A store is a folder or a URL, such as hdfs://. A commit is named by REF:
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
  deltastore import ckpt-*/ runs/history --steps-from-name     a series of full checkpoints as deltas

\b
Exit codes: 0 done, 1 failed, 2 wrong usage or input, 3 not found, 4 another writer, 5 exists already, 6 read only,
7 damaged, 8 needs a newer version, 9 timed out, 10 storage refused, 11 outcome unknown, 12 package missing, 70 a bug.
With --json an error is a document too: {"error": {"kind", "message", "exit_code"}}.
"""

USAGE = "usage"
"""Kind of an error in the command line itself; its exit code is 2."""

INTERRUPTED = 130
TRACEBACK_VARIABLE = "DELTASTORE_TRACEBACK"
_MOST_CHARACTERS = 500
_MINUS = re.compile(r"-[0-9]+")


class ErrorGroup(TyperGroup):
    """Turns every error into one block on stderr, with --json a document on stdout, and the exit code of its kind."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Read what stands before the verb."""
        # Until the verb has read its own options, this is all that is known of them.
        mode = Mode(json="--json" in args[: args.index("--")] if "--" in args else "--json" in args)
        try:
            return super().make_context(info_name, args, parent, obj=mode, **extra)
        except Exception as error:
            if _is_usage(error):
                _explain_usage(error, mode)
            raise

    def invoke(self, ctx: Any) -> Any:
        """Run the verb that the command line names."""
        mode: Mode = ctx.obj
        try:
            with logging_to_stderr():
                return super().invoke(ctx)
        except DeltaStoreError as error:
            raise _fail(error, translate(error), mode) from None
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except (typer.Exit, typer.Abort):
            raise
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise  # whoever read the output has gone; typer ends in silence
            raise _fail(error, Backend(str(error), errno=error.errno), mode) from None
        except MemoryError as error:
            raise _fail(error, DeltaStoreError("there is not enough memory for this"), mode) from None
        except Exception as error:
            if _is_usage(error):
                _explain_usage(error, mode)
                raise
            raise _fail(error, _bug(error), mode) from None


def _fail(error: BaseException, shown: DeltaStoreError, mode: Mode) -> typer.Exit:
    """Print an error, and return what ends the command."""
    if mode.traceback:
        print_traceback(error, str(shown.fields.get("details", "")))
    print_error(shown, as_json=mode.json)
    return typer.Exit(shown.exit_code)


def _bug(error: Exception) -> Internal:
    text = shorten(str(error), _MOST_CHARACTERS)
    what = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return Internal(
        f"{what}; this is a bug, please report it with what `deltastore --traceback ...` prints "
        f"(deltastore {deltastore.__version__}, Python {sys.version.split()[0]})"
    )


def _is_usage(error: BaseException) -> bool:
    # typer's usage errors have no public base that all its versions share.
    return hasattr(error, "format_message") and hasattr(error, "show")


def _explain_usage(error: Any, mode: Mode) -> None:
    """Complete the message of a usage error, and print its document; typer prints the rest and ends the command."""
    option = str(getattr(error, "option_name", ""))
    if _MINUS.fullmatch(option):
        verb = getattr(getattr(error, "ctx", None), "info_name", "")
        advice = "-n 5 gives the newest five" if verb == "log" else "the newest is latest, the one before it latest~1"
        error.message = f"{option} is no option, and commits are not counted by it: {advice}"
    if mode.json:
        code = int(getattr(error, "exit_code", 2))
        print_json({"error": {"kind": USAGE, "message": error.format_message(), "exit_code": code}})


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
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    traceback: Annotated[
        bool, typer.Option("--traceback", envvar=TRACEBACK_VARIABLE, help="Show where in the code an error arose.")
    ] = False,
) -> None:
    """Take the options that stand before the verb."""
    ctx.obj.traceback = traceback


for _verb in (demo, log, show, ls, get, import_, export, verify, tag, prune, compact, push, pull, tiers, recover):
    app.command(_verb.__name__.rstrip("_"), help=sys.modules[_verb.__module__].HELP)(_verb)


def main() -> None:
    """Run the command line of this process and exit."""
    for stream in (sys.stdout, sys.stderr):
        # A name in another alphabet must not end the command on a terminal that cannot show it.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    app()
