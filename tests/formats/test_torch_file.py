"""Torch files: what comes back is what was saved, nothing is run, a good file survives."""

from __future__ import annotations

import collections
import errno
import io
import os
import pickle
import random
import stat
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import deltastore
from deltastore import formats
from deltastore.adapters.pytorch import Checkpointer
from deltastore.errors import Backend, Corruption, InvalidInput, NotFound
from deltastore.formats import torch_lazy
from deltastore.formats.series import Checkpoint, import_series
from deltastore.testing.compare import assert_same
from tests.formats.kit import DTYPES as LOGICAL_DTYPES
from tests.formats.kit import tensor, training_state

DTYPES = [
    getattr(torch, name)
    for name in (
        "float32 float64 float16 bfloat16 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool complex64 complex128 "
        "float8_e4m3fn float8_e5m2"
    ).split()
]


def bits(tensor: torch.Tensor) -> bytes:
    tensor = tensor.detach().contiguous()
    return bytes(tensor.flatten().view(torch.uint8).numpy()) if tensor.numel() else b""


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        alike = type(other) is torch.Tensor and one.dtype == other.dtype and one.shape == other.shape
        return alike and bits(one) == bits(other)
    if isinstance(one, dict):
        return type(one) is type(other) and list(one) == list(other) and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and (one == other or (one != one and other != other))


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    count = int(np.prod(shape)) * dtype.itemsize
    if dtype == torch.bool:
        return torch.tensor(draw(st.lists(st.booleans(), min_size=count, max_size=count))).bool().reshape(shape)
    raw = draw(st.binary(min_size=count, max_size=count))
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


PLAIN = (
    st.none()
    | st.booleans()
    | st.integers(-(2**80), 2**80)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(min_size=1, max_size=8)
    | st.complex_numbers(allow_nan=False)
)
KEYS = st.text(max_size=5) | st.integers(0, 2**47)
STATES = st.recursive(
    PLAIN | tensors(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=3).map(collections.OrderedDict)
    ),
    max_leaves=12,
)


@given(state=STATES)
def test_what_is_saved_comes_back(tmp_path_factory: pytest.TempPathFactory, state: Any) -> None:
    path = tmp_path_factory.mktemp("round") / "state.pt"
    size = formats.save(state, path)
    assert size == path.stat().st_size
    assert same(formats.load(path), state)
    assert same(torch.load(path, weights_only=True), state)
    assert os.listdir(path.parent) == ["state.pt"]


def test_an_optimizer_with_old_integer_ids_comes_back(tmp_path: Path) -> None:
    # torch before 1.6 keyed the state by id(parameter): addresses of 47 bits.
    ids = [0x7F3A_1C2D_4E50, 0x7FFF_FFFF_FFF0]
    state = {
        "state": {number: {"step": 5, "exp_avg": torch.rand(3)} for number in ids},
        "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "params": ids}],
    }
    for is_zip in (True, False):
        torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=is_zip)
        assert same(formats.load(tmp_path / "old.pt"), state)
    formats.save(state, tmp_path / "new.pt")
    assert same(formats.load(tmp_path / "new.pt"), state)


def test_a_real_module_and_optimizer_round_trip(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(5, 4)).sum().backward()
    optimizer.step()
    formats.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    loaded = formats.load(tmp_path / "run.pt")
    assert same(loaded["optimizer"], optimizer.state_dict())
    assert loaded["model"]._metadata == model.state_dict()._metadata  # type: ignore[attr-defined]
    model.load_state_dict(loaded["model"])


def test_parameters_are_written_as_state_dict_would(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.arange(3.0))
    formats.save({"w": parameter, "y": parameter * 2}, tmp_path / "p.pt")
    loaded = formats.load(tmp_path / "p.pt")
    assert type(loaded["w"]) is torch.Tensor
    assert not loaded["w"].requires_grad
    assert torch.equal(loaded["y"], torch.tensor([0.0, 2.0, 4.0]))


