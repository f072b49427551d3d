"""Read every array of a pack with TensorStore's drivers `zip` and `zarr3`; run as a program, as read_zarr.py is."""

from __future__ import annotations

import hashlib
import json
import sys
import zipfile
from typing import Any

import tensorstore


def read(pack: str) -> dict[str, Any]:
    """Return path -> [dtype, length, SHA-256 of the little-endian bytes, attributes]."""
    suffix = "/zarr.json"
    with zipfile.ZipFile(pack) as archive:
        nodes = {name: json.loads(archive.read(name)) for name in archive.namelist() if name.endswith(suffix)}
    context = tensorstore.Context({"cache_pool": {"total_bytes_limit": 100_000_000}})
    found: dict[str, Any] = {}
    for name, node in nodes.items():
        if node["node_type"] != "array":
            continue
        path = name.removesuffix(suffix)
        kvstore = {"driver": "zip", "base": {"driver": "file", "path": pack}, "path": f"{path}/"}
        spec = {"driver": "zarr3", "kvstore": kvstore}
        values = tensorstore.open(spec, open=True, read=True, context=context).result().read().result()
        data = values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes()
        about = node["attributes"]["deltastore"]
        found[path] = [values.dtype.name, len(values), hashlib.sha256(data).hexdigest(), about]
    return found


if __name__ == "__main__":
    result = [read(pack) for pack in sys.argv[1:]]
    if any(name.partition(".")[0] in ("deltastore", "torch", "zarr") for name in sys.modules):
        raise SystemExit("this was meant to run without deltastore, torch and zarr")
    print(json.dumps(result))
