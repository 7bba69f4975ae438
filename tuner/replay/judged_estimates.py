"""Compares the estimates with a table: errors, ranking, and the regret of the first choice.

The estimates are calibrated on other samples, and not on the estimated cells. A layout counts as
accepted where its probability of fitting is at least 50 %.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from scipy.stats import kendalltau

from layout_tuner.array_types import Bools, Floats
from layout_tuner.predictions.belief.corrected_step_time import TimeCalibration
from layout_tuner.predictions.belief.known_measurements import Knowledge, Sample
from layout_tuner.predictions.belief.peaks.trainer_hypotheses import TrainerMemory
from layout_tuner.predictions.belief.plausible_samples import plausible_samples
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.tables import TableCell

ACCEPTED: Final = 0.5
"""Smallest probability of fitting at which a layout counts as accepted."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EstimatedCell:
    """Estimates beside measurements, layout by layout; NaN where nothing was measured."""

    cell: TableCell
    step_time_s: Floats
    """Measured seconds a step."""
    peak_bytes: Floats
    tokens_per_s: Floats
    """Measured throughput."""
    expected_step_time_s: Floats
    expected_peak_bytes: Floats
    fits: Floats
    """Probability of fitting, by the estimate."""
    outside: str | None = None
    """Why the calibration of step times does not cover this cell; None: it does."""

    @property
    def completed(self) -> Bools:
        return ~np.isnan(self.step_time_s)

    @property
    def time_errors(self) -> Floats:
        """Relative errors of the step times of those that ran."""
        return _errors(self.expected_step_time_s, self.step_time_s)

    @property
    def peak_errors(self) -> Floats:
        return _errors(self.expected_peak_bytes, self.peak_bytes)

    @property
    def kendall_tau(self) -> float | None:
        """Rank correlation of expected and measured step times; None for fewer than two."""
        ran = self.completed
        if ran.sum() < 2:
            return None
        tau = kendalltau(self.expected_step_time_s[ran], self.step_time_s[ran]).statistic
        return float(tau) if np.isfinite(tau) else None

    @property
    def first_choice_regret(self) -> float:
        """Share of throughput lost with the layout of the best estimate; 1 if that layout failed.

        The estimate is weighted by the probability of fitting.
        """
        rate = self.tokens_per_s[int(np.argmax(self.fits / self.expected_step_time_s))]
        return 1.0 if np.isnan(rate) else float(1.0 - rate / np.nanmax(self.tokens_per_s))

    @property
    def false_accepts(self) -> tuple[int, int]:
        """How many layouts that did not run were accepted, and how many did not run."""
        failed = ~self.completed
        return int(np.sum(failed & (self.fits >= ACCEPTED))), int(np.sum(failed))

    @property
    def false_rejects(self) -> tuple[int, int]:
        """How many layouts that ran were not accepted, and how many ran."""
        return int(np.sum(self.completed & (self.fits < ACCEPTED))), int(np.sum(self.completed))


def estimate_cell(
    cell: TableCell, times: TimeCalibration, knowledge: Iterable[Sample]
) -> EstimatedCell:
    """Estimates of every layout of a cell, beside its measurements.

    Where unknown columns part rows of one layout, each row is judged by itself. `knowledge` are the
    samples that calibrate the memory.
    """
    rows, software = cell.merged, cell.key.software
    columns = LayoutColumns.of_each(row.layout for row in rows)
    log_time, _ = times.predict(columns, cell.model, cell.cluster, software=software)
    belief = TrainerMemory.prior(cell.cluster, software=software).updated(knowledge, elsewhere=True)
    peak, _ = belief.peak_bytes(columns, cell.model)
    return EstimatedCell(
        cell=cell,
        step_time_s=_measured([row.step_time_s for row in rows]),
        peak_bytes=_measured([row.peak_memory_bytes for row in rows]),
        tokens_per_s=_measured([row.tokens_per_s for row in rows]),
        expected_step_time_s=np.exp(log_time),
        expected_peak_bytes=peak,
        fits=belief.fits(columns, cell.model, cell.cluster.device_memory_bytes),
        outside=times.outside(columns, cell.model, cell.cluster, software=software),
    )


def estimates_report(
    table: str, cells: Sequence[TableCell], knowledge: Knowledge
) -> dict[str, Any]:
    """The comparison over all cells and cell by cell, as plain JSON values."""
    known = plausible_samples(knowledge)
    times = TimeCalibration.fit(known.time)
    estimated = [estimate_cell(cell, times, known.memory) for cell in cells]
    outside = Counter(one.outside for one in estimated if one.outside is not None)
    return {
        "table": table,
        "settings": {"calibrated_from": len(knowledge)},
        "estimates": summarize_cells(estimated),
        "cells": [
            {
                "name": str(one.cell.key),
                "cell": asdict(one.cell.key),
                "num_layouts": len(one.fits),
                "num_completed": int(one.completed.sum()),
                "outside": one.outside,
                **summarize_cells([one]),
            }
            for one in estimated
        ],
        "notes": [
            *known.warnings,
            *(f"{warning} ({number} cells)" for warning, number in outside.items()),
        ],
    }


def summarize_cells(estimated: Sequence[EstimatedCell]) -> dict[str, Any]:
    """Errors over all layouts; Kendall's tau and the first choice's regret as means over cells.

    A figure without measurements is None. False accepts are a share of the layouts that did not
    run, false rejects a share of those that did.
    """
    times = np.concatenate([one.time_errors for one in estimated])
    peaks = np.concatenate([one.peak_errors for one in estimated])
    taus = [one.kendall_tau for one in estimated if one.kendall_tau is not None]
    regrets = [one.first_choice_regret for one in estimated]
    return {
        "time": {
            **_error_figures(times),
            "kendall_tau": float(np.mean(taus)) if taus else None,
            "first_choice_regret": float(np.mean(regrets)),
            "worst_first_choice_regret": float(np.max(regrets)),
        },
        "memory": {
            **_error_figures(peaks),
            "false_accepts": _share([one.false_accepts for one in estimated]),
            "false_rejects": _share([one.false_rejects for one in estimated]),
        },
    }


def _errors(expected: Floats, measured: Floats) -> Floats:
    known = ~np.isnan(measured)
    return np.asarray(np.abs(expected[known] / measured[known] - 1.0))


def _error_figures(errors: Floats) -> Mapping[str, float | None]:
    if not errors.size:
        return {"median_error": None, "mean_error": None}
    return {"median_error": float(np.median(errors)), "mean_error": float(np.mean(errors))}


def _share(counts: Sequence[tuple[int, int]]) -> float | None:
    total = sum(count for _, count in counts)
    return sum(hits for hits, _ in counts) / total if total else None


def _measured(values: Sequence[float | int | None]) -> Floats:
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)
