import math
import sys
from pathlib import Path

import pytest

from benchmarks import bench_trainer
from benchmarks.bench_trainer import make_cell
from benchmarks.results_file import record, table
from benchmarks.side_by_side import Series
from benchmarks.trainer.trainer_cells import CellResult
from benchmarks.trainer.trainer_table import cells_table, memory_figure, single_rank_figures
from search_spaces.errors import SearchSpaceError


def make_result(name: str = "1,1,1", **times_s: float) -> CellResult:
    series = {
        peer.replace("_", "-"): Series(
            step_times_s=(time_s,) * 3, cpu_times_s=(2 * time_s,) * 3, losses=(9.0,)
        )
        for peer, time_s in times_s.items()
    }
    cell = make_cell(name, "fp32")
    cell = type(cell)(
        layout=cell.layout,
        asked={peer: asked for peer, asked in cell.asked.items() if peer in series},
        by_cpu_time=cell.by_cpu_time,
    )
    return CellResult(
        cell=cell,
        series=series,
        loss_differences=dict.fromkeys(series, 1e-7),
        peak_tflops=0.1,
    )


def test_a_row_says_what_was_asked_and_whether_it_was_reached():
    *_, row = cells_table([make_result(ours=1.0, bare=1.1)]).splitlines()
    assert row.startswith("| 1,1,1 | fp32 | bare | 1.05 | 1.100 | 1.100 (1.100 to 1.100) | yes |")
    *_, row = cells_table([make_result(ours=1.0, bare=1.04)]).splitlines()
    assert "**no**" in row


def test_four_ranks_on_two_cores_are_compared_by_processor_time():
    result = make_result("2,1,2", ours=1.0, torch_native=1.5)
    *_, row = cells_table([result]).splitlines()
    assert "torch-native (CPU s) |  | 1.500" in row
    assert math.isnan(result.cell.asked["torch-native"])


def test_a_peer_in_its_own_process_has_no_processor_time_to_show():
    shown = cells_table([make_result(**{"ours": 1.0, "bare": 1.1, "bare, own process": 1.2})])
    *_, bare, own = (row.split(" | ") for row in shown.splitlines())
    assert (bare[10], own[10]) == ("2.20", "")


def test_a_torch_native_side_that_is_slower_than_the_bare_model_voids_the_comparison():
    fast = make_result(ours=1.0, bare=1.0, torch_native=1.04)
    slow = make_result(ours=1.0, bare=1.0, torch_native=1.10)
    assert [figure.reached for figure in single_rank_figures(fast)[1:]] == [True]
    assert [figure.reached for figure in single_rank_figures(slow)[1:]] == [False]


def test_the_share_of_the_peak_is_that_of_one_rank():
    share = single_rank_figures(make_result(ours=2.0))[0]
    tokens, flops = 4 * 2 * 256, 113_246_208
    assert share.measured.startswith(f"{tokens * flops / 2.0 / 0.1e12:.1%}")


@pytest.mark.parametrize(("sharded", "reached"), [(50, True), (52, False), (48, False)])
def test_sharded_states_are_held_against_their_share(sharded: int, reached: bool):
    assert memory_figure([100, 100], [sharded, 40], "fp32").reached is reached


@pytest.mark.parametrize("name", ["2,1", "a,b,c", "1,1,1,1,1", "", "-1,1,1"])
def test_a_cell_that_is_none_is_refused(name: str):
    with pytest.raises(ValueError, match="is not tp,pp,dp"):
        make_cell(name, "fp32")


def test_a_cell_that_makes_no_layout_is_refused():
    with pytest.raises(SearchSpaceError, match="dp"):
        make_cell("1,1,0", "fp32")


def test_a_part_of_the_table_is_not_recorded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["bench-trainer", "--record", "--cell", "1,1,1"])
    with pytest.raises(SystemExit) as ended:
        bench_trainer.main()
    assert ended.value.code == 2
    assert "--record is for the whole table" in capsys.readouterr().err


def test_a_section_takes_the_place_of_its_last_version(tmp_path: Path):
    results = tmp_path / "RESULTS.md"
    results.write_text("# Results\n\nAll of them.\n\n## First\n\nold\n\n## Second\n\nkept\n")
    record("First", "new\n", results)
    record("Third", "added", results)
    assert results.read_text() == (
        "# Results\n\nAll of them.\n\n## First\n\nnew\n\n## Second\n\nkept\n\n## Third\n\nadded\n"
    )


def test_a_table_is_markdown():
    assert table(("a", "b"), [("1", "2")]) == "| a | b |\n| --- | --: |\n| 1 | 2 |"
