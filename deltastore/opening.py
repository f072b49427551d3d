"""`deltastore.open`: options checked, tier chosen, nothing written."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from deltastore.config import Retention, TierLimits, WriterOptions, parse_retention
from deltastore.errors import InvalidInput
from deltastore.ondisk.names import is_write_id
from deltastore.remotes import RemotePlace
from deltastore.store import Store
from deltastore.tiers.base import Tier
from deltastore.urls import is_remote, open_tier

TIERS_VARIABLE = "DELTASTORE_TIERS"


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
        Further places, such as ``["hdfs://namenode:9870/ckpt/run"]``: a process of its own pushes every commit there,
        small ones merged. Each is a store that opens by itself. What the local place lacks or has damaged is read from
        there; a restore on a new machine fetches what it needs. By default what the environment variable
        DELTASTORE_TIERS names, separated by spaces.
    retention : dict, optional
        ``{"keep_last": n, "keep_every": k}``: after each commit, delete what no kept commit needs.
    pickle : {"trust"}, optional
        Store objects that the format cannot hold as pickles, and load such pickles. Loading a pickle runs the code
        that it names: trust whoever wrote the store.
    session : str, optional
        Id of this writer session, 16 hexadecimal digits; random by default.
    max_local_bytes : int, optional
        With `tiers`: beyond it, what every one of them has verified is deleted here, but for the newest chain.
    max_lag_steps : int, optional
        With `tiers`: so many commits may be only local.
    max_lag_seconds : float, optional
        How long a commit that cannot be written is tried again before it fails; 3 by default. With `tiers`: how long a
        commit may be only local; it is pushed after half of that.
    on_limit : {"wait", "fail"}
        Beyond a limit the training waits for the tiers, or the commit fails. Without `tiers`, with ``max_lag_seconds``
        given: try for ever, or fail when it is over.
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
    further = _further_tiers(tiers, url)
    if not further and (max_local_bytes is not None or max_lag_steps is not None):
        raise InvalidInput("max_local_bytes and max_lag_steps are limits of a store with tiers; it has none")
    if further and is_remote(url):
        raise InvalidInput(f"{os.fspath(url)}: a store with tiers begins with a local folder; this is a remote place")
    limits = TierLimits(
        max_local_bytes, max_lag_steps, None if max_lag_seconds is None else float(max_lag_seconds), on_limit == "wait"
    )
    tier = open_tier(url, None if further else storage_options)
    return Store(
        tier,
        places=_places(tier, further, storage_options),
        limits=limits,
        writable=mode == "a",
        retention=parse_retention(retention),
        pickle_trusted=pickle == "trust",
        session=session,
        options=options,
    )


def _further_tiers(tiers: Sequence[str], url: str | os.PathLike[str]) -> list[str]:
    """Return the URLs of the further tiers; those of the environment are not for a store that is one of them."""
    if isinstance(tiers, str) or not all(isinstance(tier, str) for tier in tiers):
        raise InvalidInput(f"tiers is {tiers!r}, expected a list of URLs")
    if tiers:
        return list(tiers)
    named = os.environ.get(TIERS_VARIABLE, "").split()
    return [] if is_remote(url) or os.fspath(url) in named else named


def _places(here: Tier, urls: Sequence[str], storage_options: Mapping[str, Any] | None) -> list[RemotePlace]:
    places: list[RemotePlace] = []
    for number, url in enumerate(urls):
        options = storage_options if is_remote(url) else None
        tier = open_tier(url, options)
        if tier.url in (here.url, *(place.tier.url for place in places)):
            raise InvalidInput(f"{tier.url}: the same place stands twice in the tiers of a store")
        places.append(RemotePlace(f"remote:{number}" if number else "remote", tier, options))
    return places
