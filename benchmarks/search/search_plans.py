"""What plans state by the priors alone: the chance of each layout to be the best of its cell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.results_file import table
from benchmarks.search.search_record import Part, Promise
from benchmarks.search.search_runs import SIMULATED, searchable, simulated_cells
from layout_tuner.predictions.belief.best_chances import (
    ENOUGH,
    MAX_COMPARED,
    BestChances,
    LayoutDraws,
)
from layout_tuner.predictions.belief.corrected_step_time import TimeCalibration
from layout_tuner.predictions.belief.peaks.trainer_hypotheses import TrainerMemory
from layout_tuner.search_spaces.tables import MeasurementTable, TableCell
from layout_tuner.tuner.replay.cell_layouts import CellLayouts

Floats = NDArray[np.float64]

LEAST_STATEMENTS: Final = 50
LANDSCAPES: Final = 12


def plans(tables: Mapping[str, MeasurementTable]) -> Part:
    """The chances of the cells that can be searched, in tenths."""
    statements: list[tuple[Floats, NDArray[np.bool_]]] = []
    found: list[tuple[bool, int]] = []
    recorded = searchable(cell for each in tables.values() for cell in each.cells)
    simulated = (cell for name in SIMULATED.values() for cell in simulated_cells(name, LANDSCAPES))
    for cell in chain(recorded, simulated):
        chances, step_s = _chances(cell, CellLayouts(cell))
        statements.append((chances.best, step_s == step_s.min()))
        needed = int(np.searchsorted(chances.near, ENOUGH)) + 1
        probed = step_s[chances.order[:needed]]
        found.append((bool(probed.min() <= step_s.min() / 0.95), needed))
    stated, best = (np.concatenate(each) for each in zip(*statements, strict=True))
    tenths = list(_tenths(stated, best))
    near, needed_of_each = zip(*found, strict=True)
    text = (
        f"Cold; chances to be the best, in all cells:\n\n"
        f"{table(('stated', 'statements', 'mean stated', 'were the best'), [t.row for t in tenths])}"
        f"\n\nThe probes that plans name for a 90 % chance of a layout within 5 % of the best: "
        f"{np.mean(needed_of_each):.1f} at the mean of {len(found)} cells; {np.mean(near):.0%} held one."
    )
    return Part(title="plans", text=text, promises=(_worst(tenths),))


def _step_s(layouts: CellLayouts) -> Floats:
    return np.array([row.step_time_s or np.inf for row in layouts.truth])


def _chances(cell: TableCell, layouts: CellLayouts) -> tuple[BestChances, Floats]:
    """The chances of a cell's layouts in the order of a plan, and their measured step times."""
    software, columns = cell.key.software, layouts.columns()
    memory = TrainerMemory.prior(cell.cluster, software=software)
    draws = LayoutDraws(
        model=cell.model,
        cluster=cell.cluster,
        software=software,
        time=TimeCalibration(),
        memory=memory,
    )
    mean, _ = draws.time.predict(columns, cell.model, cell.cluster, software=software)
    capacity = float(cell.cluster.device_memory_bytes)
    fits = memory.fits(columns, cell.model, capacity)
    order = np.argsort(mean - np.log(np.maximum(fits, 1e-300)), kind="stable")[:MAX_COMPARED]
    chances = draws.chances(columns.rows(order), np.zeros(len(order)), capacity)
    return chances, _step_s(layouts)[order]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tenth:
    """The statements of one tenth."""

    place: int
    stated: Floats
    best: NDArray[np.bool_]

    @property
    def off(self) -> float:
        """By how much the frequency differs from the mean statement."""
        return float(abs(self.best.mean() - self.stated.mean()))

    @property
    def row(self) -> tuple[str, ...]:
        """A row of the table."""
        return (
            f"{self.place / 10:.0%} to {(self.place + 1) / 10:.0%}",
            f"{len(self.stated)}",
            f"{self.stated.mean():.1%}",
            f"{self.best.mean():.1%}",
        )


def _tenths(stated: Floats, best: NDArray[np.bool_]) -> Iterator[Tenth]:
    places = np.minimum((stated * 10).astype(int), 9)
    for place in np.unique(places).tolist():
        rows = places == place
        yield Tenth(place=place, stated=stated[rows], best=best[rows])


def _worst(tenths: Sequence[Tenth]) -> Promise:
    often = [tenth.off for tenth in tenths if len(tenth.stated) >= LEAST_STATEMENTS]
    return Promise(
        what="plans: chance to be the best less how often it was, worst tenth",
        asked="10 points",
        measured=max(often),
        most=0.1,
        shown="{:.1%}",
    )
