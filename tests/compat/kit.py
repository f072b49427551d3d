"""What makers and readers of golden data share: a description of any state in JSON. No torch, no hypothesis."""

from __future__ import annotations

import hashlib
import json
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deltastore.document import build
from deltastore.dtypes import storage_dtype
from deltastore.errors import Corruption
from deltastore.history.catalog import Catalog, CatalogEntry, read_catalog
from deltastore.history.chain import Chain, open_chain
from deltastore.history.packs import Packs
from deltastore.history.session import read_format
from deltastore.layout import TensorEntry
from deltastore.sources import PackSource, read_elements
from deltastore.tiers.local import LocalTier

HERE = Path(__file__).resolve().parent
DATA = HERE / "data"
BAD = HERE / "bad_data"


@dataclass(frozen=True)
class Tensor:
    """Stands for a tensor or array: what it is called, and the SHA-256 of its little-endian bytes."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str


@dataclass(frozen=True)
class Foreign:
    """Stands for an object of a framework."""

    tag: str
    value: Any


def describe(value: Any, foreign: Callable[[Any], Any]) -> Any:
    """Return a JSON value that differs for any two different states: types, order, bits of floats.

    Parameters
    ----------
    foreign : callable
        Turns what Python and numpy do not have into :class:`Tensor` or :class:`Foreign`.
    """

    def each(values: Any) -> list[Any]:
        return [describe(item, foreign) for item in values]

    kind = type(value).__name__
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, np.generic):
        return {"npscalar": value.dtype.newbyteorder("<").str, "bits": value.tobytes().hex()}
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return {"float": struct.pack(">d", value).hex()}
    if isinstance(value, complex):
        return {"complex": each([value.real, value.imag])}
    if isinstance(value, bytes | bytearray):
        return {kind: bytes(value).hex()}
    if isinstance(value, range | slice):
        return {kind: each([value.start, value.stop, value.step])}
    if type(value) in (dict, OrderedDict, Counter, defaultdict):
        factory = value.default_factory if isinstance(value, defaultdict) else None
        return {kind: [each(pair) for pair in value.items()], "factory": factory and factory.__name__}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {"namedtuple": kind, "fields": value._fields, "values": each(value)}
    if type(value) in (list, tuple):
        return {kind: each(value)}
    if isinstance(value, deque):
        return {"deque": each(value), "maxlen": value.maxlen}
    if isinstance(value, set | frozenset):
        return {kind: sorted(each(value), key=json.dumps)}
    if isinstance(value, Tensor):
        return {value.kind: value.dtype, "shape": list(value.shape), "sha256": value.sha256}
    if isinstance(value, Foreign):
        return {value.tag: describe(value.value, foreign)}
    return describe(foreign(value), foreign)


def sha256(values: np.ndarray) -> str:
    """Return the digest of elements as they are stored: little endian, row-major."""
    return hashlib.sha256(values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes()).hexdigest()


class NoTorch:
    """Decodes a framework's nodes into stand-ins."""

    def owns(self, _tag: str) -> bool:
        """Take all."""
        return True

    def decode(self, tag: str, node: Mapping[str, Any]) -> Foreign:
        """Return what the node says."""
        return Foreign(tag, node["v"])

    def join(self, _tag: str, meta: Mapping[str, Any], parts: Mapping[Any, Any]) -> Foreign:
        """Return the parts."""
        return Foreign("quantized", [meta["scheme"], meta["dtype"], dict(sorted(parts.items()))])


class Opened:
    """A store, read without torch and without the facade."""

    def __init__(self, root: Path) -> None:
        tier = LocalTier(str(root))
        self.tier = tier
        self.packs = Packs(tier, read_format(tier).store)
        self.catalog: Catalog = read_catalog(self.packs, Catalog())

    def chain(self, entry: CatalogEntry) -> Chain:
        """Return the chain of a commit."""
        return open_chain(self.packs, self.catalog, entry)

    def state(self, entry: CatalogEntry) -> Any:
        """Return the described state of a commit."""
        chain = self.chain(entry)
        source = PackSource(self.packs, chain)
        digests: dict[Any, str] = {}
        for tensor in chain.layout.tensors:
            owner = tensor if tensor.alias is None else chain.layout.tensors[tensor.alias]
            if owner.path not in digests:
                digests[owner.path] = self._digest(source, chain, owner)
            digests[tensor.path] = digests[owner.path]

        def tensor_at(path: Any, kind: str) -> Tensor:
            about = chain.layout.by_path.get(path)
            if about is None:
                raise Corruption(f"{list(path)}: the layout lacks it")
            return Tensor(kind, about.dtype, about.shape, digests[path])

        return describe(build(chain.document, tensor_at, NoTorch()), _nothing_else)

    def _digest(self, source: PackSource, chain: Chain, entry: TensorEntry) -> str:
        values = np.zeros(sum(piece.count for piece in entry.pieces), storage_dtype(entry.dtype))
        read_elements(source, chain.layout, entry, 0, values)
        return sha256(values)

    def close(self) -> None:
        """Close all packs."""
        self.packs.close()


def _nothing_else(value: Any) -> Any:
    raise TypeError(f"{type(value)} in a golden store")
