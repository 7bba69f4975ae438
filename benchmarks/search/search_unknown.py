"""P(fits) for a trainer that is not known: after the first outcomes of guided searches.

Nothing is chosen by these tables: the prior weights of the hypotheses are those of the known
trainers (`predictions.estimates.trainer_storage`). The other layouts of a cell are judged after the
outcomes; so is each single hypothesis, with the same outcomes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.results_file import table
from benchmarks.search.search_attainable import expected_figures
from benchmarks.search.search_cells import probes_needed
from benchmarks.search.search_record import Part, Promise
from benchmarks.search.search_runs import Effort, tasks_of
from layout_tuner.predictions.belief.known_measurements import knowledge_of
from layout_tuner.predictions.belief.peaks.trainer_hypotheses import TrainerMemory
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.tables import CellKey, MeasurementTable, TableCell, TableRow
from layout_tuner.tuner.replay.run import ReplayRun, replay_all

Floats = NDArray[np.float64]

UNKNOWN: Final = "alephalpha_a100"
SWEEP: Final = "nanotron_h100"
HIDDEN: Final = "a trainer without a name"
NUM_TOLD: Final = 5
LIKELY: Final = 0.8
UNLIKELY: Final = 0.2
MOST_GAP: Final = 0.03
"""Nats that the mixture may lose on the best hypothesis."""
MOST_REGRET: Final = 0.06
"""Mean regret of the first probe."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """P(fits) of layouts beside whether they ran, pooled over searches."""

    ran: NDArray[np.bool_]
    fits: Floats
    single: Floats
    """The same under each hypothesis alone; shape [layouts, hypotheses]."""

    def log_loss(self, fits: Floats) -> float:
        """Mean negative logarithm of the probability of each outcome, in nats."""
        chances = np.where(self.ran, fits, 1.0 - fits)
        return float(-np.log(np.maximum(chances, 1e-9)).mean())

    @property
    def base_rate_loss(self) -> float:
        """Log loss of the share that ran, given to every layout."""
        return self.log_loss(np.full(self.ran.size, self.ran.mean()))

    @property
    def best_single_loss(self) -> float:
        """The smallest log loss of one hypothesis."""
        return min(self.log_loss(fits) for fits in self.single.T)

    @property
    def false_accepts(self) -> float:
        """Share of the layouts that did not run with P(fits) above `LIKELY`."""
        return float(np.mean(self.fits[~self.ran] > LIKELY))

    @property
    def false_rejects(self) -> float:
        """Share of the layouts that ran with P(fits) below `UNLIKELY`."""
        return float(np.mean(self.fits[self.ran] < UNLIKELY))


def judge(cells: Sequence[TableCell], effort: Effort, num_told: int) -> Judged:
    """The layouts of each cell after so many outcomes of each search."""
    if not num_told:
        return _pooled([_judge(cell, cell.rows, ()) for cell in cells])
    by_key = {cell.key: cell for cell in cells}
    parts = []
    for run in _told_runs(cells, effort, num_told):
        cell = by_key[run.cell]
        asked = {probe.layout for probe in run.probes}
        told = [row for row in cell.rows if row.layout in asked]
        parts.append(_judge(cell, [row for row in cell.rows if row.layout not in asked], told))
    return _pooled(parts)


def _told_runs(cells: Sequence[TableCell], effort: Effort, num_told: int) -> list[ReplayRun]:
    tasks = tasks_of(cells, "guided", range(effort.seeds), probes=num_told, stop_within=None)
    return list(replay_all(tasks, jobs=effort.jobs))


def _judge(cell: TableCell, rows: Sequence[TableRow], told: Sequence[TableRow]) -> Judged:
    known = knowledge_of([replace(cell, rows=tuple(told))] if told else [])
    prior = TrainerMemory.prior(cell.cluster, software=cell.key.software, campaign="it")
    belief = prior.updated(known)
    columns = LayoutColumns.of_each(row.layout for row in rows)
    capacity = float(cell.cluster.device_memory_bytes)
    return Judged(
        ran=np.array([row.status == "completed" for row in rows]),
        fits=belief.fits(columns, cell.model, capacity),
        single=np.stack(
            [each.fits(columns, cell.model, capacity) for each in belief.beliefs], axis=1
        ),
    )


def _pooled(parts: Sequence[Judged]) -> Judged:
    return Judged(
        ran=np.concatenate([part.ran for part in parts]),
        fits=np.concatenate([part.fits for part in parts]),
        single=np.concatenate([part.single for part in parts]),
    )


def hidden(cells: Sequence[TableCell]) -> list[TableCell]:
    """The same cells without the name of their trainer."""
    return [replace(cell, key=_renamed(cell.key)) for cell in cells]


def _renamed(key: CellKey) -> CellKey:
    return replace(key, source=HIDDEN)


def unknown_trainer(tables: Mapping[str, MeasurementTable], effort: Effort) -> Part:
    """Both tables: one of a trainer that is not known, and one whose trainer's name is hidden."""
    rows, promises = [], []
    for name in (UNKNOWN, SWEEP):
        if name not in tables:
            continue
        cells = hidden([cell for cell in tables[name].cells if cell.num_completed])
        for num_told in (0, NUM_TOLD):
            judged = judge(cells, effort, num_told)
            rows.append(_row(name, num_told, judged))
            promises += _promises(name, num_told, judged)
    header = (
        "table",
        "outcomes told",
        "layouts",
        "log loss",
        "of the base rate",
        "best hypothesis",
        f"did not run, P(fits) > {LIKELY}",
        f"ran, P(fits) < {UNLIKELY}",
    )
    text = table(header, rows)
    if UNKNOWN in tables:
        cells = [cell for cell in tables[UNKNOWN].cells if cell.num_completed]
        told = _told_runs(cells, effort, NUM_TOLD)
        expected = expected_figures(cells, told, MOST_GAP, MOST_REGRET)
        text += f"\n\n{UNKNOWN}, beside worlds that are drawn from the belief:\n\n{expected}"
        runs = list(replay_all(tasks_of(cells, "guided", range(effort.seeds)), jobs=effort.jobs))
        promises += _search_promises(runs)
    return Part(title="unknown-trainer", text=text, promises=tuple(promises))


