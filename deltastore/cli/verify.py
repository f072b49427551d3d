"""``deltastore verify``: whether everything is there, and is what was written."""

from __future__ import annotations

from typing import Annotated

import typer

from deltastore.cli.arguments import JsonOption, UrlArgument, open_to_read
from deltastore.cli.output import Bar, cell, print_json, print_table, say
from deltastore.errors import Corruption, UnsupportedFormat
from deltastore.history.verify import VerifyReport

HELP = """Check a store. Nothing is changed. Exit code 0 if all is well, 7 if something is damaged or missing.

Without --deep: metadata of all packs, and that every commit has what it needs. With --deep every byte is read and
decoded, each array against its checksums and each state against its record.

\b
Examples:
  deltastore verify runs/gpt2
  deltastore verify runs/gpt2 --deep --json
"""


def verify(
    url: UrlArgument,
    deep: Annotated[bool, typer.Option("--deep", help="Read and decode every byte.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Check a store."""
    with open_to_read(url) as store, Bar("verify") as bar:
        report = store.verify(deep, progress=bar.show)
        place = store.url
    newest = report.newest_intact
    if as_json:
        findings = [
            {"kind": f.kind, "where": f.where, "message": f.message, "step": f.step, "commit": f.commit}
            for f in report.findings
        ]
        document = {
            "store": place,
            "ok": report.ok,
            "deep": report.deep,
            "commits": report.commits,
            "packs": report.packs,
            "findings": findings,
            "damaged_steps": report.damaged_steps,
            "newest_intact": None if newest is None else {"id": newest.id, "step": newest.step},
        }
        print_json(document)
    else:
        _print_report(report)
    if not report.ok:
        raise typer.Exit(_exit_code(report))


def _print_report(report: VerifyReport) -> None:
    depth = "every byte was read" if report.deep else "metadata and chains; --deep reads every byte"
    if report.ok:
        say(f"ok: {report.commits} commits in {report.packs} packs ({depth})", "green")
        return
    rows = ([cell(f.kind, "red"), "-" if f.step is None else f.step, f.where, f.message] for f in report.findings)
    print_table(["finding", ("step", "right"), "where", "what"], rows)
    newest = report.newest_intact
    usable = "no commit is intact" if newest is None else f"newest intact: step {newest.step} ({newest.id[:12]})"
    say(f"{len(report.findings)} findings in {report.commits} commits and {report.packs} packs; {usable}", "red")


def _exit_code(report: VerifyReport) -> int:
    only_newer = all(finding.kind == UnsupportedFormat.kind for finding in report.findings)
    return UnsupportedFormat.exit_code if only_newer else Corruption.exit_code
