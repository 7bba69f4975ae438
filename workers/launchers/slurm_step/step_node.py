"""The agent of one node of a Slurm step: `srun` starts it for one group, or to query the node.

It serves the launcher as every agent does (`workers.launchers.agent`). Where it queries, it has no
ranks, and greets with the other steps that have processes on the node.
"""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from layout_tuner.workers.launchers.agent import ADDRESS_VARIABLE, TOKEN_VARIABLE, NodeAgent, greet
from layout_tuner.workers.ranks.processes import die_with_parent
from layout_tuner.workers.ranks.rank_task import RANK_ENTRY

STEP_VARIABLE: Final = "LAYOUT_TUNER_STEP"
"""Name of the step, in the environment of all of its processes."""

_NODE_VARIABLE: Final = "SLURMD_NODENAME"


def living_steps(environment: Mapping[str, str]) -> list[str]:
    """Names of other steps of this job that have processes on this node.

    All processes of a step have its name in their environment, also those whose parents have ended.
    """
    ours = {name: environment.get(name, "") for name in ("SLURM_JOB_ID", _NODE_VARIABLE)}
    found = set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:  # the process ended meanwhile, or belongs to another user
            continue
        theirs = dict(word.partition("=")[::2] for word in words)
        if STEP_VARIABLE in theirs and all(theirs.get(name, "") == ours[name] for name in ours):
            found.add(theirs[STEP_VARIABLE])
    return sorted(found - {environment.get(STEP_VARIABLE)})


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="layout_tuner.workers.launchers.slurm_step.step_node", description=__doc__
    )
    parser.add_argument("--entry", default=RANK_ENTRY)
    parser.add_argument("--look", action="store_true", help="report other steps on this node")
    arguments = parser.parse_args()
    die_with_parent(os.getppid())
    job, step = (os.environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    fields = {
        "name": os.environ.get(_NODE_VARIABLE) or socket.gethostname(),
        "step": f"{job}.{step}",
        "steps": living_steps(os.environ) if arguments.look else [],
    }
    line = greet(os.environ.pop(ADDRESS_VARIABLE), os.environ.pop(TOKEN_VARIABLE), fields)
    if arguments.look:
        line.receive()  # the launcher gives no order; it closes the line
    else:
        NodeAgent(line, arguments.entry).run()


if __name__ == "__main__":
    main()
