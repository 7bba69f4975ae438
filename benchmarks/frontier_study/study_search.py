"""What searches of both spaces of each model need: probes, node-hours, failures; and the knobs."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.frontier_study import study_page as page
from benchmarks.frontier_study.study_runs import (
    BUILD,
    MODELS,
    StudyEffort,
    sources_hash,
)
from benchmarks.frontier_study.study_spaces import (
    TABLE_V,
    WIDE,
    StudyLandscape,
    landscape,
)
from benchmarks.search.search_curves import AnytimeCurve, regret_by_cost, regret_by_probes
from benchmarks.search.search_disturbances import NoisyProbes
from benchmarks.search.search_large import COSTS
from benchmarks.search.search_plots import COLOURS as STRATEGY_COLOURS
from benchmarks.search.search_plots import LEAST_SHOWN
from benchmarks.search.search_runs import PROBES, tasks_of
from benchmarks.simulator.simulator_frontier import FRONTIER
from layout_tuner.search_spaces.layouts.layout import KNOBS
from layout_tuner.tuner.analysis.importance import METHOD, MOST_LAYOUTS, importances
from layout_tuner.tuner.replay.cell_layouts import CellLayouts
from layout_tuner.tuner.replay.run import ReplayRun, by_strategy, replay_all
from layout_tuner.workers.simulation.machine import Machine

STRATEGIES: Final = ("guided", "random", "deephyper", "deephyper+memory")
SEEDS: Final = {"22B": 5, "175B": 20, "1T": 5}
WITHIN: Final = (0.05, 0.02)
NOISE: Final = Machine.of(FRONTIER).noise
"""Of a probe's step time: as much as of one iteration's, though a probe takes the median of ten."""
_Runs = Mapping[str, Sequence[ReplayRun]]


def search(effort: StudyEffort, _tables: Path | None) -> page.StudyPart:
    """Searches of every space in which something fits."""
    rows, blocks, empty = [], [], []
    for size in MODELS:
        for name in (TABLE_V, WIDE):
            each = landscape(size, name, effort)
            if not each.num_fitting:
                empty.append(f"{size}, {name}")
                continue
            runs = _runs(each, effort)
            rows += [_row(each, strategy, some) for strategy, some in runs.items()]
            if size == "175B":
                blocks.append(_draw(each, runs))
    header = (
        "space, strategy",
        "runs",
        *(f"probes to {share:.0%}" for share in WITHIN),
        *(f"node-hours to {share:.0%}" for share in WITHIN),
        f"regret after {PROBES}",
        f"failed to {WITHIN[0]:.0%}, of {PROBES}",
    )
    none = f" Nothing fits in {' and '.join(empty)}, so that it is not searched." if empty else ""
    return page.StudyPart(
        title="What the search needs",
        blocks=(
            f"Simulated campaigns of {PROBES} probes, cold, one at a time: medians over seeds, with "
            "the share of runs that got there (a run that does not counts with all that it spent). "
            "Probes until the layout that leads is truly within a share of the best of its space. A "
            f"probe starts for {COSTS.start_s:.0f} s and runs {COSTS.warmup} + {COSTS.iterations} "
            f"iterations; its step time is off by {NOISE:.1%} of noise. One out of memory costs its "
            "start and a step of median length. Every run goes on to its last probe, where a campaign "
            "would end once little improvement is expected. Nodes are alike and none is lost: all layouts of a "
            f"job of all nodes would meet the same slow ones.{none}",
            page.rows_table(header, rows),
            *blocks,
        ),
    )


def _runs(each: StudyLandscape, effort: StudyEffort) -> dict[str, list[ReplayRun]]:
    """The searches of a space, kept by strategy."""
    cell, seeds = each.cell(), range(effort.seeds(SEEDS[each.size]))
    sources = sources_hash(
        "workers/simulation", "tuner", "search_spaces", "layout_tuner/predictions"
    )
    # What a space is worth searching by belongs to its layouts and their times.
    belongs = sha256(f"{sources} {NOISE} {COSTS} {len(seeds)}".encode())
    belongs.update(each.rates.tobytes())
    paths = {
        name: BUILD / f"searches-{each.size}-{each.name}-{name}-{belongs.hexdigest()[:12]}.pickle"
        for name in STRATEGIES
    }
    new = [name for name, path in paths.items() if not path.exists()]
    noise = NoisyProbes(noise=NOISE)
    tasks = [
        task
        for name in new
        for task in tasks_of([cell], name, seeds, stop_within=None, costs=COSTS, disturbance=noise)
    ]
    if tasks:
        print(f"  {each.size}, {each.name}: {len(tasks)} searches", flush=True)
        done = by_strategy(list(replay_all(tasks, jobs=effort.jobs)))
        for name, runs in done.items():
            paths[name].write_bytes(pickle.dumps(runs))
    return {name: pickle.loads(path.read_bytes()) for name, path in paths.items()}


def _row(each: StudyLandscape, strategy: str, runs: Sequence[ReplayRun]) -> tuple[str, ...]:
    probes, hours = [], []
    for share in WITHIN:
        needed = [run.probes_to(share) for run in runs]
        reached = sum(count is not None for count in needed)
        median = np.median([PROBES + 1 if count is None else count for count in needed])
        number = f"{median:.3g}" if median <= PROBES else f"over {PROBES}"
        probes.append(f"{number} ({reached}/{len(runs)})")
        spent = [_node_hours(run, count) for run, count in zip(runs, needed, strict=True)]
        hours.append(f"{np.median(spent):,.0f}" + ("" if median <= PROBES else " and more"))
    regrets = [run.regret_after(PROBES) for run in runs]
    early = [run.failed_within(run.probes_to(WITHIN[0]) or PROBES) for run in runs]
    failed = [run.failed_within(PROBES) for run in runs]
    return (
        f"{each.size}, {each.name}: `{strategy}`",
        f"{len(runs)}",
        *probes,
        *hours,
        f"{np.median(regrets):.1%}",
        f"{np.mean(early):.1f}, {np.mean(failed):.1f}",
    )


def _node_hours(run: ReplayRun, count: int | None) -> float:
    """Of the first probes; None: of all."""
    return sum(probe.node_seconds for probe in run.probes[:count]) / 3600


def _draw(each: StudyLandscape, runs: _Runs) -> str:
    name = f"search_{each.size}_{each.name}".replace(" ", "_").lower()
    most = max(_node_hours(run, None) for some in runs.values() for run in some)
    grid = np.geomspace(1.0, most, 120)
    with page.figure(name, 3) as (left, middle, right):
        for strategy, some in runs.items():
            colour = STRATEGY_COLOURS[strategy]
            _line(left, strategy, colour, regret_by_probes(some, PROBES))
            hours = regret_by_cost(some, [3600.0] * len(some), grid.tolist())
            _line(middle, strategy, colour, hours)
            failed = [[run.failed_within(n) for n in range(1, PROBES + 1)] for run in some]
            right.plot(range(1, PROBES + 1), np.mean(failed, axis=0), color=colour)
        for axes, label in ((left, "probes"), (middle, "node-hours"), (right, "probes")):
            axes.set(xlabel=f"{label}, simulated")
        for axes in (left, middle):
            axes.set(xscale="log", yscale="log")
            axes.set_yticks([0.001, 0.01, 0.1, 1], ["0.1 %", "1 %", "10 %", "100 %"])
        left.set(ylabel="regret (median, quartiles)")
        right.set(ylabel="failed so far (mean)", ylim=(0, PROBES))
        left.legend(fontsize=7)
    count = len(runs["guided"])
    return page.shown(
        name,
        f"175B over the {each.name} space ({count} seeds): regret of the layout that leads against "
        "probes and against node-hours, and the probes that had failed.",
    )


def _line(axes: Any, name: str, colour: str, curve: AnytimeCurve) -> None:
    low, median, high = (
        np.maximum(values, LEAST_SHOWN) for values in (curve.low, curve.median, curve.high)
    )
    axes.step(curve.spent, median, where="post", color=colour, label=name, linewidth=1.4)
    axes.fill_between(curve.spent, low, high, step="post", color=colour, alpha=0.15, linewidth=0)


def importance(effort: StudyEffort, _tables: Path | None) -> page.StudyPart:
    """How much of the spread of speeds each knob explains, by model."""
    shares = {}
    for size in MODELS:
        each = landscape(size, WIDE, effort)
        pairs = zip(each.layouts, each.rates.tolist(), strict=True)
        fitting = {layout: speed for layout, speed in pairs if not np.isnan(speed)}
        shares[size] = importances(CellLayouts(each.cell()), fitting, seed=0)
    names = [name for name in KNOBS if any(name in each for each in shares.values())]
    names.sort(key=lambda name: -max(each.get(name, 0.0) for each in shares.values()))
    rows = [
        (KNOBS[name].word, *(f"{each[name]:.0%}" if name in each else "-" for each in shares.values()))
        for name in names
    ]  # fmt: skip
    with page.figure("importance", height=3.2) as axes:
        for at, (size, own) in enumerate(shares.items()):
            places = np.arange(len(names)) + 0.27 * (at - 1)
            axes.barh(
                places, [100 * own.get(n, 0.0) for n in names], height=0.25, color=page.COLOURS[at],
                label=size,
            )  # fmt: skip
        axes.set_yticks(range(len(names)), [KNOBS[name].word for name in names])
        axes.invert_yaxis()
        axes.set(xlabel="% of the spread of speeds, simulated")
        axes.legend()
    most = {size: max(each, key=lambda name: each[name]) for size, each in shares.items()}
    words = ", ".join(f"{KNOBS[name].word} for {size}" for size, name in most.items())
    sentence = f"Importance of each knob in the wider space: the most important is {words}."
    return page.StudyPart(
        title="Importance of each knob",
        blocks=(
            f"Share of the spread of simulated speeds that a knob explains by itself: {METHOD}, over "
            f"the {MOST_LAYOUTS:,} fastest layouts of the wider space that fit. Knobs that follow "
            "from the others at the fixed batch (dp, micro-batches a step) are left out.",
            page.rows_table(("knob", *shares), rows),
            page.shown("importance", sentence),
        ),
    )
