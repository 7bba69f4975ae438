"""Campaigns for a large job: what finding a winner costs with cheap probes, and with full ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np

from benchmarks.results_file import table
from benchmarks.search.search_coverage import converged_at
from benchmarks.search.search_disturbances import NoisyProbes
from benchmarks.search.search_record import Part, Promise
from benchmarks.search.search_runs import Effort, simulated_cells, tasks_of
from layout_tuner.search_spaces.campaigns.fidelity import ProbeCosts
from layout_tuner.search_spaces.tables import TableCell
from layout_tuner.tuner.replay.run import ReplayedProbe, ReplayRun, ReplayTask, replay_all
from layout_tuner.workers.simulation.scenarios import simulated_part

SCENARIO: Final = "frontier-175b"
COSTS: Final = ProbeCosts(start_s=60.0)
LANDSCAPES: Final = (*range(5), *range(15, 25))
"""Seeds of the machines. The constants of cheap probes were chosen on those from 5 to 14; when a
search goes on to full probes, on those from 5 to 14 and 30 to 39, after a look at 4, 19 and 21."""
WITHIN: Final = 0.02
BUDGET_NODE_HOURS: Final = 40.0
_CHEAP: Final = "guided, cheap probes"
_FULL: Final = "guided, full probes"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ending:
    """How a campaign ended."""

    node_hours: float
    regret: float | None
    """Of the layout that leads; None: no layout was measured in full."""
    num_full: int
    num_cheap: int


def frontier_175b(effort: Effort) -> Part:
    """Node-hours to a winner within 2 %: known by its figures alone, or named by the campaign."""
    seeds = LANDSCAPES[: effort.seeds]
    every = simulated_cells(SCENARIO, max(seeds) + 1)
    cells = {seed: every[seed] for seed in seeds}
    tasks = {
        name: _tasks(cells, name.split(",")[0], is_cheap=name == _CHEAP)
        for name in (_CHEAP, _FULL, "model-only", "deephyper+memory")
    }
    found = {
        name: [_until_found(run) for run in _run(each, effort)] for name, each in tasks.items()
    }
    guided = {
        name: [replace(task, stop_within=None, expects=True) for task in tasks[name]]
        for name in (_CHEAP, _FULL)
    }
    named = {
        name: [_until_named(run) for run in _run(each, effort)] for name, each in guided.items()
    }
    bounded = {
        name: [
            _ending(run.probes)
            for run in _run(
                [replace(task, budget_node_s=BUDGET_NODE_HOURS * 3600) for task in each], effort
            )
        ]
        for name, each in guided.items()
    }
    return Part(
        title=SCENARIO,
        text="\n\n".join(
            (
                f"{_about(list(cells.values()))} A search ends when the layout that leads is truly within "
                f"{WITHIN:.0%} (*found*), when a campaign with `converged_within: {WITHIN}` names its "
                f"winner (*named*), or with `budget: {{node_hours: {BUDGET_NODE_HOURS:g}}}` "
                "(*budget*).",
                _table({"found": found, "named": named, "budget": bounded}),
            )
        ),
        promises=tuple(
            Promise(
                what=f"{SCENARIO}: node-hours until the winner is {what}, cheap probes as a share "
                "of full ones",
                asked="a fifth",
                measured=_mean_hours(each[_CHEAP]) / _mean_hours(each[_FULL]),
                most=0.2,
                shown="{:.2f}",
            )
            for what, each in (("within 2 %", found), ("named", named))
        ),
    )


def _tasks(cells: Mapping[int, TableCell], strategy: str, *, is_cheap: bool) -> list[ReplayTask]:
    return [
        replace(
            task,
            costs=COSTS,
            parts=partial(simulated_part, SCENARIO, seed) if is_cheap else None,
        )
        for seed, cell in cells.items()
        for task in tasks_of(
            [cell], strategy, [seed], stop_within=WITHIN, disturbance=NoisyProbes()
        )
    ]


def _run(tasks: Sequence[ReplayTask], effort: Effort) -> list[ReplayRun]:
    return list(replay_all(tasks, jobs=effort.jobs))


def _until_found(run: ReplayRun) -> _Ending:
    """All of a run that never gets there."""
    return _ending(run.probes[: run.probes_to(WITHIN)])


def _until_named(run: ReplayRun) -> _Ending:
    """As the driver ends a campaign; all of a run that it does not end."""
    converged = converged_at(run)
    return _ending(run.probes if converged is None else run.probes[: converged.num_probes])


def _ending(probes: Sequence[ReplayedProbe]) -> _Ending:
    num_full = sum(probe.fidelity is None for probe in probes)
    return _Ending(
        node_hours=sum(probe.node_seconds for probe in probes) / 3600,
        regret=probes[-1].leader_regret,
        num_full=num_full,
        num_cheap=len(probes) - num_full,
    )


def _mean_hours(endings: Sequence[_Ending]) -> float:
    return float(np.mean([ending.node_hours for ending in endings]))


def _table(endings: Mapping[str, Mapping[str, list[_Ending]]]) -> str:
    rows = [
        (
            f"{until}: {name}",
            f"{sum(each.regret is not None and each.regret <= WITHIN for each in some)} "
            f"of {len(some)}",
            f"{max(1.0 if each.regret is None else each.regret for each in some):.1%}",
            f"{np.mean([each.num_full for each in some]):.1f}",
            f"{np.mean([each.num_cheap for each in some]):.1f}",
            f"{_mean_hours(some):.0f}",
            f"{np.median([each.node_hours for each in some]):.0f}",
            f"{min(each.node_hours for each in some):.0f} to "
            f"{max(each.node_hours for each in some):.0f}",
        )
        for until, strategies in endings.items()
        for name, some in strategies.items()
    ]
    header = (
        "until, strategy",
        "winner within 2 %",
        "worst regret",
        "full probes",
        "cheap probes",
        "node-hours (mean)",
        "median",
        "range",
    )
    return table(header, rows)


def _about(cells: Sequence[TableCell]) -> str:
    steps = [row.step_time_s for cell in cells for row in cell.merged if row.step_time_s]
    first = cells[0].merged[0].layout
    full_h = COSTS.node_s(first.num_nodes, min(steps)) / 3600
    return (
        f"{len(cells)} landscapes of `{SCENARIO}`: {len(cells[0].merged):,} layouts on "
        f"{first.num_nodes} nodes, global batch {first.global_batch_size}, steps of {min(steps):.0f} "
        f"s and more. A probe starts for {COSTS.start_s:.0f} s and runs {COSTS.warmup} steps of "
        f"warm-up and {COSTS.iterations} timed ones (a cheap one at most 4), one at a time, each "
        f"with 2 % of noise: a full probe of the fastest layout takes {full_h:.0f} node-hours."
    )
