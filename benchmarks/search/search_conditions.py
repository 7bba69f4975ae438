"""Guided searches under conditions: one probe, eight pending, slow probes, wrong constants."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from benchmarks.results_file import table
from benchmarks.search.search_cells import (
    GROUPS,
    HALVES,
    by_cell,
    cells_table,
    failed_before,
    probes_needed,
)
from benchmarks.search.search_disturbances import SlowNode, SlowProbes
from benchmarks.search.search_record import Part, Promise
from benchmarks.search.search_runs import PROBES, Effort, tasks_of
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.tables import MeasurementTable, TableCell
from layout_tuner.tuner.replay.run import Disturbance, ReplayRun, is_within, replay_all

Tables = Mapping[str, MeasurementTable]

SLOW_NODE_SIZES: Final = (1, 2, 4)
"""Nodes of a probe in `slow-node`, so that not every probe meets the slow one of eight."""
WRONG_DRAWS: Final = 20
WRONG_BY: Final = 2.0
FIRST_ASKED: Final = {"nanotron 3B": 0.05, "nanotron 8B": 0.08}


def first_probe(tables: Tables, effort: Effort) -> Part:
    """Regret after one probe, cold, by group and by cell; beside it the estimates alone."""
    rows, promises, guided_runs = [], [], []
    for group in GROUPS:
        cells, figures = group.of(tables), []
        if not cells:
            continue
        for strategy in ("guided", "model-only"):
            seeds = range(effort.seeds_of(len(cells)))
            tasks = tasks_of(cells, strategy, seeds, probes=1)
            runs = list(replay_all(tasks, jobs=effort.jobs))
            regrets = [run.regret_after(1) for run in runs]
            shown = [f"{of(regrets):.1%}" for of in (np.median, np.mean, np.max)]
            figures.append((*shown, f"{sum(run.failed_within(1) for run in runs)}"))
            if strategy == "guided":
                guided_runs += runs
                promises += _first_promises(group.title, regrets)
        both = [", ".join(pair) for pair in zip(*figures, strict=True)]
        rows.append((group.title, f"{len(runs)}", *both))
    header = ("cells", "runs", "median regret", "mean", "worst", "failed")
    return Part(
        title="first-probe",
        text=f"Of guided, and of model-only.\n\n{table(header, rows)}",
        details=_first_by_cell(guided_runs),
        promises=tuple(promises),
    )


def _first_promises(group: str, regrets: Sequence[float]) -> list[Promise]:
    if group not in FIRST_ASKED:
        return []
    return [
        Promise(
            what=f"first-probe, {group}: regret, mean",
            asked=f"{FIRST_ASKED[group]:.0%}",
            measured=float(np.mean(regrets)),
            most=FIRST_ASKED[group],
            shown="{:.1%}",
        )
    ]


def _first_by_cell(runs: Sequence[ReplayRun]) -> str:
    cells = {key: [run.regret_after(1) for run in own] for key, own in by_cell(runs).items()}
    shown = sorted(cells, key=lambda key: -np.mean(cells[key]))[:20]
    rows = [
        (
            f"{key.model} on {key.num_devices}, batch {key.global_batch_size}",
            f"{np.median(cells[key]):.1%}",
            f"{np.mean(cells[key]):.1%}",
        )
        for key in shown
    ]
    return "The 20 worst cells of guided:\n\n" + table(("cell", "median", "mean"), rows)


def eight_pending(tables: Tables, effort: Effort) -> Part:
    """Failed probes until 5 %, with one and with eight probes at a time."""
    rows, promises, parts = [], [], []
    for pending, most in ((1, 0.0), (8, 0.3)):
        runs: list[ReplayRun] = []
        for half in HALVES:
            tasks = tasks_of(half.of(tables), "guided", range(effort.seeds), pending=pending)
            here = list(replay_all(tasks, jobs=effort.jobs))
            rows.append((f"{half.title}, {pending} pending", *_reached_row(here)))
            runs += here
        promises.append(
            Promise(
                what=f"nanotron_h100, {pending} pending: failed probes to 5 %, a run",
                asked=f"{most:g}",
                measured=float(np.mean([failed_before(run, 0.05) for run in runs])),
                most=most,
                shown="{:.2f}",
            )
        )
        parts.append(f"{pending} pending, by cell:\n\n{cells_table(runs)}")
    return Part(
        title="eight-pending",
        text=table(REACHED, rows),
        details="\n\n".join(parts),
        promises=tuple(promises),
    )


REACHED: Final = (
    "searches",
    "runs",
    "mean probes to 5 %",
    "to 2 %",
    "never 5 %",
    "worst cell's mean to 5 %",
    "most to 5 %",
    "failed to 5 %, a run",
    "failed in all, a run",
)


def _reached_row(runs: Sequence[ReplayRun], *, two: bool = True) -> tuple[str, ...]:
    """What the searches needed; without `two` they ended within 5 % and say nothing of 2 %."""
    to_five = [probes_needed(run, 0.05) for run in runs]
    return (
        f"{len(runs)}",
        f"{np.mean(to_five):.2f}",
        f"{np.mean([probes_needed(run, 0.02) for run in runs]):.2f}" if two else "-",
        f"{np.mean([run.probes_to(0.05) is None for run in runs]):.1%}",
        f"{_worst_cell(runs):.1f}",
        f"{max(to_five)}",
        f"{np.mean([failed_before(run, 0.05) for run in runs]):.2f}",
        f"{np.mean([run.failed_within(len(run.probes)) for run in runs]):.2f}",
    )


def _worst_cell(runs: Sequence[ReplayRun]) -> float:
    return max(
        float(np.mean([probes_needed(run, 0.05) for run in own])) for own in by_cell(runs).values()
    )


def slow_probe(tables: Tables, effort: Effort) -> Part:
    """15 % of the probes are 1.5 times slower, whatever their layout."""
    return _disturbed(
        "slow-probe",
        tables,
        effort,
        lambda place: SlowProbes(draw=place),
        lambda _cell: True,
    )


def slow_node(tables: Tables, effort: Effort) -> Part:
    """One node of eight is 1.5 times slower; cells whose probes use one, two or four nodes."""
    return _disturbed(
        "slow-node",
        tables,
        effort,
        lambda place: SlowNode(draw=place),
        lambda cell: cell.rows[0].layout.num_nodes in SLOW_NODE_SIZES,
    )


def _disturbed(
    title: str,
    tables: Tables,
    effort: Effort,
    disturbance: Callable[[int], Disturbance],
    takes_part: Callable[[TableCell], bool],
) -> Part:
    """Disturbed searches of both halves, beside undisturbed ones of the same cells."""
    rows, disturbed_runs = [], []
    for half in HALVES:
        cells = [cell for cell in half.of(tables) if takes_part(cell)]
        seeds = range(effort.seeds)
        calm = list(replay_all(tasks_of(cells, "guided", seeds), jobs=effort.jobs))
        tasks = [
            task
            for place, cell in enumerate(cells)
            for task in tasks_of([cell], "guided", seeds, disturbance=disturbance(place))
        ]
        runs = list(replay_all(tasks, jobs=effort.jobs))
        rows += [
            (f"{half.title}, undisturbed", *_reached_row(calm)),
            (f"{half.title}, disturbed", *_reached_row(runs)),
        ]
        disturbed_runs += runs
    text = ""
    if title == "slow-probe":
        text = f"{DEFINITIONS}\n\n{_definitions_table(disturbed_runs)}"
    return Part(
        title=title,
        text=text,
        details=f"{table(REACHED, rows)}\n\nDisturbed, by cell:\n\n{cells_table(disturbed_runs)}",
        promises=_disturbed_promises(title, disturbed_runs),
    )


DEFINITIONS: Final = (
    "Of the disturbed searches, by other definitions than *reached* "
    "([which](../docs/explanation/search.md#results-of-all-strategies) a user has): *stays*, the leader "
    "is within the share from then to the last probe (a run ends when the true best leads and was not "
    f"measured slow, or after {PROBES} probes); *measured*, some probe's own figure is within the share "
    "of the true best; *ended early*, the same, but the search ends with the first probe of the true "
    "best, however slow it was measured."
)


def _stays(run: ReplayRun, share: float) -> int | None:
    """Probes from which on the leader is within the share until the end; None: it is not then."""
    outside = [
        number
        for number, probe in enumerate(run.probes, 1)
        if not is_within(probe.leader_regret, share)
    ]
    last = max(outside, default=0)
    return None if last == len(run.probes) else last + 1


def _measured(run: ReplayRun, share: float) -> int | None:
    """Number of the first probe whose measured figure is within the share of the true best."""
    for number, probe in enumerate(run.probes, 1):
        if probe.regret is None:
            continue
        if is_within(1 - (1 - probe.regret) / probe.conditions.slowdown, share):
            return number
    return None


def _ended_early(run: ReplayRun, share: float) -> int | None:
    """As `_measured`, of a search that ends when the true best is first probed."""
    number = _measured(run, share)
    found = [count for count, probe in enumerate(run.probes, 1) if probe.regret == 0.0]
    return None if number is None or number > min(found, default=PROBES) else number


DEFINED: Final[Mapping[str, Callable[[ReplayRun, float], int | None]]] = {
    "reached": ReplayRun.probes_to,
    "stays": _stays,
    "measured": _measured,
    "ended early": _ended_early,
}


def _definitions_table(runs: Sequence[ReplayRun]) -> str:
    rows = []
    for name, count in DEFINED.items():
        cells = []
        for share in (0.05, 0.02):
            counts = [count(run, share) for run in runs]
            needed = [PROBES + 1 if number is None else number for number in counts]
            never = np.mean([number is None for number in counts])
            cells += [f"{np.mean(needed):.2f}", f"{never:.1%}"]
        rows.append((name, *cells))
    return table(("definition", "mean probes to 5 %", "never", "to 2 %", "never"), rows)


def _disturbed_promises(title: str, runs: Sequence[ReplayRun]) -> tuple[Promise, ...]:
    if title != "slow-probe":
        return ()
    return (
        Promise(
            what=f"{title}: probes to 5 %, mean",
            asked="4",
            measured=float(np.mean([probes_needed(run, 0.05) for run in runs])),
            most=4,
        ),
        Promise(
            what=f"{title}: runs that never get within 5 %",
            asked="0",
            measured=float(np.mean([run.probes_to(0.05) is None for run in runs])),
            most=0,
            shown="{:.1%}",
        ),
    )


def wrong_constants(tables: Tables, effort: Effort) -> Part:
    """Every rate of the cluster's description is off by a factor of two, up or down."""
    draws = min(WRONG_DRAWS, effort.seeds)
    rows, every = [], []
    for half in HALVES:
        tasks = [
            task
            for draw in range(draws)
            for cell in half.of(tables)
            for task in tasks_of(
                [_with_wrong_constants(cell, draw)], "guided", [draw], stop_within=0.05
            )
        ]
        runs = list(replay_all(tasks, jobs=effort.jobs))
        rows.append((f"{half.title}, {draws} draws", *_reached_row(runs, two=False)))
        every += runs
    by_draw = [probes_needed(run, 0.05) for run in every]
    means = np.mean(np.reshape(by_draw, (2, draws, -1)), axis=(0, 2))
    text = (
        f"{table(REACHED, rows)}\n\nMean over the cells by draw: "
        f"{means.min():.1f} to {means.max():.1f} probes to 5 %."
    )
    promises = [
        Promise(
            what=f"wrong-constants: probes to 5 %, {name}",
            asked=f"{most:g}",
            measured=float(figure(by_draw)),
            most=most,
        )
        for name, figure, most in (("mean", np.mean, 3), ("worst", np.max, 10))
    ]
    return Part(title="wrong-constants", text=text, promises=tuple(promises))


def _with_wrong_constants(cell: TableCell, draw: int) -> TableCell:
    """The cell, described by a cluster of which every rate is doubled or halved."""
    return replace(cell, cluster=wrong_cluster(cell.cluster, np.random.default_rng([17, draw])))


def wrong_cluster(cluster: Cluster, rng: np.random.Generator) -> Cluster:
    """A cluster with every rate multiplied or divided by two; one factor for each rate.

    The bandwidths inside a node share a factor, and so do the peaks of all precisions.
    """

    def off() -> float:
        return float(WRONG_BY ** rng.choice([-1.0, 1.0]))

    changes: dict[str, Any] = {}
    for name in ("peak_flops_per_s", "intra_node_bandwidth_bytes_per_s"):
        factor = off()
        changes[name] = {key: value * factor for key, value in getattr(cluster, name).items()}
    for name in (
        "memory_bandwidth_bytes_per_s",
        "inter_node_bandwidth_bytes_per_s",
        "host_operation_s",
        "intra_node_latency_s",
        "inter_node_latency_s",
    ):
        changes[name] = getattr(cluster, name) * off()
    return replace(cluster, **changes)
