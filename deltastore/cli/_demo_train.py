"""The demo's run with commits: ``python -m deltastore.cli._demo_train --steps 40 --store URL [--kill-at 20]``.

It resumes from the newest commit of the store, if there is any, and commits each step. It reports what it does as one
JSON object on each line of stdout; that is for tests and other tools too.
"""

from __future__ import annotations

import os
import signal
import time

import deltastore
from deltastore.adapters.pytorch import Checkpointer
from deltastore.cli._demo_loop import digest, parser, report, start, train_step


def main() -> None:
    """Train from the newest commit to the end, or to the step at which to die."""
    arguments = parser(__doc__)
    arguments.add_argument("--store", required=True, help="commit each step here")
    arguments.add_argument("--kill-at", type=int, help="die by SIGKILL in the middle of this step")
    options = arguments.parse_args()
    training = start(options)
    with deltastore.open(options.store) as store:
        with Checkpointer(
            store,
            model=training.model,
            optimizer=training.optimizer,
            scheduler=training.scheduler,
            data=training.data,
        ) as checkpointer:
            begin = time.perf_counter()
            first = checkpointer.restore()
            report("restored", start=first, seconds=time.perf_counter() - begin)
            for step in range(first, options.steps):

                def interrupt(step: int = step) -> None:
                    if step == options.kill_at:
                        report("kill", step=step, acknowledged=store.durable())
                        os.kill(os.getpid(), signal.SIGKILL)

                loss, seconds = train_step(training, interrupt)
                begin = time.perf_counter()
                checkpointer.step(step, metrics={"loss": loss})
                stall = time.perf_counter() - begin
                report("step", step=step, loss=loss.hex(), train_seconds=seconds, stall_seconds=stall)
            begin = time.perf_counter()
        drained = time.perf_counter() - begin
    report("end", digest=digest(training), drain_seconds=drained)


if __name__ == "__main__":
    main()
