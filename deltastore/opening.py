"""`deltastore.open`: options checked, tier chosen, nothing written."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from deltastore.config import Retention, WriterOptions, parse_retention
from deltastore.errors import InvalidInput
from deltastore.ondisk.names import is_write_id
from deltastore.store import Store
from deltastore.urls import open_tier


def open(
    url: str | os.PathLike[str],
    mode: str = "a",
    tiers: Sequence[str] = (),
    *,
    retention: Mapping[str, Any] | Retention | None = None,
    pickle: str | None = None,
    session: str | None = None,
    max_local_bytes: int | None = None,
    max_lag_steps: int | None = None,
    max_lag_seconds: float | None = None,
    on_limit: str = "wait",
    codec: str = "auto",
    max_pending: int = 2,
    storage_options: Mapping[str, Any] | None = None,
) -> Store:
    """Open a store; nothing is written before the first commit.

    Parameters
    ----------
    url : str or path
        A folder, ``file://...``, ``memory://name`` or ``hdfs://[user@]namenode:9870[,namenode2:9870]/folder``: the
        ports are those where the NameNodes answer HTTP (HTTPS: ``swebhdfs://``). Or a URL of fsspec, ``s3://...``.
    mode : {"a", "r"}
        "a" reads and writes; a missing store is made by the first commit. "r" writes nothing, and a missing store is
        NotFound. Any number of readers may open a store that is being written.
    tiers : sequence of str
        Further places to flush to; not part of this version. :func:`deltastore.push` gives commits to another place.
    retention : dict, optional
        ``{"keep_last": n, "keep_every": k}``: after each commit, delete what no kept commit needs.
    pickle : {"trust"}, optional
        Store objects that the format cannot hold as pickles, and load such pickles. Loading a pickle runs the code
        that it names: trust whoever wrote the store.
    session : str, optional
        Id of this writer session, 16 hexadecimal digits; random by default.
    max_local_bytes, max_lag_steps : optional
        Limits of a tiered store; not part of this version.
    max_lag_seconds : float, optional
        How long a commit that cannot be written is tried again before it fails; 3 by default.
    on_limit : {"wait", "fail"}
        With ``max_lag_seconds`` given: try for ever, or fail when it is over.
    codec : {"auto", "raw", "blosc"}
        How bases are stored.
    max_pending : int
        States in memory beside the reconstruction; `commit` waits while there are as many.
    storage_options : dict, optional
        For fsspec what its file system takes. For HDFS ``requests_session`` (Kerberos, certificates, proxies),
        ``user_name``, ``replication``, ``block_bytes``, ``connect_seconds``, ``read_seconds``, ``patience_seconds``.

    Returns
    -------
    Store

    Raises
    ------
    NotFound
        Mode "r", and there is no store.
    Backend
        Mode "a", and the place cannot be written.
    UnsupportedFormat
        A newer format.
    InvalidInput
        An argument cannot be used.
    """
    if mode not in ("a", "r"):
        raise InvalidInput(f"mode is {mode!r}, expected 'a' (read and write) or 'r' (read only)")
    if tiers or max_local_bytes is not None or max_lag_steps is not None:
        raise InvalidInput(
            "tiers, max_local_bytes and max_lag_steps belong to tiered stores, which are not part of this version;"
            " deltastore.push gives another place the commits of this one"
        )
    if pickle not in (None, "trust"):
        raise InvalidInput(f"pickle is {pickle!r}, expected None or 'trust'")
    if session is not None and not is_write_id(session):
        raise InvalidInput(f"session is {session!r}, expected 16 hexadecimal digits")
    if on_limit not in ("wait", "fail"):
        raise InvalidInput(f"on_limit is {on_limit!r}, expected 'wait' or 'fail'")
    if max_lag_seconds is not None and not (isinstance(max_lag_seconds, int | float) and max_lag_seconds >= 0):
        raise InvalidInput(f"max_lag_seconds is {max_lag_seconds!r}, expected a number of 0 or more")
    options = WriterOptions(
        codec=codec,
        max_pending=max_pending,
        give_up_seconds=3.0 if max_lag_seconds is None else float(max_lag_seconds),
        wait_for_space=max_lag_seconds is not None and on_limit == "wait",
    )
    tier = open_tier(url, storage_options)
    return Store(
        tier,
        writable=mode == "a",
        retention=parse_retention(retention),
        pickle_trusted=pickle == "trust",
        session=session,
        options=options,
    )
