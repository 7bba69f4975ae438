"""A replayed search: what may be asked, the answers and the report; `replay` and `scenario`."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from layout_tuner.cli.predictions.replay import replay
from layout_tuner.cli.predictions.replay_report import summarize
from layout_tuner.cli.predictions.scenario import scenario
from layout_tuner.predictions.belief.known_measurements import Knowledge, knowledge_of
from layout_tuner.predictions.belief.observation import Observation
from layout_tuner.predictions.belief.peaks.corrected_peak import MemoryBelief
from layout_tuner.predictions.estimates.step_time import step_time_s
from layout_tuner.predictions.estimates.trainer_kernels import kernels_of
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.tables import (
    CellKey,
    MeasurementTable,
    TableCell,
    read_table,
    write_table,
)
from layout_tuner.tuner.errors import ReplayFailedError, StrategyUnknownError
from layout_tuner.tuner.replay import run as run_module
from layout_tuner.tuner.replay.cell_layouts import CellLayouts
from layout_tuner.tuner.replay.judged_estimates import (
    EstimatedCell,
    estimates_report,
    summarize_cells,
)
from layout_tuner.tuner.replay.run import ProbeConditions, ReplayedProbe, ReplayRun, ReplayTask
from layout_tuner.tuner.strategies.ask_and_tell import AskLimits, LayoutSearch, Proposer
from layout_tuner.workers.simulation.scenarios import SCENARIOS
from tests.search_spaces.tables.tables import make_measured_cell, make_row, make_text
from tests.tuner.replay.cells import make_cell, make_cell_text


def replayed(cell: Any, strategy: str = "exhaustive", **changes: Any) -> Any:
    settings = {"seed": 0, "pending": 1, "probes": 60} | changes
    return ReplayTask(cell=cell, strategy=strategy, **settings).run()


def test_probes_count_from_one_and_regret_is_the_share_of_throughput_that_is_lost() -> None:
    # Throughputs 0.5, 0.8, 0.96, 1 of the best, in the order in which exhaustive asks.
    cell = make_cell([1.0, 0.625, 0.5 / 0.96, 0.5])
    run = replayed(cell)
    assert [probe.regret for probe in run.probes] == pytest.approx([0.5, 0.2, 0.04, 0.0])
    assert [run.probes_to(share) for share in (0.5, 0.05, 0.02, 0.0)] == [1, 3, 4, 4]
    assert [run.regret_after(n) for n in (1, 2, 3, 4, 60)] == pytest.approx([0.5, 0.2, 0.04, 0, 0])

    exactly = replayed(make_cell([1 / 0.95, 1.0]))
    assert exactly.probes_to(0.05) == 1, "what is exactly five percent off is within five percent"
    short = replayed(make_cell([3.0, 2.0, 1.0]), probes=2)
    assert (short.probes_to(0.05), len(short.probes)) == (None, 2)


def test_what_fails_costs_a_probe_and_is_no_find() -> None:
    run = replayed(make_cell(["out_of_memory", "failed", 1.0, 2.0]))
    assert run.probes_to(0.0) == 3
    assert run.regret_after(2) == 1.0
    assert [run.failed_within(n) for n in (1, 2, 4)] == [1, 2, 2]


def test_the_strategy_is_told_tokens_per_second_and_device_and_what_was_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = asking_for(monkeypatch, [0, 1, 2, 3])
    replayed(make_cell([0.5, "out_of_memory", "failed", 0.25]))
    states = ["completed", "infeasible", "failed", "completed"]
    assert [observation.state for observation in told] == states
    assert told[0].objective == pytest.approx(8 * 512 / 0.5 / 8)
    assert (told[0].step_time_s, told[0].peak_memory_bytes) == (0.5, 2_000_000_000)


def test_the_order_of_the_rows_tells_a_strategy_nothing() -> None:
    rows = make_cell_text([1.0 + (place * 7) % 40 for place in range(40)]).splitlines()
    found = []
    for shuffle in (sorted, lambda body: random.Random(3).sample(body, len(body))):
        cell = read_table("\n".join([rows[0], *shuffle(rows[1:])])).cells[0]
        found.append([probe.layout for probe in replayed(cell, "random", seed=5).probes])
    assert found[0] == found[1]


def test_only_the_layouts_of_the_cell_can_be_asked_for_though_our_rules_forbid_them() -> None:
    # Three stages of eight layers, and tp across nodes of four: our trainer runs neither.
    odd = {"pp": 3, "tp": 8, "dp": 1, "num_devices": 24, "num_microbatches": 8}
    (cell,) = read_table(make_text(make_row(**odd))).cells
    assert [probe.layout.pp for probe in replayed(cell).probes] == [3]


def test_with_several_pending_results_come_back_in_the_order_of_their_durations() -> None:
    # Asked: 9, 3, 4 s. At 3 s there is room for one of 5 s, at 4 s for one of 7, at 8 for one of 2.
    cell = make_cell([0.9, 0.3, 0.4, 0.5, 0.7, 0.2])
    run = replayed(cell, pending=3)
    assert [round(probe.ended_at_s, 6) for probe in run.probes] == [3.0, 4.0, 8.0, 9.0, 10.0]
    by_time = {row.layout: row.step_time_s for row in cell.merged}
    assert [by_time[probe.layout] for probe in run.probes] == [0.3, 0.4, 0.5, 0.9, 0.2]
    one_by_one = replayed(cell, pending=1).probes
    assert [by_time[probe.layout] for probe in one_by_one] == [0.9, 0.3, 0.4, 0.5, 0.7, 0.2]


def test_a_probe_costs_its_seconds_times_its_nodes_and_a_failed_one_a_median_iteration() -> None:
    run = replayed(make_cell([3.0, "failed", 2.0, 1.0]))
    assert [probe.node_seconds for probe in run.probes] == [60.0, 4.0, 40.0, 20.0]  # two nodes


def test_no_more_is_asked_than_allowed_however_many_are_pending() -> None:
    cell = make_cell([40.0 - place for place in range(30)])
    assert len(replayed(cell, pending=8, probes=11).probes) == 11
    assert len(replayed(make_cell(["failed"] * 20 + [1.0]), pending=50).probes) == 21


def test_random_search_needs_the_probes_that_probability_says() -> None:
    num_good = 4
    # Of n layouts in random order the first of g good ones stands at (n + 1)/(g + 1) on average.
    cell = make_cell([1.0] * num_good + [2.0] * (40 - num_good))
    needed = [replayed(cell, "random", seed=seed).probes_to(0.05) for seed in range(400)]
    expected = 41 / (num_good + 1)
    error = float(np.std(needed)) / np.sqrt(400)
    assert np.mean(needed) == pytest.approx(expected, abs=4 * error)


def test_repeats_in_a_table_are_one_layout_with_their_median() -> None:
    rows = [make_row(step_time_s=time) for time in (0.5, 0.6, 0.9)]
    (cell,) = read_table(make_text(*rows)).cells
    layouts = CellLayouts(cell)
    assert len(layouts) == 1
    assert layouts.truth[0].step_time_s == 0.6


def test_a_strategy_that_fails_is_an_error_that_names_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Broken(Proposer):
        def propose(self, history: Any) -> int:
            if history.num_taken == 2:
                raise ZeroDivisionError("nothing left")
            return history.num_taken

    def broken(name: str, problem: Any, *, seed: int) -> LayoutSearch:
        return LayoutSearch(problem.layouts, Broken())

    monkeypatch.setattr(run_module, "make_strategy", broken)
    with pytest.raises(ReplayFailedError) as caught:
        replayed(make_cell([3.0, 2.0, 1.0]), seed=7)
    message = str(caught.value)
    assert "strategy 'exhaustive' failed on cell small-gpt on 8 x testbox" in message
    assert "seed 7, after 2 probes: ZeroDivisionError: nothing left" in message


def test_an_unknown_strategy_and_a_cell_without_a_best_are_refused() -> None:
    with pytest.raises(StrategyUnknownError, match="'clever' is not one of"):
        replayed(make_cell([1.0]), "clever")
    two = make_text(make_row(), make_row(source="other", status="failed"))
    with pytest.raises(ReplayFailedError, match="no row is completed"):
        replayed(read_table(two).cells[1])


def slow_first(row: Any, seed: int, number: int) -> ProbeConditions:
    return ProbeConditions(slowdown=2.0 if number == seed else 1.0, nodes=(f"node-{number}",))


def asking_for(monkeypatch: pytest.MonkeyPatch, order: list[int]) -> list[Observation]:
    """Replaces the strategy by one that asks for the layouts of these places, repeats included."""
    told: list[Observation] = []

    class Repeating:
        def __init__(self, layouts: Any) -> None:
            self._left = [layouts.layout(place) for place in order]

        def ask(self, limits: AskLimits) -> Layout | None:
            assert limits.left_node_s is None
            return self._left.pop(0) if self._left else None

        def predict(self, layout: Layout) -> None:
            return None

        def fidelity(self, layout: Layout) -> None:
            return None

        def tell(self, layout: Layout, observation: Observation, *, fidelity: None) -> None:
            told.append(observation)

    monkeypatch.setattr(
        run_module, "make_strategy", lambda name, problem, *, seed: Repeating(problem.layouts)
    )
    return told


def test_a_disturbance_changes_what_is_measured_and_told_but_not_what_is_true(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = asking_for(monkeypatch, [0, 1])
    run = replayed(make_cell([0.5, 0.8]), seed=0, disturbance=slow_first, stop_within=None)
    assert [observation.step_time_s for observation in told] == [1.0, 0.8]
    assert told[0].objective == pytest.approx(8 * 512 / 1.0 / 8)
    assert [observation.nodes for observation in told] == [("node-0",), ("node-1",)]
    assert [probe.ended_at_s for probe in run.probes] == [10.0, 18.0]
    assert [probe.regret for probe in run.probes] == pytest.approx([0.0, 0.375])
    # Measured at 1.0 s, the best layout is ranked behind the one of 0.8 s.
    assert [probe.leader_regret for probe in run.probes] == pytest.approx([0.0, 0.375])


def test_a_disturbed_failure_still_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    told = asking_for(monkeypatch, [0, 1])
    replayed(make_cell(["out_of_memory", 0.8]), seed=0, disturbance=slow_first)
    assert [seen.state for seen in told] == ["infeasible", "completed"]
    assert [seen.nodes for seen in told] == [("node-0",), ("node-1",)]


def test_a_repeat_is_a_probe_and_the_median_of_a_layouts_probes_ranks_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The better layout is measured at 1.0, 0.5 and 0.5 s; the other one at 0.8 s.
    asking_for(monkeypatch, [1, 0, 0, 0])
    run = replayed(make_cell([0.5, 0.8]), seed=1, disturbance=slow_first)
    assert [probe.leader_regret for probe in run.probes] == pytest.approx([0.375, 0.375, 0, 0])
    assert (run.probes_to(0.05), len(run.probes)) == (3, 4)
    assert run.regret_after(2) == pytest.approx(0.375)


def test_a_search_does_not_end_with_a_best_layout_that_was_measured_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asking_for(monkeypatch, [0, 1, 0, 0, 1])
    run = replayed(make_cell([0.5, 0.8]), seed=0, disturbance=slow_first)
    # At 1.0 s it leads alone, then 0.8 s leads; its median of two leads again, that of three is
    # what it truly takes.
    assert [probe.leader_regret for probe in run.probes] == pytest.approx([0.0, 0.375, 0.0, 0.0])


def test_a_search_may_end_near_the_best_or_use_all_of_its_probes() -> None:
    cell = make_cell([1.0, 0.52, 0.5, 0.6])
    numbers = [len(replayed(cell, stop_within=within).probes) for within in (0.05, 0.0, None)]
    assert numbers == [2, 3, 4]


def test_predictions_are_made_at_the_proposal_and_expectations_after_the_probe() -> None:
    cell = make_cell([1.0 + place / 10 for place in range(12)])
    guided = replayed(cell, "guided", probes=3, stop_within=None, expects=True)
    assert guided.probes[0].prediction.source == "estimates"
    assert [probe.prediction.source for probe in guided.probes[1:]] == ["calibrated"] * 2
    assert all(probe.possible_improvement >= 0 for probe in guided.probes)
    assert replayed(cell, "random").probes[0].prediction is None
    assert replayed(cell, "guided", probes=1).probes[0].possible_improvement is None


KEY = CellKey(
    source="", cluster="testbox", model="m", seq_length=8, num_devices=8, global_batch_size=8
)


def make_run(*regrets: float | None, allowed: int = 10, search_s: float = 0.0) -> ReplayRun:
    probes = [
        ReplayedProbe(
            layout=Layout(),
            regret=regret,
            leader_regret=min((r for r in regrets[:place] if r is not None), default=None),
            ended_at_s=place,
            node_seconds=2.0,
            step_time_s=None if regret is None else 1.0,
        )
        for place, regret in enumerate(regrets, 1)
    ]
    return ReplayRun(
        cell=KEY,
        strategy="some",
        seed=0,
        num_probes=allowed,
        probes=tuple(probes),
        search_s=search_s,
    )


def test_a_run_that_fails_to_get_there_counts_one_probe_more_than_it_was_allowed() -> None:
    runs = [make_run(0.04), make_run(0.5, 0.01), make_run(0.5, 0.4, 0.3, 0.2)]
    to = summarize(runs)["probes_to"]
    assert to["0.05"] == {
        "median": 2.0,
        "mean": pytest.approx((1 + 2 + 11) / 3),
        "q25": 1.5,
        "q75": 6.5,
        "reached": pytest.approx(2 / 3),
    }
    assert to["0.02"]["median"] == 11.0
    assert to["0"]["reached"] == 0.0


def test_failed_probes_are_counted_over_the_run_and_up_to_the_first_find() -> None:
    runs = [make_run(None, None, 0.0, None, 0.5), make_run(0.01, None, 0.5)]
    summary = summarize(runs)
    assert summary["failed_probes"] == 2.0
    assert summary["failed_share_to"]["0.05"] == 2 / 4
    assert summary["failed_share_to"]["0"] == (2 + 1) / (3 + 3)


def test_the_report_has_the_regret_of_the_best_so_far_and_the_seconds_of_a_probe() -> None:
    summary = summarize([make_run(None, 0.6, 0.3, 0.5, 0.2), make_run(0.4, 0.8, 0.1)])
    assert summary["regret_after"] == pytest.approx(
        {"1": 0.7, "3": 0.2, "5": 0.15, "10": 0.15, "20": 0.15}
    )
    assert summary["mean_regret_after"]["1"] == pytest.approx(0.7)
    runs = [make_run(0.5, 0.4, search_s=3.0), make_run(0.5, 0.4, 0.3, search_s=1.0)]
    assert summarize(runs)["seconds_per_probe"] == 4.0 / 5


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
    return write_two_cells(tmp_path)


def write_two_cells(folder: Path) -> str:
    """The path of a table: forty layouts of which the last is best, and three of another batch."""
    first = make_cell_text([*(2.0 + place % 7 for place in range(39)), 1.0])
    other = make_cell_text(["out_of_memory", 1.01, 1.0], source="second").splitlines()[1:]
    path = folder / "table.csv"
    path.write_text(first + "\n".join(other) + "\n")
    return str(path)


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
        (("--cell", "model=nothing"), 2, "no cell is selected; the table has small-gpt on 8 x"),
        (
            ("--cell", "colour=red"),
            2,
            "'colour=red' selects no cells; write KEY=VALUE with KEY one",
        ),
        (("--calibrate-from", "none.csv"), 2, "none.csv: cannot be read: No such file"),
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
    assert result.exit_code == 2
    reason = "row 1 (line 2): tp*pp*dp=4*2*2=16 is not num_devices=8"
    assert result.stderr.startswith(f"Error: {path}: {reason}")


def test_a_table_is_written_that_replays_can_read(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    ended = CliRunner().invoke(scenario, ["a100-1.3b", "--seed", "2", "--out", str(path)])
    assert ended.exit_code == 0, ended.output
    assert "simulated layouts" in ended.stderr
    [cell] = read_table(path).cells
    assert cell.key.source == "simulated a100-1.3b, seed 2"
    printed = CliRunner().invoke(scenario, ["a100-1.3b", "--seed", "2"])
    assert printed.stdout == path.read_text()


def test_without_a_scenario_the_known_ones_are_listed() -> None:
    ended = CliRunner().invoke(scenario, [])
    assert [line.split()[0] for line in ended.stdout.splitlines()] == list(SCENARIOS)


def test_an_unknown_scenario_is_bad_usage_and_a_folder_no_file(tmp_path: Path) -> None:
    unknown = CliRunner().invoke(scenario, ["h100"])
    assert unknown.exit_code == 2
    assert "unknown scenario 'h100'" in unknown.stderr
    missing = str(tmp_path / "nowhere" / "table.csv")
    unwritable = CliRunner().invoke(scenario, ["a100-1.3b", "--out", missing])
    assert unwritable.exit_code == 1
    assert "cannot be written" in unwritable.stderr


def test_a_step_is_written_as_a_trace_and_an_impossible_one_refused() -> None:
    key = "n1-tp2-pp4-dp1-vpp1-mbs1-mb8-z0-rc_none-sp0-bf16"
    ended = CliRunner().invoke(scenario, ["a100-1.3b", "--trace", key])
    assert ended.exit_code == 0, ended.output
    passes = [each for each in json.loads(ended.stdout)["traceEvents"] if each["ph"] == "X"]
    # 8 micro-batches pass 4 stages twice, and 3 boundaries twice.
    assert len(passes) == 8 * 4 * 2 + 8 * 3 * 2
    for wrong in ("tp2", key.replace("tp2", "tp7")):
        refused = CliRunner().invoke(scenario, ["a100-1.3b", "--trace", wrong])
        assert refused.exit_code == 2
        assert wrong in refused.stderr


def true_cell(*, slower: float = 1.0, source: str = "Megatron-LM") -> TableCell:
    """A cell that behaves as the priors say, only `slower`."""
    cell = make_cell([1.0] * 24, source=source, cluster="a100-sxm", device_memory_gb=80)
    cell_layouts = CellLayouts(cell)
    columns = cell_layouts.columns()
    kernels = kernels_of(source, cell.cluster)
    times = slower * step_time_s(columns, cell.model, cell.cluster, kernels=kernels)
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


def test_a_cell_with_a_layout_that_a_column_parts_is_not_replayed() -> None:
    (parted,) = read_table(make_text(*(make_row(mode=mode) for mode in "ab"))).cells
    with pytest.raises(ReplayFailedError, match=r"rows of the layout n2-.* differ in 'mode'"):
        CellLayouts(parted)


def test_estimates_are_judged_row_by_row_where_a_column_parts_a_layout() -> None:
    rows = (make_row(mode="a", step_time_s=0.5), make_row(mode="b", step_time_s=5.0))
    whole, *each = (read_table(make_text(*own)).cells for own in (rows, rows[:1], rows[1:]))
    errors = [figures(*cells)["time"]["mean_error"] for cells in each]
    assert figures(*whole)["time"]["mean_error"] == pytest.approx(sum(errors) / 2)
