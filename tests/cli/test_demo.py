"""The demo: a short one for real, and that a check that fails is not hidden."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import deltastore
from deltastore import formats
from deltastore.cli import demo as demo_module
from deltastore.cli._demo_children import Child, run_training
from deltastore.cli._demo_model import GPT, Batches, Shape, corpus
from deltastore.errors import DeltaStoreError
from tests.cli.kit import Run

STEPS = 8


@pytest.mark.slow
def test_a_short_demo(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    answer = run("demo", folder, "--steps", STEPS, "--layers", 1, "--width", 32, "--json")
    assert answer.code == 0, answer.out + answer.err
    document = answer.document
    assert document.keys() == {"ok", "steps", "checks", "figures", "folder"}
    assert document["ok"] is True
    assert len(document["checks"]) == 8
    assert set(document["checks"].values()) == {True}
    figures = document["figures"]
    assert figures["commits"] == STEPS
    assert figures["full_checkpoints_bytes"] > figures["parameters"] * 12 * STEPS
    assert all(figures[name] > 0 for name in figures)
    # What it says is what is there.
    with deltastore.open(folder / "store", "r") as store:
        commits = store.commits()
        assert [commit.step for commit in commits] == list(range(STEPS))
        assert {commit.epoch for commit in commits} == {1, 2}
        assert store.verify(deep=True).ok
        weight = store.at(STEPS // 4)["model", "wte.weight"][...]
    stored = sum(path.stat().st_size for path in (folder / "store").rglob("*") if path.is_file())
    assert figures["stored_bytes"] == stored
    exported = formats.load(folder / f"step-{STEPS // 4}.pt")
    assert torch.equal(exported["model"]["wte.weight"], weight)
    assert torch.equal(formats.load(folder / "old.pt")["model"]["wte.weight"], weight)


def child(code: int = 0, **changes: Any) -> Child:
    """Return a process that did four steps and reported what the demo asks for."""
    facts: dict[str, Any] = {
        "start": {"parameters": 7},
        "restored": {"start": 2, "seconds": 0.1},
        "kill": {"acknowledged": 1},
        "end": {"digest": "d"},
    } | changes
    events = [{"event": name, **values} for name, values in facts.items() if name != "losses"]
    losses = changes.get("losses", {0: 3.0, 1: 2.5, 2: 2.25, 3: 2.0})
    steps = [{"event": "step", "step": step, "loss": float(loss).hex()} for step, loss in losses.items()]
    return Child(code, [*events, *steps])


CHECK = {"tensor_equal": True, "export_equal": True}
HEAD, TAIL = {0: 3.0, 1: 2.5, 2: 2.25}, {2: 2.25, 3: 2.0}


def test_checks_that_hold() -> None:
    checks = demo_module._checks(child(), child(-9, losses=HEAD), child(losses=TAIL), 1, CHECK)
    assert set(checks.values()) == {True}


@pytest.mark.parametrize(
    ("change", "failed"),
    [
        (lambda c: c | {"killed": child(0, losses=HEAD)}, "SIGKILL"),
        (lambda c: c | {"killed": child(-9, losses=HEAD, kill={"acknowledged": 2})}, "acknowledged"),
        (lambda c: c | {"resumed": child(losses=TAIL, restored={"start": 3})}, "went on right after"),
        (lambda c: c | {"resumed": child(losses={2: 2.25, 3: 2.0000000000000004})}, "the losses of kill"),
        (lambda c: c | {"resumed": child(losses={3: 2.0})}, "the losses of kill"),
        (lambda c: c | {"killed": child(-9, losses={0: 3.0, 1: 2.5, 2: 2.5})}, "done twice"),
        (lambda c: c | {"resumed": child(losses=TAIL, end={"digest": "e"})}, "weights and optimizer"),
        (lambda c: c | {"check": CHECK | {"tensor_equal": False}}, "a tensor"),
        (lambda c: c | {"check": CHECK | {"export_equal": False}}, "exported"),
    ],
)
def test_each_check_can_fail(change: Callable[[dict[str, Any]], dict[str, Any]], failed: str) -> None:
    parts = change(
        {"reference": child(), "killed": child(-9, losses=HEAD), "resumed": child(losses=TAIL), "check": CHECK}
    )
    checks = demo_module._checks(parts["reference"], parts["killed"], parts["resumed"], 1, parts["check"])
    assert [failed in text for text, ok in checks.items() if not ok] == [True]


FIGURES = {
    "parameters": 7,
    "commits": 4,
    "bases": 1,
    "stored_bytes": 100,
    "full_checkpoints_bytes": 400,
    "share_with_bases": 0.25,
    "share_without_bases": None,
    **dict.fromkeys(("stall_seconds", "full_checkpoint_seconds", "step_seconds", "reference_step_seconds"), 0.01),
    "restore_seconds": 0.5,
    "tensor_seconds": 0.02,
    "tensor_bytes": 2048,
    "export_bytes": 50,
}


@pytest.mark.parametrize("ok", [True, False])
def test_a_failed_check_is_exit_code_1_and_keeps_the_folder(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ok: bool
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    result = {"ok": ok, "steps": 4, "checks": {"the losses are the same": ok}, "figures": FIGURES}
    monkeypatch.setattr(demo_module, "run", lambda *args, **options: dict(result))
    answer = run("demo")
    assert answer.code == (0 if ok else 1)
    assert f"{'ok    ' if ok else 'FAILED'} the losses are the same" in answer.out
    assert "25% of a full checkpoint per commit" in answer.out
    left = list(tmp_path.iterdir())
    assert len(left) == (0 if ok else 1)
    assert ok or f"deltastore log {left[0]}/store" in answer.out


def test_the_demo_takes_a_new_folder_only(run: Run, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    answer = run("demo", tmp_path)
    assert answer.code == 5
    assert "not empty" in answer.err
    assert run("demo", "--steps", "1").code == 2


@pytest.mark.parametrize("width", [30, 33, 201])
def test_a_width_that_no_model_has(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    answer = run("demo", "--width", width)
    assert answer.code == 2
    assert f"{width} is no multiple of 4: try {width // 4 * 4} or" in answer.err
    assert list(tmp_path.iterdir()) == []


def test_a_child_that_fails_says_why() -> None:
    with pytest.raises(DeltaStoreError, match=r"'absent' of the demo ended with code 1: .*No module named"):
        run_training("absent", [], lambda done: None)
    with pytest.raises(DeltaStoreError, match=r"'train' of the demo ended with code 1: \w+Error: ") as caught:
        run_training("train", ["--steps", "4", "--width", "33", "--store", "memory://x"], lambda done: None)
    assert "Traceback" not in caught.value.message
    assert "Traceback" in caught.value.details


def test_the_model_has_about_two_million_parameters_and_tied_embeddings() -> None:
    model = GPT(Shape())
    assert 1_900_000 < sum(parameter.numel() for parameter in model.parameters()) < 2_100_000
    assert model.lm_head.weight is model.wte.weight


def test_the_corpus_is_python_and_the_loader_goes_on_where_it_was() -> None:
    text = corpus()
    assert len(text) > 1 << 20
    assert re.search(rb"\ndef \w+\(self", bytes(text.numpy()))
    one, other = (Batches(text, Shape(), 4, seed) for seed in (1, 2))
    one.draw()
    other.load_state_dict(one.state_dict())
    for left, right in zip(one.draw(), other.draw(), strict=True):
        assert torch.equal(left, right)
    inputs, targets = one.draw()
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
