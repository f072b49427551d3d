"""What commands print: tables for people, one JSON document for programs, errors for both.

Names, metrics and texts come from stores that others wrote. Everything that is printed for people goes through
:func:`clean`, so that no control sequence reaches the terminal, and is never parsed as markup.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any, Self

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from deltastore.errors import DeltaStoreError
from deltastore.handle import Commit

_MOST_FOLDED_ROWS = 200
"""Longer tables are not folded to the width of the terminal: that takes a millisecond for each row."""
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def clean(value: object) -> str:
    r"""Return a text with every character escaped that is not printable: ``\x1b[2J``, line ends, bidi overrides."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in _text(value))


def _text(value: object) -> str:
    return value if isinstance(value, str) else str(value)


def shorten(text: str, most: int) -> str:
    """Return a text of at most `most` characters."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def cell(value: object, style: str = "") -> Text:
    """Return a cell of a table: cleaned, and not parsed as markup."""
    return Text(clean(value), style)


def console(*, stderr: bool = False) -> Console:
    """Return the console of the moment: tests and pipes change the streams."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, highlight=False, emoji=False)


def say(text: str, style: str = "") -> None:
    """Print a line for people."""
    console().print(Text(clean(text), style), soft_wrap=True)


def print_table(columns: Sequence[str | tuple[str, str]], rows: Iterable[Sequence[object]]) -> None:
    """Print rows under columns; a column is a name, or a name and "right". Without any name there is no head."""
    names = [column if isinstance(column, str) else column[0] for column in columns]
    right = [not isinstance(column, str) and column[1] == "right" for column in columns]
    cells = [[value if isinstance(value, Text) else cell(value) for value in row] for row in rows]
    out = console()
    if not out.is_terminal or len(cells) > _MOST_FOLDED_ROWS:
        heads = [[cell(name) for name in names]] if any(names) else []
        typer.echo("\n".join(_aligned(heads + cells, right)))
        return
    table = Table(box=None, pad_edge=False, header_style="bold", show_header=any(names))
    for name, is_right in zip(names, right, strict=True):
        table.add_column(name, justify="right" if is_right else "left", overflow="fold")
    for line in cells:
        table.add_row(*line)
    out.print(table)


def _aligned(cells: list[list[Text]], right: list[bool]) -> Iterator[str]:
    """Yield lines of plain text, a hundred times faster than a table that folds."""
    widths = [max((text.cell_len for text in column), default=0) for column in zip(*cells, strict=True)]
    for line in cells:
        padded = []
        for text, width, is_right in zip(line, widths, right, strict=True):
            blanks = " " * (width - text.cell_len)
            padded.append(blanks + text.plain if is_right else text.plain + blanks)
        yield "  ".join(padded).rstrip()


def print_json(document: Any) -> None:
    """Print one JSON document: ASCII, so that it is safe on a terminal too."""
    text = json.dumps(jsonable(document), indent=2, ensure_ascii=True, allow_nan=False)
    typer.echo(text.replace("\x7f", "\\u007f"))  # the one control character that is ASCII and not escaped


def jsonable(value: Any) -> Any:
    """Return a value as JSON has it: tuples as lists, nan and infinities as strings, what it lacks as text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    return repr(value)


def print_error(error: DeltaStoreError, *, as_json: bool) -> None:
    """Print an error: one block on stderr, and with --json the document on stdout."""
    if as_json:
        print_json({"error": {"kind": error.kind, "message": error.message, "exit_code": error.exit_code}})
    block = Text.assemble(("error", "bold red"), f" ({error.kind}): {clean(error.message)}")
    console(stderr=True).print(block, soft_wrap=True)


def print_traceback(error: BaseException, details: str = "") -> None:
    """Print where an error arose on stderr, and what else is known of it."""
    text = "".join(traceback.format_exception(error))
    for line in [*text.splitlines(), *details.splitlines()]:
        typer.echo(clean(line), err=True)


class _CleanHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        block = Text.assemble((record.levelname.lower(), "yellow"), f": {clean(record.getMessage())}")
        console(stderr=True).print(block, soft_wrap=True)


@contextlib.contextmanager
def logging_to_stderr() -> Iterator[None]:
    """Show the warnings of the library, cleaned, while a command runs."""
    log = logging.getLogger("deltastore")
    handler = _CleanHandler(logging.WARNING)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


class Bar:
    """A progress bar on stderr, where that is a terminal; lines for people can be printed above it."""

    def __init__(self, text: str) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console(stderr=True),
            transient=True,
            disable=not sys.stderr.isatty(),
            redirect_stdout=False,  # it would send what belongs into a file to the terminal
        )
        self._task = self._progress.add_task(text, total=None)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def show(self, done: int, total: int, text: str | None = None) -> None:
        """Show how far it is, and what is done now."""
        self._progress.update(self._task, completed=done, total=total, description=text)

    def say(self, text: str) -> None:
        """Print a line for people on stdout."""
        if self._progress.disable or not sys.stdout.isatty():
            say(text)
        else:
            # Both are the same terminal: only the bar's own console knows where its line is.
            self._progress.console.print(Text(clean(text)), soft_wrap=True)


def size(number: float) -> str:
    """Return bytes as people read them."""
    unit = 0
    while abs(number) >= 1024 and unit < len(_UNITS) - 1:
        number /= 1024
        unit += 1
    return f"{number:.0f} {_UNITS[unit]}" if unit == 0 else f"{number:.1f} {_UNITS[unit]}"


def count(number: int, name: str) -> str:
    """Return a number of things: 1 pack, 2 packs."""
    return f"{number} {name}" if number == 1 else f"{number} {name}s"


def named(names: Sequence[str], most: int = 3) -> str:
    """Return the first few names."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def duration(seconds: float) -> str:
    """Return a time as people read it."""
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def local_time(created: str) -> str:
    """Return a commit's time in the zone of this machine; what is no time as it is."""
    try:
        return datetime.fromisoformat(created).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError):
        return created


def metrics_text(metrics: dict[str, Any]) -> str:
    """Return metrics on one line."""
    return " ".join(f"{name}={_number(value)}" for name, value in metrics.items())


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else shorten(str(value), 40)


def commit_json(commit: Commit) -> dict[str, Any]:
    """Return a commit as programs get it."""
    return {
        "id": commit.id,
        "step": commit.step,
        "epoch": commit.epoch,
        "kind": commit.kind,
        "parent": commit.parent,
        "bytes": commit.bytes,
        "exact": commit.exact,
        "created": commit.created,
        "tags": list(commit.tags),
        "metrics": commit.metrics,
    }
