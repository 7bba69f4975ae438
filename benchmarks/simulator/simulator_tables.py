"""The simulator against measurement tables: order, first choice and error in each cell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.search.search_recipes import Recipe, read_recipes
from benchmarks.simulator.simulator_fit import FittedCell, measured_rows, simulated_s
from benchmarks.tables import mixture_recipes
from benchmarks.tables.judged_tables import cells_by_memory
from layout_tuner.array_types import Floats
from layout_tuner.search_spaces.clusters.cluster_presets import CLUSTER_PRESETS
from layout_tuner.search_spaces.tables import TableCell, read_table
from layout_tuner.workers.simulation.machine import Machine, Software
from layout_tuner.workers.simulation.steps import steps

APART: Final = 1.05
"""Pairs of layouts count whose measured step times differ by more."""
LEAST_ROWS: Final = 3
MPT: Final = "mpt_fsdp_a100.csv"
ALEPH: Final = "alephalpha_a100.csv"
OURS: Final = Path(__file__).parents[1] / "data" / "tiny_local_cpu.csv"


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgedCell:
    """One cell."""

    cell: TableCell
    is_fitted: bool
    correlation: float
    """Pairs in the right order less those in the wrong one, as a share of the pairs that count."""
    first_loss: float
    """Measured loss of the layout that the simulator puts first."""
    errors: Floats
    """Simulated over measured step time, less 1, of each row."""


def order(simulated: Floats, measured: Floats) -> float:
    """The rank correlation over pairs that are `APART`; NaN: there are none."""
    first, second = np.triu_indices(len(measured), 1)
    ratio = np.log(measured[first] / measured[second])
    apart = np.abs(ratio) > np.log(APART)
    signs = np.sign(ratio) * np.sign(np.log(simulated[first] / simulated[second]))
    return float(signs[apart].mean()) if apart.any() else float("nan")


def judge_table(folder: Path, calibration: FittedCell) -> list[JudgedCell]:
    """Every cell of the tables that one calibration stands for."""
    found = []
    fitted = calibration.cell(folder)
    for name in calibration.tables:
        for cell in read_table(folder / name).cells:
            if len(measured_rows(cell)) >= LEAST_ROWS:
                is_fitted = cell.key == fitted.key
                found.append(judge_cell(cell, calibration.machine, is_fitted=is_fitted))
    return found


def judge_cell(cell: TableCell, machine: Machine, *, is_fitted: bool = False) -> JudgedCell:
    rows = measured_rows(cell)
    measured = np.array([row.step_time_s for row in rows], dtype=np.float64)
    simulated = simulated_s(cell, rows, machine)
    return JudgedCell(
        cell=cell,
        is_fitted=is_fitted,
        correlation=order(simulated, measured),
        first_loss=float(1 - measured.min() / measured[simulated.argmin()]),
        errors=simulated / measured - 1,
    )


def summary(judged: Sequence[JudgedCell]) -> tuple[float, float, int, int]:
    """Of cells that were not fitted: median correlation, worst loss, good first choices, cells."""
    others = [each for each in judged if not each.is_fitted and not np.isnan(each.correlation)]
    losses = [each.first_loss for each in others]
    good = sum(loss <= 0.1 for loss in losses)
    return float(np.median([e.correlation for e in others])), max(losses), good, len(others)


def cell_rows(judged: Sequence[JudgedCell]) -> list[tuple[str, ...]]:
    """Rows of a table about cells."""
    return [
        (
            f"{each.cell.key.model}, {each.cell.key.num_devices} devices"
            + (" (fitted to)" if each.is_fitted else ""),
            f"{len(each.errors)}",
            f"{each.correlation:.2f}",
            f"{each.first_loss:.0%}",
            f"{np.abs(each.errors).mean():.0%}",
            f"{np.median(each.errors):+.0%}",
            f"{np.mean(each.errors < -0.6):.0%}",
        )
        for each in judged
    ]


def recipe_errors(recipes: Sequence[Recipe]) -> Floats:
    """Simulated over published step time, less 1, with the presets' constants."""
    found = []
    for recipe in recipes:
        machine = Machine.of(recipe.cluster)
        step = steps([recipe.layout], recipe.model, machine)[0]
        found.append(step.step_s / recipe.step_time_s - 1)
    return np.array(found)


def other_tables(folder: Path) -> list[tuple[str, ...]]:
    """Tables that nothing was fitted to: name, rows, mean error, median signed error, order."""
    found = []
    path = folder / "published_recipes.csv"
    every = read_recipes(path)
    for device, name in (("a100-sxm", "recipes on A100"), ("frontier", "recipes on Frontier")):
        chosen = [each for each in every if each.cluster.name == device]
        found.append(_row(f"{path.name}, {name}", recipe_errors(chosen), float("nan")))
    mixtures = mixture_recipes.read_recipes(folder / mixture_recipes.RECIPES)
    errors = recipe_errors(mixtures)
    found.append(_row(mixture_recipes.RECIPES, errors, float("nan")))
    cells = cells_by_memory((folder / MPT).read_text())
    judged = [judge_cell(cell, Machine.of(cell.cluster)) for cell in cells]
    found.append(_row(MPT, np.concatenate([each.errors for each in judged]), float("nan")))
    for each in read_table(folder / ALEPH).cells:
        one = judge_cell(each, Machine.of(CLUSTER_PRESETS["a100-sxm"]))
        found.append(_row(f"{ALEPH}, {each.key.model}", one.errors, one.correlation))
    [ours] = read_table(OURS).cells
    cluster = replace(CLUSTER_PRESETS["a100-sxm"], name="local-cpu", **_CPU)
    one = judge_cell(ours, Machine.of(cluster, Software(step_s=2e-3)))
    found.append(_row("our own probes of `tiny` on two CPU cores", one.errors, one.correlation))
    return found


_CPU: Final = {
    "device": "CPU core",
    "devices_per_node": 2,
    "peak_flops_per_s": {"fp32": 178e9},
    "memory_bandwidth_bytes_per_s": 10e9,
    "intra_node_bandwidth_bytes_per_s": {2: 2e9},
    "inter_node_bandwidth_bytes_per_s": 1e9,
}
"""Two cores as the preset local-cpu describes them; the peak is a product's in docs/explanation."""


def _row(name: str, errors: Floats, correlation: float) -> tuple[str, ...]:
    order_of = "" if np.isnan(correlation) else f"{correlation:.2f}"
    mean, median = float(np.abs(errors).mean()), float(np.median(errors))
    return name, f"{len(errors)}", f"{mean:.0%}", f"{median:+.0%}", order_of
