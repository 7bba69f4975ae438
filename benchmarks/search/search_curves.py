"""What many replayed searches come to: probes to a target, failures, regret, anytime curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tuner.replay.run import ReplayRun

TARGETS: Final = (0.05, 0.02, 0.0)
"""Shares of the best throughput within which a layout counts as found."""
CHECKPOINTS: Final = (1, 3, 5, 10, 20)
"""Probes after which the regret is reported."""


def summarize(runs: Sequence[ReplayRun]) -> dict[str, Any]:
    """The report of one strategy over some runs, as plain JSON values.

    - probes_to: by target. A run that fails to get there counts one probe more than it was allowed; reached is
      the share of runs that got there.
    - failed_probes: mean number a run that did not complete, until it found the best or gave up.
    - failed_share_to: by target, the share of probes that did not complete among all those up to
      the first within it (or all of a run that never gets there).
    - regret_after, mean_regret_after: median and mean over runs by number of probes.
    - seconds_per_probe: seconds of search a probe, mean.
    """
    num_probes = sum(len(run.probes) for run in runs)
    after = {n: [run.regret_after(n) for run in runs] for n in CHECKPOINTS}
    return {
        "probes_to": {_name(target): _probes_to(runs, target) for target in TARGETS},
        "failed_probes": float(np.mean([run.failed_within(len(run.probes)) for run in runs])),
        "failed_share_to": {_name(target): _failed_share(runs, target) for target in TARGETS},
        "regret_after": {str(n): float(np.median(regrets)) for n, regrets in after.items()},
        "mean_regret_after": {str(n): float(np.mean(regrets)) for n, regrets in after.items()},
        "seconds_per_probe": sum(run.search_s for run in runs) / num_probes,
        "num_runs": len(runs),
    }


def _probes_to(runs: Sequence[ReplayRun], target: float) -> dict[str, float]:
    counts = [run.probes_to(target) for run in runs]
    needed = [run.num_probes + 1 if n is None else n for run, n in zip(runs, counts, strict=True)]
    low, median, high = np.percentile(needed, (25, 50, 75))
    return {
        "median": float(median),
        "mean": float(np.mean(needed)),
        "q25": float(low),
        "q75": float(high),
        "reached": sum(count is not None for count in counts) / len(runs),
    }


def _failed_share(runs: Sequence[ReplayRun], target: float) -> float:
    ends = [run.probes_to(target) or len(run.probes) for run in runs]
    failed = sum(run.failed_within(end) for run, end in zip(runs, ends, strict=True))
    return failed / sum(ends)


def _name(target: float) -> str:
    return f"{target:g}"


@dataclass(frozen=True, kw_only=True, slots=True)
class AnytimeCurve:
    """Regret of the best so far, over what was spent; quartiles over runs."""

    spent: NDArray[np.float64]
    """Probes, or node-seconds as multiples of the cell's (see `regret_by_cost`)."""
    low: NDArray[np.float64]
    median: NDArray[np.float64]
    high: NDArray[np.float64]


def regret_by_probes(runs: Sequence[ReplayRun], num_probes: int) -> AnytimeCurve:
    """Regret after each number of probes from 1 on."""
    regrets = np.array([_best_so_far(run, num_probes) for run in runs])
    return _curve(np.arange(1.0, num_probes + 1), regrets)


def regret_by_cost(
    runs: Sequence[ReplayRun], units: Sequence[float], grid: Sequence[float]
) -> AnytimeCurve:
    """Regret once so many node-seconds of probes have been spent.

    Args:
        runs: over any cells.
        units: by run, the node-seconds that count as 1, so that cells of eight and of 256 devices
            can share an axis: the cost of a probe of the cell's best layout.
        grid: multiples of the unit at which to look.
    """
    regrets = np.empty((len(runs), len(grid)))
    for place, (run, unit) in enumerate(zip(runs, units, strict=True)):
        spent = np.cumsum([probe.node_seconds for probe in run.probes]) / unit
        best = np.concatenate([[1.0], _best_so_far(run, len(run.probes))])
        regrets[place] = best[np.searchsorted(spent, grid, side="right")]
    return _curve(np.asarray(grid, dtype=np.float64), regrets)


def _best_so_far(run: ReplayRun, num_probes: int) -> NDArray[np.float64]:
    """By number of probes from 1 on; the last stands for what the cell had no layouts for."""
    regrets = np.ones(num_probes)
    own = [1.0 if probe.regret is None else probe.regret for probe in run.probes[:num_probes]]
    regrets[: len(own)] = np.minimum.accumulate(own)
    regrets[len(own) :] = regrets[len(own) - 1] if own else 1.0
    return regrets


def _curve(spent: NDArray[np.float64], regrets: NDArray[np.float64]) -> AnytimeCurve:
    low, median, high = np.percentile(regrets, (25, 50, 75), axis=0)
    return AnytimeCurve(spent=spent, low=low, median=median, high=high)
