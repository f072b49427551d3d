"""The verbs that convert: import, and export to every format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import deltastore
from deltastore import formats
from deltastore.cli.conversion import parse_size
from deltastore.errors import InvalidInput
from deltastore.testing.compare import assert_same
from tests.cli.kit import Run


def checkpoints(folder: Path, suffix: str = ".pt") -> dict[int, dict[str, Any]]:
    """Write a training of four full checkpoints, in which little changes."""
    torch.manual_seed(0)
    states = {}
    weight = torch.randn(200, 100)
    for step in (9, 10, 100, 200):
        weight = weight.clone()
        weight[step % 200] += 1
        states[step] = {"model": {"module.w": weight, "module.tied": weight}, "step": step, "lr": [0.1, 1e-3]}
        formats.save(states[step], folder / f"ckpt-{step}{suffix}")
    return states


@pytest.mark.parametrize("suffix", [".pt", ".safetensors", ".h5", ".npz", ".zarr", ".dcp"])
def test_a_series_becomes_deltas(run: Run, tmp_path: Path, suffix: str) -> None:
    states = checkpoints(tmp_path, suffix)
    names = sorted(str(path) for path in tmp_path.glob("ckpt-*"))
    answer = run("import", *names, tmp_path / "store", "--steps-from-name")
    assert answer.code == 0, answer.err
    lines = answer.out.splitlines()
    assert [line.split(":")[0] for line in lines[:4]] == ["step 9", "step 10", "step 100", "step 200"]
    assert lines[4].startswith("imported 4 checkpoints: 312.5 KiB of tensors in ")
    assert "less" in lines[4]
    with deltastore.open(tmp_path / "store", "r") as store:
        assert [commit.kind for commit in store.commits()] == ["base", "delta", "delta", "delta"]
        assert store.commits()[0].metrics == {"imported_from": f"ckpt-9{suffix}"}
        for step, state in states.items():
            assert_same(store.at(step).to_state_dict(), state)


def test_an_import_goes_on_where_it_was_cut_off(run: Run, tmp_path: Path) -> None:
    checkpoints(tmp_path)
    names = [tmp_path / f"ckpt-{step}.pt" for step in (9, 10, 100, 200)]
    run("import", *names[:2], tmp_path / "store", "--steps-from-name")
    document = run("import", *names, tmp_path / "store", "--steps-from-name", "--json").document
    assert [commit["step"] for commit in document["commits"]] == [100, 200]
    assert document["left_out"] == 2
    assert document["state_bytes"] == 2 * 200 * 100 * 4


def test_names_change_on_the_way_in(run: Run, tmp_path: Path) -> None:
    states = checkpoints(tmp_path)
    out = tmp_path / "store"
    rules = ["--unwrap", "--only", "model", "--rename", "^t=head.t", "--add-prefix", "net."]
    assert run("import", tmp_path / "ckpt-9.pt", out, "--step", 5, *rules).code == 0
    with deltastore.open(out, "r") as store:
        loaded = store.at(5).to_state_dict()
    weight = states[9]["model"]["module.w"]
    assert_same(loaded, {"model": {"net.w": weight, "net.head.tied": weight}})
    assert loaded["model"]["net.w"] is loaded["model"]["net.head.tied"]


def test_weights_alone_go_to_the_model(run: Run, tmp_path: Path) -> None:
    formats.save({"0.weight": torch.ones(2, 2), "0.bias": torch.zeros(2)}, tmp_path / "w.safetensors")
    run("import", tmp_path / "w.safetensors", tmp_path / "store")
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with deltastore.open(tmp_path / "store", "r") as store:
        assert store.at(0).load_into(model=model).ok
    assert_same(dict(model.state_dict()), {"0.weight": torch.ones(2, 2), "0.bias": torch.zeros(2)})


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["{}/absent.pt", "{}/store"], 3, "no such file"),
        (["{}/store"], 2, "name the checkpoints first"),
        (["{}/a.pt", "{}/b.pt"], 2, "the last name is that of the store"),
        (["{}/text", "{}/store"], 2, "its content names no format"),
        (["{}/a.pt", "{}/store", "--steps-from-name"], 2, "no number that could be the step"),
        (["{}/a1.pt", "{}/b1.pt", "{}/store", "--steps-from-name"], 2, "both name step 1"),
        (["{}/a.pt", "{}/store", "--only", "ema"], 3, "only ema"),
        (["{}/a.pt", "{}/store", "--memory", "1"], 2, "allowed; allow more"),
        (["{}/a.pt", "{}/store", "--memory", "much"], 2, "expected a size such as 512M"),
    ],
)
def test_what_cannot_be_imported(run: Run, tmp_path: Path, arguments: list[str], code: int, text: str) -> None:
    for name in ("a", "b", "a1", "b1"):
        formats.save({"w": torch.ones(2)}, tmp_path / f"{name}.pt")
    (tmp_path / "text").write_text("hello")
    answer = run("import", *(argument.format(tmp_path) for argument in arguments))
    assert (answer.code, text in answer.err) == (code, True), answer.err
    assert not (tmp_path / "store" / "packs").exists()


def test_a_pickle_is_not_run(run: Run, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "ran",)

    torch.save({"w": Evil()}, tmp_path / "evil.pt")
    answer = run("import", tmp_path / "evil.pt", tmp_path / "store")
    assert answer.code == 2
    assert "Nothing was run" in answer.err
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["x.safetensors", "x.h5", "x.npz", "x.zarr", "x.dcp"])
def test_export_to_every_format(run: Run, small: Path, tmp_path: Path, name: str) -> None:
    answer = run("export", small, 3, tmp_path / name)
    assert answer.code == 0, answer.err
    assert answer.out.startswith(f"wrote {tmp_path / name}: step 3, ")
    assert "not held as it is: plain:" in answer.err
    with deltastore.open(small, "r") as store:
        assert_same(formats.load(tmp_path / name), store.at(3).to_state_dict())
    strict = run("export", small, 3, tmp_path / f"strict.{name}", "--strict", "--json")
    assert strict.code == 2
    assert "cannot hold everything" in strict.document["error"]["message"]
    assert not (tmp_path / f"strict.{name}").exists()
    document = run("export", small, 3, tmp_path / name, "--force", "--json").document
    assert {"kind", "path", "text", "restored"} == set(document["losses"][0])


def test_export_many_steps_and_cast(run: Run, small: Path, tmp_path: Path) -> None:
    out = tmp_path / "step-{step}.safetensors"
    answer = run("export", small, "--steps", "1:5:2", out, "--part", "model", "--cast", "bfloat16")
    assert answer.code == 0, answer.err
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{step}.safetensors" for step in (1, 3, 5)]
    assert formats.load(tmp_path / "step-3.safetensors")["wte.weight"].dtype == torch.bfloat16
    assert "float32 becomes bfloat16, rounded to the nearest" in answer.err
    for text, code in (("7:9", 3), ("a:b", 2), ("1:5:0", 2)):
        assert run("export", small, "--steps", text, out, "--force").code == code
    assert run("export", small, "--steps", "1:5", tmp_path / "x.pt").code == 2
    assert run("export", small, 1, 2, tmp_path / "x.pt").code == 2


def test_export_checkpoint_folders_of_hugging_face(run: Run, tmp_path: Path) -> None:
    with deltastore.open(tmp_path / "store") as store:
        for step in (100, 200):
            store.commit(step, {"model": {"w": torch.full((2,), float(step))}, "step": step}).wait()
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (tmp_path / "out").mkdir()
    out = tmp_path / "out" / "checkpoint-{step}"
    options = ["--format", "huggingface", "--files-from", tmp_path / "source"]
    answer = run("export", tmp_path / "store", "--steps", ":", out, *options, "--strict")
    assert answer.code == 0, answer.err
    loaded = formats.load(tmp_path / "out" / "checkpoint-200")
    assert_same(loaded["model"], {"w": torch.full((2,), 200.0)})
    assert loaded["step"] == 200
    again = run("import", *sorted((tmp_path / "out").iterdir()), tmp_path / "again", "--steps-from-name")
    assert again.code == 0, again.err
    with deltastore.open(tmp_path / "again", "r") as store:
        assert [commit.step for commit in store.commits()] == [100, 200]


def test_export_memory_is_checked_before(run: Run, small: Path, tmp_path: Path) -> None:
    answer = run("export", small, 1, tmp_path / "x.pt", "--memory", "1K")
    assert answer.code == 2
    assert "written tensor by tensor, such as safetensors" in answer.err
    assert run("export", small, 1, tmp_path / "x.safetensors", "--memory", "512M").code == 0


def test_sizes() -> None:
    assert [parse_size(text, "--memory") for text in ("512M", "1.5 GiB", "7", "2kb")] == [512 << 20, 3 << 29, 7, 2048]
    with pytest.raises(InvalidInput):
        parse_size("-1", "--memory")
