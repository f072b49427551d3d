"""``deltastore demo``: the main job from end to end, on real text, with every figure measured."""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from deltastore.cli._demo_children import Child, run_check, run_training
from deltastore.cli.arguments import JsonOption, open_to_read
from deltastore.cli.output import Bar, duration, print_json, print_table, say, size
from deltastore.errors import AlreadyExists

HELP = """Train, kill, resume, read one old step, export it: about a minute on two cores.

A GPT-2-style model of two million parameters learns the sources of Python's standard library, with a commit at every
step. Its process kills itself with SIGKILL in the middle of a step; a new one resumes from the newest commit. The
losses must be those of a run that was never interrupted, bit for bit. Then a tensor of an old step is read without
loading the rest, and the step is exported as a state_dict that torch loads alone. Exit code 1 if any of this fails.

\b
Examples:
  deltastore demo                       in a temporary folder, which is removed
  deltastore demo runs/demo             keeps the store: `deltastore log runs/demo/store --stats`
  deltastore demo --steps 200 --json
"""

HEADS = 4
"""Attention heads of the model: each takes an equal part of its width."""


def demo(
    folder: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="A new folder, which is kept. A temporary one by default.")
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=4, help="Training steps.")] = 40,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the temporary folder too.")] = False,
    layers: Annotated[int, typer.Option("--layers", min=1, help="Layers of the model.")] = 4,
    width: Annotated[int, typer.Option("--width", min=4, help="Width of the model, a multiple of 4.")] = 200,
    as_json: JsonOption = False,
) -> None:
    """Run the demo."""
    if width % HEADS:
        lower = width // HEADS * HEADS
        raise typer.BadParameter(
            f"{width} is no multiple of {HEADS}: try {lower} or {lower + HEADS}", param_hint="--width"
        )
    if folder is not None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise AlreadyExists(f"{folder} is there and not empty: name a new folder", path=str(folder))
    place = Path(tempfile.mkdtemp(prefix="deltastore-demo-")) if folder is None else folder
    place.mkdir(parents=True, exist_ok=True)
    sizes = {"steps": steps, "layers": layers, "width": width, "heads": HEADS, "threads": _threads()}
    model = [text for name, value in sizes.items() for text in (f"--{name}", str(value))]
    keep = keep or folder is not None
    try:
        result = run(place, steps, model, narrate=not as_json)
        keep = keep or not result["ok"]  # what went wrong can be looked at
    finally:
        if not keep:
            shutil.rmtree(place, ignore_errors=True)
    result["folder"] = str(place) if keep else None
    if as_json:
        print_json(result)
    else:
        _print_result(result)
    if not result["ok"]:
        raise typer.Exit(1)


def _threads() -> int:
    # One core is left for the writer in the background.
    return max(1, min(2, len(os.sched_getaffinity(0)) - 1))


def run(place: Path, steps: int, model: list[str], *, narrate: bool) -> dict[str, Any]:
    """Run the processes of the demo one after the other, and return what they measured and what was checked."""
    url, kill_at, old = str(place / "store"), steps // 2, steps // 4
    with Bar("starting") as bar:

        def tell(text: str) -> None:
            if narrate:
                bar.say(text)

        def follow(before: int, text: str) -> Callable[[int], None]:
            return lambda done: bar.show(before + done, 2 * steps, text)

        files = ["--checkpoint", str(place / "full.pt"), "--copy-at", str(old), "--copy", str(place / "old.pt")]
        reference = run_training("reference", [*model, *files], follow(0, "reference run"))
        losses, parameters = reference.losses, reference.only("start")["parameters"]
        tell(f"reference  {steps} steps of {parameters:,} parameters, loss {losses[0]:.3f} -> {losses[steps - 1]:.3f}")

        training = [*model, "--store", url]
        killed = run_training("train", [*training, "--kill-at", str(kill_at)], follow(steps, "run with commits"))
        with open_to_read(url) as store:
            newest = store.at("latest").commit
        tell(f"killed     by SIGKILL in the middle of step {kill_at}; newest commit: step {newest.step}")

        resumed = run_training("train", training, follow(steps + newest.step + 1, "resumed run"))
        restored = resumed.only("restored")
        tell(f"resumed    at step {restored['start']}, restored in {duration(restored['seconds'])}")

        where = ["--store", url, "--step", str(old), "--reference", str(place / "old.pt")]
        check = run_check([*where, "--export", str(place / f"step-{old}.pt")])
        tell(f"read       {check['tensor']} of step {old} in {duration(check['tensor_seconds'])}, nothing else of it")
        tell(f"exported   step {old} as a state_dict, {size(check['export_bytes'])}")
    checks = _checks(reference, killed, resumed, newest.step, check)
    figures = _figures(reference, killed, resumed, check, url)
    return {"ok": all(checks.values()), "steps": steps, "checks": checks, "figures": figures}


