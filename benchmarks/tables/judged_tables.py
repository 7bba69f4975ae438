"""Cold estimates beside the rows of measurement tables: errors, order, intervals, first choices.

Nothing that a table measures is known to its estimates: only layout, model, cluster and trainer.
Rows that state in the column `lacks` what the estimates cannot know of them are judged apart.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy.stats import kendalltau

from benchmarks import bench_memory
from benchmarks.search import search_recipes
from benchmarks.search.search_recipes import Recipe
from benchmarks.tables import described_rows, mixture_recipes
from layout_tuner.predictions.belief.corrected_step_time import TimeCalibration, known_share
from layout_tuner.predictions.belief.peaks.trainer_hypotheses import TrainerMemory, quantiles
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.layouts.narrow_formats import NARROW
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.search_spaces.tables import TableCell, TableInvalidError, TableRow, read_table
from layout_tuner.units import GIB, NORMAL_95

Floats = NDArray[np.float64]

LACKS: Final = "lacks"
"""The column that names what the estimates cannot know of a row."""
NEAR_BEST: Final = 1.5
"""A row is near the best if it takes at most so many times as long as the fastest of its cell."""
BLOCKS: Final = "recipe_precision"
"""The column with the precision of a recipe, where `precision` says fp8 of all narrow ones."""
NEAR: Final = "near_best"
NEWEST: Final = "newest"
"""Columns that are computed, "1" or "0": near the best of the cell; the newest release of a model
on a machine."""
LAST_STAGE: Final = "last_rank_peak_allocated_bytes"
"""A column with the peak of the last stage, in place of the fullest device's."""
FIRST_CHOICE: Final = 0.05
"""A choice is good that loses at most this share of the best throughput."""
LEAST_LAYOUTS: Final = 5
"""Measured layouts of a cell in which choices are counted."""
LEAST_ORDERED: Final = 3
"""Measured rows of a cell in which the order is judged."""
V_NAMES: Final = {"zbv": "zbv", "zbv-formatted": "zbv", "v-half": "v_half", "v-min": "v_min"}
"""V-shaped schedules by their names in Primus."""
PEAKS: Final = "frontier_175b_memory.csv"
_PEAKS: Final = ("low_peak_bytes", "expected_peak_bytes", "high_peak_bytes")


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgedRow:
    """What was measured and what was predicted of one row."""

    cell: str
    """Rows of one cell compare with each other."""
    layout: str
    """Its key; several rows of a cell may have one layout."""
    columns: Mapping[str, str]
    """The text of the row by column, and the computed columns."""
    step_time_s: float | None = None
    """Measured; None: it did not run, or was not timed."""
    log_s: float = 0.0
    """Mean of the logarithm of the predicted seconds."""
    log_sd: float = 1.0
    share: float = 1.0
    """The share of the prior's spread that `log_sd` is."""
    peak_bytes: float | None = None
    """Measured."""
    low_peak_bytes: float = 0.0
    expected_peak_bytes: float = 1.0
    """Predicted, the median; before and after it the ends of the 80 % interval."""
    high_peak_bytes: float = 1.0
    fits: float = 1.0
    """Predicted probability of fitting."""

    @property
    def is_described(self) -> bool:
        """Whether the estimates can know all that the row says."""
        return not self.columns.get(LACKS)

    @property
    def time_error(self) -> float:
        """Predicted over measured seconds, less 1."""
        assert self.step_time_s is not None
        return float(np.exp(self.log_s)) / self.step_time_s - 1.0

    @property
    def peak_error(self) -> float:
        """Predicted over measured peak, less 1."""
        assert self.peak_bytes is not None
        return self.expected_peak_bytes / self.peak_bytes - 1.0

    @property
    def time_is_held(self) -> bool:
        """Whether the 95 % interval of the step time holds the measured one."""
        assert self.step_time_s is not None
        return bool(abs(np.log(self.step_time_s) - self.log_s) <= NORMAL_95 * self.log_sd)

    @property
    def least_share(self) -> float:
        """The share of the prior's spread with which the interval just holds the step time."""
        assert self.step_time_s is not None
        off = abs(np.log(self.step_time_s) - self.log_s)
        return float(off * self.share / (NORMAL_95 * self.log_sd))

    @property
    def peak_is_held(self) -> bool:
        """Whether the 80 % interval of the peak holds the measured one."""
        assert self.peak_bytes is not None
        return self.low_peak_bytes <= self.peak_bytes <= self.high_peak_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class RowFigures:
    """What some rows show; None where no row has the measurement."""

    rows: int
    """Rows with a step time."""
    error: float | None = None
    """Mean size of the relative error of the step time."""
    signed: float | None = None
    """Its mean with the sign."""
    tau: float | None = None
    """Mean over cells of Kendall's tau of predicted and measured step times."""
    held: float | None = None
    """Share of the 95 % intervals that hold the step time."""
    width: float | None = None
    """Median of upper over lower end."""
    peaks: int = 0
    """Rows with a peak."""
    peak_error: float | None = None
    peak_signed: float | None = None
    peak_gib: float | None = None
    """Mean size of the error in GiB."""
    peaks_held: float | None = None
    """Share of the 80 % intervals that hold the peak."""

    @classmethod
    def of(cls, rows: Sequence[JudgedRow]) -> RowFigures:
        """The figures of some rows, of one table or of several."""
        timed = [row for row in rows if row.step_time_s is not None]
        peaks = [row for row in rows if row.peak_bytes is not None]
        found: dict[str, Any] = {"rows": len(timed), "peaks": len(peaks)}
        if timed:
            errors = np.array([row.time_error for row in timed])
            spreads = np.array([row.log_sd for row in timed])
            found |= {
                "error": float(np.abs(errors).mean()),
                "signed": float(errors.mean()),
                "tau": _mean_tau(timed),
                "held": float(np.mean([row.time_is_held for row in timed])),
                "width": float(np.exp(2.0 * NORMAL_95 * np.median(spreads))),
            }
        if peaks:
            errors = np.array([row.peak_error for row in peaks])
            measured = np.array([row.peak_bytes for row in peaks], dtype=float)
            found |= {
                "peak_error": float(np.abs(errors).mean()),
                "peak_signed": float(errors.mean()),
                "peak_gib": float(np.abs(errors * measured).mean() / GIB),
                "peaks_held": float(np.mean([row.peak_is_held for row in peaks])),
            }
        return cls(**found)


