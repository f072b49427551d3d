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
    assert run("--version").out == run("-V").out == f"deltastore {deltastore.__version__}\n"
    assert "--install-completion" in run("--help").out


WRONG = [["frobnicate"], ["log"], ["get", "x"], ["log", "x", "--frob"], ["log", "x", "-n", "0"], ["--frob"]]


@pytest.mark.parametrize("arguments", WRONG)
def test_wrong_usage_is_2(run: Run, arguments: list[str]) -> None:
    answer = run(*arguments)
    assert answer.code == 2
    assert answer.out == ""
    assert "Error" in answer.err


@pytest.mark.parametrize("arguments", WRONG)
def test_wrong_usage_is_a_document_too(run: Run, arguments: list[str]) -> None:
    answer = run(*arguments, "--json")
    assert answer.code == 2
    error = answer.document["error"]
    assert error.keys() == {"kind", "message", "exit_code"}
    assert (error["kind"], error["exit_code"]) == ("usage", 2)
    assert error["message"] in answer.err
    assert run(*arguments, "--", "--json").out == ""


def test_commits_are_not_counted_by_a_minus(run: Run) -> None:
    answer = run("show", "x", "-1", "--json")
    assert answer.code == 2
    assert "the newest is latest, the one before it latest~1" in answer.err
    assert "latest~1" in answer.document["error"]["message"]
    assert "-n 5 gives the newest five" in run("log", "x", "-12").err


def test_help_names_no_places_that_this_version_lacks(run: Run) -> None:
    assert "a folder or a URL" in run("--help").out
    assert "a folder or a URL" in run("log", "--help").out


def fail_by(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(deltastore, "open", fail)


@pytest.mark.parametrize("error", [ValueError("no\nsuch \x1b[1m"), KeyError("x" * 2000), RecursionError()])
def test_a_bug_is_one_block_and_70(run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    fail_by(monkeypatch, error)
    answer = run("log", "somewhere")
    assert answer.code == 70
    assert answer.out == ""
    assert len(answer.err.splitlines()) == 1
    assert len(answer.err) < 1000
    assert answer.err.startswith(f"error (internal): {type(error).__name__}")
    assert "this is a bug, please report" in answer.err
    document = run("log", "somewhere", "--json").document
    assert (document["error"]["kind"], document["error"]["exit_code"]) == ("internal", 70)


@pytest.mark.parametrize("by_variable", [True, False])
def test_a_traceback_is_shown_to_who_asks(run: Run, monkeypatch: pytest.MonkeyPatch, by_variable: bool) -> None:
    fail_by(monkeypatch, ValueError("\x1b[2J"))
    if by_variable:
        monkeypatch.setenv("DELTASTORE_TRACEBACK", "1")
    answer = run(*([] if by_variable else ["--traceback"]), "log", "somewhere", "--json")
    assert answer.code == 70
    assert answer.document["error"]["kind"] == "internal"
    assert answer.err.startswith("Traceback (most recent call last):\n")
    assert "in fail" in answer.err
    assert "\x1b" not in answer.err
    fail_by(monkeypatch, errors.DeltaStoreError("it failed", details="what a child said"))
    assert "what a child said" in run("--traceback", "log", "somewhere").err


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (PermissionError(13, "Permission denied", "/x"), 10, "(backend): [Errno 13] Permission denied"),
        (MemoryError(), 1, "not enough memory"),
    ],
)
def test_what_the_machine_refuses_is_no_bug(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, text: str
) -> None:
    fail_by(monkeypatch, error)
    answer = run("log", "somewhere")
    assert answer.code == code
    assert text in answer.err
    assert "bug" not in answer.err


def test_advice_is_for_the_command_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_by(monkeypatch, errors.NotFound("step 5 needs p, which is gone; call refresh()", step=5, where="p"))
    assert run("log", "x").err == "error (not_found): step 5 needs p, which is gone; run the command again\n"


def test_a_pickle_is_loaded_in_python_only(run: Run, tmp_path: Path) -> None:
    with deltastore.open(tmp_path, pickle="trust") as store:
        store.commit(0, {"a": Path("x")}).wait()
    answer = run("get", tmp_path, 0, "a")
    assert answer.code == 8
    assert "; who trusts its writer loads it in Python, with deltastore.open(url, pickle='trust')" in answer.err


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
def test_each_kind_of_error_has_its_exit_code(run: Run, monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    def fail(*arguments: object, **options: object) -> None:
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
    def interrupt(*arguments: object, **options: object) -> None:
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
    assert answer.out == "no commit can be read\n1 pack cannot be opened: run `deltastore verify`\n"
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
