"""Files of torch.save, both ways: ``.pt``, ``.pth``, ``.bin``, ``.ckpt``.

Only what ``torch.load(weights_only=True)`` accepts is loaded, and only that is written. There is no way to full
unpickling: a pickle can run any code. Classes that the caller has named with
``torch.serialization.add_safe_globals`` are accepted, as torch does.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import pickle
import re
import warnings
import zipfile
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO

import torch

from deltastore.errors import Backend, Corruption, DeltaStoreError, InvalidInput, NotFound
from deltastore.formats.contents import Contents, take_apart
from deltastore.formats.loss import Loss
from deltastore.formats.numpy_globals import numpy_allowed
from deltastore.formats.registry import Options
from deltastore.formats.shards import find_index, read_index
from deltastore.formats.tensor_format import needed_bytes
from deltastore.formats.torch_lazy import open_lazily
from deltastore.formats.torch_plain import read_record, restore, simplify
from deltastore.formats.torch_stream import can_stream, stream_file
from deltastore.formats.torch_write import first_line, losses_of, save_file, save_shards
from deltastore.formats.zip_guard import check_expansion
from deltastore.reader import LazyTensor, State

_ZIP = b"PK\x03\x04"
_PIECE_BYTES = 1 << 20
_REFUSED = re.compile(r"GLOBAL (\S+) (?:was not an allowed|whose module)|(\S+) must be imported")


STEM, SUFFIX = "pytorch_model", ".bin"


class TorchFile:
    """The :class:`~deltastore.formats.registry.Converter` of torch files."""

    def load(self, path: str) -> Any:
        """Return what a file holds, or the files of an index together."""
        return _together(path, load_file)

    def open(self, path: str) -> Contents:
        """Return the contents of a file, or of the files of an index; tensors stay there where that is possible."""
        return take_apart(_together(path, lambda place: open_file(place).state(lazy=True, optimizer_names=True)))

    def held_bytes(self, path: str) -> int:
        """Return how many bytes :meth:`open` holds in memory: files whose tensors cannot stay there."""
        index_path = find_index(path, STEM, SUFFIX)
        places = [_single(path)] if index_path is None else list(read_index(index_path).files.values())
        return sum(os.path.getsize(place) for place in places if os.path.isfile(place) and open_lazily(place) is None)

    def losses(self, state: Any) -> tuple[Loss, ...]:
        """Return what a file would not hold of a state."""
        return losses_of(take_apart(state))

    def save(self, state: Any, path: str, options: Options) -> int:
        """Write a file, or a folder with an index where shards are asked for; what is not in memory is streamed."""
        if options.shard_bytes is not None:
            return save_shards(take_apart(state), path, STEM, SUFFIX, options)
        contents = _taken_apart(state)
        simple, losses = (None, ()) if contents is None else simplify(contents)
        record = contents if losses or (contents is not None and contents.bounds) else None
        if isinstance(state, State | Contents) and simple is not None and can_stream(simple):
            return stream_file(simple, path, options, record)
        written = save_file(_standard(state if simple is None or not losses else simple), path, record)
        options.progress(written, written)
        return written

    def needed_bytes(self, state: Any, options: Options) -> int:
        """Return about how much memory writing takes."""
        contents = take_apart(state)
        if options.shard_bytes is not None:
            return needed_bytes(contents) + options.shard_bytes
        return needed_bytes(contents) if can_stream(contents) else contents.nbytes


def _single(path: str) -> str:
    inner = os.path.join(path, f"{STEM}{SUFFIX}")
    return inner if os.path.isdir(path) and os.path.exists(inner) else path


def _together(path: str, read: Callable[[str], Any]) -> Any:
    """Return what is in a file, or in the files of an index."""
    index_path = find_index(path, STEM, SUFFIX)
    if index_path is None:
        return read(_single(path))
    index = read_index(index_path)
    by_file = {name: read(place) for name, place in index.files.items()}
    for name, file in index.names.items():
        if not isinstance(by_file[file], dict) or name not in by_file[file]:
            raise InvalidInput(f"{index_path}: it says that {name!r} is in {file}, which lacks it", path=index_path)
    return {name: by_file[file][name] for name, file in index.names.items()}


def _taken_apart(state: Any) -> Contents | None:
    """Return the contents of a state; None where it holds what no store does, but torch may."""
    try:
        return take_apart(state)
    except InvalidInput:
        if isinstance(state, State | Contents):
            raise
        return None


def _standard(state: Any) -> Any:
    """Return a state as torch knows it, all tensors in memory."""
    if isinstance(state, State):
        return state.to_state_dict()
    if isinstance(state, LazyTensor):
        return state[...]
    return state.state() if isinstance(state, Contents) else state


def load_file(path: str) -> Any:
    """Return what a file of torch.save holds, on the CPU.

    Tensors of the ZIP form stay in the file until they are used (mapped privately: changing one does not change the
    file). Every entry is read once, against the checksum that the file has for it: torch itself would not notice a
    flipped bit.

    Raises
    ------
    NotFound
        There is no such file.
    InvalidInput
        The file holds more than tensors and plain values. Nothing of it was run.
    Corruption
        The file is damaged, or not a torch file.
    """
    state = _load(path, *_look_at(path))
    record = read_record(path)
    return state if record is None else restore(path, record, take_apart(state)).state()


def open_file(path: str) -> Contents:
    """Return the contents of a file; its tensors stay there where that is possible. The rest is as for `load_file`."""
    is_zip, can_map = _look_at(path)
    found = open_lazily(path) or take_apart(_load(path, is_zip, can_map))
    record = read_record(path)
    return found if record is None else restore(path, record, found)


def _look_at(path: str) -> tuple[bool, bool]:
    """Return whether a file has the ZIP form, then checked in full, and whether it can be mapped."""
    try:
        with open(path, "rb") as file:
            is_zip = file.read(len(_ZIP)) == _ZIP
            return is_zip, is_zip and _check_archive(file, path)
    except FileNotFoundError:
        raise NotFound(f"{path}: there is no such file", path=path) from None
    except IsADirectoryError:
        raise InvalidInput(f"{path} is a folder, not a torch file", path=path) from None
    except DeltaStoreError:
        raise
    except OSError as error:
        raise Backend(f"{path}: {error.strerror}", errno=error.errno, path=path) from error


def _load(path: str, is_zip: bool, can_map: bool) -> Any:
    # The warnings of torch.load are about things that become errors below.
    mapped = torch.serialization.set_default_mmap_options(mmap.MAP_PRIVATE)
    with warnings.catch_warnings(), mapped, numpy_allowed():
        warnings.simplefilter("ignore")
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=can_map)
        except pickle.UnpicklingError as error:
            raise _explain(path, str(error), is_zip) from None
        except (MemoryError, OSError) as error:
            number = error.errno if isinstance(error, OSError) else errno.ENOMEM
            raise Backend(f"{path} was not loaded: {error}", errno=number, path=path) from error
        except Exception as error:  # whatever the parser trips over
            raise _damaged(path, f"{type(error).__name__}: {first_line(error)}") from error


def _check_archive(file: BinaryIO, path: str) -> bool:
    """Check the ZIP form of a torch file; return whether it can be mapped."""
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            names = {entry.filename.partition("/")[2] for entry in entries}
            check_expansion(entries, path)
            if "constants.pkl" in names:
                raise InvalidInput(
                    f"{path} is a TorchScript archive, which holds code; if you trust it, use torch.jit.load and save "
                    "the state_dict() of the module",
                    path=path,
                )
            if "data.pkl" not in names:
                raise _damaged(path, "a ZIP file without the entry data.pkl, so torch.save did not write it whole")
            for entry in entries:
                # A torch that was told not to compute checksums writes 0.
                if entry.CRC and not entry.is_dir():
                    with archive.open(entry) as stored:
                        while stored.read(_PIECE_BYTES):
                            pass
            # Mapped, a compressed entry would be taken for the tensor itself.
            return all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
    except DeltaStoreError:
        raise
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError) as error:
        raise _damaged(path, first_line(error)) from error


def _explain(path: str, reason: str, is_zip: bool) -> DeltaStoreError:
    """Return the error for a pickle that was not loaded."""
    found = _REFUSED.search(reason)
    if found is None:
        # The checksums of a ZIP were right: it was written like this.
        last = reason.rpartition("WeightsUnpickler error: ")[2].strip().partition("\n")[0]
        if not is_zip:
            return _damaged(path, last)
        return InvalidInput(
            f"{path}: its pickle does what weights_only does not allow ({last}); save it again with torch.save, as "
            "tensors and plain values",
            path=path,
        )
    refused = [found[1] or found[2]]
    if is_zip:
        # All of them at once; where that fails, the one that is known will do.
        with contextlib.suppress(pickle.UnpicklingError, EOFError, ValueError, RuntimeError):
            refused = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path)) or refused
    names = ", ".join(map(repr, refused))
    return InvalidInput(
        f"{path} asks for code beyond tensors and plain values: {names}. Nothing was run. If you trust its writer, "
        "allow these with torch.serialization.add_safe_globals([...]) before the call, or load the file yourself with "
        "torch.load(weights_only=False) and save its tensors again",
        path=path,
        refused=refused,
    )


def _damaged(path: str, reason: str) -> Corruption:
    return Corruption(f"{path} is damaged or no torch file: {reason}", path=path, where=path)


CONVERTER = TorchFile()
