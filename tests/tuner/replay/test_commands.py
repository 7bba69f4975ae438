"""`layout-tuner replay`, its judgement of estimates, and `layout-tuner simulate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from search_spaces.belief.known_measurements import Knowledge, knowledge_of
from search_spaces.belief.peaks.memory import MemoryBelief
from search_spaces.estimates.time import step_time_s
from search_spaces.tables import MeasurementTable, TableCell, read_table, write_table
from tests.search_spaces.tables.tables import make_measured_cell, make_row, make_text
from tests.tuner.replay.cells import make_cell, make_cell_text, times_by
from tuner.replay.cell_layouts import CellLayouts
from tuner.replay.commands import replay
from tuner.replay.estimates import EstimatedCell, estimates_report, summarize_cells
from tuner.replay.simulate_command import simulate
from workers.simulation.scenarios import SCENARIOS


def run(*arguments: str) -> Result:
    """Runs the command in this process alone, unless the arguments say otherwise."""
    return CliRunner().invoke(replay, ["--jobs", "1", *arguments])


def printed(*arguments: str) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert isinstance(document, dict)
    return document


@pytest.fixture
def table(tmp_path: Path) -> str:
    """Two cells: forty layouts of which the last is best, and three of another batch."""
    first = make_cell_text([*times_by(39, lambda place: 2.0 + place % 7), 1.0])
    other = make_cell_text(["out_of_memory", 1.01, 1.0], source="second").splitlines()[1:]
    path = tmp_path / "table.csv"
    path.write_text(first + "\n".join(other) + "\n")
    return str(path)


def test_the_report_has_the_keys_that_were_promised(table: str) -> None:
    report = printed(table, "--strategy", "random,exhaustive", "--seeds", "3", "--probes", "20")
    assert report["table"] == table
    assert list(report["strategies"]) == ["random", "exhaustive"]
    for summary in (
        *report["strategies"].values(),
        *(summary for cell in report["cells"] for summary in cell["strategies"].values()),
    ):
        assert list(summary["probes_to"]) == ["0.05", "0.02", "0"]
        for figures in summary["probes_to"].values():
            assert list(figures) == ["median", "mean", "q25", "q75", "reached"]
        assert list(summary["regret_after"]) == ["1", "3", "5", "10", "20"]
        assert summary["failed_probes"] >= 0
        assert summary["seconds_per_probe"] >= 0
    first, second = report["cells"]
    assert (first["num_layouts"], first["num_completed"]) == (40, 40)
    assert first["num_within"] == {"0.05": 1, "0.02": 1, "0": 1}
    assert (second["num_layouts"], second["num_completed"]) == (3, 2)
    assert first["strategies"]["exhaustive"]["probes_to"]["0"]["median"] == 21
    assert second["strategies"]["exhaustive"]["probes_to"]["0"]["median"] == 3
    assert second["strategies"]["exhaustive"]["failed_probes"] == 1
    assert report["settings"]["probes"] == 20


def test_the_report_depends_on_the_seeds_alone_and_not_on_the_jobs(table: str) -> None:
    def timeless(report: Any) -> Any:
        if isinstance(report, dict):
            return {k: timeless(v) for k, v in report.items() if k != "seconds_per_probe"}
        return [timeless(item) for item in report] if isinstance(report, list) else report

    settings = (table, "--strategy", "random", "--seeds", "2", "--pending", "3")
    assert timeless(printed(*settings)) == timeless(printed(*settings, "--jobs", "2"))


def test_a_replay_searches_the_chosen_cells_alone(table: str) -> None:
    report = printed(table, "--strategy", "random", "--seeds", "1", "--cell", "source=second")
    assert [cell["cell"]["source"] for cell in report["cells"]] == ["second"]
    either = printed(
        *(table, "--strategy", "random", "--seeds", "1"),
        *("--cell", "source=second|made up,num_devices=8"),
    )
    assert len(either["cells"]) == 2


@pytest.mark.parametrize("flags", [("--estimates",), ("--strategy=random", "--seeds=1")])
def test_a_cell_that_calibrates_its_own_judgement_is_noted(
    table: str, flags: tuple[str, ...]
) -> None:
    cells = ("--cell=num_devices=8", f"--calibrate-from={table}:source=second")
    notes = [n for n in printed(table, *cells, *flags)["notes"] if "very cell" in n]
    assert len(notes) == 1
    elsewhere = printed(table, "--cell=source=made up", *cells[1:], *flags)["notes"]
    assert not any("very cell" in note for note in elsewhere)


def test_without_json_people_get_tables(table: str) -> None:
    result = run(table, "--strategy", "random,exhaustive", "--seeds", "2")
    assert result.exit_code == 0
    assert "2 cells, 2 seeds, 1 pending, 60 probes" in result.stdout
    assert "small-gpt on 8 x testbox" in result.stdout
    assert "note: cluster 'testbox' is not a preset" in result.stderr


def test_a_cell_without_a_measurement_is_left_out_aloud(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text(make_text(make_row(), make_row(source="barren", status="failed")))
    report = printed(str(path), "--strategy", "random", "--seeds", "1")
    assert len(report["cells"]) == 1
    assert any("no row of it is completed" in note for note in report["notes"])
    barren = run(str(path), "--strategy", "random", "--cell", "source=barren")
    assert barren.exit_code == 1
    assert barren.stderr == "Error: no row of the selected cells is completed\n"


@pytest.mark.parametrize(
    ("arguments", "exit_code", "reason"),
    [
        (("--cell", "model=nothing"), 1, "no cell is selected; the table has small-gpt on 8 x"),
        (
            ("--cell", "colour=red"),
            1,
            "'colour=red' selects no cells; write KEY=VALUE with KEY one",
        ),
        (("--calibrate-from", "none.csv"), 1, "none.csv: cannot be read: No such file"),
        (("--strategy", "clever"), 2, "strategy='clever' is not one of"),
        (("--strategy", ","), 2, "no strategy is named"),
        (("--seeds", "0"), 2, "0 is not in the range"),
    ],
)
def test_bad_input_is_one_line_with_the_reason(
    table: str, arguments: tuple[str, ...], exit_code: int, reason: str
) -> None:
    result = run(table, "--strategy", "random", *arguments)
    assert result.exit_code == exit_code
    assert reason in result.stderr
    assert "Traceback" not in result.output


def test_a_bad_table_is_refused_with_its_name_the_row_and_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(make_text(make_row(tp=4)))
    result = run(str(path), "--strategy", "random")
    assert result.exit_code == 1
    reason = "row 1 (line 2): tp*pp*dp=4*2*2=16 is not num_devices=8"
    assert result.stderr.startswith(f"Error: {path}: {reason}")


def test_a_table_is_written_that_replays_can_read(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    ended = CliRunner().invoke(simulate, ["a100-1.3b", "--seed", "2", "--out", str(path)])
    assert ended.exit_code == 0, ended.output
    assert "simulated layouts" in ended.stderr
    [cell] = read_table(path).cells
    assert cell.key.source == "simulated a100-1.3b, seed 2"
    printed = CliRunner().invoke(simulate, ["a100-1.3b", "--seed", "2"])
    assert printed.stdout == path.read_text()


def test_without_a_scenario_the_known_ones_are_listed() -> None:
    ended = CliRunner().invoke(simulate, [])
    assert [line.split()[0] for line in ended.stdout.splitlines()] == list(SCENARIOS)


def test_an_unknown_scenario_is_bad_usage_and_a_folder_no_file(tmp_path: Path) -> None:
    unknown = CliRunner().invoke(simulate, ["h100"])
    assert unknown.exit_code == 2
    assert "unknown scenario 'h100'" in unknown.stderr
    missing = str(tmp_path / "nowhere" / "table.csv")
    unwritable = CliRunner().invoke(simulate, ["a100-1.3b", "--out", missing])
    assert unwritable.exit_code == 1
    assert "can't be written" in unwritable.stderr


def test_a_step_is_written_as_a_trace_and_an_impossible_one_refused() -> None:
    key = "n1-tp2-pp4-dp1-vpp1-mbs1-mb8-z0-rc_none-sp0-bf16"
    ended = CliRunner().invoke(simulate, ["a100-1.3b", "--trace", key])
    assert ended.exit_code == 0, ended.output
    passes = [each for each in json.loads(ended.stdout)["traceEvents"] if each["ph"] == "X"]
    # 8 micro-batches pass 4 stages twice, and 3 boundaries twice.
    assert len(passes) == 8 * 4 * 2 + 8 * 3 * 2
    for wrong in ("tp2", key.replace("tp2", "tp7")):
        refused = CliRunner().invoke(simulate, ["a100-1.3b", "--trace", wrong])
        assert refused.exit_code == 2
        assert wrong in refused.stderr


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
