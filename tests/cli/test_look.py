"""The verbs that only look: log, show, ls, verify."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import deltastore
from tests.cli.kit import STEPS, Run, flip, pack_of

COMMIT_TYPES: dict[str, Any] = {
    "id": str,
    "step": int,
    "epoch": int,
    "kind": str,
    "parent": (str, type(None)),
    "bytes": int,
    "exact": bool,
    "created": str,
    "tags": list,
    "metrics": dict,
}


def require_commit(document: object) -> None:
    assert isinstance(document, dict)
    assert document.keys() == COMMIT_TYPES.keys()
    for name, kind in COMMIT_TYPES.items():
        assert isinstance(document[name], kind), name


def test_log_lists_the_newest_first(run: Run, small: Path) -> None:
    lines = run("log", small).out.splitlines()
    assert lines[0].split() == ["id", "step", "epoch", "kind", "bytes", "exact", "created", "tags", "metrics"]
    assert [int(line.split()[1]) for line in lines[1:]] == list(reversed(range(STEPS)))
    (tagged,) = [line for line in lines if " best " in line]
    assert tagged.split()[1] == "2"
    assert tagged.endswith("loss=2")
    assert "yes" in tagged
    with deltastore.open(small, "r") as store:
        assert lines[1].startswith(f"{store.at('latest').commit.id[:12]} ")


def test_log_limits_and_reverses(run: Run, small: Path) -> None:
    def steps(*options: object) -> list[int]:
        return [commit["step"] for commit in run("log", small, "--json", *options).document["commits"]]

    assert steps() == [5, 4, 3, 2, 1, 0]
    assert steps("-n", 2) == [5, 4]
    assert steps("--reverse") == [0, 1, 2, 3, 4, 5]
    assert steps("--limit", 2, "--reverse") == [4, 5]


def test_log_as_json(run: Run, small: Path) -> None:
    document = run("log", small, "--json", "--stats").document
    assert document.keys() == {"store", "commits", "stats"}
    for commit in document["commits"]:
        require_commit(commit)
    assert document["commits"][3]["tags"] == ["best"]
    assert document["commits"][0]["metrics"] == {"loss": 1.25}
    assert "stats" not in run("log", small, "--json").document


def test_stats_count_bytes_with_and_without_bases(run: Run, small: Path) -> None:
    with deltastore.open(small, "r") as store:
        commits = store.commits()
    stats = run("log", small, "--json", "--stats").document["stats"]
    deltas = [commit.bytes for commit in commits if commit.kind == "delta"]
    assert stats["commits"] == STEPS == stats["bases"] + stats["deltas"]
    assert stats["bytes"] == sum(commit.bytes for commit in commits)
    assert stats["bytes_per_step_with_bases"] == pytest.approx(stats["bytes"] / STEPS)
    assert stats["bytes_per_step_without_bases"] == pytest.approx(sum(deltas) / len(deltas))
    assert stats["share_with_bases"] == pytest.approx(stats["bytes"] / STEPS / stats["full_state_bytes"])
    assert 1 <= stats["mean_chain"] <= stats["longest_chain"] <= STEPS
    table = run("log", small, "--stats").out
    assert "bytes per step, with bases" in table
    assert "bytes per step, without bases" in table
    assert f"{stats['longest_chain']} at most" in table


def test_an_empty_store(run: Run, tmp_path: Path) -> None:
    with deltastore.open(tmp_path) as store:
        store.commit(0, {"a": 1}).wait()
    pack_of(tmp_path, 0).unlink()
    assert run("log", tmp_path).out == "no commits yet\n"
    stats = run("log", tmp_path, "--stats", "--json").document["stats"]
    assert stats["commits"] == 0
    assert stats["longest_chain"] is None
    assert run("show", tmp_path).code == 3


def test_show(run: Run, small: Path) -> None:
    document = run("show", small, "best", "--json").document
    assert document.keys() == {"store", "commit", "chain", "parts"}
    require_commit(document["commit"])
    assert document["commit"]["step"] == 2
    assert document["chain"] == {"commits": 1, "bytes": document["commit"]["bytes"], "base_step": 2}
    model, *others = document["parts"]
    assert model["key"] == "model"
    assert model["tensors"] == 6
    assert model["bytes"] == 64 * 8 * 4 + 6 * 8 + 3 * 2 + 8 + 4  # the tied weight once
    assert model["dtypes"] == ["bfloat16", "complex64", "float32", "int64"]
    assert [part["key"] for part in others] == ["list", "rng", "plain"]
    text = run("show", small, "latest").out
    assert "step        5" in text
    assert "commits from step 2 on" in text


def test_show_and_ls_take_the_latest_by_default(run: Run, small: Path) -> None:
    assert run("show", small, "--json").document == run("show", small, "latest", "--json").document
    assert run("ls", small, "--json").document == run("ls", small, "latest", "--json").document


@pytest.mark.parametrize("ref", ["2", "best", "latest~3", "id"])
def test_every_kind_of_reference(run: Run, small: Path, ref: str) -> None:
    with deltastore.open(small, "r") as store:
        commit = store.at(2).commit
    document = run("show", small, commit.id[:10] if ref == "id" else ref, "--json").document
    assert document["commit"]["id"] == commit.id


def test_ls_as_json_holds_every_leaf(run: Run, small: Path) -> None:
    document = run("ls", small, 3, "--json").document
    assert document.keys() == {"store", "commit", "prefix", "leaves"}
    leaves = {tuple(leaf["path"]): leaf for leaf in document["leaves"]}
    with deltastore.open(small, "r") as store:
        assert list(leaves) == list(store.at(3))
    assert leaves["model", "wte.weight"] == {
        "path": ["model", "wte.weight"],
        "kind": "tensor",
        "dtype": "float32",
        "shape": [64, 8],
        "bytes": 2048,
        "role": leaves["model", "wte.weight"]["role"],
    }
    assert leaves["model", "head.weight"]["tied_to"] == ["model", "wte.weight"]
    assert leaves["rng", "numpy"]["kind"] == "ndarray"
    assert leaves["list", 1, 3]["value"] == "int"
    assert leaves["list", 1, "3"]["value"] == "text"
    assert leaves["plain", "nan"]["value"]["$"] == "float"
    assert leaves["plain", "none"] == {"path": ["plain", "none"], "kind": "plain", "value": None}


def test_ls_for_people_gathers_long_lists(run: Run, small: Path) -> None:
    text = run("ls", small, 3).out
    assert "rng/python/[1]  " in text
    assert "625 values" in text
    assert "tied to model/wte.weight" in text
    assert '["model", "a/b"]' in text
    assert "bytes, 3 B" in text
    assert str(2**90) in text
    assert "torch.dtype float16" in text
    assert len(text.splitlines()) < 30
    assert len(run("ls", small, 3, "--all").out.splitlines()) > 640


@pytest.mark.parametrize(
    ("prefix", "count", "first"),
    [
        ("model", 6, ["model", "wte.weight"]),
        ("list/1", 3, ["list", 1, "lr"]),
        ("list/[1]", 3, ["list", 1, "lr"]),
        ("model/wte.weight", 1, ["model", "wte.weight"]),
        ("plain/none", 1, ["plain", "none"]),
        ('["model", "a/b"]', 1, ["model", "a/b"]),
    ],
)
def test_ls_below_a_prefix(run: Run, small: Path, prefix: str, count: int, first: list[object]) -> None:
    leaves = run("ls", small, 3, prefix, "--json").document["leaves"]
    assert len(leaves) == count
    assert leaves[0]["path"] == first


def test_verify_a_good_store(run: Run, small: Path) -> None:
    answer = run("verify", small, "--deep", "--json")
    assert answer.code == 0
    document = answer.document
    assert document["newest_intact"]["step"] == STEPS - 1
    expected = {"ok": True, "deep": True, "commits": STEPS, "packs": STEPS, "findings": [], "damaged_steps": []}
    assert {name: document[name] for name in expected} == expected
    assert run("verify", small).out.startswith(f"ok: {STEPS} commits")


def test_verify_a_damaged_store(run: Run, copy: Path) -> None:
    flip(pack_of(copy, 5), -100)
    answer = run("verify", copy, "--json")
    assert answer.code == 7
    document = answer.document
    assert not document["ok"]
    assert document["newest_intact"]["step"] == 4
    assert document["findings"][0].keys() == {"kind", "where", "message", "step", "commit"}
    assert document["findings"][0]["kind"] == "corruption"
    answer = run("verify", copy)
    assert answer.code == 7
    assert "newest intact: step 4" in answer.out


def test_verify_deep_finds_what_is_only_in_the_data(run: Run, copy: Path) -> None:
    flip(pack_of(copy, 2), 200)
    assert run("verify", copy).code == 0
    answer = run("verify", copy, "--deep", "--json")
    assert answer.code == 7
    assert 2 in answer.document["damaged_steps"]


def test_looking_needs_no_torch(small: Path) -> None:
    program = f"""