def test_tied_tensors_stay_tied(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.rand(100, 10))
    size = formats.save({"wte": weight, "head": {"weight": weight}, "rows": weight.detach()[:10]}, tmp_path / "t.pt")
    assert size < 4000 + 2500
    loaded = formats.load(tmp_path / "t.pt")
    loaded["wte"][0] = 7.0
    assert torch.equal(loaded["head"]["weight"][0], torch.full((10,), 7.0))
    assert torch.equal(loaded["rows"][0], torch.full((10,), 7.0))


def test_a_view_does_not_drag_its_storage_along(tmp_path: Path) -> None:
    flat = torch.rand(1_000_000)
    view = flat[10:20]
    formats.save({"a": view, "again": view, "column": flat.view(1000, 1000)[:5, 3]}, tmp_path / "v.pt")
    assert (tmp_path / "v.pt").stat().st_size < 4000
    loaded = formats.load(tmp_path / "v.pt")
    assert torch.equal(loaded["a"], view)
    assert torch.equal(loaded["column"], flat.view(1000, 1000)[:5, 3])
    loaded["a"][0] = 9.0
    assert loaded["again"][0] == 9.0
    assert flat[10] != 9.0


def test_views_that_cover_their_storage_share_it(tmp_path: Path) -> None:
    flat = torch.rand(100_000)
    state = {f"p{i}": flat[i * 25_000 : (i + 1) * 25_000] for i in range(4)} | {"all": flat}
    assert formats.save(state, tmp_path / "flat.pt") < 100_000 * 4 + 5000
    assert same(formats.load(tmp_path / "flat.pt"), state)


def test_containers_keep_their_types_when_a_view_in_them_is_copied(tmp_path: Path) -> None:
    small = torch.arange(10)[:2]
    state: dict[str, Any] = collections.OrderedDict(a=[small, (small, {"b": small})], n=collections.Counter(x=2))
    formats.save(state, tmp_path / "c.pt")
    assert same(formats.load(tmp_path / "c.pt"), state)
    assert state["a"][0] is small


def test_large_files_are_mapped_and_changes_stay_private(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    formats.save({"w": torch.zeros(1000)}, path)
    before = path.read_bytes()
    loaded = formats.load(path)
    loaded["w"].fill_(3.0)
    assert path.read_bytes() == before
    formats.save({"w": torch.ones(1000)}, path)
    assert torch.equal(loaded["w"], torch.full((1000,), 3.0))


class Attack:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("is_zip", [True, False])
def test_code_in_a_file_is_refused_by_name_and_not_run(tmp_path: Path, is_zip: bool) -> None:
    state = {"w": torch.ones(1), "x": Attack(tmp_path / "owned")}
    torch.save(state, tmp_path / "evil.pt", _use_new_zipfile_serialization=is_zip)
    wanted = r"asks for code.*posix\.mkdir.*Nothing was run.*weights_only=False"
    with pytest.raises(InvalidInput, match=wanted) as caught:
        formats.load(tmp_path / "evil.pt")
    assert caught.value.refused == ["posix.mkdir"]
    assert "\x1b" not in str(caught.value)
    assert not (tmp_path / "owned").exists()


def test_every_refused_global_is_named_and_can_be_allowed(tmp_path: Path) -> None:
    path = tmp_path / "n.pt"
    torch.save({"d": collections.deque([1]), "f": frozenset([2])}, path)
    with pytest.raises(InvalidInput, match=r"'builtins\.frozenset', 'collections\.deque'"):
        formats.load(path)
    with torch.serialization.safe_globals([collections.deque, frozenset]):
        with pytest.raises(InvalidInput, match="append"):  # torch appends to lists only
            formats.load(path)
        torch.save({"f": frozenset([2])}, path)
        assert formats.load(path) == {"f": frozenset([2])}


def test_another_pickle_protocol_is_refused_with_a_way_out(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1)}, tmp_path / "p4.pt", pickle_protocol=4)
    with pytest.raises(InvalidInput, match=r"does what weights_only does not allow.*save it again"):
        formats.load(tmp_path / "p4.pt")


