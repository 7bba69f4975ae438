"""Estimates against tables whose truth is made from the estimates themselves."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from search_spaces.belief.known_measurements import Knowledge, knowledge_of
from search_spaces.belief.peaks.memory import MemoryBelief
from search_spaces.estimates.time import step_time_s
from search_spaces.tables import MeasurementTable, TableCell, read_table, write_table
from tests.search_spaces.tables.tables import make_measured_cell, make_row, make_text
from tests.tuner.replay.cells import make_cell
from tuner.replay.cell_layouts import CellLayouts
from tuner.replay.commands import replay
from tuner.replay.estimates import EstimatedCell, estimates_report, summarize_cells


def true_cell(*, slower: float = 1.0, source: str = "Megatron-LM") -> TableCell:
    """A cell that behaves as the priors say, only `slower`."""
    cell = make_cell([1.0] * 24, source=source, cluster="a100-sxm", device_memory_gb=80)
    cell_layouts = CellLayouts(cell)
    columns = cell_layouts.columns()
    times = slower * step_time_s(columns, cell.model, cell.cluster)
    peaks, _ = MemoryBelief.prior(cell.cluster, software=source).peak_bytes(columns, cell.model)
    layouts = [row.layout for row in cell_layouts.truth]
    return make_measured_cell(layouts, cell.model, cell.cluster, times, peaks, source=source)


def figures(*cells: TableCell, knowledge: Knowledge | None = None) -> Any:
    return estimates_report("some.csv", cells, knowledge or Knowledge())["estimates"]


def test_a_machine_that_is_slower_throughout_is_off_by_that_and_calibration_mends_it() -> None:
    slow = true_cell(slower=1.25)
    found = figures(slow)
    assert found["time"]["mean_error"] == pytest.approx(0.2, abs=1e-6)
    assert found["time"]["kendall_tau"] == pytest.approx(1.0)
    assert found["time"]["first_choice_regret"] == pytest.approx(0.0, abs=1e-6)
    assert found["memory"]["mean_error"] == pytest.approx(0.0, abs=1e-6)
    assert (found["memory"]["false_accepts"], found["memory"]["false_rejects"]) == (None, 0.0)
    known = knowledge_of([slow])
    assert figures(slow, knowledge=known)["time"]["mean_error"] < 0.03


def judged(
    times: list[float], expected: list[float], fits: list[float], **changes: Any
) -> EstimatedCell:
    measured = np.array(times)
    return EstimatedCell(
        cell=make_cell([1.0]),
        step_time_s=measured,
        tokens_per_s=1 / measured,
        peak_bytes=np.full(len(times), np.nan),
        expected_step_time_s=np.array(expected),
        expected_peak_bytes=np.ones(len(times)),
        fits=np.array(fits),
        **changes,
    )


def test_the_figures_of_a_report_are_those_worked_out_by_hand() -> None:
    none = float("nan")
    one = judged([1.0, 2.0, 4.0, none, none], [1.1, 3.0, 2.0, 1.0, 5.0], [0.9, 0.9, 0.4, 0.8, 0.1])
    found = summarize_cells([one])
    assert found["time"]["median_error"] == pytest.approx(0.5)
    assert found["time"]["mean_error"] == pytest.approx((0.1 + 0.5 + 0.5) / 3)
    assert found["time"]["kendall_tau"] == pytest.approx(1 / 3)
    assert found["memory"] == {
        "median_error": None,
        "mean_error": None,
        "false_accepts": 1 / 2,
        "false_rejects": 1 / 3,
    }
    # 0.9 / 1.1 is the most that the estimates expect of any layout, and it is the best indeed.
    assert found["time"]["first_choice_regret"] == 0.0


def test_a_first_choice_that_does_not_run_costs_everything() -> None:
    one = judged([1.0, float("nan")], [2.0, 1.0], [0.9, 0.9])
    assert one.first_choice_regret == 1.0
    slower = judged([1.0, 1.25], [2.0, 1.0], [0.9, 0.9])
    assert slower.first_choice_regret == pytest.approx(0.2)


def test_what_was_not_calibrated_is_said_of_the_cell_and_of_the_whole() -> None:
    small = make_cell([1.0, 2.0], cluster="a100-sxm", device_memory_gb=80)
    cold = estimates_report("some.csv", [small], Knowledge())
    assert "nothing was measured there" in cold["cells"][0]["outside"]
    assert "nothing was measured there" in cold["notes"][0]
    assert cold["notes"][0].endswith("(1 cells)")
    inside = estimates_report("some.csv", [small], knowledge_of([small]))
    assert inside["cells"][0]["outside"] is None
    assert inside["notes"] == []
    wider = {"cluster": "a100-sxm", "device_memory_gb": 80, "tp": 4, "pp": 4, "dp": 1}
    larger = make_row(**wider, num_devices=16, num_microbatches=8)
    (other,) = read_table(make_text(larger)).cells
    beyond = estimates_report("some.csv", [other], knowledge_of([small]))["cells"][0]["outside"]
    assert "num_devices 16, measured 8" in beyond


def test_the_command_judges_some_cells_from_others(tmp_path: Path) -> None:
    first, second = true_cell(slower=1.3, source="x a.csv"), true_cell(slower=1.3, source="x b.csv")
    path = tmp_path / "table.csv"
    path.write_text(write_table(MeasurementTable(cells=(first,))))
    lines = write_table(MeasurementTable(cells=(second,))).splitlines()[1:]
    path.write_text(path.read_text() + "\n".join(lines) + "\n")
    arguments = (str(path), "--estimates", "--cell", "source=x b.csv")
    known = ("--calibrate-from", f"{path}:source=x a.csv")
    cold, warm = (
        json.loads(CliRunner().invoke(replay, [*arguments, *more, "--json"]).stdout)
        for more in ((), known)
    )
    assert len(cold["cells"]) == 1
    assert warm["settings"]["calibrated_from"] == 24
    assert warm["estimates"]["time"]["mean_error"] < cold["estimates"]["time"]["mean_error"] / 2
    assert any("nothing was measured there" in note for note in cold["notes"])
    shown = CliRunner().invoke(replay, [*arguments, *known])
    assert shown.exit_code == 0
    assert "Kendall tau within cells, mean" in shown.stdout
