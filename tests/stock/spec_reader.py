"""Read one step of a deltastore: `reader.py ROOT STEP`. Numbers in comments are sections of its specification."""
import hashlib
import json
import struct
from pathlib import Path

import numpy as np
import zstandard
from crc32c import crc32c
from numcodecs import Blosc

ARRAYS = {"full": ["data"], "overlay": ["indptr", "gaps", "values"], "xor": ["xor"]}  # 4.1
STORAGE = {"bool": "uint8", "bfloat16": "uint16", "complex32": "uint32", "float4_e2m1fn_x2": "uint8"}  # 5.1
STORAGE |= {f"float8_{n}": "uint8" for n in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e8m0fnu")}
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
PLAIN = dict.fromkeys(("dict", "odict", "optimizer"), lambda n: dict(zip(n["k"], n["v"], strict=True))) | {  # 8.2
    "tuple": lambda n: tuple(n["v"]), "int": lambda n: int(n["v"], 16), "complex": lambda n: complex(*n["v"]),
    "float": lambda n: struct.unpack(">d", bytes.fromhex(n["bits"]))[0], "bytes": lambda n: unbase64(n["b"]),
    "ints": lambda n: {"list": list, "tuple": tuple}[n["of"]](
        i for p in n["parts"] for i in np.frombuffer(unbase64(p["b"]), "<" + p["d"], p["n"]).tolist())}
def unbase64(text: str) -> bytes:
    bits = "".join(f"{LETTERS.index(c):06b}" for c in text.rstrip("="))
    return bytes(int(bits[i : i + 8], 2) for i in range(0, len(bits) // 8 * 8, 8))
def need(ok: object, text: str) -> None:
    if not ok:
        raise ValueError(text)
def blob(extent: list[int], data: np.ndarray, limit: int, digest: str | None = None) -> dict:  # 6.1
    frame = data[extent[0] : extent[0] + extent[1]]
    need(extent[2] in (None, crc32c(frame)) and 0 < zstandard.frame_content_size(frame) <= limit, "CRC-32C or size")
    text = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    need(digest in (None, hashlib.sha256(text).hexdigest()), "digest")
    return json.loads(text)
def open_pack(path: Path) -> dict:  # 3.7: the index, with the bytes of the file
    data = np.memmap(path, np.uint8, "r")
    magic, tail, start, length, tail_crc, size, crc = struct.unpack("<8sQQIIQI", data[-44:])
    need(magic == b"DSPACK01" and crc32c(data[-44:-4]) == crc and size == len(data), "trailer")
    need(tail <= start <= size - 44 - length and crc32c(data[tail:-44]) == tail_crc, "tail")
    index = blob([start, length, None], data, 1 << 30)
    need(index["format"][0] == 1 and index["write"] == path.stem[-16:], "major version or write id")
    return index | {"data": data, "name": path.name}
def array(entry: dict, data: np.ndarray) -> np.ndarray:  # 4.3
    chunk, out, raw = entry["chunk"] * np.dtype(entry["dtype"]).itemsize, bytearray(), entry["codec"] == "raw"
    need(len(entry["chunks"]) == -(-entry["length"] // entry["chunk"]) and chunk <= 64 << 20, "chunks")
    for i, (offset, size, crc) in enumerate(entry["chunks"]):
        body, end = np.split(data[offset : offset + size], [size - 4])
        need(crc32c(body) == crc == int.from_bytes(end, "little") and len(end) == 4, f"c/{i}: CRC-32C or length")
        need(raw or struct.unpack_from("<4xI4xI", body) == (chunk, len(body)), f"c/{i}: blosc header")
        out += body.tobytes() if raw else Blosc().decode(body)
        need(len(out) == chunk * (i + 1), f"c/{i}: length")
    return np.frombuffer(out, entry["dtype"])[: entry["length"]]
def fetch(packs: list[dict], kind: str, entry: str, read: object, *args: object) -> object:  # 13.4: any good copy
    errors = []
    for pack in (p for p in packs if entry in p[kind]):
        try:
            return read(pack[kind][entry], pack["data"], *args)
        except Exception as error:
            errors.append(f"{pack['name']}: {entry}: {error!r}")
    raise ValueError("; ".join(errors) or f"{entry}: no pack has it")
def apply(out: np.ndarray, first: np.ndarray, *more: np.ndarray) -> np.ndarray:  # 9.2 to 9.4
    if not more:  # xor
        word = np.dtype(f"uint{8 * min(8, out.itemsize)}")
        need(first.dtype == word and first.nbytes == out.nbytes, "dtype or length of xor")
        return (out.view(word) ^ first).view(out.dtype)
    (gaps, values), ends = more, first.astype(np.int64)
    need([first.dtype, gaps.dtype, values.dtype] == ["uint32", "uint16", out.dtype], "dtypes of the overlay")
    counts, total = np.diff(ends), np.cumsum(gaps, dtype=np.int64)
    need(ends[0] == 0 <= counts.min() and ends[-1] == len(gaps) == len(values), "indptr of the overlay")
    start, filled = ends[:-1][counts > 0], counts[counts > 0]
    place = total - np.repeat(total[start] - gaps[start], filled)
    need(len(counts) == -(-len(out) // 65536) and np.delete(gaps, start).all() and place.max() < 65536, "gaps")
    out[place + 65536 * np.repeat(np.arange(len(counts)), counts)] = values
    return out
def patch(box: list, operations: list) -> list:  # 8.6
    for kind, pointer, value in operations:
        place, name = box, 0
        for step in pointer:
            place, name = place[name], step
        old = place[name]
        place[name] = {"set": lambda: value, "extend": lambda: old + value, "cut": lambda: old[:value]}[kind]()
    return box
def read_step(root: str, step: int) -> tuple[dict[tuple, np.ndarray], object]:
    """The tensors (by path, storage dtypes) and the document of the newest commit of a step."""
    packs, records, damaged = [], {}, []
    for path in sorted(Path(root, "packs").glob(f"e*-*-*-{'[0-9a-f]' * 16}.zip")):
        try:
            pack, own = open_pack(path), {}
            for i, digest in ((c["id"], c["digest"]) for c in pack["commits"]):
                own[i] = fetch([pack], "blobs", f"deltastore/records/{i}.json.zst", blob, 1 << 28, digest)
                own[i]["digest"] = digest
            need(all(r["id"] == i and records.get(i, r) == r for i, r in own.items()), "commit id or second digest")
            need(pack["store"] == (packs or [pack])[0]["store"], "store id")
            packs, records = [*packs, pack], records | own
        except Exception as error:
            damaged.append(([int(n) for n in path.name[1:].split("-")[:3]], f"{path.name}: {error!r}"))
    found = max((r for r in records.values() if r["step"] == step), default={"epoch": -1},
                key=lambda r: (r["epoch"], r["sequence"], r["id"]))
    for (epoch, low, high), error in damaged:  # 11.3
        need(not low <= step <= high or epoch < found["epoch"], error)
    need("id" in found, f"{root}: no commit of step {step}")
    chain = [found]
    while chain[0]["kind"] == "delta":  # 9.1
        ref = chain[0]["parents"][0]
        chain.insert(0, records.get(ref["id"], {}))
        same = all(chain[0].get(k) == ref[k] for k in ("id", "digest", "epoch", "sequence", "step"))
        same = same and [ref["epoch"], ref["sequence"]] < [chain[1]["epoch"], chain[1]["sequence"]]
        need(same, f"commit {chain[1]['id']}: parent {ref['id']} is missing or differs {damaged}")
    before, layers, box, data, tensors = {}, {}, [], {}, {}
    for record in chain:
        where, needs, values = f"commit {record['id']}", set(record["requires"]), record["values"]
        need(needs <= {*ARRAYS, "hold"}, f"{where} needs {sorted(needs)}")
        name = f"deltastore/layouts/{record['layout']}.json.zst"
        layout = fetch(packs, "blobs", name, blob, 1 << 28, record["layout"])
        now = {p["id"]: (STORAGE.get(p["dtype"], p["dtype"]), p["length"]) for p in layout["partitions"]}
        new = {layer["partition"]: layer["kind"] for layer in record["layers"]}
        need({*new.values()} <= needs and all(new.get(n) == "full" or before.get(n) == now[n] for n in now), where)
        for n, kind in new.items():
            layers[n] = [*(layers[n] if kind != "full" else ()), (f"{record['id']}/p{n}.", kind)]
        before, box = now, [values["full"]] if "full" in values else patch(box, values["patch"])
    check = found["check"] or {"phase": None, "crc32c": []}
    for n in now:  # 9.6
        for prefix, kind in layers[n]:
            parts = [fetch(packs, "arrays", prefix + name, array) for name in ARRAYS[kind]]
            data[n] = parts[0] if kind == "full" else apply(data[n], *parts)
            need((data[n].dtype.name, len(data[n])) == now[n], f"{where}: dtype or length of partition {n}")
        blocks = np.split(data[n], range(65536, len(data[n]), 65536))
        k, crc = min(16, len(blocks)), dict(check["crc32c"]).get(n)
        got = crc32c(b"".join(blocks if check["phase"] is None else blocks[check["phase"] % k :: k]))
        need(crc == got or crc is None and found["kind"] == "base", f"{where}: check of partition {n}")
    for t in layout["tensors"]:  # 7.1; an alias names an earlier entry
        pieces = [data[n][start : start + count] for n, start, count in t.get("pieces", ())]
        whole = np.concatenate([np.empty(0, STORAGE.get(t["dtype"], t["dtype"])), *pieces])
        tensors[tuple(t["path"])] = list(tensors.values())[t["alias"]] if "alias" in t else whole.reshape(t["shape"])
    return tensors, json.loads(json.dumps(box[0]), object_hook=lambda n: PLAIN.get(n.get("$"), dict)(n))
if __name__ == "__main__":
    import sys
    result, document = read_step(sys.argv[1], int(sys.argv[2]))
    shown = {"/".join(map(str, p)): [a.dtype.name, a.shape, hashlib.sha256(a).hexdigest()] for p, a in result.items()}
    print(json.dumps(shown), json.dumps(document, default=repr), sep="\n")
