"""One conversion in a process of its own: prints the bytes by which its resident memory grew."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch

import deltastore
from deltastore import formats
from deltastore.formats.series import find_series, import_series


def convert(verb: str, sources: list[str], target: str) -> None:
    """Convert as one of the verbs of the command line does."""
    if verb == "export":
        with deltastore.open(sources[0], "r") as store:
            formats.save(store.at("latest"), target)
    elif verb == "import":
        with deltastore.open(target) as store:
            import_series(store, find_series(sources, steps_from_name=False), memory_bytes=512 << 20)
    else:
        formats.save(formats.open_contents(sources[0]), target)


def main(verb: str, *paths: str) -> None:
    *sources, target = paths
    # The same of a small state at first: what is imported, and what every state takes, is none of the growth.
    small = f"{target}.warm-store"
    if verb == "export":
        with deltastore.open(small) as store:
            store.commit(0, {"w": torch.ones(2)}).wait()
    else:
        small = f"{target}.warm{formats.format_of(sources[0]).suffixes[0]}"
        formats.save({"w": torch.ones(2)}, small)
    convert(verb, [small] * len(sources), f"{target}.small{Path(target).suffix}")
    before = peak_bytes()
    convert(verb, sources, target)
    print(peak_bytes() - before)


def peak_bytes() -> int:
    """Return the most that was resident; getrusage would say at least what the process had that started this one."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


if __name__ == "__main__":
    main(*sys.argv[1:])
