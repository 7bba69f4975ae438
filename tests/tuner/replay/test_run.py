"""One replayed search: what may be asked, in which order answers come, and its report."""

import random
from typing import Any

import numpy as np
import pytest

from search_spaces.belief.observation import Observation
from search_spaces.spec.layout import Layout
from search_spaces.tables import read_table
from tests.search_spaces.tables.tables import make_row, make_text
from tests.tuner.replay.cells import make_cell, make_cell_text, times_by
from tests.tuner.replay.made_run import make_run
from tuner.errors import ReplayFailedError, StrategyUnknownError
from tuner.replay import run as run_module
from tuner.replay.cell_layouts import CellLayouts
from tuner.replay.report import summarize
from tuner.replay.run import ProbeConditions, ReplayTask
from tuner.strategies.base import AskLimits, LayoutSearch, Proposer


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
    rows = make_cell_text(times_by(40, lambda place: 1.0 + (place * 7) % 40)).splitlines()
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
    cell = make_cell(times_by(30, lambda place: 40.0 - place))
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


def test_equal_seeds_give_equal_searches_and_others_do_not() -> None:
    cell = make_cell(times_by(40, lambda place: 1.0 + (place * 7) % 40))
    first, again, other = (replayed(cell, "random", seed=seed, pending=4) for seed in (1, 1, 2))
    assert first.probes == again.probes
    assert first.probes != other.probes


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
    cell = make_cell(times_by(12, lambda place: 1.0 + place / 10))
    guided = replayed(cell, "guided", probes=3, stop_within=None, expects=True)
    assert guided.probes[0].prediction.source == "estimates"
    assert [probe.prediction.source for probe in guided.probes[1:]] == ["calibrated"] * 2
    assert all(probe.possible_improvement >= 0 for probe in guided.probes)
    assert replayed(cell, "random").probes[0].prediction is None
    assert replayed(cell, "guided", probes=1).probes[0].possible_improvement is None


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
