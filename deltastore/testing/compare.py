"""Comparison of nested states: bit for bit, type for type, in order."""

from __future__ import annotations

import json
import struct
from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from deltastore.dtypes import storage_dtype
from deltastore.torch_bridge import TORCH
from deltastore.tree import flatten
from deltastore.types import Path, show_path


def assert_same(a: Any, b: Any, path: Path = ()) -> None:
    """Assert that two nested states are the same.

    Tensors by dtype, shape and bits (a Parameter counts as the plain tensor that is stored of it; device, strides and
    requires_grad do not count), floats by their bits, everything else by exact type and value, dicts with the order of
    their keys.

    Raises
    ------
    AssertionError
        Names the path of the first difference.
    """
    where = show_path(path)
    if isinstance(a, torch.Tensor | np.ndarray):
        _assert_same_tensor(a, b, where)
        return
    assert _type_of(a) == _type_of(b), f"{where}: {_type_of(a)} became {_type_of(b)}"
    if isinstance(a, Mapping):
        assert [(type(key), key) for key in a] == [(type(key), key) for key in b], (
            f"{where}: {list(a)} became {list(b)}"
        )
        for key in a:
            assert_same(a[key], b[key], (*path, key))
        if isinstance(a, defaultdict):
            assert a.default_factory is b.default_factory, f"{where}: {a.default_factory} became {b.default_factory}"
    elif isinstance(a, list | tuple | deque):
        assert len(a) == len(b), f"{where}: {len(a)} elements became {len(b)}"
        for index, (left, right) in enumerate(zip(a, b, strict=True)):
            assert_same(left, right, (*path, index))
        if isinstance(a, deque):
            assert a.maxlen == b.maxlen, f"{where}: maxlen {a.maxlen} became {b.maxlen}"
    else:
        assert _bits(a) == _bits(b), f"{where}: {a!r} became {b!r}"


def _assert_same_tensor(a: Any, b: Any, where: str) -> None:
    kind = torch.Tensor if isinstance(a, torch.Tensor) else np.ndarray
    assert isinstance(b, kind), f"{where}: {kind.__name__} became {type(b).__name__}"
    assert (a.dtype, tuple(a.shape)) == (b.dtype, tuple(b.shape)), (
        f"{where}: {a.dtype} {tuple(a.shape)} became {b.dtype} {tuple(b.shape)}"
    )
    if isinstance(a, torch.Tensor) and a.is_quantized:
        # Taken apart as they are stored: integers, scales and zero points.
        assert isinstance(b, torch.Tensor)
        assert b.is_quantized, f"{where}: no longer quantized"
        left, right = flatten(a, TORCH), flatten(b, TORCH)
        assert left.document == right.document, f"{where}: {left.document} became {right.document}"
        for (_, one), (_, other) in zip(left.tensors, right.tensors, strict=True):
            _assert_same_tensor(one, other, where)
        return
    one, other = _content(a), _content(b)
    if one.tobytes() != other.tobytes():
        width = one.itemsize
        differing = (one.view(np.uint8).reshape(-1, width) != other.view(np.uint8).reshape(-1, width)).any(axis=1)
        first = int(differing.argmax())
        raise AssertionError(
            f"{where}: {int(differing.sum())} of {len(one)} elements differ, the first is {first}: "
            f"{one[first].tobytes().hex()} became {other[first].tobytes().hex()}"
        )


def _content(value: Any) -> np.ndarray:
    about = TORCH.describe(value)
    size = int(np.prod(about.shape, dtype=np.int64))
    content = np.empty(size, storage_dtype(about.dtype))
    TORCH.copy_into(value, content, 0, size)
    return content


def _type_of(value: Any) -> Any:
    # A namedtuple whose class cannot be found again comes back as an equal class of the same name.
    fields = getattr(type(value), "_fields", None)
    return type(value) if fields is None else (type(value).__module__, type(value).__name__, fields)


def _bits(value: Any) -> Any:
    if isinstance(value, float) and type(value) is float:
        return struct.pack("<d", value)
    if isinstance(value, complex | np.generic | set | frozenset):
        return json.dumps(flatten(value, TORCH).document, sort_keys=True)
    return value
