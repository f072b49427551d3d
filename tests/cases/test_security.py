"""O20, O37: a store is data: nothing in it runs, and no name in it leaves it."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import deltastore
from deltastore.errors import DeltaStoreError, InvalidInput, UnsupportedFormat
from tests.cases.kit import Store, biggest, files, freeze, raises, same


class Boom:
    """Runs a command when it is unpickled."""

    def __init__(self, flag: Path) -> None:
        self.flag = flag

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.flag}",)


# ---------------------------------------------------------------- O20: loading runs code


def test_objects_are_refused_and_planted_pickles_are_data(tmp_path: Path) -> None:
    root, flag = tmp_path / "store", tmp_path / "ran"
    with Store(root) as store:
        error = raises(lambda: store.save(1, {"user": {"callback": Boom(flag)}}), InvalidInput)
        assert "callback" in str(error)
        state = {"model": {"w": torch.ones(4)}, "user": {"note": pickle.dumps(Boom(flag))}}
        store.save(2, state)
        store.wait()
        same(state, store.read(2))
    buffer = io.BytesIO()
    torch.save({"w": Boom(flag)}, buffer)
    for path in files(root):
        good = path.read_bytes()
        for evil in (pickle.dumps(Boom(flag)), buffer.getvalue()):
            path.write_bytes(evil)
            try:
                with Store(root, owner=False) as reader:
                    for step in reader.steps():
                        reader.read(step)
                    reader.verify()
            except DeltaStoreError:
                pass
        path.write_bytes(good)
    assert not flag.exists(), "reading ran code"


def test_a_trusted_pickle_is_not_loaded_by_who_does_not_trust_it(tmp_path: Path) -> None:
    root, flag = tmp_path / "store", tmp_path / "ran"
    with deltastore.open(root, pickle="trust") as store:
        store.commit(1, {"model": {"w": torch.ones(4)}, "user": {"callback": Boom(flag)}}).wait()
    with Store(root, owner=False) as reader:
        error = raises(lambda: reader.read(1), UnsupportedFormat)
        assert "user/callback" in str(error)
        raises(lambda: reader.product.at(1)["user", "callback"], UnsupportedFormat)
        same(torch.ones(4), reader.product.at(1)["model", "w"][...])  # the rest can be read
        assert not reader.verify()
    with Store(root) as owner:  # restoring reads the tensors and runs nothing
        owner.save(2, {"model": {"w": torch.ones(4)}})
        owner.wait()
    assert not flag.exists(), "reading ran code"
    with deltastore.open(root, "r", pickle="trust") as trusting:
        trusting.at(1).to_state_dict()
    assert flag.exists()


class Descriptor(tuple[int, ...]):
    """A class with the name and fields of a stored namedtuple that would run code when it is made."""

    _fields = ("x", "y")
    made = 0

    def __new__(cls, *args: Any) -> Descriptor:
        cls.made += 1
        return super().__new__(cls, args)


def test_naming_a_class_does_not_run_it(tmp_path: Path) -> None:
    stored = tuple.__new__(Descriptor, (1, 2))
    with Store(tmp_path / "store") as store:
        store.save(1, {"user": {"point": stored}})
        store.wait()
        back = store.read(1)["user"]["point"]
        assert type(back) is Descriptor
        assert tuple(back) == (1, 2)
        assert Descriptor.made == 0


def test_names_of_modules_in_a_store_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "evil_module.py"
    module.write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass Point(tuple):\n    _fields = ('x',)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    point = type("Point", (tuple,), {"_fields": ("x",), "__module__": "evil_module", "__slots__": ()})
    with Store(tmp_path / "store") as store:
        store.save(1, {"user": {"p": tuple.__new__(point, (1,))}})
        store.wait()
        assert tuple(store.read(1)["user"]["p"]) == (1,)
    assert not (tmp_path / "ran").exists()


# ---------------------------------------------------------------- O37: path traversal

EVIL_KEYS = [
    "../../evil",
    "/abs/evil",
    "a/../../../evil",
    "..\\..\\evil",
    "C:\\evil",
    "..",
    ".",
    "a\0b",
    "~/evil",
    "$HOME/evil",
    "%2e%2e/evil",
    "file:///evil",
    "evil\n",
]


def evil_state() -> dict[str, Any]:
    tensors = {key: torch.full((100,), float(number)) for number, key in enumerate(EVIL_KEYS)}
    return {"model": tensors, "../part": {"w": torch.ones(3)}}


def test_keys_are_data_and_files_stay_below_the_root(tmp_path: Path) -> None:
    root, secret = tmp_path / "in" / "store", tmp_path / "secret.bin"
    content = os.urandom(400)
    secret.write_bytes(content)
    state = evil_state()
    truth = freeze(state)
    with Store(root) as store:
        store.save(1, state)
        store.wait()
        same(truth, store.read(1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "secret.bin"]
    assert not [path for path in tmp_path.rglob("*evil*") if root not in path.parents], "wrote outside"
    assert not Path("/abs").exists()

    pack = biggest(root)
    good = pack.read_bytes()
    pack.unlink()
    pack.symlink_to(secret)  # a pack that is a link to outside
    with Store(root, owner=False) as reader:
        raises(lambda: reader.read(1))
    pack.unlink()
    pack.write_bytes(good)
    for path in files(root):
        if path == pack:
            continue
        text = path.read_bytes()  # what names a file, made to name one outside
        evil = text.replace(pack.name.encode(), b"../" * 8 + str(secret)[1:].encode())
        if evil != text:
            path.write_bytes(evil)
            with Store(root, owner=False) as reader:
                raises(lambda: reader.read(1))
            path.write_bytes(text)
    with Store(root, owner=False) as reader:
        same(truth, reader.read(1))
    assert secret.read_bytes() == content


@pytest.mark.parametrize(
    "tag", ["../x", "a/b", "..", ".", "", ".hidden", "-x", "a\0b", "x" * 101, "é", "latest", "12", "a" * 8]
)
def test_names_of_tags_cannot_leave_the_store(tmp_path: Path, tag: str) -> None:
    root = tmp_path / "store"
    with Store(root) as store:
        store.save(1, {"model": {"w": torch.ones(3)}})
        store.wait()
        before = files(tmp_path)
        raises(lambda: store.product.tag(tag), InvalidInput)
        raises(lambda: store.product.commit(2, {"model": {}}, tag=tag), InvalidInput)
        assert files(tmp_path) == before


def test_a_link_to_a_good_pack_outside_of_the_store_is_not_followed(tmp_path: Path) -> None:
    root, other = tmp_path / "store", tmp_path / "other"
    for place, value in ((root, 1.0), (other, 666.0)):
        with Store(place) as store:
            store.save(1, {"model": {"w": torch.full((5000,), value)}})
    pack, foreign = biggest(root), biggest(other)
    pack.unlink()
    pack.symlink_to(foreign)
    with Store(root, owner=False) as reader:
        raises(lambda: reader.read(1))
    pack.unlink()
    (root / "packs" / foreign.name).write_bytes(foreign.read_bytes())  # copied in: of another store
    with Store(root, owner=False) as reader:
        raises(lambda: reader.read(1))
        assert reader.verify()


def test_links_inside_the_store_do_not_lead_deletions_outside(tmp_path: Path) -> None:
    root, precious = tmp_path / "store", tmp_path / "precious"
    precious.mkdir()
    (precious / "OWNER").write_text("not ours")
    (precious / "thesis.tex").write_text("years of work")
    with Store(root) as store:
        store.save(1, {"model": {"w": torch.ones(3)}})
    (root / "tmp").mkdir(exist_ok=True)
    (root / "tmp" / "0123456789abcdef").symlink_to(precious, target_is_directory=True)
    with Store(root) as store:  # cleans what dead writers left
        store.save(2, {"model": {"w": torch.ones(3)}})
        store.wait()
    assert sorted(path.name for path in precious.iterdir()) == ["OWNER", "thesis.tex"]
