"""Stores that earlier versions wrote are read as they were written: by deltastore without torch, by plain zarr."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deltastore.errors import Corruption, DeltaStoreError, NotFound, UnsupportedFormat
from deltastore.history.catalog import Catalog, read_catalog
from deltastore.history.lineage import resolve
from deltastore.history.packs import Packs
from deltastore.history.session import read_format
from deltastore.history.tags import read_tags
from deltastore.history.verify import verify
from deltastore.ondisk.fidelity import encode_fidelity
from deltastore.ondisk.index import FORMAT_MAJOR, FORMAT_MINOR
from deltastore.tiers.local import LocalTier
from tests.compat.kit import BAD, DATA, Opened
from tests.forge import Pack, sealed

CASES = sorted(path.parent for path in DATA.glob("*/*/expected.json"))
STOCK = Path(__file__).resolve().parent.parent / "stock" / "read_zarr.py"


@pytest.fixture(params=CASES, ids=lambda path: f"{path.parent.name}-{path.name}")
def case(request: pytest.FixtureRequest) -> Path:
    """The folder of a golden store and what is expected of it."""
    folder: Path = request.param
    return folder


@pytest.fixture
def opened(case: Path) -> Iterator[Opened]:
    store = Opened(case / "store")
    yield store
    store.close()


def load(case: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((case / "expected.json").read_text("ascii"))
    return found


def test_the_golden_stores_are_there() -> None:
    versions = {path.parent.name for path in CASES}
    assert f"{FORMAT_MAJOR}.{FORMAT_MINOR}" in versions
    for version in versions:
        names = {path.name for path in CASES if path.parent.name == version}
        assert names == {
            "chain",
            "dtypes",
            "layouts",
            "values",
            "history",
            "retention",
            "bounded",
            "predicted",
            "replayed",
        }


def test_they_hold_predictions_and_codes_of_every_kind() -> None:
    used: set[tuple[str, str | None, bool, int]] = set()
    for path in CASES:
        opened = Opened(path / "store")
        for entry in opened.catalog.ordered():
            for found in opened.chain(entry).record.predictions:
                used.add((found.kind, found.code, found.refine is not None, max(found.steps)))
        opened.close()
    assert {kind for kind, *_ in used} == {"adam", "sgd", "replay-adam", "replay-sgd"}
    assert {code for _kind, code, *_ in used} == {None, "bit", "ternary", "pair"}
    assert {steps for *_, steps in used} == {1, 2}
    assert any(refined for _kind, _code, refined, _steps in used)


def test_commits(case: Path, opened: Opened) -> None:
    expected = load(case)
    assert f"{expected['format'][0]}.{expected['format'][1]}" == case.parent.name
    found = opened.catalog.ordered()
    assert not opened.catalog.damaged
    for entry, about in zip(found, expected["commits"], strict=True):
        parent = None if entry.parent is None else entry.parent.id
        assert (entry.id, entry.step, entry.ref.epoch, entry.ref.sequence, entry.kind, parent, entry.metrics) == tuple(
            about[name] for name in ("id", "step", "epoch", "sequence", "kind", "parent", "metrics")
        )


def test_states(case: Path, opened: Opened) -> None:
    """Every value and every bit of every commit."""
    for entry, about in zip(opened.catalog.ordered(), load(case)["commits"], strict=True):
        if "refused" in about["state"]:
            with pytest.raises(UnsupportedFormat, match=about["state"]["refused"]):
                opened.state(entry)
            continue
        assert json.loads(json.dumps(opened.state(entry))) == about["state"], f"step {entry.step}"
        aliases = [list(tensor.path) for tensor in opened.chain(entry).layout.tensors if tensor.alias is not None]
        assert aliases == about["aliases"]


def test_fidelity(case: Path, opened: Opened) -> None:
    """What each commit says of its bounds."""
    exact: dict[str, Any] = {"exact": True}
    for entry, about in zip(opened.catalog.ordered(), load(case)["commits"], strict=True):
        assert encode_fidelity(opened.chain(entry).record.fidelity) == about.get("fidelity", exact)
        assert entry.exact == about.get("fidelity", exact)["exact"]


def test_references(case: Path, opened: Opened) -> None:
    expected = load(case)
    tags = read_tags(opened.tier)
    assert tags == expected["tags"]
    for ref, commit in expected["references"].items():
        assert resolve(opened.catalog, tags, int(ref) if ref.isdigit() else ref).id == commit, ref
        assert resolve(opened.catalog, {}, commit[:12]).id == commit


def test_deep_verification(opened: Opened) -> None:
    report = verify(opened.packs, opened.catalog, deep=True)
    assert report.findings == []


def test_plain_zarr(case: Path) -> None:
    """Every array of every pack, in a process that has neither deltastore nor torch."""
    arrays = load(case)["arrays"]
    packs = [case / "store" / "packs" / name for name in arrays]
    assert packs == sorted((case / "store" / "packs").iterdir())
    command = [sys.executable, "-I", "-W", "error", str(STOCK), *map(str, packs)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    found = [{path: row[:3] for path, row in pack.items()} for pack in json.loads(done.stdout)]
    assert found == list(arrays.values())


def test_no_torch_was_needed() -> None:
    """Where torch is installed other tests may have loaded it; where it is not, all of this ran without."""
    if importlib.util.find_spec("torch") is None:
        assert "torch" not in sys.modules
    program = "import sys, tests.compat.kit; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=DATA.parent.parent.parent, check=False).returncode == 0


# ---------------------------------------------------------------- what is newer


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    """A copy of the newest golden chain: a base and deltas, then again."""
    return Path(shutil.copytree(DATA / f"{FORMAT_MAJOR}.{FORMAT_MINOR}" / "chain" / "store", tmp_path / "store"))


def forge(root: Path, step: int, change: Any) -> None:
    (path,) = (path for path in (root / "packs").iterdir() if f"-{step}-{step}-" in path.name)
    pack = Pack.parse(path.read_bytes())
    change(pack)
    path.write_bytes(pack.build())


def steps_read(root: Path) -> tuple[list[int], list[DeltaStoreError]]:
    opened = Opened(root)
    read, errors = [], list(opened.catalog.damaged.values())
    for entry in opened.catalog.ordered():
        try:
            opened.state(entry)
            read.append(entry.step)
        except DeltaStoreError as error:
            errors.append(error)
    opened.close()
    return read, errors


@pytest.mark.parametrize("members", [{"min_reader": [2, 0], "major": 2}, {"min_reader": [1, 1]}, {"major": 2}])
def test_a_store_of_a_newer_version(chain: Path, members: dict[str, Any]) -> None:
    path = chain / "FORMAT.json"
    path.write_bytes(sealed({**json.loads(path.read_bytes()), **members}))
    with pytest.raises(UnsupportedFormat, match="newer deltastore"):
        read_format(LocalTier(str(chain)))


def test_a_pack_of_a_newer_major_version(chain: Path) -> None:
    """It is refused by its version; what does not need it is read."""
    forge(chain, 11, lambda pack: setattr(pack, "index", {**pack.index, "format": [2, 0]}))
    read, errors = steps_read(chain)
    assert read == [0, 1, 2, 3, 4, 5, 10]
    assert type(errors[0]) is UnsupportedFormat
    assert "format 2" in str(errors[0])
    assert len(errors) == 1 + 4  # and the deltas that need it


def test_a_pack_of_a_newer_minor_version(chain: Path) -> None:
    forge(chain, 11, lambda pack: setattr(pack, "index", {**pack.index, "format": [1, 7]}))
    assert steps_read(chain) == ([0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14, 15], [])


def test_an_unknown_feature(chain: Path) -> None:
    """The commit is refused with the feature's name, and so are those that need it; bases are read."""
    forge(chain, 12, lambda pack: pack.record.update(requires=["adam", "lion", "xor"]))
    read, errors = steps_read(chain)
    assert read == [0, 1, 2, 3, 4, 5, 10, 11]
    assert type(errors[0]) is UnsupportedFormat
    assert "needs adam, lion" in str(errors[0])
    assert "step 12" in str(errors[0])


