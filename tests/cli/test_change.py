"""The verbs that change a store: tag and prune."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import deltastore
from tests.cli.kit import STEPS, Run, flip, pack_of


def steps(path: Path) -> list[int]:
    with deltastore.open(path, "r") as store:
        return [commit.step for commit in store.commits()]


def test_tags_are_made_moved_listed_and_removed(run: Run, copy: Path) -> None:
    assert run("tag", copy, "first", "0").out.startswith("first -> step 0 (")
    newest = run("tag", copy, "newest", "--json").document["commit"]
    assert newest["step"] == STEPS - 1
    assert newest["tags"] == ["newest"]
    assert run("tag", copy, "second", "best", "--json").document["commit"]["tags"] == ["best", "second"]
    assert run("tag", copy, "second", "--delete").code == 0
    tags = run("tag", copy, "--json").document["tags"]
    assert {name: commit["step"] for name, commit in tags.items()} == {"best": 2, "first": 0, "newest": STEPS - 1}
    refused = run("tag", copy, "best", "4")
    assert refused.code == 5
    assert "; --move lets it name another" in refused.err
    assert "move=" not in refused.err
    assert run("tag", copy, "best", "4", "--move").code == 0
    assert run("tag", copy, "first", "--delete").out == "removed tag first\n"
    assert run("tag", copy, "newest", "-d", "--json").document["commit"] is None
    text = run("tag", copy).out
    assert [line.split()[::2][0] for line in text.splitlines()] == ["tag", "best"]
    assert steps(copy) == list(range(STEPS))
    assert run("tag", copy, "best", "-d").code == 0
    assert run("tag", copy).out == "no tags\n"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["latest"], 2),
        (["1234"], 2),
        (["x", "99"], 3),
        (["absent", "--delete"], 3),
        (["best", "3", "--delete"], 2),
        (["--move"], 2),
    ],
)
def test_tags_that_cannot_be(run: Run, copy: Path, arguments: list[str], code: int) -> None:
    assert run("tag", copy, *arguments).code == code


def test_prune_says_what_would_go_and_then_deletes_it(run: Run, copy: Path) -> None:
    options = ["--keep-last", "1", "--keep-every", "2"]
    planned = run("prune", copy, *options, "--json").document
    assert planned.keys() == {"store", "dry_run", "commits", "kept", "bytes", "held_back"}
    assert planned["held_back"] == []
    assert planned["dry_run"] is True
    assert steps(copy) == list(range(STEPS))
    text = run("prune", copy, *options).out
    assert "--apply deletes" in text or "nothing to delete" in text
    done = run("prune", copy, *options, "--apply", "--json").document
    assert done == {**planned, "dry_run": False}
    gone = {commit["step"] for commit in done["commits"]}
    assert steps(copy) == [step for step in range(STEPS) if step not in gone]
    assert done["kept"] == len(steps(copy))
    assert run("verify", copy, "--deep").code == 0


def test_prune_keeps_what_tags_need(run: Run, copy: Path) -> None:
    assert run("prune", copy, "--keep-last", "1", "--apply").out.startswith("deleted 2 of 6 commits")
    assert steps(copy) == [2, 3, 4, 5]  # best is the base of the latest
    assert run("prune", copy, "--keep-last", "1").out.startswith("nothing to delete")


def test_prune_says_why_nothing_goes(run: Run, tmp_path: Path) -> None:
    with deltastore.open(tmp_path) as store:
        for step in range(4):
            store.commit(step, {"w": torch.arange(100_000) + step // 3}).wait()
        assert [commit.kind for commit in store.commits()] == ["base", "delta", "delta", "delta"]
    text = run("prune", tmp_path, "--keep-last", "2").out
    assert "read from all 4, from the base of step 0 on. A newer base would let them go" in text
    assert run("prune", tmp_path, "--keep-last", "4").out == "nothing to delete: of 4 commits the last 4 are kept\n"


def test_prune_names_the_damaged_packs_that_hold_the_rest_back(run: Run, copy: Path) -> None:
    damaged = pack_of(copy, 5)
    flip(damaged, -100)
    text = run("prune", copy, "--keep-last", "1").out
    assert text.startswith("nothing to delete: 1 pack cannot be opened")
    assert damaged.name in text
    assert "deltastore verify" in text
    document = run("prune", copy, "--keep-last", "1", "--json").document
    assert document["held_back"] == [f"packs/{damaged.name}"]
    assert document["commits"] == []


def test_deleting_needs_to_be_told_what_stays(run: Run, copy: Path) -> None:
    assert run("prune", copy, "--apply").code == 2
    assert run("prune", copy, "--keep-last", "0").code == 2
    assert steps(copy) == list(range(STEPS))


def test_prune_leaves_a_store_alone_that_is_being_written(run: Run, copy: Path) -> None:
    with deltastore.open(copy) as writer:
        writer.commit(STEPS, {"a": 1}).wait()
        answer = run("prune", copy, "--keep-last", "1", "--apply", "--json")
        assert answer.code == 4
        assert answer.document["error"]["kind"] == "conflict"
        assert "try again when it has ended" in answer.err
        assert "mode=" not in answer.err
    assert steps(copy) == list(range(STEPS + 1))


@pytest.mark.parametrize("arguments", [["tag", "x"], ["prune", "--keep-last", "1", "--apply"]])
def test_a_mistyped_name_makes_no_store(run: Run, tmp_path: Path, arguments: list[str]) -> None:
    verb, *rest = arguments
    assert run(verb, tmp_path / "absent", *rest).code == 3
    assert not (tmp_path / "absent").exists()
