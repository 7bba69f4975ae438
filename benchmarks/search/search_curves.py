"""Regret of many replayed searches over what they spent: the curves of the plots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from layout_tuner.tuner.replay.run import ReplayRun


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
    return np.array([run.regret_after(count) for count in range(1, num_probes + 1)])


def _curve(spent: NDArray[np.float64], regrets: NDArray[np.float64]) -> AnytimeCurve:
    low, median, high = np.percentile(regrets, (25, 50, 75), axis=0)
    return AnytimeCurve(spent=spent, low=low, median=median, high=high)
