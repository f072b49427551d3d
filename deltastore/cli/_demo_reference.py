"""The demo's uninterrupted run, in plain torch: ``python -m deltastore.cli._demo_reference --steps 40 ...``.

After each step it writes a full checkpoint with torch.save and fsync, as a training loop without deltastore would to
lose no step. It reports what it does as one JSON object on each line of stdout.
"""

from __future__ import annotations

import os
import time

import torch

from deltastore.cli._demo_loop import digest, parser, report, start, train_step


def main() -> None:
    """Train without interruption."""
    arguments = parser(__doc__)
    arguments.add_argument("--checkpoint", required=True, help="where each full checkpoint replaces the last")
    arguments.add_argument("--copy-at", type=int, help="keep the checkpoint of this step")
    arguments.add_argument("--copy", help="where to keep it")
    options = arguments.parse_args()
    training = start(options)
    for step in range(options.steps):
        loss, seconds = train_step(training)
        begin = time.perf_counter()
        with open(options.checkpoint, "wb") as file:
            torch.save(training.state_dict(), file)
            file.flush()
            os.fsync(file.fileno())
        stall = time.perf_counter() - begin
        size = os.path.getsize(options.checkpoint)
        if step == options.copy_at:
            os.replace(options.checkpoint, options.copy)
        report("step", step=step, loss=loss.hex(), train_seconds=seconds, stall_seconds=stall, bytes=size)
    report("end", digest=digest(training))


if __name__ == "__main__":
    main()
