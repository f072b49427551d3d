"""The verbs that only look: log, show, ls, verify."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from zarr.storage import ZipStore

import deltastore
from deltastore.cli import wording
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
    assert document.keys() == {"store", "commits", "unreadable_packs", "stats"}
    assert document["unreadable_packs"] == []
    for commit in document["commits"]:
        assert commit.pop("on_line") is True
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


def test_log_marks_what_was_left_behind(run: Run, copy: Path) -> None:
    assert "~" not in run("log", copy).out
    with deltastore.open(copy) as store:
        store.restore(3)
        store.commit(4, {"a": 1}).wait()
    found = [(c["step"], c["epoch"], c["on_line"]) for c in run("log", copy, "--json").document["commits"]]
    assert found[:4] == [(4, 2, True), (5, 1, False), (4, 1, False), (3, 1, True)]
    assert all(on_line for _step, _epoch, on_line in found[4:])
    lines = run("log", copy).out.splitlines()
    assert lines[0].split()[:4] == ["id", "step", "epoch", "line"]
    assert [line.split()[1] for line in lines[1:-1] if line.split()[3] == "~"] == ["5", "4"]
    assert lines[-1].startswith("~ left behind")
    assert "~" not in run("log", copy, "-n", 1).out


def test_log_tells_of_packs_that_cannot_be_opened(run: Run, copy: Path) -> None:
    for step in (4, 5):
        os.truncate(pack_of(copy, step), 100)
    answer = run("log", copy)
    assert answer.out.splitlines()[-1] == "2 packs cannot be opened: run `deltastore verify`"
    names = [f"packs/{pack_of(copy, step).name}" for step in (4, 5)]
    assert run("log", copy, "--json").document["unreadable_packs"] == names


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_place_without_a_store(run: Run, small: Path, tmp_path: Path, scheme: str) -> None:
    for name in ("a", "b", "c/store", "d"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "FORMAT.json").touch()
    (tmp_path / "runs" / "c" / "deeper" / "store").mkdir(parents=True)
    runs = f"{scheme}{tmp_path}/runs"
    answer = run("log", runs)
    assert answer.code == 3
    assert answer.err == f"error (not_found): no store at {runs}; stores below it: {runs}/a, {runs}/b, {runs}/d, ...\n"
    assert run("log", f"{runs}/c").err.endswith(f"stores below it: {runs}/c/store\n")
    assert "neither a store" in run("log", f"{runs}/c/deeper").err
    assert run("log", f"{runs}/absent", "--json").document["error"]["message"].endswith("there is no such folder")
    assert "it is a file" in run("log", f"{runs}/a/FORMAT.json").err
    assert "mode" not in run("tag", f"{runs}/absent", "x").err
    assert "in the process that made it" in run("log", "memory://somewhere").err


def test_the_search_for_stores_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wording, "_MOST_FOLDERS", 3)
    for number in range(5):
        (tmp_path / f"{number}").mkdir()
    (tmp_path / "4" / "FORMAT.json").touch()
    assert list(wording.stores_below(str(tmp_path), 3)) == []
    assert list(wording.stores_below(str(tmp_path / "absent"), 3)) == []


def test_an_empty_store(run: Run, tmp_path: Path) -> None:
    with deltastore.open(tmp_path) as store:
        store.commit(0, {"a": 1}).wait()
    pack_of(tmp_path, 0).unlink()
    assert run("log", tmp_path).out == run("log", tmp_path, "--stats").out == "no commits yet\n"
    stats = run("log", tmp_path, "--stats", "--json").document["stats"]
    assert stats["commits"] == 0
    assert stats["longest_chain"] is None
    assert run("show", tmp_path).code == 3
    assert run("prune", tmp_path).out == "nothing to delete: there are no commits\n"


def test_show(run: Run, small: Path) -> None:
    document = run("show", small, "best", "--json").document
    assert document.keys() == {"store", "commit", "chain", "parts", "predictions"}
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
        ("model/wte", 1, ["model", "wte.weight"]),
        ("model/wte.", 1, ["model", "wte.weight"]),
        ('["model", "head"]', 1, ["model", "head.weight"]),
    ],
)
def test_ls_below_a_prefix(run: Run, small: Path, prefix: str, count: int, first: list[object]) -> None:
    leaves = run("ls", small, 3, prefix, "--json").document["leaves"]
    assert len(leaves) == count
    assert leaves[0]["path"] == first


@pytest.fixture(scope="module")
def dotted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dotted") / "a store"
    with deltastore.open(path) as store:
        model = {"h.0.w": 1, "h.0.b": 2, "h.10.w": 3, "ho": 4, "0.weight": 5, "0.bias": 6, "top": 7}
        store.commit(1, {"model": model, "optimizer": {"h.0.w": {"exp_avg": 8}, "h.1.w": {"exp_avg": 9}}}).wait()
    return path


@pytest.mark.parametrize(
    ("prefix", "keys"),
    [
        ("model/h", ["h.0.w", "h.0.b", "h.10.w"]),
        ("model/h.0", ["h.0.w", "h.0.b"]),
        ("model/h.1", None),
        ("model/0", ["0.weight", "0.bias"]),
        ("model/ho", ["ho"]),
        ("optimizer/h.0", ["h.0.w"]),
        ("optimizer/h.0.w/exp", None),
        ("model/.", None),
    ],
)
def test_a_prefix_ends_at_a_dot_too(run: Run, dotted: Path, prefix: str, keys: list[str] | None) -> None:
    answer = run("ls", dotted, 1, prefix, "--json")
    if keys is None:
        assert answer.code == 3
    else:
        assert [leaf["path"][1] for leaf in answer.document["leaves"]] == keys


@pytest.mark.parametrize("prefix", ["model", "model/h.0", "optimizer/h.1.w", '["model"]'])
def test_a_prefix_in_the_place_of_a_reference(run: Run, dotted: Path, prefix: str) -> None:
    answer = run("ls", dotted, prefix)
    assert answer.code == 3
    written = prefix if "[" not in prefix else f"'{prefix}'"
    assert answer.err.endswith(f"did you mean `deltastore ls '{dotted}' latest {written}`?\n")


@pytest.mark.parametrize("arguments", [["madel"], ["model", "h"], ["7"]])
def test_no_hint_where_it_would_not_help(run: Run, dotted: Path, arguments: list[str]) -> None:
    answer = run("ls", dotted, *arguments)
    assert answer.code == 3
    assert "did you mean" not in answer.err


def read_by_zarr(store: Path, dtype: str, pieces: list[Any]) -> tuple[np.ndarray, set[str]]:
    """Return a tensor's elements from what `ls --layout` says, with zarr alone."""

    def array(layer: Any, name: str) -> Any:
        (place,) = [place for place in layer["arrays"] if place["name"] == name]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            packed = ZipStore(store / layer["pack"], mode="r")
            values: Any = zarr.open_array(store=packed, path=place["path"], mode="r")[:]
            packed.close()
        return values if place["start"] is None else values[place["start"] : place["stop"]]

    whole = np.empty(sum(piece["elements"] for piece in pieces), dtype)
    kinds = set()
    for piece in pieces:
        out = whole[piece["first_element"] : piece["first_element"] + piece["elements"]]
        for layer in piece["layers"]:
            kinds.add(layer["kind"])
            if layer["kind"] == "full":
                out[:] = array(layer, "data")
            elif layer["kind"] == "xor":
                words = array(layer, "xor")
                out.view(words.dtype)[:] ^= words
            else:
                indptr, gaps, values = (array(layer, name) for name in ("indptr", "gaps", "values"))
                block = piece["partition_offset"] // 65_536
                for number, (begin, end) in enumerate(pairwise(indptr)):
                    at = -1
                    for entry in range(begin, end):
                        at += 1 + int(gaps[entry])
                        place = (block + number) * 65_536 + at - piece["partition_offset"]
                        if 0 <= place < len(out):
                            out[place] = values[entry]
    return whole, kinds


