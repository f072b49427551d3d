"""One conversion in a process of its own: prints the bytes by which its resident memory grew."""

from __future__ import annotations

import resource
import sys

import torch

import deltastore
from deltastore import formats


def main(verb: str, source: str, target: str) -> None:
    # Everything that is imported once, before the measurement.
    formats.save({"w": torch.ones(2)}, f"{target}.warm", format=formats.target_format(target).name)
    if verb == "convert":
        formats.format_of(source).converter  # noqa: B018 - imports its package
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if verb == "export":
        with deltastore.open(source, "r") as store:
            formats.save(store.at("latest"), target)
    else:
        formats.save(formats.open_contents(source), target)
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10)


if __name__ == "__main__":
    main(*sys.argv[1:])
