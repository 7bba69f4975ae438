"""Fits constants of a simulated machine to one cell of a measurement table.

The fit is a least-squares one on the logarithm of simulated over measured step times; the logarithm
of each constant is drawn towards its usual value (`PRIOR_LOG_SD`), since a cell does not tell all
of them apart. Nothing else than the cell's rows is looked at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
from scipy.optimize import least_squares

from layout_tuner.array_types import Floats
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.clusters.cluster_presets import CLUSTER_PRESETS
from layout_tuner.search_spaces.tables import TableCell, TableRow, read_table
from layout_tuner.workers.simulation.machine import Machine, Software
from layout_tuner.workers.simulation.steps import steps

PRIOR_LOG_SD: Final[Mapping[str, float]] = {
    "matmul_share": 0.15,
    "attention_share": 0.3,
    "stream_share": 0.3,
    "kernel_s": 0.4,
    "ramp": 0.5,
    "host_share": 0.7,
    "host_collective": 1.0,
    "host_crowding": 1.0,
    "far_share": 0.5,
    "near_share": 0.3,
}
"""Constants that a fit changes, with the spread of their logarithm beforehand."""
MEASURED_LOG_SD: Final = 0.05
_CROWDING: Final = 0.2
"""Where a fit begins, since the usual value has no logarithm."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FittedCell:
    """Constants of the machine and the software behind some tables, fitted to one cell of them."""

    title: str
    tables: tuple[str, ...]
    """Files; the cell is in the first."""
    fitted_to: tuple[str, int]
    """Model and devices of the cell; of several the first one."""
    cluster: Cluster
    software: Software
    constants: Mapping[str, float]

    @property
    def machine(self) -> Machine:
        return Machine.of(self.cluster, self.software, **self.constants)

    def cell(self, folder: Path) -> TableCell:
        """The cell that the constants were fitted to."""
        cells = read_table(folder / self.tables[0]).cells
        return next(c for c in cells if (c.key.model, c.key.num_devices) == self.fitted_to)

    def again(self, folder: Path) -> tuple[dict[str, float], Software, float]:
        """The fit, anew, without the constants that earlier ones left."""
        return fitted(self.cell(folder), replace(self.cluster, name="unfitted"), self.software)


FITTED_CELLS: Final = (
    FittedCell(
        title="nanotron on H100",
        tables=("nanotron_h100.csv",),
        fitted_to=("llama-3B", 16),
        cluster=CLUSTER_PRESETS["h100-sxm"],
        software=Software(splits_by_work=True),
        constants={
            "matmul_share": 0.5434,
            "attention_share": 0.2759,
            "stream_share": 0.7973,
            "kernel_s": 4e-6,
            "ramp": 171.1,
            "host_share": 1.647,
            "host_collective": 26.36,
            "host_crowding": 0.4762,
            "far_share": 0.9542,
            "near_share": 0.8966,
        },
    ),
    FittedCell(
        title="vTrain on A100",
        tables=("vtrain_a100_small.csv", "vtrain_a100_multi.csv"),
        fitted_to=("GPT-L24-h2048", 4),
        cluster=CLUSTER_PRESETS["a100-sxm"],
        software=Software(),
        constants={
            "matmul_share": 0.8682,
            "attention_share": 0.5357,
            "stream_share": 0.435,
            "kernel_s": 4e-6,
            "ramp": 172.9,
            "host_share": 0.8798,
            "host_collective": 36.65,
            "near_share": 0.9392,
        },
    ),
)
"""Each fitted by `python -m benchmarks.bench_simulator --tables DIR --refit`. The cells: of
nanotron the smallest that crosses nodes, of vTrain the first of those with the most rows."""


def measured_rows(cell: TableCell) -> list[TableRow]:
    """The completed rows of a cell."""
    return [row for row in cell.rows if row.step_time_s is not None]


def simulated_s(cell: TableCell, rows: Sequence[TableRow], machine: Machine) -> Floats:
    """Simulated step times of rows."""
    found = steps([row.layout for row in rows], cell.model, machine)
    return np.array([step.step_s for step in found])


def fitted(
    cell: TableCell,
    cluster: Cluster,
    software: Software,
    names: Sequence[str] = tuple(PRIOR_LOG_SD),
) -> tuple[dict[str, float], Software, float]:
    """Constants, software with or without overlap, and the mean error on the cell itself."""
    found = [
        _fit(
            cell,
            cluster,
            replace(software, overlaps_reduction=overlaps, overlaps_shards=of_shards),
            names,
        )
        for overlaps, of_shards in ((True, True), (True, False), (False, False))
    ]
    _, constants, chosen = min(found, key=lambda each: each[0])
    rows = measured_rows(cell)
    machine = Machine.of(cluster, chosen, **constants)
    measured = np.array([row.step_time_s for row in rows], dtype=np.float64)
    off = np.abs(simulated_s(cell, rows, machine) / measured - 1)
    return constants, chosen, float(off.mean())


def _fit(
    cell: TableCell, cluster: Cluster, software: Software, names: Sequence[str]
) -> tuple[float, dict[str, float], Software]:
    rows = measured_rows(cell)
    measured = np.log([row.step_time_s or np.nan for row in rows])
    usual = {"host_crowding": _CROWDING} | {
        name: value for name, value in Machine.constants(cluster).items() if value
    }

    def of(logs: Floats) -> dict[str, float]:
        return {n: usual[n] * float(np.exp(x)) for n, x in zip(names, logs, strict=True)}

    def residuals(logs: Floats) -> Floats:
        times = simulated_s(cell, rows, Machine.of(cluster, software, **of(logs)))
        priors = [x / PRIOR_LOG_SD[n] for n, x in zip(names, logs, strict=True)]
        return np.concatenate([(np.log(times) - measured) / MEASURED_LOG_SD, priors])

    ended = least_squares(
        residuals,
        np.full(len(names), 1e-3),
        loss="cauchy",
        diff_step=0.02,
        x_scale=0.2,
        max_nfev=20,
    )
    return float(ended.cost), of(ended.x), software
