"""Every snippet of the README runs; the quick start is also killed in the middle."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
SNIPPET = re.compile(r"<!-- readme: (\w+) -->\n```python\n(.*?)```", re.DOTALL)
CONSOLE = re.compile(r"<!-- readme: console -->\n```console\n(.*?)```", re.DOTALL)
KILLED_AT = 23


def snippets() -> dict[str, str]:
    return dict(SNIPPET.findall(README.read_text(encoding="utf-8")))


def run(code: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(output: str) -> dict[int, str]:
    return {int(step): loss for step, loss in (line.split() for line in output.splitlines())}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("readme")
    return folder, run(snippets()["quickstart"], folder)


def test_all_python_blocks_are_named() -> None:
    text = README.read_text(encoding="utf-8")
    assert text.count("```python") == len(snippets()) > 0


def test_history_reads_what_the_quick_start_wrote(trained: tuple[Path, str]) -> None:
    folder, _output = trained
    output = run(snippets()["history"], folder)
    assert "tensor([[" in output
    assert "True {'loss':" in output


def shape_of(output: str) -> list[str]:
    """Return output without what differs from run to run: ids, numbers, widths."""
    # Which step is a base depends on sizes, and they on the random numbers of a machine.
    lines = re.sub(r"\b(base|delta)\b", "KIND", re.sub(r"\b[0-9a-f]{12}\b", "ID", output)).splitlines()
    return [" ".join(re.sub(r"-?\d+(\.\d+)?", "#", line).split()) for line in lines if line.strip()]


def test_console_shows_what_the_command_line_prints(trained: tuple[Path, str]) -> None:
    folder, _output = trained
    found = CONSOLE.search(README.read_text(encoding="utf-8"))
    assert found is not None
    command = [sys.executable, "-m", "deltastore.cli"]
    for block in found[1].split("$ ")[1:]:
        line, expected = block.split("\n", maxsplit=1)
        name, *arguments = line.split()
        assert name == "deltastore"
        done = subprocess.run(
            command + arguments,
            cwd=folder,
            env={**os.environ, "COLUMNS": "100"},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert shape_of(done.stdout) == shape_of(expected), line


@pytest.mark.parametrize("name", ["adapter", "plain", "formats"])
def test_snippet_runs(name: str, tmp_path: Path) -> None:
    output = run(snippets()[name], tmp_path)
    assert output.strip()


def test_a_run_with_a_further_tier_survives_its_machine(tmp_path: Path) -> None:
    code = snippets()["tiers"]
    assert "file:///tmp/deltastore-hadoop" in code
    output = run(code.replace("file:///tmp/deltastore-hadoop", (tmp_path / "hadoop").as_uri()), tmp_path)
    assert output.splitlines() == ["9", "9 tensor([0., 1., 2., 3., 0.])"]


def test_quick_start_survives_a_kill(trained: tuple[Path, str], tmp_path: Path) -> None:
    _folder, reference = trained
    seen = ""
    with subprocess.Popen(
        [sys.executable, "-c", snippets()["quickstart"]], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            seen += line
            if line.startswith(f"{KILLED_AT} "):
                os.kill(process.pid, signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL
    resumed = losses(run(snippets()["quickstart"], tmp_path))
    assert 0 < min(resumed) <= max(losses(seen)) + 1
    assert losses(seen) | resumed == losses(reference)
    assert resumed == {step: loss for step, loss in losses(reference).items() if step >= min(resumed)}
