"""Other tools open what is written, and what they write is read: the real libraries, nothing of ours in between."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import safetensors
import safetensors.torch
import torch
import zarr
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from deltastore import formats
from deltastore.testing.compare import assert_same
from tests.formats.kit import DTYPES, tensor, training_state


def flat() -> dict[str, torch.Tensor]:
    return {
        "w": torch.randn(5, 3),
        "half": tensor("bfloat16", 4),
        "fp8": tensor("float8_e5m2", 3),
        "n": torch.arange(3),
    }


# ---------------------------------------------------------------- safetensors


def test_safetensors_opens_ours(tmp_path: Path) -> None:
    state = {name: tensor(name, 3, 2) for name in DTYPES}
    formats.save(state, tmp_path / "x.safetensors")
    with safetensors.safe_open(tmp_path / "x.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a mapping
            assert file.get_tensor(name).shape[:2] == (3, 2)
    ours = {name: value for name, value in state.items() if name not in ("complex32", "complex128")}
    del ours["float8_e8m0fnu"], ours["float4_e2m1fn_x2"]
    loaded = safetensors.torch.load_file(tmp_path / "x.safetensors")
    assert_same({name: loaded[name] for name in ours}, ours)


def test_what_safetensors_writes_is_read(tmp_path: Path) -> None:
    state = flat()
    safetensors.torch.save_file(state, tmp_path / "x", metadata={"format": "pt", "by": "someone"})
    loaded = formats.load(tmp_path / "x")
    assert_same({name: loaded[name] for name in state}, state)


def test_tied_weights_of_save_model_come_back(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    safetensors.torch.save_model(model, str(tmp_path / "tied.safetensors"))
    loaded = formats.load(tmp_path / "tied.safetensors")
    assert loaded["0.weight"] is loaded["1.weight"]
    formats.save(model.state_dict(), tmp_path / "ours.safetensors")
    fresh = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False))
    fresh[1].weight = fresh[0].weight
    safetensors.torch.load_model(fresh, str(tmp_path / "ours.safetensors"))
    assert_same(fresh.state_dict(), model.state_dict())


# ---------------------------------------------------------------- hdf5, zarr, numpy


def test_h5py_alone_opens_ours(tmp_path: Path) -> None:
    state = {"model": flat(), "a/b": {"": torch.ones(2)}}
    state["model"]["tied"] = state["model"]["w"]
    formats.save(state, tmp_path / "x.h5")
    with h5py.File(tmp_path / "x.h5") as file:
        assert np.array_equal(file["model/w"][...], state["model"]["w"].numpy())
        assert file["model/tied"].id.__eq__(file["model/w"].id)
        assert file["model/half"].attrs["logical_dtype"] == "bfloat16"
        assert np.array_equal(file["model/half"][...], state["model"]["half"].view(torch.uint16).numpy())
        assert list(file["model"]) == ["w", "half", "fp8", "n", "tied"]
        assert list(file["a%2Fb"]) == ["%"]


def test_what_h5py_writes_is_read(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x", "w") as file:
        file["layer/kernel"] = np.arange(6, dtype=">f4").reshape(2, 3)
        file["layer/bias"] = file["layer/kernel"]
        file.create_dataset("packed", data=np.arange(1000, dtype=np.int16), chunks=(100,), compression="gzip")
        file["flag"] = np.array([True, False])
    loaded = formats.load(tmp_path / "x")
    expected = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    assert torch.equal(loaded["layer"]["kernel"], expected)
    assert loaded["layer"]["bias"] is loaded["layer"]["kernel"]
    assert torch.equal(loaded["packed"], torch.arange(1000, dtype=torch.int16))
    assert loaded["flag"].tolist() == [True, False]


def test_zarr_alone_opens_ours_and_we_its(tmp_path: Path) -> None:
    state = {"model": flat(), "zeros": torch.full((3,), -0.0)}
    formats.save(state, tmp_path / "x.zarr")
    group = zarr.open_group(tmp_path / "x.zarr", mode="r")
    assert np.array_equal(np.asarray(group["model/w"][...]), state["model"]["w"].numpy())  # type: ignore[index]
    assert group["model/fp8"].attrs["logical_dtype"] == "float8_e5m2"
    assert np.signbit(np.asarray(group["zeros"][...])).all()  # type: ignore[index]
    theirs = zarr.open_group(tmp_path / "theirs", mode="w")
    theirs.create_array("deep/er", data=np.arange(6.0).reshape(2, 3), chunks=(1, 2))
    assert_same(
        formats.load(tmp_path / "theirs"), {"deep": {"er": torch.arange(6.0, dtype=torch.float64).reshape(2, 3)}}
    )


def test_numpy_alone_opens_ours_and_we_its(tmp_path: Path) -> None:
    state = flat()
    formats.save(state, tmp_path / "x.npz")
    with np.load(tmp_path / "x.npz") as archive:
        assert np.array_equal(archive["w"], state["w"].numpy())
        assert np.array_equal(archive["half"], state["half"].view(torch.uint16).numpy())
    arrays = {
        "f": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "big": np.arange(3, dtype=">i4"),
        "s": np.float32(2),
    }
    writers: list[Any] = [np.savez, np.savez_compressed]
    for save in writers:
        save(tmp_path / "theirs.npz", **arrays)
        loaded = formats.load(tmp_path / "theirs.npz")
        assert torch.equal(loaded["f"], torch.arange(6.0, dtype=torch.float64).reshape(2, 3))
        assert loaded["big"].tolist() == [0, 1, 2]
        assert loaded["s"].item() == 2


# ---------------------------------------------------------------- torch


def test_torch_loads_a_folder_of_shards(tmp_path: Path) -> None:
    state = {**flat(), "tied": torch.ones(40)}
    state["tied2"] = state["tied"]
    formats.save(state, tmp_path / "m", format="torch", shard_bytes=100)
    index = json.loads((tmp_path / "m" / "pytorch_model.bin.index.json").read_text())
    merged: dict[str, torch.Tensor] = {}
    for name in set(index["weight_map"].values()):
        merged |= torch.load(tmp_path / "m" / name, weights_only=True)
    assert_same({name: merged[name] for name in state}, state)
    loaded = formats.load(tmp_path / "m")
    assert_same(loaded, state)
    assert loaded["tied"].data_ptr() == loaded["tied2"].data_ptr()


# ---------------------------------------------------------------- torch.distributed.checkpoint


def test_dcp_loads_ours(tmp_path: Path) -> None:
    state = training_state()
    formats.save(state, tmp_path / "x.dcp")
    empty: dict[str, Any] = {
        "model": {key: torch.zeros_like(value) for key, value in state["model"].items()},
        "step": 0,
    }
    del empty["model"]["tied.weight"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_load(empty, checkpoint_id=tmp_path / "x.dcp", no_dist=True)
    assert empty["step"] == 7
    assert_same(empty["model"], {key: value for key, value in state["model"].items() if key != "tied.weight"})


def test_what_dcp_writes_is_read(tmp_path: Path) -> None:
    state = {"model": flat(), "list": [torch.ones(2), 3, "text"], "step": 4, "none": None}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_save(state, checkpoint_id=tmp_path / "x", no_dist=True)
    assert_same({key: formats.load(tmp_path / "x")[key] for key in state}, state)


RANK = """
import os, sys, torch, warnings
import torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor, zeros
warnings.simplefilter("ignore")
verb, folder, meeting, rank, world = *sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5])
dist.init_process_group("gloo", init_method="file://" + meeting, rank=rank, world_size=world)
mesh = init_device_mesh("cpu", (world,))
whole = torch.arange(70.0).reshape(10, 7)
if verb == "save":
    rows, columns = (distribute_tensor(whole, mesh, [Shard(dim)]) for dim in (0, 1))
    dcp.save({"model": {"w": rows, "v": columns}}, checkpoint_id=folder)
else:
    state = {"model": {"w": zeros(10, 7, device_mesh=mesh, placements=[Shard(0)])}}
    dcp.load(state, checkpoint_id=folder)
    assert torch.equal(state["model"]["w"].full_tensor(), whole)
dist.destroy_process_group()
"""


def ranks(verb: str, folder: Path, world: int) -> None:
    meeting = folder.parent / f"meeting-{verb}-{world}"
    command = [sys.executable, "-c", RANK, verb, str(folder), str(meeting)]
    running = [subprocess.Popen([*command, str(rank), str(world)]) for rank in range(world)]
    assert [process.wait(120) for process in running] == [0] * world


def test_dcp_of_several_ranks_both_ways(tmp_path: Path) -> None:
    whole = torch.arange(70.0).reshape(10, 7)
    ranks("save", tmp_path / "theirs", 3)
    lazy = formats.load(tmp_path / "theirs", lazy=True)
    assert torch.equal(lazy["model"]["w"][2:9], whole[2:9])
    assert torch.equal(lazy["model"]["v"][...], whole)
    formats.save({"model": {"w": whole}}, tmp_path / "ours.dcp")
    ranks("load", tmp_path / "ours.dcp", 2)