def _mean_tau(rows: Sequence[JudgedRow]) -> float | None:
    taus = []
    for own in _by_cell(rows).values():
        if len(own) >= LEAST_ORDERED:
            pairs = zip(*((row.log_s, row.step_time_s) for row in own), strict=True)
            taus.append(float(kendalltau(*pairs).statistic))
    known = [tau for tau in taus if np.isfinite(tau)]
    return float(np.mean(known)) if known else None


def _by_cell(rows: Iterable[JudgedRow]) -> dict[str, list[JudgedRow]]:
    cells: dict[str, list[JudgedRow]] = {}
    for row in rows:
        cells.setdefault(row.cell, []).append(row)
    return cells


@dataclass(frozen=True, kw_only=True, slots=True)
class ChoiceScore:
    """How often a good layout is predicted first, or among the first three."""

    cells: int = 0
    first: int = 0
    first_three: int = 0

    def __add__(self, other: ChoiceScore) -> ChoiceScore:
        sums = {name: value + asdict(other)[name] for name, value in asdict(self).items()}
        return ChoiceScore(**sums)

    @classmethod
    def of(cls, rows: Iterable[JudgedRow]) -> ChoiceScore:
        """The score of the described rows of a table, in its cells with enough layouts.

        The order is that of a plan: by the predicted step time over the probability of fitting. A
        layout with several rows counts with its fastest; one that did not run is a bad choice.
        """
        total = cls()
        for own in _by_cell(row for row in rows if row.is_described).values():
            fastest: dict[str, JudgedRow] = {}
            for row in sorted(own, key=lambda row: row.step_time_s or np.inf):
                fastest.setdefault(row.layout, row)
            times = [row.step_time_s for row in fastest.values() if row.step_time_s]
            if len(times) < LEAST_LAYOUTS:
                continue
            order = sorted(
                fastest.values(), key=lambda row: row.log_s - np.log(max(row.fits, 1e-300))
            )
            limit = min(times) / (1.0 - FIRST_CHOICE)
            good = [row.step_time_s is not None and row.step_time_s <= limit for row in order]
            total += cls(cells=1, first=int(good[0]), first_three=int(any(good[:3])))
        return total


