"""What plans state, by the priors alone: intervals of step times, and chances to be the best."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.results_file import table
from benchmarks.search.search_recipes import MEGATRON, RECIPES, read_recipes
from benchmarks.search.search_record import Part, Promise
from benchmarks.search.search_runs import SIMULATED, simulated_cells
from layout_tuner.predictions.belief.best_chances import MAX_COMPARED, BestChances, LayoutDraws
from layout_tuner.predictions.belief.corrected_step_time import TimeCalibration, known_share
from layout_tuner.predictions.belief.peaks.trainer_hypotheses import TrainerMemory
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.tables import MeasurementTable, TableCell
from layout_tuner.tuner.replay.cell_layouts import CellLayouts
from layout_tuner.units import NORMAL_95

Floats = NDArray[np.float64]

NEAR_BEST: Final = 1.5
"""Layouts that take at most so many times as long as the best of their cell count."""
LARGE_GROUP: Final = 100
LEAST_STATEMENTS: Final = 50
LANDSCAPES: Final = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanIntervals:
    """Errors of some predicted steps beside what was stated."""

    off: Floats
    """Logarithms of measured over predicted seconds."""
    log_sd: Floats
    """The stated standard deviations of these."""
    known: bool
    """Whether errors of this trainer on this device are known."""

    @property
    def held(self) -> NDArray[np.bool_]:
        """Which 95 % intervals hold the measurement."""
        return np.asarray(np.abs(self.off) <= NORMAL_95 * self.log_sd)

    @property
    def width(self) -> float:
        """Median of upper over lower end."""
        return float(np.exp(2.0 * NORMAL_95 * np.median(self.log_sd)))


def plans(tables: Mapping[str, MeasurementTable], folder: Path | None) -> Part:
    """The intervals by trainer, and the chances in tenths."""
    groups: dict[str, list[PlanIntervals]] = {}
    statements: list[tuple[Floats, NDArray[np.bool_]]] = []
    found: list[tuple[bool, int]] = []
    simulated = [cell for name in SIMULATED.values() for cell in simulated_cells(name, LANDSCAPES)]
    for cell in [*(cell for each in tables.values() for cell in each.cells), *simulated]:
        if not cell.num_completed:
            continue
        layouts = CellLayouts(cell)
        if not cell.key.source.startswith("simulated"):
            trainer = MEGATRON if "vTrain" in cell.key.software else cell.key.software
            groups.setdefault(trainer, []).append(_intervals(cell, layouts))
        chances, step_s = _chances(cell, layouts)
        statements.append((chances.best, step_s == step_s.min()))
        probed = step_s[np.argsort(-chances.best, kind="stable")][: chances.probes_needed]
        found.append((bool(probed.min() <= step_s.min() / 0.95), chances.probes_needed))
    if folder is not None and (folder / RECIPES).exists():
        groups.setdefault(MEGATRON, []).extend(_of_recipes(folder / RECIPES))
    stated, best = (np.concatenate(each) for each in zip(*statements, strict=True))
    tenths = list(_tenths(stated, best))
    near, needed = zip(*found, strict=True)
    text = (
        f"Cold, layouts within {NEAR_BEST} times the best of their cell, and recipes.\n\n"
        f"{_groups_table(groups)}\n\nChances to be the best, in all cells:\n\n"
        f"{table(('stated', 'statements', 'mean stated', 'were the best'), [t.row for t in tenths])}"
        f"\n\nThe probes that plans name for a 90 % chance of a layout within 5 % of the best: "
        f"{np.mean(needed):.1f} at the mean of {len(found)} cells; {np.mean(near):.0%} held one."
    )
    return Part(title="plans", text=text, promises=(*_held_promises(groups), _worst(tenths)))


def _intervals(cell: TableCell, layouts: CellLayouts) -> PlanIntervals:
    columns, software = layouts.columns(), cell.key.software
    mean, deviation = TimeCalibration().predict(
        columns, cell.model, cell.cluster, software=software
    )
    step_s = _step_s(layouts)
    near = step_s <= NEAR_BEST * step_s.min()
    return PlanIntervals(
        off=np.log(step_s[near]) - mean[near],
        log_sd=deviation[near],
        known=_is_known(software, cell.cluster),
    )


def _of_recipes(path: Path) -> Iterator[PlanIntervals]:
    for recipe in read_recipes(path):
        mean, deviation = TimeCalibration().predict(
            recipe.layout, recipe.model, recipe.cluster, software=MEGATRON
        )
        off = np.log(recipe.step_time_s) - mean
        known = _is_known(MEGATRON, recipe.cluster)
        yield PlanIntervals(off=off, log_sd=deviation, known=known)


def _is_known(software: str, cluster: Cluster) -> bool:
    return known_share(software, cluster) < 1.0


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


def _groups_table(groups: Mapping[str, Sequence[PlanIntervals]]) -> str:
    rows = []
    for trainer, parts in groups.items():
        whole = _joined(parts)
        rows.append(
            (
                trainer or "the embedded trainer",
                "yes" if whole.known else "no",
                f"{whole.off.size}",
                f"{whole.held.mean():.1%}",
                f"{whole.width:.2f}",
            )
        )
    return table(("trainer", "errors known", "layouts", "held", "median width"), rows)


def _joined(parts: Sequence[PlanIntervals]) -> PlanIntervals:
    return PlanIntervals(
        off=np.concatenate([part.off for part in parts]),
        log_sd=np.concatenate([part.log_sd for part in parts]),
        known=all(part.known for part in parts),
    )


def _held_promises(groups: Mapping[str, Sequence[PlanIntervals]]) -> Iterator[Promise]:
    whole = {trainer: _joined(parts) for trainer, parts in groups.items()}
    small = {name: each for name, each in whole.items() if each.off.size < LARGE_GROUP}
    for trainer, each in whole.items():
        if trainer not in small:
            yield _held(f"{trainer}, {each.off.size} layouts", each, 0.9, 0.98)
    if small:
        pooled = _joined(list(small.values()))
        yield _held(f"smaller groups together, {pooled.off.size} layouts", pooled, 0.88, 1.0)
    known = [each for each in whole.values() if each.known]
    if known:
        yield Promise(
            what="plans: median width of intervals, trainer and device known",
            asked="1.8",
            measured=_joined(known).width,
            most=1.8,
            shown="{:.2f}",
        )


def _held(what: str, each: PlanIntervals, least: float, most: float) -> Promise:
    return Promise(
        what=f"plans: 95 % intervals that hold the measurement, {what}",
        asked=f"{least:.0%} to {most:.0%}",
        measured=float(each.held.mean()),
        least=least,
        most=most,
        shown="{:.1%}",
    )


def _worst(tenths: Sequence[Tenth]) -> Promise:
    often = [tenth.off for tenth in tenths if len(tenth.stated) >= LEAST_STATEMENTS]
    return Promise(
        what="plans: chance to be the best less how often it was, worst tenth",
        asked="10 points",
        measured=max(often),
        most=0.1,
        shown="{:.1%}",
    )
