"""A simulated campaign as a measurement table: nobody has measured it, and its source says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from search_spaces.columns import LayoutColumns
from search_spaces.layout import Layout
from search_spaces.tables import CellKey, MeasurementTable, TableCell, TableRow
from tuner.simulation.machine import Machine
from tuner.simulation.memory import peak_memory_bytes
from tuner.simulation.scenarios import Scenario, scenario
from tuner.simulation.steps import step_times_s
from tuner.simulation.stress import StressedEstimates

Floats = NDArray[np.float64]

SIMULATED: Final = "simulated"
"""How the source of a table begins that nobody has measured."""


def simulated_table(described: Scenario | str, seed: int) -> MeasurementTable:
    """Every layout of a scenario on the machine that the seed draws, as if it had been measured.

    Args:
        described: the scenario, or its name.
        seed: of the machine and of the noise; equal seeds give equal tables.

    Raises:
        ScenarioUnknownError: there is no scenario of that name.
    """
    chosen = scenario(described) if isinstance(described, str) else described
    legal = chosen.legal_set()
    layouts = [legal.layout(position) for position in range(len(legal))]
    peaks, steps = _truth(chosen, layouts, legal.columns(), seed)
    rows = tuple(
        _row(chosen, layout, peak, step_s, number=number)
        for number, (layout, peak, step_s) in enumerate(zip(layouts, peaks, steps, strict=True), 1)
    )
    first = layouts[0]
    key = CellKey(
        source=f"{SIMULATED} {chosen.name}, seed {seed}",
        cluster=chosen.cluster.name,
        model=chosen.model.name,
        seq_length=chosen.model.seq_length,
        num_devices=first.num_devices,
        global_batch_size=first.global_batch_size,
    )
    cluster = replace(chosen.cluster, num_nodes=first.num_nodes)
    cell = TableCell(key=key, model=chosen.model, cluster=cluster, rows=rows)
    return MeasurementTable(cells=(cell,), notes=(f"{SIMULATED}: nobody has measured these rows",))


def _truth(
    chosen: Scenario, layouts: Sequence[Layout], columns: LayoutColumns, seed: int
) -> tuple[Floats, Floats]:
    """Peak memory and step time of each layout; of one that does not fit the time means nothing."""
    machine_rng, noise_rng = (np.random.default_rng([seed, part]) for part in range(2))
    if chosen.truth == "stress":
        stressed = StressedEstimates.draw(columns, chosen.model, chosen.cluster, machine_rng)
        peaks, steps, noise = stressed.peaks, stressed.step_times_s, stressed.noise
    else:
        machine = Machine.draw(chosen.cluster, layouts[0].num_devices, machine_rng)
        peaks = np.array(
            [peak_memory_bytes(layout, chosen.model, machine, seed=seed) for layout in layouts]
        )
        fitting = np.flatnonzero(peaks <= chosen.cluster.device_memory_bytes).tolist()
        steps, noise = np.full(len(layouts), np.nan), machine.noise
        steps[fitting] = step_times_s([layouts[i] for i in fitting], chosen.model, machine)
    return peaks, steps * np.exp(noise * noise_rng.standard_normal(len(steps)))


def _row(
    chosen: Scenario, layout: Layout, peak_bytes: float, step_s: float, *, number: int
) -> TableRow:
    if peak_bytes > chosen.cluster.device_memory_bytes:
        return TableRow(layout=layout, status="out_of_memory", number=number)
    tokens = layout.global_batch_size * chosen.model.seq_length
    return TableRow(
        layout=layout,
        status="completed",
        tokens_per_s=float(tokens / step_s),
        step_time_s=float(step_s),
        peak_memory_bytes=round(float(peak_bytes)),
        number=number,
    )
