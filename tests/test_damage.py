"""Every byte of a store damaged: right values or an error that says what and what to do, never wrong numbers."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import deltastore
from deltastore.errors import Corruption, DeltaStoreError, NotFound
from deltastore.ondisk import zarr_profile
from deltastore.store import Store
from deltastore.testing.compare import assert_same
from tests.forge import Region, compress, decompress, regions, sealed

BASE, OVERLAY, XOR, COMPRESSED, AFTER = range(5)
"""Steps of the store: two chains, 0-1-2 on a raw base and 3-4 on a compressed one."""
NEEDS = {
    BASE: {BASE},
    OVERLAY: {BASE, OVERLAY},
    XOR: {BASE, OVERLAY, XOR},
    COMPRESSED: {COMPRESSED},
    AFTER: {COMPRESSED, AFTER},
}
"""Step -> steps whose packs it is read from."""
STOCK_ONLY = {"local header", "name", "padding"}
"""Regions in front of a chunk that only other ZIP readers look at."""


@dataclass
class Made:
    """A store, the states that were committed, and the pack of each step."""

    root: Path
    states: dict[int, Any]
    packs: dict[int, Path]

    def open(self) -> Store:
        return deltastore.open(self.root, mode="r")


def states() -> dict[int, Any]:
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(3001, generator=generator)
    half = torch.randn(33, 7, generator=generator).to(torch.bfloat16)
    found: dict[int, Any] = {}
    for step in NEEDS:
        if step in (OVERLAY, AFTER):
            weight[17::997] += 1
            half[3] += 1
        elif step != BASE:
            weight = weight * 1.0001
        found[step] = {"model": {"w": weight.clone(), "h": half.clone()}, "step": step, "log": [0.5] * step}
    return found


def make_store(root: Path) -> Made:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zarr_profile, "CHUNK_BYTES", 4096)  # several chunks in a small file
        for codec, steps in (("raw", (BASE, OVERLAY, XOR)), ("blosc", (COMPRESSED, AFTER))):
            with deltastore.open(root, codec=codec) as store:
                for step in steps:
                    store.commit(step, states()[step]).wait()
    with deltastore.open(root) as store:
        store.tag("good", XOR)
    found = {int(path.name.split("-")[1]): path for path in (root / "packs").iterdir()}
    return Made(root, states(), found)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make_store(tmp_path_factory.mktemp("damage") / "store")


@pytest.fixture
def made(original: Made, tmp_path: Path) -> Made:
    root = tmp_path / "store"
    shutil.copytree(original.root, root)
    return Made(root, original.states, {step: root / "packs" / path.name for step, path in original.packs.items()})


def read(store: Store, step: int) -> Any:
    return store.at(step).to_state_dict()


def outcome(made: Made, step: int) -> DeltaStoreError | None:
    """Read a step: None if it is right, else the error; wrong values fail the test."""
    with made.open() as store:
        try:
            found = read(store, step)
        except DeltaStoreError as error:
            return error
    assert_same(made.states[step], found)
    return None


def check_others(made: Made, damaged: int) -> None:
    """Steps that do not need the damaged pack are read as before."""
    for step, needed in NEEDS.items():
        if damaged not in needed:
            assert outcome(made, step) is None


def check_error(made: Made, error: DeltaStoreError, damaged: Path) -> None:
    """The error names the pack, and a commit that really can be used instead."""
    assert isinstance(error, Corruption)
    assert damaged.name in str(error)
    instead = error.fields.get("newest_intact")
    assert instead is not None, str(error)
    assert f"step {instead}" in str(error)
    assert outcome(made, instead) is None, f"{error} - and step {instead} is not intact"


def check_damaged_pack(made: Made, step: int, region: Region | None = None) -> None:
    """Everything that must hold while the pack of a step is damaged."""
    path = made.packs[step]
    error = outcome(made, step)
    stock_only = region is not None and region.kind in STOCK_ONLY and "/c/" in region.entry
    if stock_only:
        assert error is None
    else:
        assert error is not None, f"damage in {region} was not noticed"
        check_error(made, error, path)
    with made.open() as store:
        report = store.verify(deep=True)
        assert not report.ok, f"deep verification found nothing in {region}"
        assert any(path.name in finding.where for finding in report.findings)
        if not stock_only:
            shallow = store.verify()
            assert shallow.ok == (region is not None and region.kind.startswith("chunk")), region


def flips(region: Region, count: int) -> Iterator[tuple[int, int]]:
    """Yield `count` places (byte, bit) over a region, all eight bits among them where there are so many."""
    size = region.stop - region.start
    for index in range(min(count, size * 8)):
        yield region.start + (index * size) // count % size, (index * 3) % 8


@pytest.mark.parametrize("step", NEEDS)
def test_flipped_bits(made: Made, step: int) -> None:
    path = made.packs[step]
    whole = path.read_bytes()
    seen: dict[str, int] = {}
    for region in regions(whole):
        # Chunks are many and alike: each kind of region gets its share.
        seen[region.kind] = seen.get(region.kind, 0) + 1
        for offset, bit in flips(region, 4 if seen[region.kind] == 1 else 1):
            damaged = bytearray(whole)
            damaged[offset] ^= 1 << bit
            path.write_bytes(damaged)
            check_damaged_pack(made, step, region)
    check_others(made, step)
    expected = {"local header", "name", "padding", "chunk body", "chunk checksum", "zarr.json", "record", "index"}
    assert expected | {"central directory", "zip64 records", "end record", "trailer"} <= set(seen)


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("step", NEEDS)
def test_zero_filled(made: Made, step: int, cached: bool) -> None:
    if not cached:
        shutil.rmtree(made.root / "cache")
    path = made.packs[step]
    whole = path.read_bytes()
    for region in regions(whole):
        if any(whole[region.start : region.stop]) and region.kind in (
            "chunk body",
            "chunk checksum",
            "record",
            "trailer",
        ):
            path.write_bytes(whole[: region.start] + bytes(region.stop - region.start) + whole[region.stop :])
            check_damaged_pack(made, step, region)
    path.write_bytes(bytes(len(whole)))
    check_damaged_pack(made, step)
    check_others(made, step)


@pytest.mark.parametrize("step", NEEDS)
def test_truncated(made: Made, step: int) -> None:
    path = made.packs[step]
    whole = path.read_bytes()
    starts = [region.start for region in regions(whole)]
    lengths = {
        0,
        1,
        43,
        44,
        65,
        66,
        len(whole) // 2,
        len(whole) - 45,
        len(whole) - 44,
        len(whole) - 1,
        *starts[:: len(starts) // 8],
    }
    for length in sorted(lengths):
        path.write_bytes(whole[:length])
        check_damaged_pack(made, step)
    path.write_bytes(whole + b"\0")
    check_damaged_pack(made, step)
    path.write_bytes(whole + whole[-44:])
    check_damaged_pack(made, step)
    check_others(made, step)


def test_truncated_while_it_is_open(made: Made) -> None:
    """The tail was read when the file was whole; the chunks are not there any more."""
    path = made.packs[COMPRESSED]
    with made.open() as store:
        state = store.at(AFTER)
        os.truncate(path, 100)
        with pytest.raises(Corruption) as caught:
            state.to_state_dict()
    check_error(made, caught.value, path)


@pytest.mark.parametrize("step", NEEDS)
def test_removed(made: Made, step: int) -> None:
    """A pack that is gone cannot be told from one that never was, but what needs it says so."""
    made.packs[step].unlink()
    with made.open() as store:
        report = store.verify()
        for other, needed in NEEDS.items():
            if other == step:
                with pytest.raises(NotFound):
                    store.at(step)
            elif step in needed:
                with pytest.raises(Corruption, match=f"of step {step}, which is in no readable pack") as caught:
                    store.at(other)
                instead = caught.value.fields["newest_intact"]
                assert_same(made.states[instead], read(store, instead))
            else:
                assert_same(made.states[other], read(store, other))
        lost = [other for other, needed in NEEDS.items() if step in needed and other != step]
        assert report.damaged_steps == lost


@pytest.mark.parametrize("step", NEEDS)
def test_replaced_by_another_pack(made: Made, step: int, tmp_path: Path) -> None:
    other_store = make_store(tmp_path / "other")
    path = made.packs[step]
    own = path.read_bytes()
    for other in [made.packs[(step + 1) % len(NEEDS)], other_store.packs[step]]:
        path.write_bytes(other.read_bytes())
        check_damaged_pack(made, step)
    path.write_bytes(own)
    assert outcome(made, step) is None


def test_chunks_of_another_pack(made: Made, tmp_path: Path) -> None:
    """The same chunk of another store: good checksums of its own, but not the ones that the index lists."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zarr_profile, "CHUNK_BYTES", 4096)
        with deltastore.open(tmp_path / "other", codec="raw") as store:
            state = states()[BASE]
            state["model"]["w"] += 1
            store.commit(0, state).wait()
    (foreign_path,) = (tmp_path / "other" / "packs").iterdir()
    foreign, path = foreign_path.read_bytes(), made.packs[BASE]
    whole = path.read_bytes()
    chunks = [
        r for r in regions(whole) if r.kind == "chunk body" and foreign[r.start : r.stop] != whole[r.start : r.stop]
    ]
    assert chunks
    for region in chunks:
        path.write_bytes(whole[: region.start] + foreign[region.start : region.stop + 4] + whole[region.stop + 4 :])
        check_damaged_pack(made, BASE, region)