def test_a_torchscript_archive_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "s.pt", "w") as archive:
        archive.writestr("s/data.pkl", b"")
        archive.writestr("s/constants.pkl", b"")
    with pytest.raises(InvalidInput, match="TorchScript"):
        formats.load(tmp_path / "s.pt")


@pytest.mark.parametrize(
    "value",
    [np.array(["a"]), np.datetime64(1, "s"), collections.UserDict(), Ellipsis],
    ids=lambda value: type(value).__name__,
)
def test_what_load_would_refuse_is_not_written(tmp_path: Path, value: Any) -> None:
    path = tmp_path / "state.pt"
    path.write_bytes(b"old")
    with pytest.raises(InvalidInput, match="would refuse") as caught:
        formats.save({"rng": [1, {"numpy": value}]}, path)
    assert f"{type(value).__qualname__} at rng/[1]/numpy" in str(caught.value)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["state.pt"]


@pytest.mark.parametrize("dtype", ["?", "i1", "<u2", ">u4", "<i8", "<f2", ">f4", "f8", "c8"])
def test_numpy_becomes_tensors_of_the_same_bits(tmp_path: Path, dtype: str) -> None:
    array = np.arange(12).astype(dtype).reshape(3, 4)[::-1, ::2]
    array.flags.writeable = False
    formats.save({"a": array, "s": array[1, 1], "rng": np.random.get_state()}, tmp_path / "n.pt")  # noqa: NPY002
    loaded = torch.load(tmp_path / "n.pt", weights_only=True)
    for name, value in (("a", array), ("s", array[1, 1])):
        native = np.asarray(value).astype(value.dtype.newbyteorder("="))
        assert loaded[name].numpy().dtype == native.dtype
        assert loaded[name].numpy().tobytes() == native.tobytes()
        assert loaded[name].shape == native.shape
    np.random.set_state(loaded["rng"])  # noqa: NPY002
    back = formats.load(tmp_path / "n.pt")
    assert_same(back["a"], np.ascontiguousarray(array, array.dtype.newbyteorder("=")))
    assert type(back["s"]) is type(array[1, 1])
    np.random.set_state(back["rng"])  # noqa: NPY002


def test_values_that_have_no_bytes_are_refused_with_their_path(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="model/w: a tensor on the meta device"):
        formats.save({"model": {"w": torch.ones(2, device="meta")}}, tmp_path / "x.pt")
    with pytest.raises(InvalidInput, match="cannot be pickled"):
        formats.save({"f": lambda: 1}, tmp_path / "x.pt")
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(InvalidInput, match="contains itself"):
        formats.save(loop, tmp_path / "x.pt")
    assert os.listdir(tmp_path) == []


def _good(is_zip: bool) -> bytes:
    buffer = io.BytesIO()
    state = {"a": torch.arange(300.0), "b": [torch.ones(3, dtype=torch.bfloat16), {"c": 7}]}
    torch.save(state, buffer, _use_new_zipfile_serialization=is_zip)
    return buffer.getvalue()


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_truncated_file_is_corruption(tmp_path: Path, is_zip: bool) -> None:
    good = _good(is_zip)
    path = tmp_path / "cut.pt"
    for length in [0, 1, 3, 4, 20, len(good) // 2, len(good) - 30, len(good) - 1]:
        path.write_bytes(good[:length])
        with pytest.raises(Corruption, match=r"cut\.pt is damaged") as caught:
            formats.load(path)
        assert caught.value.path == str(path)


@pytest.mark.parametrize(
    "content",
    [b"hello world", b"PK\x03\x04 and then nothing", pickle.dumps({"a": 1}, protocol=2), b"\0" * 4096],
    ids=["text", "half a zip", "a pickle", "zeros"],
)
def test_garbage_is_corruption(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "garbage.pt").write_bytes(content)
    with pytest.raises(Corruption, match=r"garbage\.pt is damaged or no torch file"):
        formats.load(tmp_path / "garbage.pt")


def test_another_zip_is_no_torch_file(tmp_path: Path) -> None:
    with open(tmp_path / "arrays.pt", "wb") as file:
        np.savez(file, a=np.ones(3))
    with pytest.raises(Corruption, match=r"without the entry data\.pkl"):
        formats.load(tmp_path / "arrays.pt", format="torch")


def test_a_flipped_bit_in_a_tensor_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "flip.pt"
    weight = torch.rand(1000)
    formats.save({"w": weight}, path)
    damaged = bytearray(path.read_bytes())
    damaged[damaged.index(bits(weight)) + 1234] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(Corruption, match="CRC-32"):
        formats.load(path)


def test_a_file_without_checksums_loads(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.arange(9)}, tmp_path / "nocrc.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert torch.equal(formats.load(tmp_path / "nocrc.pt")["w"], torch.arange(9))


def test_a_recompressed_file_is_not_mapped(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(5000)}, tmp_path / "stored.pt")
    with zipfile.ZipFile(tmp_path / "stored.pt") as stored, zipfile.ZipFile(tmp_path / "small.pt", "w") as small:
        for entry in stored.infolist():
            small.writestr(entry.filename, stored.read(entry), zipfile.ZIP_DEFLATED)
    assert torch.equal(formats.load(tmp_path / "small.pt")["w"], torch.zeros(5000))


