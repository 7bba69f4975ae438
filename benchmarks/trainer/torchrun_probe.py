"""A probe as one rank under torchrun, which writes down when it did what.

    torchrun --nproc-per-node=2 benchmarks/trainer/torchrun_probe.py GROUP REQUEST

REQUEST is a probe's JSON document, GROUP the name that its moments are written under.
"""

from __future__ import annotations

import json
import os
import sys
import time

from benchmarks.workers.rank_records import Moment, write_moment
from layout_tuner.protocol.outcome import ProbeRequest
from layout_tuner.workers.ranks.json_lines import Document
from layout_tuner.workers.trainer.job.launch import context_from_environment
from layout_tuner.workers.trainer.probe.probe import run_probe


def main() -> None:
    """Runs this rank to its end."""
    group, request = sys.argv[1], ProbeRequest.from_mapping(json.loads(sys.argv[2]))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    context = context_from_environment()

    def report(event: Document) -> None:
        at_s = time.monotonic()
        if event["event"] == "iteration":
            write_moment(
                Moment(
                    at_s=at_s,
                    what="iteration",
                    group=group,
                    rank=context.rank,
                    step_time_s=event["step_time_s"],
                )
            )

    run_probe(request, context, report)
    sys.stdout.flush()
    os._exit(0)  # tearing a gloo group down can hang


if __name__ == "__main__":
    main()