def test_a_foreign_pack_beside_the_own_ones(made: Made, tmp_path: Path) -> None:
    with deltastore.open(tmp_path / "other") as store:
        store.commit(77, states()[BASE]).wait()
        store.restore()
        store.commit(77, {"x": torch.ones(3)}).wait()
    for path in (tmp_path / "other" / "packs").iterdir():
        shutil.copy(path, made.root / "packs" / path.name)
    for damage in ("", "FORMAT.json", "cache"):  # whichever file tells the store's id
        if damage:
            (shutil.rmtree if damage == "cache" else os.unlink)(made.root / damage)
        with made.open() as store:
            for step in NEEDS:
                assert_same(made.states[step], read(store, step))
            with pytest.raises(Corruption, match="belongs to store"):
                store.at(77)
            assert store.at("latest").commit.step == AFTER


@pytest.mark.parametrize("target", ["own", "other", "nothing", "folder"])
def test_replaced_by_something_else(made: Made, target: str, tmp_path: Path) -> None:
    path = made.packs[OVERLAY]
    copy = tmp_path / path.name
    shutil.move(path, copy)
    if target == "folder":
        path.mkdir()
        error = outcome(made, OVERLAY)
        assert isinstance(error, NotFound | Corruption)
    else:
        path.symlink_to({"own": copy, "other": made.packs[BASE], "nothing": tmp_path / "gone"}[target])
        check_damaged_pack(made, OVERLAY)
    check_others(made, OVERLAY)


