"""python -m tests.bench [--quick | --full] [--json FILE] [names]: the figures of a machine, each with its target."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.bench import converting, filtering, frequency, hdfs, history, reading, windows, writing
from tests.bench.measure import Figure, machine


def main() -> int:
    """Run what was chosen and print it; 0 whatever the figures are, for a busy machine is no fault of the code."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    benchmarks: dict[str, Callable[[Path, argparse.Namespace], list[Figure]]] = {
        "write": lambda folder, options: writing.base_write(folder, options.quick),
        "load": lambda folder, options: reading.load(folder, options.quick),
        "convert": lambda folder, options: converting.convert(folder, options.quick),
        "tensor": lambda folder, options: reading.one_tensor(folder, options.quick),
        "open": lambda folder, options: history.opening(folder, options.quick),
        "memory": lambda folder, options: history.memory(folder, options.quick),
        "pack": lambda folder, options: writing.pack_writer(folder, options.quick),
        "filter": lambda folder, options: filtering.filter_pass(folder, options.quick),
        "budget": lambda folder, options: filtering.budgets(folder, options.quick),
        "bf16": lambda folder, options: filtering.bf16(folder, options.quick),
        "frequency": lambda folder, options: frequency.frequency(folder, options.quick),
        "hdfs": lambda folder, options: hdfs.hdfs(folder, options.quick),
        "windows": lambda folder, options: windows.windows(folder, options.quick, options.full),
        "stall": lambda folder, options: writing.stalls(folder, options.quick, options.full),
    }
    parser.add_argument("names", nargs="*", metavar="name", help=f"which ones: {', '.join(benchmarks)} (default all)")
    parser.add_argument("--quick", action="store_true", help="small states and few rounds: to see that it runs")
    parser.add_argument("--full", action="store_true", help="also the states that need several GB of memory")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine and figures to a file too")
    parser.add_argument("--folder", type=Path, help="where to write (default: the temporary folder)")
    options = parser.parse_args()
    unknown = set(options.names) - set(benchmarks)
    if unknown:
        parser.error(f"no benchmark {', '.join(sorted(unknown))}")
    command = f"python -m tests.bench {' '.join(sys.argv[1:])}".strip()
    facts = machine()
    print(f"{command}\n" + "".join(f"  {name}: {value}\n" for name, value in facts.items()))
    figures: dict[str, list[Figure]] = {}
    for name in options.names or benchmarks:
        folder = Path(tempfile.mkdtemp(prefix="deltastore-bench-", dir=options.folder))
        started = time.perf_counter()
        try:
            figures[name] = benchmarks[name](folder, options)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        print(f"{name} ({time.perf_counter() - started:.0f} s)")
        print("".join(f"  {figure.line()}\n" for figure in figures[name]), flush=True)
    if options.json:
        body = {
            "command": command,
            "machine": facts,
            "figures": {name: [figure.as_json() for figure in found] for name, found in figures.items()},
        }
        options.json.write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
