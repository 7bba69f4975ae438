"""Regret against probes and against node-seconds, as drawings: medians, with quartiles shaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.search.search_curves import AnytimeCurve, regret_by_cost, regret_by_probes
from benchmarks.search.search_runs import PROBES, Landscape
from layout_tuner.tuner.replay.run import by_strategy

PLOTS: Final = Path(__file__).parents[2] / "docs" / "plots"
COLOURS: Final = {
    "guided": "#0072b2",
    "model-only": "#009e73",
    "communication": "#56b4e9",
    "deephyper": "#d55e00",
    "deephyper+memory": "#e69f00",
    "random": "#777777",
    "exhaustive": "#cc79a7",
}
LEAST_SHOWN: Final = 1e-3
"""Less regret than this is drawn as this: the axis is logarithmic."""
_COSTS: Final = np.geomspace(0.5, 300.0, 120)


def draw(landscape: Landscape, folder: Path = PLOTS) -> Path:
    """Draws a landscape's two diagrams side by side; returns the file."""
    import matplotlib as mpl

    mpl.use("svg")
    # Equal numbers give equal files: no dates, no random names.
    mpl.rcParams.update({"svg.hashsalt": landscape.name, "svg.fonttype": "none", "font.size": 9})
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True, layout="constrained")
    units = landscape.unit_costs()
    for name, runs in by_strategy(landscape.runs).items():
        colour = COLOURS.get(name, "black")
        _line(left, name, colour, regret_by_probes(runs, PROBES))
        costed = [run for run in runs if str(run.cell) in units]
        each = [units[str(run.cell)] for run in costed]
        _line(right, name, colour, regret_by_cost(costed, each, _COSTS.tolist()))
    left.set(xscale="log", xlabel="probes", ylabel="regret (median, quartiles)", yscale="log")
    right.set(xscale="log", xlabel="node-seconds, in probes of the best layout")
    for axes in (left, right):
        axes.set_yticks(
            [0.001, 0.01, 0.02, 0.05, 0.1, 1], ["0", "1 %", "2 %", "5 %", "10 %", "100 %"]
        )
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    left.set_xticks([1, 2, 5, 10, 20, 60], ["1", "2", "5", "10", "20", "60"])
    right.set_xticks([1, 3, 10, 30, 100, 300], ["1", "3", "10", "30", "100", "300"])
    left.legend(frameon=False)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"search_{landscape.name}.svg"
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path


def _line(axes: Any, name: str, colour: str, curve: AnytimeCurve) -> None:
    low, median, high = (
        np.maximum(values, LEAST_SHOWN) for values in (curve.low, curve.median, curve.high)
    )
    axes.step(curve.spent, median, where="post", color=colour, label=name, linewidth=1.6)
    axes.fill_between(curve.spent, low, high, step="post", color=colour, alpha=0.15, linewidth=0)