@dataclass(frozen=True, kw_only=True, slots=True)
class ColdEstimates:
    """The estimates of layouts of one model on one cluster, before anything was measured."""

    model: ModelShape
    cluster: Cluster
    software: str
    _memory: TrainerMemory = field(init=False)

    def __post_init__(self) -> None:
        memory = TrainerMemory.prior(self.cluster, software=self.software)
        object.__setattr__(self, "_memory", memory)

    def of(self, layouts: Sequence[Layout]) -> Iterator[dict[str, float]]:
        """Fields of a `JudgedRow`, for each layout."""
        columns = LayoutColumns.of_each(layouts)
        log_s, log_sd = TimeCalibration().predict(
            columns, self.model, self.cluster, software=self.software
        )
        peaks = quantiles(self._memory.each_peak_bytes(columns, self.model))
        fits = self._memory.fits(columns, self.model, self.cluster.device_memory_bytes)
        names = ("log_s", "log_sd", *_PEAKS, "fits")
        share = known_share(self.software, self.cluster)
        for values in zip(log_s, log_sd, *peaks, fits, strict=True):
            yield {"share": share, **dict(zip(names, map(float, values), strict=True))}

    def stages(self, layout: Layout) -> Iterator[dict[str, float]]:
        """Fields for the peak of each stage of a layout."""
        for values in quantiles(self._memory.each_stage_peak_bytes(layout, self.model)).T:
            yield dict(zip(_PEAKS, map(float, values), strict=True))


def judged_rows(path: Path) -> list[JudgedRow]:
    """The rows of a measurement table, of recipes, or of the peaks of Frontier's run.

    Raises:
        TableInvalidError: the file is none of these.
    """
    if path.name == search_recipes.RECIPES:
        return list(_of_recipes(search_recipes.read_recipes(path)))
    if path.name == mixture_recipes.RECIPES:
        return list(_of_recipes(mixture_recipes.read_recipes(path)))
    if path.name == PEAKS:
        return list(_of_peaks(path))
    return [row for cell, texts in table_cells(path.read_text()) for row in _of_cell(cell, texts)]


def cells_by_memory(text: str) -> list[TableCell]:
    """The cells of a table that has two sizes of a device under one name: it is read in two."""
    return [cell for cell, _ in table_cells(text)]


