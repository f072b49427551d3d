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
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from deltastore.errors import DeltaStoreError
from deltastore.handle import Commit

_PIPE_WIDTH = 1000
"""Columns of a table that is not printed on a terminal: nothing is folded or cut."""
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
    return Console(file=stream, width=None if stream.isatty() else _PIPE_WIDTH, highlight=False, emoji=False)


def say(text: str, style: str = "") -> None:
    """Print a line for people."""
    console().print(Text(clean(text), style), soft_wrap=True)


def print_table(columns: Iterable[str | tuple[str, str]], rows: Iterable[Iterable[object]], title: str = "") -> None:
    """Print rows under columns; a column is a name, or a name and "right"."""
    out = console()
    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        name, side = (column, "left") if isinstance(column, str) else column
        table.add_column(name, justify="right" if side == "right" else "left", overflow="fold")
    for row in rows:
        table.add_row(*(value if isinstance(value, Text) else cell(value) for value in row))
    out.print(table)


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


@contextlib.contextmanager
def progress(text: str) -> Iterator[Callable[[int, int], None]]:
    """Give a function that shows (done, total) on stderr, where that is a terminal."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    task = bar.add_task(text, total=None)
    with bar:
        yield lambda done, total: bar.update(task, completed=done, total=total)


def size(count: float) -> str:
    """Return bytes as people read them."""
    unit = 0
    while abs(count) >= 1024 and unit < len(_UNITS) - 1:
        count /= 1024
        unit += 1
    return f"{count:.0f} {_UNITS[unit]}" if unit == 0 else f"{count:.1f} {_UNITS[unit]}"


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
