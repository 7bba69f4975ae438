"""What one log is worth, on tables that are made so that the answer is known."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.tables.one_log import CellScore, judged_cell, mean_of
from layout_tuner.predictions.belief.corrected_step_time import TimeCalibration
from layout_tuner.search_spaces.clusters.cluster_presets import CLUSTER_PRESETS
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.search_spaces.tables.table import CellKey, TableCell, TableRow

MODEL, CLUSTER = model_preset("llama-8b"), CLUSTER_PRESETS["h100-sxm"]
LAYOUTS = [
    Layout(tp=tp, dp=16 // tp, num_nodes=2, micro_batch_size=1, num_microbatches=2 * tp)
    for tp in (1, 2, 4, 8)
]


def judged(factor: Callable[[int], float]) -> CellScore:
    """The score of a cell whose rows take so many times as long as is predicted."""
    columns = LayoutColumns.of_each(LAYOUTS)
    predicted, _ = TimeCalibration().predict(columns, MODEL, CLUSTER, software="theirs")
    times_s = [float(np.exp(log_s)) * factor(row) for row, log_s in enumerate(predicted)]
    tokens = LAYOUTS[0].global_batch_size * MODEL.seq_length
    rows = tuple(
        TableRow(
            layout=layout,
            status="completed",
            step_time_s=seconds,
            tokens_per_s=tokens / seconds,
            number=row,
        )
        for row, (layout, seconds) in enumerate(zip(LAYOUTS, times_s, strict=True), 1)
    )
    key = CellKey.of("theirs", CLUSTER, MODEL, LAYOUTS[0])
    cell = TableCell(key=key, model=MODEL, cluster=CLUSTER, rows=rows)
    score = judged_cell(cell, frozenset())
    assert score is not None
    return score


def test_a_log_shows_a_factor_that_all_rows_share() -> None:
    score = judged(lambda _: 1.5)
    assert score.cold == pytest.approx(np.full(4, np.log(1.5)))
    assert score.best_factor == pytest.approx(np.zeros(4), abs=1e-9)
    assert mean_of([score], "warm") < 0.6 * mean_of([score], "cold")


def test_a_log_says_nothing_of_errors_of_single_rows() -> None:
    score = judged(lambda row: 1.2 if row % 2 else 1 / 1.2)
    assert mean_of([score], "best_factor") == pytest.approx(np.log(1.2))
    assert mean_of([score], "warm") > 0.8 * mean_of([score], "cold")


def test_rows_far_from_the_best_are_no_jobs_that_people_run() -> None:
    score = judged(lambda row: 20.0 if row == 0 else 1.0)
    assert score.near_best[0] == 0.0
    assert score.near_best.sum() >= 1
