"""`deltastore tiers`, `recover`, `pull`: what several places hold, and where a run goes on."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest
import torch

import deltastore
from deltastore.errors import Corruption, NotFound
from tests.cli.kit import invoke


@pytest.fixture
def places(tmp_path: Path) -> tuple[str, str]:
    """Two places with steps 0 to 3, and a local one with 4 beside."""
    here, there = str(tmp_path / "here"), str(tmp_path / "there")
    with deltastore.open(here) as store:
        for step in range(4):
            store.commit(step, {"w": torch.full((5000,), float(step))}).wait()
        deltastore.push(here, there)
        store.commit(4, {"w": torch.full((5000,), 4.0)})
    return here, there


def spoil(pack: Path) -> None:
    data = bytearray(pack.read_bytes())
    data[len(data) // 3] ^= 1
    pack.write_bytes(data)


def test_tiers_shows_each(places: tuple[str, str]) -> None:
    here, there = places
    found = invoke("tiers", here, "--tier", there, "--json").document["tiers"]
    assert [(tier["url"], tier["commits"], tier["oldest"], tier["newest"]) for tier in found] == [
        (here, 5, 0, 4),
        (there, 4, 0, 3),
    ]
    assert there in invoke("tiers", here, "--tier", there).out


def test_tiers_shows_one_that_does_not_answer(places: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = places
    shutil.rmtree(there)
    found = invoke("tiers", here, "--tier", there, "--json").document["tiers"]
    assert (found[1]["commits"], found[1]["newest"]) == (0, None)


def test_log_says_which_tiers_have_a_commit(places: tuple[str, str]) -> None:
    here, there = places
    document = invoke("log", here, "--tier", there, "--stats", "--json").document
    assert [commit["tiers"] for commit in document["commits"]] == [["local"], *[["local", "remote"]] * 4]
    near, far = document["stats"]["tiers"]
    assert (near["commits"], near["newest"], near["commits_behind"]) == (5, 4, 0)
    assert (far["commits"], far["newest"], far["commits_behind"]) == (4, 3, 1)
    assert far["bytes_behind"] == document["commits"][0]["bytes"]
    text = invoke("log", here, "--tier", there, "--stats").out
    assert "local remote" in text
    assert "4 commits, 1 commit (" in text
    assert "5 commits, up to the newest" in text
    shutil.rmtree(Path(there, "packs"))
    assert "local remote" not in invoke("log", here, "--tier", there, "--stats").out


def test_log_says_what_a_limit_held_up(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    there.write_text("in the way", encoding="ascii")
    with deltastore.open(here, tiers=[there.as_uri()], max_lag_steps=1) as store:
        store.commit(0, {"w": torch.zeros(5000)}).wait()
        threading.Timer(1.0, there.unlink).start()
        store.commit(1, {"w": torch.ones(5000)}, metrics={"loss": 2.0}).wait("remote", timeout=60)
    held, loss = "deltastore.held_seconds", "loss"
    document = invoke("log", str(here), "--stats", "--json").document
    assert held not in document["commits"][1]["metrics"]
    assert document["commits"][0]["metrics"][loss] == 2.0
    assert document["commits"][0]["metrics"][held] > 0.5
    assert document["stats"]["held"]["commits"] == 1
    assert document["stats"]["held"]["seconds_by_limit"].keys() == {"max_lag_steps"}
    assert "s by max_lag_steps" in invoke("log", str(here), "--stats").out


def test_recover_takes_the_newest_that_is_whole(places: tuple[str, str]) -> None:
    here, there = places
    answer = invoke("recover", here, "--tier", there, "--json").document
    assert (answer["commit"]["step"], answer["from"], answer["rejected"]) == (4, here, [])
    for pack in Path(here, "packs").iterdir():
        spoil(pack)
    answer = invoke("recover", here, "--tier", there, "--json").document
    assert (answer["commit"]["step"], answer["from"]) == (3, there)
    assert {rejected["url"] for rejected in answer["rejected"]} <= {here}
    text = invoke("recover", here, "--tier", there)
    assert f"is whole at {there}" in " ".join(text.out.split())


def test_recover_fetches(places: tuple[str, str]) -> None:
    here, there = places
    shutil.rmtree(here)
    assert invoke("recover", here, "--tier", there, "--fetch").code == 0
    with deltastore.open(here, "r") as store:
        assert store.at("latest").commit.step == 3
        assert torch.equal(store.at(3)["w"][...], torch.full((5000,), 3.0))
    with deltastore.open(here) as store, pytest.raises(NotFound):
        store.fetch(17)


def test_nothing_to_recover(places: tuple[str, str]) -> None:
    for place in places:
        for pack in Path(place, "packs").iterdir():
            spoil(pack)
    here, there = places
    assert invoke("recover", here, "--tier", there).code in (NotFound.exit_code, Corruption.exit_code)
    assert invoke("recover", here + "-none", "--tier", there + "-none").code == NotFound.exit_code


def test_pull_is_push_the_other_way(places: tuple[str, str]) -> None:
    here, there = places
    answer = invoke("pull", there, here, "--json").document
    assert (answer["commits"], answer["newest"]) == (1, 4)


def test_compact_says_what_it_would_do_and_does_it(places: tuple[str, str]) -> None:
    here, _there = places
    planned = invoke("compact", here, "--json").document
    assert planned == {
        "store": here,
        "packs_before": 5,
        "packs_after": 1,
        "merged": 5,
        "duplicates": 0,
        "damaged": [],
        "dry_run": True,
    }
    assert "5 files would become 1" in invoke("compact", here).out
    assert len(list(Path(here, "packs").iterdir())) == 5
    assert "5 files became 1" in invoke("compact", here, "--apply").out
    assert len(list(Path(here, "packs").iterdir())) == 1
    assert "nothing to merge: 1 file" in invoke("compact", here, "--apply").out
    assert invoke("verify", here, "--deep", "--json").document["ok"]
    assert invoke("compact", here, "--pack-size", "many").code == 2