import sys
sys.modules["torch"] = None
from typer.testing import CliRunner
from deltastore.cli import app
for line in ["log {small} --stats", "show {small} best", "ls {small} 3 model", "verify {small} --deep",
             "tag {small}", "prune {small}", "--help", "get {small} 3 list/1/lr"]:
    result = CliRunner().invoke(app, line.split())
    print(line, result.exit_code, result.output if result.exit_code else "")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    answers = [line.split() for line in done.stdout.splitlines()]
    assert len(answers) == 8, done.stdout
    assert all(answer[-1] == "0" for answer in answers), done.stdout


def test_looking_changes_nothing(run: Run, copy: Path) -> None:
    def content() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in copy.rglob("*") if path.is_file()}

    before = content()
    for line in (["log"], ["show"], ["ls"], ["verify", "--deep"], ["tag"], ["prune"], ["get", "3", "plain/big"]):
        assert run(line[0], copy, *line[1:]).code == 0, line
    assert content() == before


def test_metrics_that_json_lacks(run: Run, tmp_path: Path) -> None:
    with deltastore.open(tmp_path) as store:
        store.commit(0, {"a": 1}, metrics={"nan": math.nan, "inf": -math.inf, "ok": True}).wait()
    document = run("log", tmp_path, "--json").document
    assert document["commits"][0]["metrics"] == {"nan": "NaN", "inf": "-Infinity", "ok": True}
    assert "inf=-inf nan=nan ok=True" in run("log", tmp_path).out