def _checks(reference: Child, killed: Child, resumed: Child, newest: int, check: dict[str, Any]) -> dict[str, bool]:
    before = {step: loss for step, loss in killed.losses.items() if step <= newest}
    twice = killed.losses.keys() & resumed.losses.keys()
    acknowledged = killed.only("kill")["acknowledged"]
    ends = resumed.only("end")["digest"], reference.only("end")["digest"]
    return {
        "the process was killed by SIGKILL": killed.code == -signal.SIGKILL,
        "no acknowledged commit was lost": acknowledged is None or newest >= acknowledged,
        "training went on right after the newest commit": resumed.only("restored")["start"] == newest + 1,
        "the losses of kill + resume are the reference's, bit for bit": before | resumed.losses == reference.losses,
        "steps that were done twice gave the same loss": all(killed.losses[n] == resumed.losses[n] for n in twice),
        "weights and optimizer end as the reference's, bit for bit": ends[0] == ends[1],
        "a tensor of an old step is the reference's, bit for bit": check["tensor_equal"],
        "the exported state_dict loads with torch alone and is the reference's": check["export_equal"],
    }


def _figures(reference: Child, killed: Child, resumed: Child, check: dict[str, Any], url: str) -> dict[str, Any]:
    with open_to_read(url) as store:
        commits = store.commits()
    full, committed = reference.all("step"), [*killed.all("step"), *resumed.all("step")]
    stored = sum(path.stat().st_size for path in Path(url).rglob("*") if path.is_file())
    full_bytes = sum(step["bytes"] for step in full)
    deltas = [commit.bytes for commit in commits if commit.kind == "delta"]
    return {
        "parameters": reference.only("start")["parameters"],
        "commits": len(commits),
        "bases": len(commits) - len(deltas),
        "stored_bytes": stored,
        "full_checkpoints_bytes": full_bytes,
        "share_with_bases": stored / len(commits) / (full_bytes / len(full)),
        "share_without_bases": statistics.mean(deltas) / (full_bytes / len(full)) if deltas else None,
        "stall_seconds": statistics.median(step["stall_seconds"] for step in committed),
        "full_checkpoint_seconds": statistics.median(step["stall_seconds"] for step in full),
        "step_seconds": statistics.median(step["train_seconds"] for step in committed),
        "reference_step_seconds": statistics.median(step["train_seconds"] for step in full),
        "restore_seconds": resumed.only("restored")["seconds"],
        "tensor_bytes": check["tensor_bytes"],
        "tensor_seconds": check["tensor_seconds"],
        "export_bytes": check["export_bytes"],
    }


def _print_result(result: dict[str, Any]) -> None:
    say("")
    print_table(["", ("deltastore", "right"), ("torch.save + fsync", "right"), ""], _rows(result))
    say("")
    for text, ok in result["checks"].items():
        say(f"{'ok    ' if ok else 'FAILED'} {text}", "green" if ok else "bold red")
    say("")
    say("Every figure was measured just now, on this machine; times are medians over the steps.")
    if result["folder"] is not None:
        say(f"Look around: deltastore log {Path(result['folder'], 'store')} --stats")


def _rows(result: dict[str, Any]) -> list[list[object]]:
    figures = result["figures"]
    share, alone = figures["share_with_bases"], figures["share_without_bases"]
    shares = f"{share:.0%} of a full checkpoint per commit" + ("" if alone is None else f", {alone:.0%} without bases")
    return [
        ["steps", result["steps"], result["steps"], f"{figures['parameters']:,} parameters"],
        ["commits", figures["commits"], result["steps"], f"{figures['bases']} bases, the others deltas; all exact"],
        ["bytes stored", size(figures["stored_bytes"]), size(figures["full_checkpoints_bytes"]), shares],
        ["stall per step", duration(figures["stall_seconds"]), duration(figures["full_checkpoint_seconds"]), ""],
        ["training step", duration(figures["step_seconds"]), duration(figures["reference_step_seconds"]), ""],
        ["restore", duration(figures["restore_seconds"]), "", "weights, optimizer, scheduler, data, random states"],
        ["one tensor", duration(figures["tensor_seconds"]), "", f"{size(figures['tensor_bytes'])} of an old step"],
    ]
