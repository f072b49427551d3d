"""A training whose commits go to a real HDFS while it runs, and whose machine is lost."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import deltastore
from deltastore.adapters.pytorch import Checkpointer
from deltastore.policy import Policy
from deltastore.reader import LazyTensor
from tests.adapters.training import Run, losses_of, make_run

ROOT = Path(__file__).parents[2]
POLICIES = {"exact": None, "bounded": Policy(budget=0.5, restore_cost=1e9)}

TRAINER = """
import sys
import time
import deltastore
from deltastore.adapters.pytorch import Checkpointer
from tests.adapters.training import make_run
from tests.hdfs.test_tiers import POLICIES

run = make_run("adamw")
with deltastore.open(sys.argv[1], tiers=[sys.argv[2]], max_lag_seconds=2.0) as store:
    with Checkpointer(store, policy=POLICIES[sys.argv[3]], **run.objects) as ckpt:
        for step in range(100_000):
            run.step(step)
            ckpt.step(step).wait()
            print(step, store.durable("remote"), flush=True)
            time.sleep(0.2)  # the machine that goes on trains all these steps anew, twice
"""


@pytest.mark.parametrize("policy", ["exact", pytest.param("bounded", marks=pytest.mark.soak)])
def test_a_new_machine_goes_on_from_hdfs_alone(policy: str, tmp_path: Path, url: str) -> None:
    command = [sys.executable, "-c", TRAINER, str(tmp_path / "nvme"), url, policy]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as trainer:
        assert trainer.stdout is not None
        acknowledged = -1
        for line in trainer.stdout:
            durable = line.split()[1]
            acknowledged = -1 if durable == "None" else int(durable)
            if acknowledged >= 10:
                break
        shutil.rmtree(tmp_path / "nvme", ignore_errors=True)  # the machine is lost
        trainer.kill()
    assert acknowledged >= 10, trainer.returncode

    run = make_run("adamw", seed=1)
    with deltastore.open(tmp_path / "new machine", tiers=[url]) as store:
        with Checkpointer(store, policy=POLICIES[policy], **run.objects) as ckpt:
            start = ckpt.restore()
            assert start > acknowledged
            state = store.at(start - 1)
            other = make_run_at(start)  # leaves the random states as they were then
            for name, value in other.model.state_dict().items():
                read = state["model", name]
                assert isinstance(read, LazyTensor)
                deviation = (read[...].double() - value.double()).abs().max().item()
                assert deviation <= state.fidelity.bound("model", name)
            if policy == "exact":
                assert state.fidelity.exact
                assert losses_of(run, range(start, start + 3), ckpt) == losses_of(
                    make_run_at(start), range(start, start + 3)
                )
            else:
                losses_of(run, range(start, start + 3), ckpt)
        assert store.wait(start + 2, tier="remote", timeout=120).step == start + 2
    with deltastore.open(url, mode="r") as alone:
        assert alone.at("latest").commit.step == start + 2
        for name, value in run.model.state_dict().items():
            assert torch.equal(alone.at("latest")["model", name][...], value)
        assert alone.verify(deep=True).ok


def make_run_at(step: int) -> Run:
    """Return an uninterrupted run after so many steps."""
    run = make_run("adamw")
    losses_of(run, range(step))
    return run
