"""Deep verification reconstructs each chain once, and says of each commit what reading it would."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import nn

import deltastore
from deltastore.adapters.pytorch import Checkpointer
from deltastore.errors import DeltaStoreError
from deltastore.history import chunks
from deltastore.history.chain import open_chain
from deltastore.history.walk import first_fault
from deltastore.policy import Policy
from deltastore.store import Store

POLICIES = {
    "exact": Policy(budget=None, prediction="hold", restore_cost=1e9),
    "replayed": Policy(budget=None, restore_cost=1e9),
    "predicted": Policy(budget=0.1, restore_cost=1e9),
    "held": Policy(budget=0.1, prediction="hold", restore_cost=1e9),
}
STEPS = 9


@pytest.fixture(params=POLICIES)
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A training with a second line of history, a parameter that is frozen, and a buffer that comes and goes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 400), nn.Tanh(), nn.Linear(400, 96))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Checkpointer(tmp_path / "run", policy=POLICIES[request.param], model=model, optimizer=optimizer) as ckpt:
        for step in range(STEPS):
            if step == 5:
                ckpt.flush()
                ckpt.restore(2)
            with ckpt.edit():
                ckpt.extra["noise"] = torch.randn(5000) if step % 4 else None
                model[0].weight.requires_grad_(step < 7)
            model(torch.randn(8, 96)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            ckpt.step(step)
    return tmp_path / "run"


def test_an_intact_history(root: Path) -> None:
    with deltastore.open(root, "r") as store:
        report = store.verify(deep=True)
        assert report.ok
        assert report.newest_intact is not None
        assert report.newest_intact.step == STEPS - 1


def readable(store: Store, commit: str) -> bool:
    try:
        store.at(commit).to_state_dict()
    except DeltaStoreError:
        return False
    return True


def test_damage_is_told_of_the_commits_that_it_hits(root: Path) -> None:
    for _ in range(6):
        pack = random.choice(sorted((root / "packs").glob("*.zip")))
        good = pack.read_bytes()
        bad = bytearray(good)
        bad[random.randrange(len(bad))] ^= 1 << random.randrange(8)
        pack.write_bytes(bad)
        with deltastore.open(root, "r") as store:
            report = store.verify(deep=True)
            told = {finding.commit for finding in report.findings}
            for commit in store.commits():
                if not readable(store, commit.id) and commit.step not in report.damaged_steps:
                    assert commit.id in told
            if report.newest_intact is not None:
                assert readable(store, report.newest_intact.id)
        pack.write_bytes(good)


def test_a_reconstruction_that_its_record_denies(root: Path) -> None:
    denied = 0
    with deltastore.open(root, "r") as store:
        view = store._view
        for entry in view.catalog.ordered():
            chain = open_chain(view.packs, view.catalog, entry)
            assert first_fault(view.packs, chain) is None
            for at, link in enumerate(chain.links):
                crcs = {} if link.record.check is None else link.record.check.crcs
                for number in list(crcs)[:1]:
                    crcs[number] ^= 1
                    found = first_fault(view.packs, chain)
                    crcs[number] ^= 1
                    assert found is not None
                    assert found[0] == at
                    assert f"the reconstruction of partition {number} has CRC-32C" in str(found[1])
                    denied += 1
    assert denied


def test_each_layer_is_read_a_few_times_not_once_for_each_commit(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = 0
    read = chunks._read_run

    def counted(*arguments: object) -> None:
        nonlocal reads
        reads += 1
        read(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(chunks, "_read_run", counted)
    with deltastore.open(root, "r") as store:
        arrays = sum(len(store._view.packs.tail(name).index.arrays) for name in store._view.catalog.packs)
        assert store.verify(deep=True).ok
    assert reads <= 4 * arrays
