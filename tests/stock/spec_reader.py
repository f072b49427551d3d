"""Read one step of a deltastore: `reader.py ROOT STEP`. Numbers in comments are sections of its specification."""
import hashlib
import json
import math
import struct
from itertools import pairwise
from pathlib import Path

import numpy as np
import zstandard
from crc32c import crc32c
from numcodecs import Blosc

ARRAYS = {"full": ["data"], "overlay": ["indptr", "gaps", "values"], "xor": ["xor"]}  # 4.1
STORAGE = {"bool": "uint8", "bfloat16": "uint16", "complex32": "uint32", "float4_e2m1fn_x2": "uint8"}  # 5.1
STORAGE |= {f"float8_{n}": "uint8" for n in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e8m0fnu")}
KINDS = {"adam": (3, 8, 3), "sgd": (2, 4, 2)}  # 6.7: partitions; constants that all steps share, those of each step
CODES = {"bit": (8, [-1, 1]), "ternary": (5, [0, 1, -1]), "pair": (4, [-3, 3, -10, 10])}  # 9.10
PARTS = ["codes", "scales", "signs", "factors"]  # 6.7
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
P = """000000 0164D2 02CD87 043A29 05AAC3 071F62 08980F 0A14D5 0B95C2 0D1ADF 0EA43A 1031DC 11C3D3 135A2B 14F4F0 16942D
1837F0 19E046 1B8D3A 1D3EDA 1EF532 20B051 227043 243516 25FED7 27CD94 29A15B 2B7A3A 2D583F 2F3B79 3123F6 3311C4
3504F3 36FD92 38FBAF 3AFF5B 3D08A4 3F179A 412C4D 4346CD 45672A 478D75 49B9BE 4BEC15 4E248C 506334 52A81E 54F35B
5744FD 599D16 5BFBB8 5E60F5 60CCDF 633F89 65B907 68396A 6AC0C7 6D4F30 6FE4BA 728177 75257D 77D0DF 7A83B3 7D3E0C"""
P = np.array([0x3F800000 + int(digits, 16) for digits in P.split()], np.uint32).view(np.float32)
def power(n: np.ndarray) -> np.ndarray:  # 9.10: 2 ** (n / 64) as binary32
    return np.ldexp(P[n % 64], n // 64)
def integers(data: np.ndarray, code: str, count: int) -> np.ndarray:  # 9.10
    size, values = CODES[code]
    base, length = len(values), 64 * -(-count // (64 * size))
    need(data.dtype == np.uint8 and len(data) == length and data.max() < base**size, "dtype, length or bytes of codes")
    digits = data.reshape(-1, 1, 64) // base ** np.arange(size)[:, None] % base
    return np.array(values, np.float32)[digits.ravel()[:count]]
def blocks(layout: dict, n: int) -> list:  # 9.10: of each block its first element, its end, the tensor's first element
    out = []
    for t in layout["tensors"]:
        row, at, pieces = math.prod(t["shape"][1:]), 0, t.get("pieces", ())
        first, k = min((start for part, start, _ in pieces if part == n), default=None), -(-row // 256)
        for part, start, count in pieces:
            if part == n:
                rows = range(at // row, -(-(at + count) // row))
                cuts = {max(r * row + j * row // k - at, 0) for r in rows for j in range(k)}
                cuts = range(0, count, 256) if row < 64 else sorted(cut for cut in cuts if cut < count)
                out += [(start + a, start + b, first) for a, b in pairwise([*cuts, count])]
            at += count
    return sorted(out)
def larger(x: np.ndarray, y: np.ndarray) -> np.ndarray:  # 9.9
    return np.where(x > y, x, y)
def one_nan(x: np.ndarray) -> np.ndarray:  # 9.9
    return np.where(np.isnan(x), np.uint32(0x7FC00000).view(np.float32), x)
def adam(q: np.ndarray, s: np.ndarray, shared: np.ndarray, steps: np.ndarray, *parts: np.ndarray) -> tuple:  # 9.9
    (w, m, v), (b1, a1, b2, a2, z, c, eps, unit), zero = parts, shared, np.float32(0)
    lanes = np.zeros((len(v), 16), np.float32)  # a row is a block
    for at in range(0, v.shape[1], 16):
        lanes[:, : v.shape[1] - at] += v[:, at : at + 16]
    for half in (8, 4, 2, 1):
        lanes[:, :half] += lanes[:, half : 2 * half]
    mean = lanes[:, :1] / np.float32(v.shape[1])
    r = np.where(mean != 0, larger(np.sqrt(v), np.float32(0.05) * np.sqrt(mean)), unit)
    g = np.where(s == 0, zero, (q * s) * r)
    e = np.where((s == 0) | (q != 0), zero, (z * (s * r)) * (s * r))
    for keep, rate, fix in steps:
        m = b1 * m + a1 * g
        v = b2 * v + ((a2 * g) * g + e)
        d = larger(np.sqrt(v), c * np.abs(m)) * fix + eps
        w = w * keep - (rate * m) / d
        w, m, v = one_nan(w), one_nan(m), one_nan(v)
    return w, m, v
def sgd(q: np.ndarray, s: np.ndarray, shared: np.ndarray, steps: np.ndarray, *parts: np.ndarray) -> tuple:  # 9.9
    (w, m), (mu, k, l, unit) = parts, shared
    g = (q * s) * unit
    for keep, rate in steps:
        m = mu * m + g
        w = w * keep - rate * (k * g + l * m)
        w, m = one_nan(w), one_nan(m)
    return w, m
def predict(group: dict, layout: dict, parts: list, codes: np.ndarray, scales: np.ndarray, *more: np.ndarray) -> None:
    """Bring the partitions of a group from the parent's reconstruction to what the optimizer makes of it (9.9)."""
    found, alike, refine = blocks(layout, group["partitions"][0]), {}, group["refine"]
    need(scales.dtype == np.uint8 and len(scales) == len(found), "dtype or length of scales")
    q, scales = integers(codes, group["code"], len(parts[0])), scales.astype(int)
    s = np.where(scales == 0, np.float32(0), power(8 * (scales - 1) - 1024))
    for b, (start, end, first) in enumerate(found):  # blocks of one length and one set of constants at a time
        for low, high, number in group["ranges"]:
            if low <= first < high:
                alike.setdefault((end - start, number), {})[b] = start
    for (length, number), starts in alike.items():
        common, each = KINDS[group["kind"]][1:]
        values = np.array(group["constants"][number], np.uint32).view(np.float32)
        at = np.array([*starts.values()])[:, None] + np.arange(length)
        known = q[at], s[[*starts]][:, None], values[:common], values[common:].reshape(-1, each)
        formula = {"adam": adam, "sgd": sgd}[group["kind"]]
        for part, new in zip(parts, formula(*known, *(part[at] for part in parts)), strict=True):
            part[at] = new
    if refine is not None:  # 9.10
        (signs, factors), due = more, range(refine["phase"], len(found), refine["period"])
        need(factors.dtype == np.uint8 and len(factors) == len(due), "dtype or length of factors")
        ends = np.cumsum([0, *(found[b][1] - found[b][0] for b in due)])
        signs = integers(signs, "bit", ends[-1])
        for b, f, low, high in zip(due, factors.astype(int), ends[:-1], ends[1:], strict=True):
            block = parts[2][found[b][0] : found[b][1]]
            block[:] = one_nan(block * np.where(signs[low:high] > 0, power(f), power(-f)))
def check_groups(record: dict, now: dict, new: dict) -> dict[int, str]:  # 6.2, 6.7; the prediction of each partition
    held = {}
    for group in record.get("predictions", ()):
        kind, partitions, refine, ranges = (group[name] for name in ("kind", "partitions", "refine", "ranges"))
        need(kind in KINDS and group["code"] in CODES and record["kind"] == "delta", "prediction")
        (count, common, each), names = KINDS[kind], PARTS[: 2 if refine is None else 4]
        need(len({*partitions}) == len(partitions) == count and not held.keys() & partitions, "partitions of a group")
        need({now.get(n) for n in partitions} == {("float32", now[partitions[0]][1])}, "dtype or length in a group")
        need(not any(new.get(n) == "full" for n in partitions) and {*names} == {*group["arrays"]}, "layers of a group")
        ok = all((len(s) - common) % each == 0 < len(s) - common <= 64 * each for s in group["constants"])
        ok = ok and all(type(bits) is int and 0 <= bits < 1 << 32 for s in group["constants"] for bits in s)
        need(ok, "constants of a group")
        ends = [0, *(end for low, high, _ in ranges for end in (low, high - 1))]
        need(ends == sorted(ends) and all(a[1] <= b[0] for a, b in pairwise(ranges)), "ranges of a group")
        need(all(0 <= number < len(group["constants"]) for _, _, number in ranges), "sets of a group")
        need(refine is None or kind == "adam" and 0 <= refine["phase"] < refine["period"], "refinement of a group")
        need({"codes", f"predict-{kind}"} <= {*record["requires"]}, "features of a group")
        held |= dict.fromkeys(partitions, kind)
    return held
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
    before, plan, box, data, tensors = {}, [], [], {}, {}
    for record in chain:
        where, needs, values = f"commit {record['id']}", set(record["requires"]), record["values"]
        known = {*ARRAYS, "hold", "codes", *(f"predict-{kind}" for kind in KINDS)}
        need(needs <= known, f"{where} needs {sorted(needs)}")
        name = f"deltastore/layouts/{record['layout']}.json.zst"
        layout = fetch(packs, "blobs", name, blob, 1 << 28, record["layout"])
        now = {p["id"]: (STORAGE.get(p["dtype"], p["dtype"]), p["length"]) for p in layout["partitions"]}
        new = {layer["partition"]: layer["kind"] for layer in record["layers"]}
        need({*new.values()} <= needs and all(new.get(n) == "full" or before.get(n) == now[n] for n in now), where)
        held = check_groups(record, now, new)
        made = {layer["partition"]: layer["prediction"] for layer in record["layers"] if layer["kind"] != "full"}
        need(all(held.get(n, "hold") == kind for n, kind in made.items()), f"{where}: prediction of a layer")
        plan.append((record, layout, now, new))
        before, box = now, [values["full"]] if "full" in values else patch(box, values["patch"])
    wanted, live = [], {*now}
    for record, _, _, new in reversed(plan):  # what the result depends on
        groups = [group for group in record.get("predictions", ()) if live & {*group["partitions"]}]
        live = live.union(*(group["partitions"] for group in groups))
        wanted.insert(0, (groups, live))
        live = {n for n in live if new.get(n) != "full"}
    for (record, layout, sizes, new), (groups, live) in zip(plan, wanted, strict=True):
        where = f"commit {record['id']}"
        for group in groups:
            prefix, names = f"{record['id']}/p{group['partitions'][1]}.", PARTS[: len(group["arrays"])]
            arrays = [fetch(packs, "arrays", prefix + name, array) for name in names]
            with np.errstate(all="ignore"):
                predict(group, layout, [data[n] for n in group["partitions"]], *arrays)
        for n in live & {*new}:
            parts = [fetch(packs, "arrays", f"{record['id']}/p{n}.{name}", array) for name in ARRAYS[new[n]]]
            data[n] = parts[0] if new[n] == "full" else apply(data[n], *parts)
            need((data[n].dtype.name, len(data[n])) == sizes[n], f"{where}: dtype or length of partition {n}")
    check = found["check"] or {"phase": None, "crc32c": []}
    for n in now:  # 9.6
        parts = np.split(data[n], range(65536, len(data[n]), 65536))
        k, crc = min(16, len(parts)), dict(check["crc32c"]).get(n)
        got = crc32c(b"".join(parts if check["phase"] is None else parts[check["phase"] % k :: k]))
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