def test_a_newer_writer_is_not_overlooked(chain: Path) -> None:
    """A step that only a newer reader knows is not 'not found'."""
    forge(chain, 15, lambda pack: pack.record.update(requires=["adam"]))
    opened = Opened(chain)
    with pytest.raises(UnsupportedFormat, match="needs adam"):
        resolve(opened.catalog, {}, 15)
    with pytest.raises(NotFound):
        resolve(opened.catalog, {}, 16)
    opened.close()


def test_unknown_members_are_ignored(chain: Path) -> None:
    """In records, layouts, indexes and sealed files; tensors and values are the same."""
    before = [Opened(chain).state(entry) for entry in Opened(chain).catalog.ordered()]

    def add(pack: Pack) -> None:
        pack.record["zzz"] = {"new": [1]}
        pack.record["layers"][0]["zzz"] = 1
        pack.record["fidelity"]["zzz"] = 1
        pack.record["values"]["full"]["zzz"] = 1
        layout = pack.layout
        layout["zzz"] = 1
        layout["tensors"][0]["zzz"] = layout["partitions"][0]["zzz"] = 1
        pack.set_layout(layout)
        pack.index["zzz"] = 1
        for array in pack.index["arrays"].values():
            array["zzz"] = 1

    # Bases only: a delta names the digest of its parent.
    for step in (1, 2, 3, 4, 5, 11, 12, 13, 14, 15):
        (path,) = (path for path in (chain / "packs").iterdir() if f"-{step}-{step}-" in path.name)
        path.unlink()
    for step in (0, 10):
        forge(chain, step, add)
    path = chain / "FORMAT.json"
    path.write_bytes(sealed({**json.loads(path.read_bytes()), "zzz": 1, "minor": 9}))
    opened = Opened(chain)
    after = [opened.state(entry) for entry in opened.catalog.ordered()]
    assert after == [before[0], before[6]]
    assert verify(opened.packs, opened.catalog, deep=True).findings == []
    opened.close()


