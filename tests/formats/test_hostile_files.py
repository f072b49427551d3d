"""Hostile and damaged files: a clear error, nothing run, nothing read or written elsewhere, no memory filled."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from deltastore import formats
from deltastore.errors import Corruption, DeltaStoreError, InvalidInput, NotFound, UnsupportedFormat
from tests.formats.kit import TENSOR_FORMATS, training_state


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, flag: Path) -> None:
        self.flag = flag

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.flag}",)


def header(table: Any, length: int | None = None, data: bytes = b"") -> bytes:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


EIGHT = bytes(8)


@pytest.mark.parametrize(
    ("content", "error", "text"),
    [
        (b"\x10", Corruption, "has 1 bytes, a header needs 8"),
        (header({}, length=1 << 62), Corruption, "its header says that it has"),
        (header({"w": entry()}, length=500), Corruption, "its header says that it has 500 bytes"),
        (header(b'{"w": '), Corruption, "its header is no JSON"),
        (header(b"[" * 100_000), Corruption, "its header is no JSON"),
        (header(b'{"\xff": 1}'), Corruption, "its header is no JSON"),
        (header(b'{"w":1,"w":2}'), Corruption, "stands in it twice"),
        (header([]), Corruption, "not an object"),
        (header({"__metadata__": {"a": 1}}), Corruption, "metadata are not text"),
        (header({"w": {"dtype": "F32"}}, data=EIGHT), Corruption, "lacks dtype, shape or data_offsets"),
        (header({"w": entry("F4")}, data=EIGHT), UnsupportedFormat, "has the dtype 'F4'"),
        (header({"w": entry(shape=[-2])}, data=EIGHT), Corruption, r"has the shape \[-2\]"),
        (header({"w": entry(shape=[True])}, data=EIGHT), Corruption, "has the shape"),
        (header({"w": entry(shape=[1 << 62, 1 << 62])}, data=EIGHT), Corruption, "needs 85,070,.* bytes and has 8"),
        (header({"w": entry(offsets=[8, 0])}, data=EIGHT), Corruption, "needs 8 bytes and has -8"),
        (header({"w": entry(offsets=[0, 16], shape=[4])}, data=EIGHT), Corruption, "its tensors end at byte"),
        (header({"w": entry(), "v": entry()}, data=EIGHT), Corruption, "begins at byte"),
        (header({"w": entry(offsets=[8, 16])}, data=2 * EIGHT), Corruption, "begins at byte"),
        (header({"w": entry()}, data=2 * EIGHT), Corruption, "its tensors end at byte"),
    ],
)
def test_a_safetensors_file_that_lies(tmp_path: Path, content: bytes, error: type[Exception], text: str) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(error, match=text):
        formats.load(tmp_path / "x.safetensors")


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "..", "", "a/../../b", "a\0b"])
def test_an_index_names_files_of_its_folder_only(tmp_path: Path, suffix: str, name: str) -> None:
    stem = "model" if suffix == ".safetensors" else "pytorch_model"
    formats.save({"w": torch.ones(2)}, tmp_path / f"secret{suffix}")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / f"{stem}{suffix}.index.json").write_text(
        json.dumps({"weight_map": {"w": f"{name}{suffix}" if "secret" in name else name}})
    )
    with pytest.raises(InvalidInput, match="which is not in the folder: nothing of it was read"):
        formats.load(folder)


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_an_index_that_does_not_fit(tmp_path: Path, suffix: str) -> None:
    stem, name = ("model", "safetensors") if suffix == ".safetensors" else ("pytorch_model", "torch")
    formats.save({"a": torch.ones(8), "b": torch.ones(8)}, tmp_path / "m", format=name, shard_bytes=32)
    index = tmp_path / "m" / f"{stem}{suffix}.index.json"
    document = json.loads(index.read_text())
    swapped = dict(zip(document["weight_map"], reversed(document["weight_map"].values()), strict=True))
    index.write_text(json.dumps({"weight_map": swapped}))
    with pytest.raises(InvalidInput, match="which lacks it"):
        formats.load(tmp_path / "m")
    for text in ("{", "[]", '{"weight_map": {"a": 3}}', "[" * 100_000):
        index.write_text(text)
        with pytest.raises(Corruption, match="no index"):
            formats.load(tmp_path / "m")
    index.write_text('{"weight_map": {"a": "gone"}}')
    with pytest.raises(NotFound, match="gone that it names is not there"):
        formats.load(tmp_path / "m")


def test_pickles_are_not_run(tmp_path: Path) -> None:
    flag = tmp_path / "ran"
    evil = Evil(flag)
    torch.save({"w": evil}, tmp_path / "new.pt")
    torch.save({"w": evil}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "bare.pt").write_bytes(pickle.dumps(evil))
    np.savez(tmp_path / "object.npz", a=np.array([evil], dtype=object))
    formats.save({"w": torch.ones(2), "step": 1}, tmp_path / "meta.dcp")
    (tmp_path / "meta.dcp" / ".metadata").write_bytes(pickle.dumps(evil))
    formats.save({"w": torch.ones(2), "step": 1}, tmp_path / "value.dcp")
    data = next((tmp_path / "value.dcp").glob("*.distcp"))
    stream = io.BytesIO()
    torch.save(evil, stream)
    content = data.read_bytes()
    data.write_bytes(stream.getvalue()[: len(content)].ljust(len(content), b"\0"))
    for name in ("new.pt", "old.pt", "bare.pt", "object.npz", "meta.dcp", "value.dcp"):
        with pytest.raises((InvalidInput, Corruption)):
            formats.load(tmp_path / name)
        assert not flag.exists(), name


def test_a_dcp_folder_that_leads_elsewhere(tmp_path: Path) -> None:
    formats.save({"w": torch.ones(2)}, tmp_path / "x.dcp")
    place = tmp_path / "x.dcp" / ".metadata"
    content = place.read_bytes()
    assert b"\x8c\x0e__0_0_0.distcp" in content
    place.write_bytes(content.replace(b"__0_0_0.distcp", b"../../a.secret"))
    with pytest.raises(InvalidInput, match="which is not in the folder"):
        formats.load(tmp_path / "x.dcp")


def test_zip_bombs(tmp_path: Path) -> None:
    with (
        zipfile.ZipFile(tmp_path / "bomb.npz", "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("a.npy", "w") as file,
    ):
        np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": (1 << 30,)})
        for _ in range(64):
            file.write(bytes(16 << 20))
    with pytest.raises(InvalidInput, match="as a ZIP bomb does"):
        formats.load(tmp_path / "bomb.npz")
    (tmp_path / "bomb.npz").rename(tmp_path / "bomb.pt")
    with pytest.raises(InvalidInput, match="as a ZIP bomb does"):
        formats.load(tmp_path / "bomb.pt", format="torch")


def _external_link(file: h5py.File, secret: Path) -> None:
    file["w"] = h5py.ExternalLink(str(secret), "w")


def _soft_link(file: h5py.File, _secret: Path) -> None:
    file["w"] = h5py.SoftLink("/elsewhere")


def _external_storage(file: h5py.File, secret: Path) -> None:
    file.create_dataset("w", (4,), "u1", external=[(str(secret), 0, 4)])


def _virtual(file: h5py.File, secret: Path) -> None:
    layout = h5py.VirtualLayout((2,), "f4")
    layout[:] = h5py.VirtualSource(str(secret), "w", shape=(2,))
    file.create_virtual_dataset("w", layout)


def _cycle(file: h5py.File, _secret: Path) -> None:
    group = file.create_group("w")
    group.create_group("inner")["again"] = group


def _strings(file: h5py.File, _secret: Path) -> None:
    file["w"] = "text"


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (_external_link, "is a link"),
        (_soft_link, "is a link"),
        (_external_storage, "are in other files"),
        (_virtual, "are in other files"),
        (_cycle, "contains itself"),
        (_strings, "which is no tensor"),
    ],
)
def test_hdf5_stays_in_its_file(tmp_path: Path, make: Callable[[h5py.File, Path], None], text: str) -> None:
    formats.save({"w": torch.ones(2)}, tmp_path / "secret.h5")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        make(file, tmp_path / "secret.h5")
    with pytest.raises(InvalidInput, match=text):
        formats.load(tmp_path / "x.h5")


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(place for place in path.rglob("*") if place.is_file())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TENSOR_FORMATS)
def test_random_damage_raises_only_our_errors(tmp_path: Path, name: str) -> None:
    path = tmp_path / f"state.{TENSOR_FORMATS[name]}"
    formats.save({**training_state(), "bool": torch.tensor([True])}, path)
    files = _files(path)
    for _ in range(80):
        place = random.choice(files)
        good = place.read_bytes()
        damaged = bytearray(good)
        if random.random() < 0.3:
            damaged = damaged[: random.randrange(len(damaged))]
        else:
            for _ in range(random.randrange(1, 6)):
                damaged[random.randrange(min(len(damaged), 4000))] = random.randrange(256)
        place.write_bytes(damaged)
        with contextlib.suppress(DeltaStoreError):
            formats.load(path)
        place.write_bytes(good)


def test_a_header_of_npz_that_does_not_end(tmp_path: Path) -> None:
    formats.save({"w": torch.ones(2)}, tmp_path / "x.npz")
    content = (tmp_path / "x.npz").read_bytes()
    with zipfile.ZipFile(tmp_path / "x.npz") as good, zipfile.ZipFile(tmp_path / "bad.npz", "w") as bad:
        for name in good.namelist():
            bad.writestr(name, good.read(name).replace(b"(2,)", b"(2,("))
    assert b"(2,)" in content
    with pytest.raises(Corruption, match=r"w\.npy"):
        formats.load(tmp_path / "bad.npz")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda found: found.__dict__.pop("state_dict_metadata"),
        lambda found: vars(found.state_dict_metadata["w"].chunks[0]).pop("sizes"),
        lambda found: vars(found.state_dict_metadata["w"]).pop("properties"),
        lambda found: vars(found.state_dict_metadata["w"]).update(size=(2, -2)),
        lambda found: vars(found.state_dict_metadata["w"]).update(chunks=7),
        lambda found: [vars(info).pop("relative_path") for info in found.storage_data.values()],
        lambda found: [vars(info).update(offset="0") for info in found.storage_data.values()],
        lambda found: found.storage_data.update(w=3),
    ],
)
def test_metadata_of_dcp_that_lacks_something(tmp_path: Path, spoil: Callable[[Any], object]) -> None:
    formats.save({"w": torch.ones(2, 2)}, tmp_path / "x.dcp")
    place = tmp_path / "x.dcp" / ".metadata"
    found = pickle.loads(place.read_bytes())
    spoil(found)
    place.write_bytes(pickle.dumps(found))
    with pytest.raises(Corruption, match="is damaged"):
        formats.load(tmp_path / "x.dcp")


def test_a_record_that_does_not_fit(tmp_path: Path) -> None:
    formats.save({"w": torch.ones(2), "step": 1}, tmp_path / "x.safetensors")
    content = (tmp_path / "x.safetensors").read_bytes()
    for before, after in (
        (b'\\"names\\":[\\"w\\"]', b'\\"names\\":[\\"v\\"]'),
        (b'\\"version\\":1', b'\\"version\\":x'),
        (b'{\\"version', b'[\\"version'),
    ):
        assert content.count(before) == 1
        (tmp_path / "x.safetensors").write_bytes(content.replace(before, after))
        with pytest.raises(Corruption, match="the deltastore record in it"):
            formats.load(tmp_path / "x.safetensors")
    (tmp_path / "x.safetensors").write_bytes(content.replace(b'\\"version\\":1', b'\\"version\\":2'))
    with pytest.raises(UnsupportedFormat, match="version 2"):
        formats.load(tmp_path / "x.safetensors")