def test_layout_lets_plain_zarr_find_every_tensor(run: Run, tmp_path: Path) -> None:
    torch.manual_seed(0)
    dense, sparse = torch.randn(301, 300), torch.arange(200_000)
    pair = torch.randn(1000, dtype=torch.complex128)
    state: dict[str, torch.Tensor] = {}
    with deltastore.open(tmp_path) as store:
        for step in range(4):
            dense, sparse, pair = dense + 1e-4, sparse.clone(), pair + 1e-9
            sparse[step * 40_000 + 7] = step
            state = {"a": torch.ones(5, 3), "dense": dense, "sparse": sparse, "pair": pair, "none": torch.ones(0)}
            store.commit(step, {**state, "tied": dense, "n": step}).wait()
    document = run("ls", tmp_path, "latest", "--layout", "--json").document
    leaves = {leaf["path"][0]: leaf for leaf in document["leaves"]}
    assert "places" not in leaves["n"]
    assert leaves["none"]["places"] == []
    seen: set[str] = set()
    for name, expected in {**state, "tied": dense}.items():
        found, kinds = read_by_zarr(tmp_path, str(expected.dtype).removeprefix("torch."), leaves[name]["places"])
        assert np.array_equal(found.reshape(expected.shape), expected.numpy()), name
        seen |= kinds
    assert seen == {"full", "xor", "overlay"}
    text = run("ls", tmp_path, "latest", "sparse", "--layout").out
    assert "by indptr" in text
    assert "zarr.open_array(" in text
    assert "no elements" in run("ls", tmp_path, "latest", "none", "--layout").out


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
for line in ["log {small} --stats", "show {small} best", "ls {small} 3 model --layout", "verify {small} --deep",
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
