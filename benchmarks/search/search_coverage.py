"""Whether a search knows how sure it may be: its intervals, and its word that it has converged."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from benchmarks.results_file import table
from benchmarks.search.search_cells import GROUPS
from benchmarks.search.search_record import Part, Promise
from benchmarks.search.search_runs import (
    SIMULATED,
    STRESS_PENDING,
    Effort,
    simulated_cells,
    tasks_of,
)
from layout_tuner.search_spaces.tables import MeasurementTable, TableCell
from layout_tuner.tuner.driver.campaign_end import LEAST_COMPLETED
from layout_tuner.tuner.replay.run import ReplayRun, is_within, replay_all

STATED: Final = 0.95
WIDTH: Final = 1.959964
"""Standard deviations to each side of an interval that holds 95 % of a normal distribution."""
CONVERGED_WITHIN: Final = 0.02
RANGES: Final = ((1, 1), (2, 5), (6, 20), (21, 60), (1, 60))
"""Numbers of the probes that are counted together; the last one is all of them."""
PROBES_ON_TABLES: Final = 20
LANDSCAPES: Final = 12
SEEDS: Final = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvergedRun:
    """When a search called itself converged, and what was left to gain."""

    num_probes: int
    regret: float
    """Of the layout that was ranked first then."""


def coverage(tables: Mapping[str, MeasurementTable], effort: Effort) -> Part:
    """Cold guided searches that go on after they have found the best."""
    searched = {group.title: _on_cells(group.of(tables), effort) for group in GROUPS}
    searched |= {name: _on_simulated(name, effort) for name in SIMULATED}
    searched = {title: runs for title, runs in searched.items() if runs}
    every = [run for runs in searched.values() for run in runs]
    text = "\n\n".join(
        [
            f"First the share of the stated {STATED:.0%} intervals of step times that hold the true step "
            "time, by number of the probe. *Converged*: as a campaign with `converged_within: "
            f"{CONVERGED_WITHIN}` ends, after at least {LEAST_COMPLETED} completed probes; *had*: the "
            f"layout ranked first was within {CONVERGED_WITHIN:.0%} of the best. Searches that had "
            "probed every layout by then are not counted.",
            _searches_table({**searched, "all": every}),
        ]
    )
    return Part(
        title="coverage",
        text=text,
        promises=(
            *(_interval_promise(title, runs) for title, runs in searched.items()),
            _interval_promise("all", every),
            *(
                Promise(
                    what=f"coverage, {name}: converged searches that had",
                    asked="11 of 12",
                    measured=_converged_share(searched[name]),
                    most=1,
                    least=11 / 12 - 1e-9,
                    shown="{:.0%}",
                )
                for name in SIMULATED
            ),
        ),
    )


def _on_cells(cells: Sequence[TableCell], effort: Effort) -> list[ReplayRun]:
    if not cells:
        return []
    seeds = range(min(SEEDS, effort.seeds_of(len(cells))))
    tasks = tasks_of(
        cells, "guided", seeds, probes=PROBES_ON_TABLES, stop_within=None, expects=True
    )
    return list(replay_all(tasks, jobs=effort.jobs))


def _on_simulated(name: str, effort: Effort) -> list[ReplayRun]:
    cells = simulated_cells(SIMULATED[name], min(LANDSCAPES, effort.seeds))
    tasks = [
        task
        for seed, cell in enumerate(cells)
        for task in tasks_of(
            [cell], "guided", [seed], pending=STRESS_PENDING, stop_within=None, expects=True
        )
    ]
    return list(replay_all(tasks, jobs=effort.jobs))


def held(runs: Sequence[ReplayRun], first: int = 1, last: int = 60) -> Iterator[bool]:
    """Whether each interval held the truth, of completed probes of these numbers."""
    for run in runs:
        for probe in run.probes[first - 1 : last]:
            stated = probe.prediction
            if stated is None or probe.step_time_s is None:
                continue
            off = abs(math.log(probe.step_time_s / stated.step_time_s))
            yield off <= WIDTH * stated.log_step_time_sd


def converged_at(run: ReplayRun) -> ConvergedRun | None:
    """By the rule of campaigns; None: it never called itself converged."""
    last = math.inf
    for count, probe in enumerate(run.probes, 1):
        completed = count - run.failed_within(count)
        possible = math.inf if probe.possible_improvement is None else probe.possible_improvement
        if completed >= LEAST_COMPLETED and max(last, possible) < CONVERGED_WITHIN:
            return ConvergedRun(num_probes=count, regret=run.regret_after(count))
        last = possible
    return None


def _converged(runs: Sequence[ReplayRun]) -> list[ConvergedRun]:
    """Those that converged before the layouts ran out."""
    found = [converged_at(run) for run in runs]
    return [
        one
        for run, one in zip(runs, found, strict=True)
        if one is not None
        and (one.num_probes < len(run.probes) or one.num_probes == run.num_probes)
    ]


def _had(one: ConvergedRun) -> bool:
    return is_within(one.regret, CONVERGED_WITHIN)


def _converged_share(runs: Sequence[ReplayRun]) -> float | None:
    found = _converged(runs)
    return float(np.mean([_had(one) for one in found])) if found else None


def _interval_promise(title: str, runs: Sequence[ReplayRun]) -> Promise:
    return Promise(
        what=f"coverage, {title}: stated 95 % intervals that hold the truth",
        asked="92-97%",
        measured=float(np.mean(list(held(runs)))),
        most=0.97,
        least=0.92,
        shown="{:.1%}",
    )


def _searches_table(searched: Mapping[str, Sequence[ReplayRun]]) -> str:
    """A row for each kind of searches: shares of intervals, and what those that converged had."""
    names = [f"{low}-{high}" if low != high else f"{low}" for low, high in RANGES]
    rows = []
    for title, runs in searched.items():
        shares = [list(held(runs, *part)) for part in RANGES]
        shown = [f"{np.mean(own):.1%} of {len(own)}" if own else "-" for own in shares]
        rows.append((title, *shown, f"{len(runs)}", *_converged_cells(runs)))
    header = (
        "searches",
        *names,
        "runs",
        "converged",
        "had",
        "after (median)",
        "left (mean)",
        "worst",
    )
    return table(header, rows)


def _converged_cells(runs: Sequence[ReplayRun]) -> tuple[str, ...]:
    found = _converged(runs)
    if not found:
        return ("0", *["-"] * 4)
    regrets = [one.regret for one in found]
    return (
        f"{len(found)}",
        f"{sum(_had(one) for one in found)}",
        f"{np.median([one.num_probes for one in found]):g}",
        f"{np.mean(regrets):.1%}",
        f"{np.max(regrets):.1%}",
    )