@pytest.mark.parametrize("is_zip", [True, False])
def test_random_damage_raises_only_our_errors(tmp_path: Path, is_zip: bool, seed: int) -> None:
    good = _good(is_zip)
    generator = random.Random(seed)
    path = tmp_path / "fuzz.pt"
    refused = 0
    for _ in range(150):
        damaged = bytearray(good)
        for _ in range(generator.choice((1, 4, 30))):
            damaged[generator.randrange(len(damaged))] ^= generator.randrange(1, 256)
        path.write_bytes(damaged)
        try:
            formats.load(path)
        except (Corruption, InvalidInput, Backend):
            refused += 1
    assert refused > 50


def test_a_good_file_survives_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "best.pt"
    formats.save({"w": torch.ones(4)}, path)
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(Backend, match="No space left") as caught:
        formats.save({"w": torch.zeros(4)}, path)
    assert caught.value.errno == errno.ENOSPC
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["best.pt"]


def test_a_write_that_the_system_cuts_off_leaves_the_good_file(tmp_path: Path) -> None:
    # The limit on file sizes is the one full disk that needs no privileges; torch's writer hides its error.
    path = tmp_path / "best.pt"
    formats.save({"w": torch.ones(4)}, path)
    before = path.read_bytes()
    program = f"""
import resource, torch
from deltastore import formats
from deltastore.errors import Backend
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    formats.save({{"w": torch.rand(1_000_000)}}, {str(path)!r})
except Backend as error:
    print(error.errno)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) == errno.EFBIG
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["best.pt"]


def test_the_place_of_the_file(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        formats.save({"w": 1}, tmp_path / "real.pt")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "real.pt").stat().st_mode) == 0o640
    (tmp_path / "link.pt").symlink_to("real.pt")
    formats.save({"w": 2}, tmp_path / "link.pt")
    assert (tmp_path / "link.pt").is_symlink()
    assert formats.load(tmp_path / "real.pt") == {"w": 2}
    long = tmp_path / f"{'n' * 252}.pt"
    formats.save({"w": 3}, long)
    assert formats.load(long) == {"w": 3}
    with pytest.raises(NotFound, match="does not exist"):
        formats.save({}, tmp_path / "absent" / "x.pt")
    (tmp_path / "folder.pt").mkdir()
    with pytest.raises(InvalidInput, match="is a folder"):
        formats.save({}, tmp_path / "folder.pt")


def test_a_commit_is_written_tensor_by_tensor(tmp_path: Path) -> None:
    state = training_state()
    state["model"] |= {name: tensor(name, 5, 3) for name in LOGICAL_DTYPES} | {"empty": torch.empty(0, 2)}
    with deltastore.open(tmp_path / "store") as store:
        store.commit(0, {**state, "array": np.arange(4, dtype=np.int16)}).wait()
        formats.save(store.at(0), tmp_path / "x.pt")
    loaded = torch.load(tmp_path / "x.pt", weights_only=True)
    assert_same(loaded, {**state, "array": torch.arange(4, dtype=torch.int16)})
    assert loaded["model"]["tied.weight"].data_ptr() == loaded["model"]["0.weight"].data_ptr()
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        assert archive.testzip() is None
        assert all(entry.CRC for entry in archive.infolist() if entry.file_size > 8)
    damaged = bytearray((tmp_path / "x.pt").read_bytes())
    damaged[damaged.index(bits(state["model"]["0.weight"])) + 5] ^= 1
    (tmp_path / "x.pt").write_bytes(damaged)
    with pytest.raises(Corruption, match="Bad CRC"):
        formats.load(tmp_path / "x.pt")


@pytest.mark.filterwarnings("ignore")
def test_a_quantized_tensor_is_written_as_a_whole(tmp_path: Path) -> None:
    state = {"q": torch.quantize_per_tensor(torch.randn(3), 0.1, 3, torch.qint8), "w": torch.ones(2)}
    with deltastore.open(tmp_path / "store") as store:
        store.commit(0, state).wait()
        formats.save(store.at(0), tmp_path / "x.pt")
    assert_same(torch.load(tmp_path / "x.pt", weights_only=True), state)


@pytest.mark.parametrize("is_zip", [True, False])
@given(state=STATES)
def test_tensors_that_stay_in_the_file_are_those_that_load_gives(
    tmp_path_factory: pytest.TempPathFactory, state: Any, is_zip: bool
) -> None:
    path = tmp_path_factory.mktemp("lazy") / "state.pt"
    torch.save({"s": state}, path, _use_new_zipfile_serialization=is_zip)
    found = torch_lazy.open_lazily(str(path))
    if found is None:  # torch cannot read unsigned integers from the old form
        assert not is_zip
        with pytest.raises(Corruption):
            formats.load(path)
    else:
        assert same(found.state(), formats.load(path))


@pytest.mark.parametrize("is_zip", [True, False])
def test_views_and_ties_are_read_from_their_places(tmp_path: Path, is_zip: bool) -> None:
    base = torch.randn(300, 40)
    state = {"base": base, "t": base.t(), "rows": base[5:9], "every": base[::3, 1], "tied": base, "scalar": base[3, 3]}
    state |= {
        "conj": torch.randn(4, dtype=torch.complex64).conj(),
        "neg": torch.randn(3, dtype=torch.complex64).conj().imag,
    }
    state |= {"expanded": torch.tensor([1.0]).expand(3), "empty": torch.zeros(0, 3)}
    torch.save(state, tmp_path / "v.pt", _use_new_zipfile_serialization=is_zip)
    found = torch_lazy.open_lazily(str(tmp_path / "v.pt"))
    assert found is not None
    assert found.owners[("tied",)] == ("base",)
    for name, wanted in state.items():
        assert torch.equal(found.leaves[(name,)][...], wanted)
        assert not wanted.ndim or torch.equal(found.leaves[(name,)][1:3], wanted[1:3])
    with deltastore.open(tmp_path / "store") as store:
        store.commit_streamed(0, found.state(lazy=True))
        assert_same(store.at(0).to_state_dict(), formats.load(tmp_path / "v.pt"))


def test_what_cannot_stay_in_the_file_is_said_before(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = torch.quantize_per_tensor(torch.randn(100, 100), 0.1, 3, torch.qint8)
    torch.save({"q": quantized}, tmp_path / "q.pt")
    assert formats.held_bytes(tmp_path / "q.pt") == (tmp_path / "q.pt").stat().st_size
    for is_zip in (True, False):
        torch.save({"w": torch.randn(100, 100)}, tmp_path / "w.pt", _use_new_zipfile_serialization=is_zip)
        assert formats.held_bytes(tmp_path / "w.pt") == 0
    with deltastore.open(tmp_path / "store") as store, pytest.raises(InvalidInput, match=r"takes about .* allow more"):
        import_series(store, [Checkpoint(str(tmp_path / "q.pt"), 0)], memory_bytes=1000)


def test_a_pickle_that_claims_more_than_its_file_has_is_damaged(tmp_path: Path) -> None:
    for is_zip in (True, False):
        torch.save({"w": torch.arange(1000.0)}, tmp_path / "w.pt", _use_new_zipfile_serialization=is_zip)
        content = (tmp_path / "w.pt").read_bytes()
        if is_zip:
            with zipfile.ZipFile(tmp_path / "w.pt") as archive, zipfile.ZipFile(tmp_path / "more.pt", "w") as more:
                for entry in archive.infolist():
                    more.writestr(entry.filename, archive.read(entry).replace(b"M\xe8\x03", b"M\xff\xff"))
        else:
            (tmp_path / "more.pt").write_bytes(content.replace(b"M\xe8\x03", b"M\xff\xff"))
        assert torch_lazy.open_lazily(str(tmp_path / "more.pt")) is None
        with pytest.raises(Corruption, match="damaged"):
            formats.open_contents(tmp_path / "more.pt")


class Pair(NamedTuple):
    first: Any
    second: Any


def odd_state() -> dict[str, Any]:
    """Return what a training may hold and weights_only does not load."""
    return {
        "queue": collections.deque([1, torch.ones(2), collections.deque(maxlen=2)], maxlen=5),
        "pair": Pair(torch.zeros(3), [Pair(1, "x")]),
        "sets": [frozenset({1, 2}), {frozenset({3}), 4}, {"a"}],
        "default": collections.defaultdict(list, {"k": [torch.full((2,), 7.0)]}),
        "range": range(3, 9, 2),
        "slice": slice(None, 4),
        "empty": [b"", bytearray(), b"x"],
        "big": [2**3000, -(2**3000), 2**2038, 2**2040],
        "numpy": {"array": np.arange(4, dtype=np.int16), "scalar": np.float32(0.1), "after": torch.ones(1)},
        "counter": collections.Counter("aab"),
    }


def test_what_weights_only_does_not_load_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "odd.pt"
    state = odd_state()
    losses = formats.losses(state, path)
    assert {loss.kind for loss in losses} == {"type"}
    assert all(loss.is_restored for loss in losses)
    named = {loss.path[0] for loss in losses}
    assert named == set(state) - {"counter"}
    formats.save(state, path)
    assert_same(formats.load(path), state)
    assert_same(formats.open_contents(path).state(), state)
    plain = torch.load(path, weights_only=True)
    assert type(plain["queue"]) is list
    assert torch.equal(plain["pair"][0], torch.zeros(3))
    assert plain["pair"][1] == [(1, "x")]
    assert plain["counter"] == state["counter"]
    with pytest.raises(InvalidInput, match="of kind type"):
        formats.save(state, path, strict=True)


def test_from_a_store_too_and_parameters_keep_their_names(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(1, 2)).sum().backward()
    optimizer.step()
    store = deltastore.open(tmp_path / "store")
    with store, Checkpointer(store, model=model, optimizer=optimizer) as training:
        training.extra["window"] = [1, 2]
        training.step(0)
        training.flush()
        state = store.at(0)
        formats.save({**state.to_lazy_state(), "odd": odd_state()}, tmp_path / "x.pt")
        formats.save(formats.open_contents(tmp_path / "x.pt"), tmp_path / "y.pt")
        for name in ("x.pt", "y.pt"):
            found = formats.load(tmp_path / name)
            assert_same(found["odd"], odd_state())
            assert_same(found["optimizer"], state.to_state_dict()["optimizer"])
            names = formats.open_contents(tmp_path / name).state(optimizer_names=True)["optimizer"]["state"]
            assert list(names) == ["weight", "bias"]


def test_a_record_that_does_not_fit_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "odd.pt"
    formats.save(odd_state(), path)
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(tmp_path / "cut.pt", "w") as cut:
        for entry in archive.infolist():
            cut.writestr(entry.filename, archive.read(entry).replace(b'"names":["0",', b'"names":['))
    with pytest.raises(Corruption, match="record in it does not name"):
        formats.load(tmp_path / "cut.pt")
