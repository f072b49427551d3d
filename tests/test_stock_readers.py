"""Readers that know nothing of deltastore read every array of every pack bit for bit (spec 4)."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import deltastore
from deltastore.dtypes import LOGICAL
from deltastore.history.chain import Link
from deltastore.history.chunks import Wanted, read_arrays
from deltastore.history.packs import Packs
from deltastore.layout import Layout
from deltastore.ondisk import zarr_profile
from deltastore.ondisk.index import storage_dtype_of
from deltastore.ondisk.records import parse_record
from deltastore.testing.compare import assert_same
from deltastore.tiers.local import LocalTier
from tests.forge import regions

PROGRAMS = Path(__file__).resolve().parent / "stock"
DTYPES = [name for name in LOGICAL if hasattr(torch, name)]
STEPS = range(6)
BASE, OVERLAY, XOR, NOISE, FULL, NEW = STEPS


def random_bits(dtype: str, length: int, generator: np.random.Generator) -> torch.Tensor:
    """Return elements of any bits, NaN and subnormal numbers among them."""
    itemsize = LOGICAL[dtype].itemsize
    data = generator.integers(0, 2 if dtype == "bool" else 256, length * itemsize, np.uint8)
    return torch.from_numpy(data).view(getattr(torch, dtype))


def of_all_sizes(tensor: torch.Tensor, generator: np.random.Generator) -> torch.Tensor:
    """Return a copy with a random part of each 64 elements zero: chunks of it are compressed to many sizes."""
    copy = tensor.clone()
    elements = copy.view(torch.uint8).view(-1, tensor.itemsize)
    for start in range(0, len(elements), 64):
        elements[start : start + int(generator.integers(64))] = 0
    return copy


def flipped(tensor: torch.Tensor, where: slice) -> torch.Tensor:
    """Return a copy with the lowest bit of some elements changed."""
    copy = tensor.clone()
    copy.view(torch.uint8).view(-1, tensor.itemsize)[where, 0] ^= 1
    return copy


def states() -> list[dict[str, Any]]:
    """Return states that make a base, overlays, xors, and full layers of old and of new partitions."""
    generator = np.random.default_rng(5)

    def drawn(length: int) -> dict[str, torch.Tensor]:
        # Odd lengths: sizes of chunks, and so the paddings in front of them, are of every kind.
        return {name: random_bits(name, length + 2 * index, generator) for index, name in enumerate(DTYPES)}

    still = {"opt": {"state": {"x": {"exp_avg": torch.arange(77.0)}}}}  # by its role a partition of its own
    base = {name: of_all_sizes(tensor, generator) for name, tensor in drawn(2001).items()}
    overlay = {name: flipped(tensor, slice(3, None, 101)) for name, tensor in base.items()}
    xor = {name: flipped(tensor, slice(None)) for name, tensor in overlay.items()}
    full = {name: torch.zeros_like(tensor) for name, tensor in xor.items()}  # after noise, from which an xor is noise
    new = {f"new.{name}": tensor for name, tensor in drawn(33).items()}
    return [still | content for content in (base, overlay, xor, drawn(2001), full, full | new)]


@pytest.fixture(scope="module", params=["raw", "blosc"])
def packs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The packs of a store, in the order of its steps."""
    root = tmp_path_factory.mktemp("stock") / request.param
    made = states()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zarr_profile, "CHUNK_BYTES", 256)
        with deltastore.open(root, codec=request.param) as store:
            store.set_restore_cost(100)
            for step in STEPS:
                store.commit(step, made[step]).wait()
    with deltastore.open(root, mode="r") as store:
        for step in STEPS:
            assert_same(made[step], store.at(step).to_state_dict())
        assert [commit.kind for commit in store.commits()] == ["base", *["delta"] * (len(STEPS) - 1)]
    found = {int(path.name.split("-")[1]): path for path in (root / "packs").iterdir()}
    return [found[step] for step in STEPS]


