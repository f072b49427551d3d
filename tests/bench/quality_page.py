"""The page of the filter's quality: tables, and a plot of the error over the bytes."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

NAME = "filter-quality"


def write_page(folder: Path, body: dict[str, Any]) -> None:
    """Write `filter-quality.md` and `filter-quality.svg`."""
    _plot(folder / f"{NAME}.svg", body["chains"])
    lines = [
        "# What bounded commits are worth",
        "",
        "Made by `make bench-quality`. Training state = weights, moments, master weights; the filter at its defaults",
        "(prediction `hold`, everything filtered alike). Byte shares are medians of whole delta commits. Loss alone is",
        "a weak test: a reconstruction that lags averages, and may score better than the truth. So the first table",
        "shows how far the weights are off (over their movement since the base), the cosine between the next update",
        "and the true one, and the difference of the first ten losses after a resume. The rules without feedback keep",
        "2 % of the elements.",
        "",
        *(f"- {name}: {value}" for name, value in body["machine"].items()),
        "",
        f"![weights' error over bytes]({NAME}.svg)",
        "",
        "## Chains without another base",
        "",
        "| training | steps | rule | bytes | weights: error / movement | next-update cosine | first ten losses |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in body["chains"]:
        share = "-" if row["bytes_share"] != row["bytes_share"] else f"{row['bytes_share']:.2%}"
        known = {name: row[name] == row[name] for name in ("cosine", "losses")}
        cosine = f"{row['cosine']:.3f}" if known["cosine"] else "-"
        losses = f"{row['losses']:.4f}" if known["losses"] else "-"
        first = f"| {row['training']} | {row['steps']} | {row['rule']} | {share} "
        lines.append(first + f"| {row['error']:.3f} | {cosine} | {losses} |")
    lines += [
        "",
        "## Training killed at five random steps and resumed from bounded commits",
        "",
        "Final validation loss, mean of the seeds, and the difference of each pair.",
        "",
        "| training | budget | uninterrupted | killed | difference: mean | of each seed |",
        "|---|---|---|---|---|---|",
    ]
    for row in body["kills"]:
        pairs = [b - a for a, b in zip(row["uninterrupted"], row["killed"], strict=True)]
        each = " ".join(f"{pair:+.4f}" for pair in pairs)
        lines.append(
            f"| {row['training']} | {row['budget']:.0%} | {statistics.mean(row['uninterrupted']):.4f} | "
            f"{statistics.mean(row['killed']):.4f} | {statistics.mean(pairs):+.4f} | {each} |"
        )
    (folder / f"{NAME}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _plot(path: Path, rows: list[dict[str, Any]]) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    plt.rcParams["svg.hashsalt"] = NAME
    figure, axes = plt.subplots(figsize=(7, 4.5))
    titles = list(dict.fromkeys((row["training"], row["steps"]) for row in rows))
    for training, steps in titles:
        points = [
            (row["bytes_share"], row["error"])
            for row in rows
            if (row["training"], row["steps"]) == (training, steps) and row["rule"].startswith("filter")
        ]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, linewidth=1, label=f"{training}, {steps} steps")
    axes.set(
        xscale="log", yscale="log", xlabel="bytes of a delta / bytes of the state", ylabel="weights: error / movement"
    )
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize=5, ncols=2)
    figure.savefig(path, metadata={"Date": None})