# ---------------------------------------------------------------- what is malformed


def bad_rows() -> list[tuple[str, str, str]]:
    rows = re.findall(r"^\| ([\w-]+)\.zip \| .* \| (\w+) \| (.*) \|$", (BAD / "README.md").read_text(), re.MULTILINE)
    return [(name, error, text) for name, error, text in rows]


def test_every_bad_pack_is_explained() -> None:
    assert {f"{name}.zip" for name, _, _ in bad_rows()} == {path.name for path in BAD.glob("*.zip")}


@pytest.mark.parametrize(("name", "error", "text"), bad_rows(), ids=lambda value: str(value)[:20])
def test_a_bad_pack(tmp_path: Path, name: str, error: str, text: str) -> None:
    (tmp_path / "packs").mkdir()
    shutil.copy(BAD / f"{name}.zip", tmp_path / "packs" / "e1-0-0-b1b1b1b1b1b1b1b1.zip")
    packs = Packs(LocalTier(str(tmp_path)))
    catalog = read_catalog(packs, Catalog())
    kinds: dict[str, type[DeltaStoreError]] = {"Corruption": Corruption, "UnsupportedFormat": UnsupportedFormat}
    findings = verify(packs, catalog, deep=True).findings
    assert any(kinds[error].kind == finding.kind and text in finding.message for finding in findings), findings
    packs.close()
    (tmp_path / "FORMAT.json").write_bytes((DATA / "1.0" / "chain" / "store" / "FORMAT.json").read_bytes())
    _, errors = steps_read_any_store(tmp_path)
    assert any(type(found) is kinds[error] and text in str(found) for found in errors), errors


def steps_read_any_store(root: Path) -> tuple[list[int], list[DeltaStoreError]]:
    """As steps_read, without asking FORMAT.json for the store's id."""
    format_file = json.loads((root / "FORMAT.json").read_bytes())
    (root / "FORMAT.json").write_bytes(sealed({**format_file, "store": "00112233445566778899aabbccddeeff"}))
    return steps_read(root)