def expected_arrays(pack: Path) -> dict[str, Any]:
    """Return what deltastore itself finds in a pack; the states that it makes of this were compared before."""
    opened = Packs(LocalTier(str(pack.parent.parent)))
    name = f"packs/{pack.name}"
    tail = opened.tail(name)
    ((commit, digest),) = tail.index.commits
    record = parse_record(tail.blob(f"deltastore/records/{commit}.json.zst"), digest, name)
    link = Link(record, tail, name)
    kinds = {layer.partition: layer.kind for layer in record.layers}
    layout = layout_of(opened, commit)
    result = {}
    for path, array in tail.index.arrays.items():
        values = np.empty(array.spec.length, storage_dtype_of(array.spec))
        read_arrays(opened, link, [Wanted(path, array, 0, values)])
        partition = layout.by_id[int(path.split("/p")[1].split(".")[0])]
        about = {"layer": kinds[partition.id], "dtype": partition.dtype, "role": partition.role}
        result[path] = [values.dtype.name, len(values), hashlib.sha256(values.tobytes()).hexdigest(), about]
    opened.close()
    return result


def layout_of(opened: Packs, commit: str) -> Layout:
    with deltastore.open(opened.tier.url, mode="r") as store:
        layout: Layout = store.at(commit)._layout
        return layout


def test_the_store_has_every_kind_of_layer_of_every_dtype(packs: list[Path]) -> None:
    seen: dict[str, set[str]] = {}
    chunks = 0
    for pack in packs:
        for path, (_dtype, _length, _sha, about) in expected_arrays(pack).items():
            seen.setdefault(path.split(".")[-1], set()).add(about["dtype"])
            if path.endswith(".data"):
                seen.setdefault(f"{pack.name.split('-')[1]} full", set()).add(about["dtype"])
        opened = Packs(LocalTier(str(pack.parent.parent)))
        chunks = max(
            [chunks, *(len(array.chunks) for array in opened.tail(f"packs/{pack.name}").index.arrays.values())]
        )
        opened.close()
    assert chunks > 10
    every = set(DTYPES)
    assert every <= seen["data"]
    assert every == seen["gaps"] == seen["values"] == seen["indptr"] == seen["xor"]
    assert every <= seen[f"{BASE} full"]
    assert every - {"bool"} <= seen[f"{FULL} full"]
    assert every <= seen[f"{NEW} full"]
    assert {LOGICAL[name] for name in DTYPES} == set(LOGICAL.values())


def test_every_padding_occurs(packs: list[Path]) -> None:
    """All 64 distances to the next multiple of 64, those among them that need a longer field (spec 3.3)."""
    paddings = set()
    for pack in packs:
        found = {region.entry: region for region in regions(pack.read_bytes()) if region.kind == "padding"}
        for region in regions(pack.read_bytes()):
            if region.kind == "chunk body":
                padding = found.get(region.entry)
                paddings.add(0 if padding is None else padding.stop - padding.start)
    wanted = {0, *range(5, 64), *range(65, 69)}
    assert paddings <= wanted
    if "raw" not in str(packs[0]):  # raw chunks have few different sizes
        assert paddings == wanted


def run(program: str, packs: list[Path]) -> list[dict[str, Any]]:
    command = [sys.executable, "-I", "-W", "error", str(PROGRAMS / program), *map(str, packs)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    result: list[dict[str, Any]] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("program", ["read_zarr.py", "read_tensorstore.py"])
def test_a_stock_reader(packs: list[Path], program: str) -> None:
    found = run(program, packs)
    for pack, arrays in zip(packs, found, strict=True):
        assert arrays == expected_arrays(pack), pack.name


def test_zip_tools(packs: list[Path]) -> None:
    for pack in packs:
        if shutil.which("unzip"):
            done = subprocess.run(["unzip", "-tq", pack], capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
        with zipfile.ZipFile(pack) as archive:
            assert archive.testzip() is None
            names = archive.namelist()
        assert len(set(names)) == len(names)
        assert all(name.isascii() for name in names)


def test_a_damaged_chunk_is_found_by_stock_readers_too(packs: list[Path], tmp_path: Path) -> None:
    data = bytearray(packs[BASE].read_bytes())
    chunk = next(region for region in regions(bytes(data)) if region.kind == "chunk body")
    data[chunk.stop - 1] ^= 1
    damaged = tmp_path / packs[BASE].name
    damaged.write_bytes(data)
    for program in ("read_zarr.py", "read_tensorstore.py"):
        command = [sys.executable, "-I", str(PROGRAMS / program), str(damaged)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
        assert done.returncode != 0
        assert re.search("checksum|digest|blosc|Bad CRC-32", done.stderr, re.IGNORECASE), done.stderr
