"""A campaign for a large job: what finding a winner costs when every probe is a full one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from benchmarks.results_file import table
from benchmarks.search.search_disturbances import NoisyProbes
from benchmarks.search.search_record import Part, Promise
from benchmarks.search.search_runs import Effort, simulated_cells, tasks_of
from tuner.replay.run import ReplayedProbe, ReplayRun, replay_all

SCENARIO: Final = "frontier-175b"
START_S: Final = 60.0
"""Seconds until a probe's first step."""
LANDSCAPES: Final = 5
WITHIN: Final = 0.02


def frontier_175b(effort: Effort) -> Part:
    """Node-hours until the leader is truly within 2 % of the best; probes of ten full steps."""
    cells = simulated_cells(SCENARIO, min(LANDSCAPES, effort.seeds))
    rows = []
    for strategy in ("guided", "model-only", "deephyper+memory"):
        tasks = [
            task
            for seed, cell in enumerate(cells)
            for task in tasks_of(
                [cell], strategy, [seed], stop_within=WITHIN, disturbance=NoisyProbes()
            )
        ]
        runs = list(replay_all(tasks, jobs=effort.jobs))
        hours = [_node_hours(run) for run in runs]
        rows.append(
            (
                strategy,
                f"{sum(run.probes_to(WITHIN) is not None for run in runs)} of {len(runs)}",
                f"{np.mean([len(_until_found(run)) for run in runs]):.1f}",
                f"{np.mean(hours):.0f}",
                f"{np.min(hours):.0f} to {np.max(hours):.0f}",
            )
        )
    steps = [row.step_time_s for cell in cells for row in cell.merged if row.step_time_s]
    first = cells[0].merged[0].layout
    about = (
        f"{len(cells)} landscapes of `{SCENARIO}`: {len(cells[0].merged):,} layouts on "
        f"{first.num_nodes} nodes, global batch {first.global_batch_size}, steps of {min(steps):.0f} "
        f"s and more. A probe starts for {START_S:.0f} s and runs ten full steps; one at a time, each with 2 % of noise."
    )
    header = ("strategy", "reached 2 %", "probes", "node-hours (mean)", "range")
    return Part(
        title="frontier-175b",
        text=f"{about}\n\n{table(header, rows)}\n\nThere are no cheaper probes yet.",
        promises=(
            Promise(
                what="frontier-175b: node-hours to 2 %, cheap probes as a share of full ones",
                asked="a fifth",
                measured=None,
                most=0.2,
            ),
        ),
    )


def _until_found(run: ReplayRun) -> Sequence[ReplayedProbe]:
    """The probes until the leader is truly within the share; all of a run that never gets there."""
    return run.probes[: run.probes_to(WITHIN)]


def _node_hours(run: ReplayRun) -> float:
    probes = _until_found(run)
    starting = sum(START_S * probe.layout.num_nodes for probe in probes)
    return (starting + sum(probe.node_seconds for probe in probes)) / 3600
