"""The verbs that read tensors: get and export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import deltastore
from deltastore import formats
from deltastore.cli.get import parse_slice
from deltastore.errors import InvalidInput
from tests.cli.kit import Run, weight


def test_get_for_people(run: Run, small: Path) -> None:
    answer = run("get", small, "best", "model/wte.weight", "--slice", "0:2,:3")
    assert answer.code == 0
    assert answer.out.splitlines()[0] == "model/wte.weight  float32 [2, 3]  step 2"
    assert str(weight(2)[0:2, :3]) in answer.out


def test_get_as_json(run: Run, small: Path) -> None:
    document = run("get", small, 4, "model/wte.weight", "-s", "1:9:4", "--json").document
    assert document.keys() == {"store", "commit", "path", "kind", "slice", "dtype", "shape", "values"}
    assert document["path"] == ["model", "wte.weight"]
    assert document["shape"] == [2, 8]
    assert torch.equal(torch.tensor(document["values"]), weight(4)[1:9:4])


@pytest.mark.parametrize(
    ("path", "values"),
    [
        ("model/half", [1.5, "Infinity", "NaN"]),
        ("model/z", [[1.0, 2.0]]),
        ('["model", "a/b"]', [[0, 1, 2], [3, 4, 5]]),
        ("rng/numpy", [0, 1, 2]),
        ("list/0", [0.0, 0.0]),
        ("model/0", [1.0]),
    ],
)
def test_values_of_every_kind(run: Run, small: Path, path: str, values: object) -> None:
    assert run("get", small, 1, path, "--json").document["values"] == values


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        ("list/1/lr", 0.001, "0.001"),
        ("list/1/[3]", "int", "'int'"),
        ("list/1/3", "text", "'text'"),
        ("plain/none", None, "None"),
        ("rng/python/0", 3, "3"),
    ],
)
def test_plain_values(run: Run, small: Path, path: str, value: object, text: str) -> None:
    document = run("get", small, 1, path, "--json").document
    assert document["kind"] == "plain"
    assert document["value"] == value
    assert run("get", small, 1, path).out == f"{text}\n"


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        ("a", "is no index"),
        ("", "is no index"),
        ("0:4:0", "is no index"),
        ("4:0:-1", "is no index"),
        ("1:2:3:4", "is no index"),
        ("...,...", "only one"),
        ("0,0,0", "3 indices for a tensor of 2 dimensions"),
        ("64", "row 64"),
        ("0,8", "out of"),
    ],
)
def test_a_slice_that_does_not_fit(run: Run, small: Path, index: str, reason: str) -> None:
    answer = run("get", small, 1, "model/wte.weight", "--slice", index)
    assert answer.code == 2
    assert reason in answer.err


BOUND = st.none() | st.integers(-70, 70)
SLICES = st.builds(slice, BOUND, BOUND, st.none() | st.integers(1, 5))
INDEX = st.lists(st.integers(-8, 7) | SLICES, min_size=1, max_size=2)


def spelled(entry: Any) -> str:
    if not isinstance(entry, slice):
        return str(entry)
    bounds = ["" if bound is None else str(bound) for bound in (entry.start, entry.stop, entry.step)]
    return ":".join(bounds if entry.step is not None else bounds[:2])


@given(index=INDEX)
def test_slices_mean_what_numpy_means(index: list[Any]) -> None:
    parsed = parse_slice(", ".join(map(spelled, index)))
    assert np.array_equal(weight(0).numpy()[parsed], weight(0).numpy()[tuple(index)])
    with pytest.raises(InvalidInput):
        parse_slice("-")


@pytest.mark.parametrize("name", ["t.npy", "t.pt", "t.PT"])
def test_get_into_a_file(run: Run, small: Path, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    answer = run("get", small, 3, "model/wte.weight", "--slice", "5:7", "-o", path, "--json")
    assert answer.document["bytes"] == path.stat().st_size
    read = torch.from_numpy(np.load(path)) if name.endswith("npy") else torch.load(path, weights_only=True)
    assert torch.equal(read, weight(3)[5:7])
    assert list(tmp_path.iterdir()) == [path]
    assert run("get", small, 4, "model/wte.weight", "-o", path).code == 5
    assert run("get", small, 4, "model/wte.weight", "-o", path, "--force").out.startswith(f"wrote {path}")


@pytest.mark.parametrize(
    ("path", "options", "reason"),
    [
        ("model", [], "6 are below it"),
        ("model/wte.weight", ["-o", "x.txt"], "none of .npy .pt"),
        ("model/half", ["-o", "half.npy"], "numpy has no bfloat16"),
        ("list/1/lr", ["--slice", "0"], "is a plain value"),
        ("[true]", [], "a path as JSON is a list of strings and integers"),
    ],
)
def test_what_get_refuses(
    run: Run, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, options: list[str], reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = run("get", small, 1, path, *options)
    assert answer.code == 2
    assert reason in answer.err
    assert list(tmp_path.iterdir()) == []


def test_a_leaf_that_is_not_there(run: Run, small: Path) -> None:
    answer = run("get", small, 1, "model/wte.wieght")
    assert answer.code == 3
    assert "near it: model/wte.weight" in answer.err


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("nope", "its parts: model, list, rng, plain"),
        ("modle", "near it: model"),
        ("rng/quantum", "in rng: rng/python, rng/numpy"),
        ("rng/python/1/xyzzyxyzzy", "in rng/python/[1]: rng/python/[1]/[0], "),
        ("wte.weight", "near it: model/wte.weight"),
        ("list/5", "in list: list/[0], list/[1]"),
        ("list/0/deeper", "in list/[0]: nothing"),
        ("model/wte", "below it: model/wte.weight"),
    ],
)
def test_what_is_there_instead(run: Run, small: Path, tmp_path: Path, path: str, hint: str) -> None:
    for answer in (run("get", small, 1, path), run("export", small, 1, tmp_path / "x.pt", "--part", path)):
        assert answer.code == 3
        assert f"step 1 has no such leaf; {hint}" in answer.err
        assert len(answer.err) < 400
    assert list(tmp_path.iterdir()) == []


def test_more_values_than_a_document_should_hold(run: Run, tmp_path: Path) -> None:
    with deltastore.open(tmp_path / "s") as store:
        store.commit(0, {"w": torch.zeros(1_000_001, dtype=torch.uint8)}).wait()
    answer = run("get", tmp_path / "s", 0, "w", "--json")
    assert answer.code == 2
    assert answer.document["error"]["kind"] == "invalid_input"
    assert run("get", tmp_path / "s", 0, "w", "--json", "-s", "0:2").document["values"] == [0, 0]


def test_export_a_whole_commit(run: Run, small: Path, tmp_path: Path) -> None:
    out = tmp_path / "all.pt"
    document = run("export", small, 3, out, "--json").document
    assert document["bytes"] == out.stat().st_size
    assert document["commit"]["step"] == 3
    loaded = torch.load(out, weights_only=True)
    assert list(loaded) == ["model", "list", "rng", "plain"]
    assert torch.equal(loaded["model"]["wte.weight"], weight(3))
    assert loaded["model"]["wte.weight"].data_ptr() == loaded["model"]["head.weight"].data_ptr()
    assert loaded["list"][1] == {"lr": 0.001, 3: "int", "3": "text"}
    assert loaded["rng"]["numpy"].tolist() == [0, 1, 2]


def test_export_a_part(run: Run, small: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.bin"
    assert run("export", small, "best", out, "--part", "model").out.startswith(f"wrote {out}: step 2")
    assert torch.equal(formats.load(out)["wte.weight"], weight(2))
    assert run("export", small, "best", tmp_path / "one.pt", "--part", "model/wte.weight").code == 0
    assert torch.equal(formats.load(tmp_path / "one.pt"), weight(2))


def test_export_overwrites_only_by_force(run: Run, small: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.pt"
    out.write_bytes(b"precious")
    answer = run("export", small, 1, out)
    assert answer.code == 5
    assert "--force" in answer.err
    assert out.read_bytes() == b"precious"
    assert run("export", small, 1, out, "--part", "model", "--force").code == 0
    assert torch.equal(formats.load(out)["wte.weight"], weight(1))


def test_export_names_the_formats(run: Run, small: Path, tmp_path: Path) -> None:
    answer = run("export", small, 1, tmp_path / "model.onnx")
    assert answer.code == 2
    assert "'torch' (.pt .pth .bin .ckpt), 'safetensors' (.safetensors), " in answer.err
    assert "; give one with --format" in answer.err
    answer = run("export", small, 1, tmp_path / "model.pt", "--format", "pickle")
    assert answer.code == 2
    assert "format 'pickle' is unknown; known are 'huggingface' (a folder), 'torch'" in answer.err
    assert run("export", small, 1, tmp_path / "model.onnx", "--format", "torch").code == 0
