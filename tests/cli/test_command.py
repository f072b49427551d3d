"""The command as a whole: help, errors and their exit codes, hostile stores, streams."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import deltastore
from deltastore import errors
from deltastore.cli import output
from tests.cli.kit import Run, flip, pack_of

VERBS = ["demo", "log", "show", "ls", "get", "export", "verify", "tag", "prune"]
KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.DeltaStoreError)]


def test_help_teaches(run: Run) -> None:
    text = run("--help").out
    assert all(f"  {verb} " in text for verb in VERBS)
    assert "latest~3" in text
    for verb in VERBS:
        answer = run(verb, "-h")
        assert answer.code == 0
        assert f"  deltastore {verb}" in answer.out, verb
        assert "--json" in answer.out


def test_version_and_completion(run: Run) -> None:
    assert run("--version").out == f"deltastore {deltastore.__version__}\n"
    assert "--install-completion" in run("--help").out


@pytest.mark.parametrize(
    "arguments", [["frobnicate"], ["log"], ["get", "x"], ["log", "x", "--frob"], ["log", "x", "-n", "0"]]
)
def test_wrong_usage_is_2(run: Run, arguments: list[str]) -> None:
    answer = run(*arguments)
    assert answer.code == 2
    assert answer.out == ""
    assert "Error" in answer.err


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
def test_each_kind_of_error_has_its_exit_code(run: Run, monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    def fail(*arguments: object) -> None:
        raise kind("chunk 17 is not what it was")

    monkeypatch.setattr(deltastore, "open", fail)
    answer = run("log", "somewhere")
    assert answer.code == kind.exit_code != 0
    assert answer.out == ""
    assert answer.err == f"error ({kind.kind}): chunk 17 is not what it was\n"
    answer = run("log", "somewhere", "--json")
    assert answer.code == kind.exit_code
    message = {"kind": kind.kind, "message": "chunk 17 is not what it was", "exit_code": kind.exit_code}
    assert answer.document == {"error": message}
    assert answer.err.startswith(f"error ({kind.kind})")


def test_codes_of_real_errors(run: Run, copy: Path, tmp_path: Path) -> None:
    assert run("log", tmp_path / "absent").code == 3
    assert run("log", "gopher://x").code == 2
    assert run("show", copy, "99").code == 3
    assert run("show", copy, "12345678").code == 3
    flip(pack_of(copy, 5), -100)
    answer = run("get", copy, 5, "model/wte.weight")
    assert answer.code == 7
    assert run("get", copy, 4, "model/wte.weight").code == 0


def test_an_interrupt_is_130(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(deltastore, "open", interrupt)
    assert run("log", "somewhere").code == 130


HOSTILE = "\x1b]0;owned\x07\x1b[2J[bold red]x[/]\r\n\u202eevil\x9b1m:smile:"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store whose writer wanted to own the terminal of whoever looks at it."""
    path = tmp_path_factory.mktemp("hostile") / "run\x1b[31m"
    with deltastore.open(path) as store:
        state = {HOSTILE: torch.ones(2), "plain": {HOSTILE: HOSTILE}, "list": [HOSTILE]}
        store.commit(1, state, metrics={HOSTILE: HOSTILE, "loss": 1.0}).wait()
    return path


@pytest.mark.parametrize(
    "arguments",
    [
        ["log", "--stats"],
        ["show"],
        ["ls"],
        ["get", "1", "list/0"],
        ["get", "1", json.dumps([HOSTILE])],
        ["get", "1", "absent"],
        ["show", HOSTILE],
        ["tag", HOSTILE],
        ["verify"],
    ],
    ids=lambda arguments: arguments[0],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_nothing_of_a_hostile_store_reaches_the_terminal(
    run: Run, hostile: Path, arguments: list[str], as_json: bool
) -> None:
    answer = run(arguments[0], hostile, *arguments[1:], *(["--json"] if as_json else []))
    for text in (answer.out, answer.err):
        assert all(char.isprintable() or char == "\n" for char in text)
        assert "\U0001f604" not in text
    if arguments[0] == "ls" and not as_json:
        assert "[bold red]x[/]" in answer.out  # shown, not obeyed
    if as_json:
        assert isinstance(answer.document, dict)


def test_warnings_of_the_library_are_cleaned_too(run: Run, hostile: Path, tmp_path: Path) -> None:
    copy = tmp_path / hostile.name
    shutil.copytree(hostile, copy)
    os.truncate(pack_of(copy, 1), 100)
    answer = run("log", copy)
    assert answer.out == "no commits yet\n"
    assert "warning: pack cannot be used" in answer.err
    assert "run\\x1b[31m" in answer.err
    assert "\x1b" not in answer.err


def test_cleaning() -> None:
    assert output.clean("plain text, ünïcode, 漢字") == "plain text, ünïcode, 漢字"
    assert output.clean("\x1b[2J\x07\x9b\u202e\ud800\x7f\n") == "\\x1b[2J\\x07\\x9b\\u202e\\ud800\\x7f\\n"


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536 * 1024, "1.5 MiB"), (5 << 40, "5.0 TiB")]
)
def test_sizes(count: int, text: str) -> None:
    assert output.size(count) == text


@pytest.mark.parametrize(("seconds", "text"), [(2e-5, "20 us"), (0.0125, "12.5 ms"), (3.456, "3.46 s")])
def test_durations(seconds: float, text: str) -> None:
    assert output.duration(seconds) == text


def test_a_long_table_is_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_table(["id", ("step", "right")], ([f"漢{number:x}", number] for number in range(20_000)))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 20_001
    assert lines[:2] == ["id       step", "漢0         0"]
    assert len({output.cell(line).cell_len for line in lines}) == 1


def test_a_time_that_is_none_is_shown_as_it_is() -> None:
    assert output.local_time("yesterday") == "yesterday"
    assert output.local_time("2026-11-30T20:46:07.480230Z")[:4] == "2026"


def test_progress_goes_to_the_terminal_and_json_to_stdout(small: Path) -> None:
    terminal, side = pty.openpty()
    command = [sys.executable, "-m", "deltastore.cli", "verify", "--deep", "--json", str(small)]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=side, env=environment, check=True)
        shown = os.read(terminal, 65536)
    finally:
        os.close(side)
        os.close(terminal)
    assert json.loads(done.stdout)["ok"] is True
    assert b"verify" in shown


def test_the_command_is_on_path_and_survives_a_reader_that_goes_away(small: Path) -> None:
    command = Path(sys.executable).with_name("deltastore")
    done = subprocess.run([command, "log", small], capture_output=True, text=True, check=True)
    assert len(done.stdout.splitlines()) == 7
    reader, writer = os.pipe()
    os.close(reader)
    try:
        gone = subprocess.run([command, "ls", small, "--all"], stdout=writer, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(writer)
    assert gone.returncode == 1
    assert b"Traceback" not in gone.stderr
