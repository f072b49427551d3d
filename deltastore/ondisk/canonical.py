"""Canonical JSON, its digest, sealed files and compressed blobs (spec 2.3, 6.1). The door to zstandard and msgspec."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any, TypeVar

import msgspec
import zstandard

from deltastore.errors import Corruption, InvalidInput
from deltastore.types import Json

SEAL = "sha256"

_UNSURE = object()

T = TypeVar("T")


def encode_canonical(value: Json) -> bytes:
    """Return the one byte string that stands for a JSON value.

    Keys sorted, no spaces, ASCII only, no NaN or infinity.
    """
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(f"not a JSON value: {error}") from error
    return text.encode("ascii")


def parse_json(data: bytes, where: str) -> Json:
    """Return the JSON value of untrusted bytes.

    Raises
    ------
    Corruption
        The bytes are not ASCII JSON, repeat a key, or nest too deep.
    """
    value = _parse_quickly(data)
    if value is not _UNSURE:
        return value
    try:
        return json.loads(
            data.decode("ascii"), object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite
        )
    except (ValueError, RecursionError) as error:
        raise Corruption(f"{where}: not valid JSON ({error})", where=where) from error


def _parse_quickly(data: bytes) -> Json:
    """Return the value of most canonical JSON; `_UNSURE`, never an error, for everything else.

    What gives the same bytes again repeats no key and is no infinity: the dict of an object has each key once. Not so
    for numbers with exponents and for escaped characters, which msgspec writes in its own way.
    """
    try:
        value: Json = msgspec.json.decode(data)
        return value if data.isascii() and msgspec.json.encode(value) == data else _UNSURE
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return _UNSURE


def convert(value: Json, kind: type[T], where: str) -> T:
    """Return a JSON value as the type that the spec gives it: no integer is a bool, no list has another length.

    Raises
    ------
    Corruption
        The value has another type.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise Corruption(f"{where}: {error}", where=where) from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return result


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:40]} is too large for a float")
    return value


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not allowed")


def digest_of(data: bytes) -> str:
    """Return the SHA-256 of bytes in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def seal(fields: dict[str, Json]) -> bytes:
    """Return a sealed file: canonical JSON that carries its own SHA-256."""
    return encode_canonical({**fields, SEAL: digest_of(encode_canonical(fields))})


def parse_sealed(data: bytes, where: str, limit: int) -> dict[str, Json]:
    """Return the members of a sealed file without the seal.

    Raises
    ------
    Corruption
        Too long, not JSON, not an object, or the seal does not fit.
    """
    if len(data) > limit:
        raise Corruption(f"{where}: {len(data)} bytes, at most {limit} are allowed", where=where)
    value = _parse_quickly(data)
    is_plain = value is not _UNSURE
    if not is_plain:
        value = parse_json(data, where)
    if not isinstance(value, dict) or not isinstance(value.get(SEAL), str):
        raise Corruption(f"{where}: not a sealed file (no member {SEAL!r})", where=where)
    expected = value.pop(SEAL)
    try:
        # What msgspec gave back byte for byte is written by it as canonically, ten times as fast.
        found = digest_of(msgspec.json.encode(value, order="sorted") if is_plain else encode_canonical(value))
    except InvalidInput as error:
        raise Corruption(f"{where}: nested too deep for a sealed file", where=where) from error
    if found != expected:
        raise Corruption(
            f"{where}: SHA-256 is {found[:12]}..., the seal says {expected[:12]}...",
            where=where,
            expected=expected,
            found=found,
        )
    return value


def compress(data: bytes) -> bytes:
    """Return one zstd frame that names its content size."""
    return zstandard.ZstdCompressor(level=3, write_content_size=True).compress(data)


def decompress(data: bytes, limit: int, where: str) -> bytes:
    """Return the content of one zstd frame of at most `limit` bytes.

    Raises
    ------
    Corruption
        Not one whole frame, or larger than allowed; nothing large is allocated before that is known.
    """
    try:
        size = zstandard.frame_content_size(data)
        if not 0 <= size <= limit:
            raise Corruption(f"{where}: holds {size} bytes, at most {limit} are allowed", where=where)
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=max(size, 1), allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise Corruption(f"{where}: not a zstd frame ({error})", where=where) from error