def table_cells(text: str) -> Iterator[tuple[TableCell, Sequence[Mapping[str, str]]]]:
    """Cells, each with the texts of the rows of its part of the table by their number."""
    rows = csv.DictReader(io.StringIO(text))
    texts = [_with_schedule(_with_precision(described_rows.described(row))) for row in rows]
    if not texts or "device_memory_gb" not in texts[0]:
        yield from ((cell, texts) for cell in read_table(text).cells)
        return
    for size in dict.fromkeys(row["device_memory_gb"] for row in texts):
        part = [row for row in texts if row["device_memory_gb"] == size]
        written = io.StringIO()
        names = [
            name
            for name in dict.fromkeys(name for row in part for name in row)
            if name not in described_rows.COLUMNS
        ]
        writer = csv.DictWriter(written, names, restval="", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(part)
        for cell in read_table(written.getvalue()).cells:
            own = part[cell.merged[0].number - 1]
            yield replace(cell, model=described_rows.model_of(cell.model, own)), part


def _with_schedule(row: dict[str, str]) -> dict[str, str]:
    """A row of Primus' schedules with its V-shaped schedule, which the table names beside them."""
    schedule = V_NAMES.get(row.get("pp_algorithm", ""))
    if schedule is None:
        return row
    return {**row, "schedule": schedule, LACKS: "", "source": row["source"].split(",")[0]}


def _with_precision(row: dict[str, str]) -> dict[str, str]:
    """A row in the precision of its recipe, which it then does not lack."""
    precision = row.get(BLOCKS, "")
    if precision not in NARROW:
        return row
    lacks = [word for word in row[LACKS].split() if word != precision]
    return {**row, "precision": precision, LACKS: " ".join(lacks)}


def _of_cell(cell: TableCell, texts: Sequence[Mapping[str, str]]) -> Iterator[JudgedRow]:
    estimates = ColdEstimates(model=cell.model, cluster=cell.cluster, software=cell.key.software)
    rows = cell.merged
    best_s = min((row.step_time_s for row in rows if row.step_time_s), default=np.inf)
    for row, predicted in zip(rows, estimates.of([row.layout for row in rows]), strict=True):
        is_near = row.step_time_s is not None and row.step_time_s <= NEAR_BEST * best_s
        columns = {**texts[row.number - 1], NEAR: str(int(is_near))}
        yield JudgedRow(
            cell=f"{cell.key.source}: {cell.key}",
            layout=row.layout.key,
            columns=columns,
            step_time_s=row.step_time_s,
            **{"peak_bytes": row.peak_memory_bytes, **predicted, **_of_stage(row, estimates)},
        )


def _of_stage(row: TableRow, estimates: ColdEstimates) -> dict[str, float]:
    peak = row.aside.get(LAST_STAGE)
    return {"peak_bytes": float(peak), **list(estimates.stages(row.layout))[-1]} if peak else {}


def _of_recipes(recipes: Sequence[Recipe]) -> Iterator[JudgedRow]:
    newest = {(each.model.name, each.cluster.name): each for each in reversed(recipes)}
    for each in recipes:
        estimates = ColdEstimates(model=each.model, cluster=each.cluster, software=each.software)
        [predicted] = estimates.of([each.layout])
        is_newest = newest[each.model.name, each.cluster.name] is each
        yield JudgedRow(
            cell=f"{each.model.name} on {each.layout.num_devices} x {each.cluster.name}",
            layout=each.layout.key,
            columns={"source": each.source, NEWEST: str(int(is_newest))},
            step_time_s=each.step_time_s,
            **predicted,
        )


def _of_peaks(path: Path) -> Iterator[JudgedRow]:
    """The peaks of the stages of the run that `bench_memory` describes."""
    run = bench_memory.default_run()
    peaks = bench_memory.read_peaks(path, "max_allocated_mib", run.layout.pp)
    estimates = ColdEstimates(model=run.model, cluster=run.cluster, software=run.software)
    for stage, predicted in enumerate(estimates.stages(run.layout)):
        yield JudgedRow(
            cell="stages",
            layout=f"stage {stage}",
            columns={},
            peak_bytes=peaks[stage] * bench_memory.MIB,
            **predicted,
        )


def read_folder(folder: Path, only: Sequence[str] = ()) -> Iterator[tuple[str, list[JudgedRow]]]:
    """Name and rows of every table of a folder; prints which files are none that can be judged."""
    for path in sorted(folder.glob("*.csv")):
        if only and path.stem not in only:
            continue
        try:
            rows = judged_rows(path)
        except TableInvalidError as error:
            print(f"left out: {path.name}: {str(error)[:160]}")
            continue
        yield path.stem, rows