def _row(name: str, num_told: int, judged: Judged) -> tuple[str, ...]:
    return (
        name,
        f"{num_told}",
        f"{judged.ran.size}",
        f"{judged.log_loss(judged.fits):.3f}",
        f"{judged.base_rate_loss:.3f}",
        f"{judged.best_single_loss:.3f}",
        f"{judged.false_accepts:.1%}",
        f"{judged.false_rejects:.1%}",
    )


def _promises(name: str, num_told: int, judged: Judged) -> list[Promise]:
    after = f"{name}, unknown trainer, after {num_told} outcomes"
    if name == SWEEP:
        most = 0.01 if num_told else 0.03
        return [_share(f"{after}: ran, P(fits) < {UNLIKELY}", judged.false_rejects, most)]
    if not num_told:
        return []
    loss = judged.log_loss(judged.fits)
    return [
        Promise(
            what=f"{after}: log loss over that of the base rate",
            asked="0.5",
            measured=loss / judged.base_rate_loss,
            most=0.5,
        ),
        Promise(
            what=f"{after}: log loss less that of the best hypothesis, nats",
            asked=f"{MOST_GAP}",
            measured=loss - judged.best_single_loss,
            most=MOST_GAP,
        ),
        _share(f"{after}: out of memory, P(fits) > {LIKELY}", judged.false_accepts, 0.05),
        _share(f"{after}: ran, P(fits) < {UNLIKELY}", judged.false_rejects, 0.05),
    ]


def _search_promises(runs: Sequence[ReplayRun]) -> list[Promise]:
    probes = float(np.mean([probes_needed(run, 0.05) for run in runs]))
    first = float(np.mean([run.regret_after(1) for run in runs]))
    what = f"{UNKNOWN}, guided"
    return [
        Promise(what=f"{what}: mean probes to 5 %", asked="1.6", measured=probes, most=1.6),
        _share(f"{what}: mean regret of the first probe", first, MOST_REGRET),
    ]


def _share(what: str, measured: float, most: float) -> Promise:
    return Promise(what=what, asked=f"{most:.0%}", measured=measured, most=most, shown="{:.1%}")
