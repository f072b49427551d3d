"""Which tier a URL names."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from deltastore.errors import InvalidInput
from deltastore.tiers.base import Tier
from deltastore.tiers.fsspec_tier import FsspecTier
from deltastore.tiers.hdfs import HdfsTier
from deltastore.tiers.hdfs_connection import HdfsOptions
from deltastore.tiers.local import LocalTier
from deltastore.tiers.memory import MemoryTier

_HDFS_PORTS = {"hdfs": 9870, "swebhdfs": 9871}
"""Where a NameNode answers HTTP and HTTPS, unless it is set otherwise."""
_HOST = re.compile(r"[A-Za-z0-9._-]+(:[0-9]{1,5})?")


def open_tier(url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> Tier:
    """Return the tier that a folder or URL names.

    Parameters
    ----------
    storage_options : mapping, optional
        For ``hdfs://`` the fields of :class:`HdfsOptions`, such as ``requests_session``; for all but that, folders,
        ``file://`` and ``memory://``, what fsspec's file system takes.

    Raises
    ------
    InvalidInput
        A scheme that neither we nor fsspec know.
    MissingDependency
        The package that such a place needs is not installed.
    """
    if not isinstance(url, str | os.PathLike):
        raise InvalidInput(f"{url!r} is no URL: give a folder, or memory://name", url=repr(url))
    text = os.fspath(url)
    if not text:
        raise InvalidInput("an empty URL: give a folder, or memory://name", url=text)
    options = dict(storage_options or {})
    parts = urlsplit(text) if "://" in text else SplitResult("", "", "", "", "")
    if parts.query or parts.fragment:
        raise InvalidInput(f"{text}: write ? and # in a URL as %3F and %23", url=text)
    if parts.scheme in _HDFS_PORTS:
        return _open_hdfs(text, parts, options)
    if is_remote(text):
        return FsspecTier(text, options)
    if options:
        raise InvalidInput(f"{text}: storage_options are for remote places; this one takes none", url=text)
    if "://" not in text:
        return LocalTier(Path(text).expanduser().absolute())
    if parts.scheme == "memory":
        return MemoryTier((parts.netloc + parts.path) or "default")
    if parts.scheme == "file" and parts.netloc not in ("", "localhost"):
        raise InvalidInput(
            f"{text}: {parts.netloc!r} would be a host; a file URL has three slashes: file:///folder", url=text
        )
    return LocalTier(Path(unquote(parts.path)))


def is_remote(url: str | os.PathLike[str]) -> bool:
    """Tell whether a URL names a place that storage_options are for."""
    scheme, separator, _ = os.fspath(url).partition("://")
    return bool(separator) and scheme.lower() not in ("memory", "file")


def _open_hdfs(url: str, parts: SplitResult, options: dict[str, Any]) -> HdfsTier:
    """Return the tier of ``hdfs://[user@]namenode[:port][,namenode[:port]...]/folder``."""
    user, _, netloc = parts.netloc.rpartition("@")
    hosts = netloc.split(",")
    if not all(map(_HOST.fullmatch, hosts)):
        raise InvalidInput(f"{url}: expected hdfs://namenode:port/folder, of several NameNodes a,b", url=url)
    port = _HDFS_PORTS[parts.scheme]
    known = {field.name for field in fields(HdfsOptions)}
    if not set(options) <= known:
        unknown = sorted(set(options) - known)
        raise InvalidInput(f"{url}: unknown storage_options {unknown}; known are {sorted(known)}", url=url)
    if user:
        options.setdefault("user_name", unquote(user))
    return HdfsTier(
        [host if ":" in host else f"{host}:{port}" for host in hosts],
        unquote(parts.path),
        "https" if parts.scheme == "swebhdfs" else "http",
        HdfsOptions(**options),
    )
