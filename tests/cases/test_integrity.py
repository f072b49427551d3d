"""O16, O17: bytes that are missing, cut or flipped are an error, never other values."""

from __future__ import annotations

import random
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from deltastore.errors import Corruption, DeltaStoreError
from tests.cases.kit import Store, biggest, files, raises, same

# ---------------------------------------------------------------- O16: a missing chunk is not the fill value


def test_a_file_that_is_missing_is_an_error_not_zeros(tmp_path: Path) -> None:
    root = tmp_path / "store"
    truth = {"model": {"w": torch.randn(2_000_000), "zeros": torch.zeros(2_000_000), "b": torch.randn(10)}}
    with Store(root) as store:
        store.save(1, truth)
    with Store(root, owner=False) as reader:
        same(truth, reader.read(1))
    biggest(root).unlink()
    with Store(root, owner=False) as reader:
        error = raises(lambda: reader.read(1))
        assert "1" in str(error)
        assert reader.verify() or 1 not in reader.steps()


def chunks(pack: Path) -> list[tuple[str, int, int]]:
    """Return name, offset and length of the stored chunks of a pack, as any ZIP reader finds them."""
    found = []
    with zipfile.ZipFile(pack) as archive, pack.open("rb") as file:
        for info in archive.infolist():
            if "/c/" in info.filename:
                file.seek(info.header_offset + 26)
                name, extra = (int.from_bytes(file.read(2), "little") for _ in range(2))
                found.append((info.filename, info.header_offset + 30 + name + extra, info.file_size))
    return found


def test_a_chunk_that_became_zeros_is_an_error_that_names_it(tmp_path: Path) -> None:
    root = tmp_path / "store"
    truth = {"model": {"w": torch.randn(1_500_000), "zeros": torch.zeros(300_000), "b": torch.randn(10)}}
    with Store(root) as store:
        store.save(7, truth)
    pack = biggest(root)
    good = pack.read_bytes()
    for name, offset, length in chunks(pack):
        pack.write_bytes(good[:offset] + bytes(length) + good[offset + length :])
        with Store(root, owner=False) as reader:
            error = raises(lambda: reader.read(7), Corruption)
            assert "step 7" in str(error)
            assert name in str(error)
            assert pack.name in str(error)
            assert 7 in reader.verify()
    pack.write_bytes(good)
    with Store(root, owner=False) as reader:
        same(truth, reader.read(7))
        assert not reader.verify()


def test_a_tensor_of_zeros_is_stored_and_told_apart(tmp_path: Path) -> None:
    with Store(tmp_path / "store") as store:
        states = [{"model": {"w": torch.full((70_000,), value)}} for value in (0.0, 1.0, 0.0, -0.0)]
        for step, state in enumerate(states):
            store.save(step, state)
        store.wait()
        for step, state in enumerate(states):
            same(state, store.read(step))


# ---------------------------------------------------------------- O17: truncated files and flipped bits


def two_steps(root: Path) -> dict[int, dict[str, Any]]:
    truth: dict[int, dict[str, Any]] = {}
    with Store(root) as store:
        for step in (1, 2):
            truth[step] = {
                "model": {"w": torch.randn(20_000), "i": torch.arange(500)},
                "user": {"lr": 0.1},
            }
            store.save(step, truth[step])
        store.wait()
        store.product.tag("best", 1)
    return truth


def check_readable(root: Path, truth: dict[int, dict[str, Any]]) -> set[int]:
    """Return the steps that read back; whatever reads without an error must be right."""
    fine = set()
    with Store(root, owner=False) as reader:
        for step, state in truth.items():
            try:
                got = reader.read(step)
            except DeltaStoreError:
                continue  # said so
            same(state, got)
            fine.add(step)
    return fine


def damages(good: bytes, source: random.Random) -> Iterator[bytes]:
    for cut in (0, 1, len(good) // 2, len(good) - 1):
        yield good[:cut]
    yield good + b"\0"
    for _ in range(12 if good else 0):
        place = source.randrange(len(good))
        yield good[:place] + bytes([good[place] ^ (1 << source.randrange(8))]) + good[place + 1 :]


@pytest.mark.filterwarnings("error")
def test_damage_anywhere_raises_or_does_not_matter(tmp_path: Path, seed: int) -> None:
    root = tmp_path / "store"
    truth = two_steps(root)
    source = random.Random(seed)
    for path in files(root):
        good = path.read_bytes()
        for bad in damages(good, source):
            path.write_bytes(bad)
            fine = check_readable(root, truth)
            assert path.parent.name == "packs" or fine == {1, 2}, f"{path}: only packs may be needed to read"
        path.write_bytes(good)
    assert check_readable(root, truth) == {1, 2}
    with Store(root, owner=False) as reader:
        assert not reader.verify()


def test_every_flipped_bit_of_a_pack_is_found_and_blamed_on_its_steps(tmp_path: Path, seed: int) -> None:
    root = tmp_path / "store"
    truth = two_steps(root)
    source = random.Random(seed)
    packs = sorted((root / "packs").iterdir(), key=lambda path: path.name)
    for number, pack in enumerate(packs):
        good = pack.read_bytes()
        # The first local header lies in front of all data: only stock readers look at it, and no step needs it.
        for place in [*range(0, 96, 7), *(source.randrange(len(good)) for _ in range(40))]:
            pack.write_bytes(good[:place] + bytes([good[place] ^ (1 << source.randrange(8))]) + good[place + 1 :])
            with Store(root, owner=False) as reader:
                report = reader.product.verify(deep=True)
            what = f"byte {place} of {pack.name}"
            assert any(pack.name in finding.where for finding in report.findings), what
            damaged = report.damaged_steps
            if damaged:
                # The second step may be a delta on the first.
                assert damaged in ([1], [1, 2]) if number == 0 else damaged == [2], what
            else:
                assert check_readable(root, truth) == {1, 2}, what
        pack.write_bytes(good)


def test_a_damaged_step_does_not_hinder_the_others(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with Store(root) as store:
        for step in range(6):
            store.save(step, {"model": {"w": torch.full((1000 + step,), float(step))}})  # a base each
        store.wait()
    packs = sorted((root / "packs").iterdir(), key=lambda path: path.name)
    for damaged, pack in enumerate(packs):
        good = pack.read_bytes()
        for bad in (good[:-1], b"", good[: len(good) // 2]):
            pack.write_bytes(bad)
            with Store(root, owner=False) as reader:
                for step in range(6):
                    if step != damaged:
                        same({"model": {"w": torch.full((1000 + step,), float(step))}}, reader.read(step))
                error = raises(partial(reader.read, damaged), Corruption)
                assert f"step {damaged}" in str(error)
        pack.write_bytes(good)