def test_renamed(made: Made) -> None:
    path = made.packs[OVERLAY]
    folder, (epoch, first, last, write) = path.parent, path.name.removesuffix(".zip").split("-")
    wrong = made.packs[BASE].name.removesuffix(".zip").split("-")[3]
    for name in (f"{epoch}-{first}-{last}-{wrong}.zip", f"e9-{first}-{last}-{wrong}.zip"):
        path = path.rename(folder / name)
        made.packs[OVERLAY] = path
        check_damaged_pack(made, OVERLAY)
    # Epoch and steps in a name are hints: the record decides.
    path = path.rename(folder / f"e7-50-60-{write}.zip")
    for step in NEEDS:
        assert outcome(made, step) is None
    path.rename(folder / "unknown.zip")
    assert isinstance(outcome(made, OVERLAY), NotFound)
    assert isinstance(outcome(made, XOR), Corruption)


def damage_of_a_file(data: bytes) -> Iterator[bytes]:
    """Yield damaged versions of a small file, none of them with a seal that fits."""
    for index in range(0, len(data) * 8, max(1, len(data) * 8 // 60)):
        flipped = bytearray(data)
        flipped[index // 8] ^= 1 << index % 8
        yield bytes(flipped)
    yield from (data[:length] for length in (0, 1, len(data) // 2, len(data) - 1))
    yield from (data + b"x", bytes(len(data)), b"{}", b"[]", b'"x"', b"\xff", b"[" * 100_000)


def test_a_damaged_format_file(made: Made) -> None:
    path = made.root / "FORMAT.json"
    for data in damage_of_a_file(path.read_bytes()):
        path.write_bytes(data)
        with made.open() as store:
            assert_same(made.states[AFTER], read(store, AFTER))
            assert any("FORMAT.json" in finding.where for finding in store.verify().findings)
    with deltastore.open(made.root) as store:
        assert_same(made.states[XOR], read(store, XOR))
        with pytest.raises(Corruption, match=r"FORMAT\.json"):
            store.commit(9, made.states[AFTER])
    path.unlink()
    with deltastore.open(made.root) as store:
        assert_same(made.states[XOR], read(store, XOR))
        assert [finding.kind for finding in store.verify().findings] == ["not_found"]
        with pytest.raises(Corruption, match=r"FORMAT\.json"):
            store.restore()
    path.symlink_to(made.packs[BASE])
    with made.open() as store:
        assert_same(made.states[XOR], read(store, XOR))
        assert not store.verify().ok


def test_the_format_file_of_another_store(made: Made, tmp_path: Path) -> None:
    other = make_store(tmp_path / "other")
    shutil.copy(other.root / "FORMAT.json", made.root / "FORMAT.json")
    for step in NEEDS:
        assert isinstance(outcome(made, step), Corruption)
    with made.open() as store:
        assert len(store.verify().findings) >= len(NEEDS)


def test_damaged_tags(made: Made) -> None:
    path = made.root / "tags" / "good" / "0.json"
    whole = path.read_bytes()
    for data in damage_of_a_file(whole):
        path.write_bytes(data)
        with made.open() as store:
            with pytest.raises(Corruption, match=r"tags/good/0\.json"):
                store.at("good")
            assert_same(made.states[XOR], read(store, XOR))
            assert len(store.commits()) == len(NEEDS)
            assert any("tags/good/0.json" in finding.where for finding in store.verify().findings)
    # An older entry never takes the place of a damaged one, and a tag's entry is good for its own name only.
    path.write_bytes(whole)
    (path.parent / "1.json").write_bytes(whole)
    (made.root / "tags" / "copy").mkdir()
    (made.root / "tags" / "copy" / "0.json").write_bytes(whole)
    for name in ("good", "copy"):
        with made.open() as store, pytest.raises(Corruption, match="does not belong to its name"):
            store.at(name)


def test_a_damaged_tag_does_not_hinder_ids(made: Made) -> None:
    with made.open() as store:
        commit = store.at(XOR).commit.id
    (made.root / "tags" / "good" / "0.json").write_bytes(b"")
    with made.open() as store:
        assert store.at(commit).commit.step == XOR
        assert store.at(commit[:10]).commit.step == XOR


def test_damaged_epochs(made: Made) -> None:
    """A damaged claim still counts; verification finds it."""
    path = made.root / "epochs" / "2.json"
    whole = path.read_bytes()
    for data in damage_of_a_file(whole):
        path.write_bytes(data)
        with made.open() as store:
            assert_same(made.states[AFTER], read(store, AFTER))
            assert any("epochs/2.json" in finding.where for finding in store.verify().findings)
    with deltastore.open(made.root) as store:
        assert store.commit(9, made.states[AFTER]).wait().epoch == 3
    path.write_bytes((made.root / "epochs" / "1.json").read_bytes())
    with made.open() as store:
        assert any("epochs/2.json" in finding.where for finding in store.verify().findings)
    path.unlink()
    with made.open() as store:
        assert any("epochs/2.json" in finding.where for finding in store.verify().findings)


def test_a_damaged_cache_is_ignored(made: Made) -> None:
    (path,) = (made.root / "cache").iterdir()
    for data in damage_of_a_file(path.read_bytes()):
        path.write_bytes(data)
        with made.open() as store:
            assert [commit.step for commit in store.commits()] == list(NEEDS)
            assert_same(made.states[XOR], read(store, XOR))
            assert store.verify(deep=True).ok
    path.unlink()
    path.symlink_to(made.packs[BASE])
    with made.open() as store:
        assert_same(made.states[XOR], read(store, XOR))


def test_a_cache_that_lies(made: Made) -> None:
    """A cache of another history under the names and sizes of this one: an error at worst."""
    (path,) = (made.root / "cache").iterdir()
    body = json.loads(decompress(path.read_bytes()))
    names = sorted(body["packs"])
    first, second = body["packs"][names[0]], body["packs"][names[1]]
    first[1], second[1] = second[1], first[1]
    path.write_bytes(compress(sealed(body)))
    for step in NEEDS:
        error = outcome(made, step)
        assert error is None or isinstance(error, Corruption)


@pytest.mark.parametrize(
    ("damaged", "expected"),
    [({AFTER}, COMPRESSED), ({COMPRESSED}, XOR), ({COMPRESSED, XOR}, OVERLAY), ({COMPRESSED, BASE}, None)],
)
@pytest.mark.parametrize("where", ["chunk", "tail", "cut"])
def test_restore_falls_back(
    made: Made, damaged: set[int], expected: int | None, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    for step in damaged:
        path = made.packs[step]
        data = bytearray(path.read_bytes())
        chunk = next(region for region in regions(bytes(data)) if region.kind == "chunk body")
        data[chunk.start if where == "chunk" else -60] ^= 1
        path.write_bytes(data[:-1] if where == "cut" else data)
    with deltastore.open(made.root) as store:
        if expected is None:
            with pytest.raises((Corruption, NotFound)):
                store.restore()
            return
        with caplog.at_level(logging.WARNING, "deltastore"):
            state = store.restore()
        assert caplog.records
        assert state.commit.step == expected
        assert_same(made.states[expected], state.to_state_dict())
        new = {"model": made.states[AFTER]["model"], "step": 9, "log": []}
        commit = store.commit(9, new).wait()
        assert commit.parent == state.commit.id
    with made.open() as store:
        assert_same(new, read(store, 9))
        assert store.at("latest").commit.id == commit.id
        for step, needed in NEEDS.items():
            if not needed & damaged:
                assert_same(made.states[step], read(store, step))


def test_restore_of_a_named_commit_never_takes_another(made: Made) -> None:
    data = bytearray(made.packs[XOR].read_bytes())
    data[next(regions(bytes(data))).stop + 200] ^= 1
    made.packs[XOR].write_bytes(data)
    for ref in (XOR, "good"):
        with deltastore.open(made.root) as store, pytest.raises(Corruption):
            store.restore(ref)
