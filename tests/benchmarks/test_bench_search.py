"""The search benchmark's tables and plots, of made-up runs."""

from pathlib import Path

import pytest

from benchmarks.search.search_exams import EXAMS, cold_exam, exam_promises, exams_table, sit
from benchmarks.search.search_figures import (
    landscape_table,
    local_promises,
    sweep_promises,
    worst_cell_mean,
)
from benchmarks.search.search_plots import draw
from benchmarks.search.search_record import Promise, promises_table
from benchmarks.search.search_runs import Effort, Landscape, read_tables, search_table
from search_spaces.tables import read_table
from tests.search_spaces.tables.tables import make_row, make_text
from tests.tuner.replay.cells import make_cell, times_by


@pytest.fixture
def landscape() -> Landscape:
    cells = [
        make_cell(times_by(20, lambda place: 3.0 - place / 10)),
        make_cell(["failed", *times_by(9, lambda place: 2.0 - place / 10)], source="other"),
    ]
    strategies = ("exhaustive", "random")
    return search_table("made_up", "two cells", cells, strategies, Effort(seeds=3))


def test_a_promise_is_kept_broken_or_not_run() -> None:
    rows = [
        Promise(what="a", asked="2", measured=2.0, most=2).row(),
        Promise(what="b", asked="2", measured=2.5, most=2).row(),
        Promise(what="c", asked="2", measured=None, most=2).row(),
    ]
    assert [row[2:] for row in rows] == [("2", "yes"), ("2.5", "**no**"), ("-", "not run")]
    table = promises_table([Promise(what="a", asked="2", measured=2.0, most=2)])
    assert "| a | 2 | 2 | yes |" in table


def test_every_strategy_has_a_row(landscape: Landscape) -> None:
    lines = landscape_table(landscape).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["exhaustive", "random"]
    # 20 and 10 layouts of which the last is best and the last but one within a tenth.
    assert "| exhaustive | 6 | 15 (10 to 20) |" in lines[2]
    assert worst_cell_mean(landscape, "exhaustive") == 20.0


def test_promises_are_only_made_of_strategies_that_ran(landscape: Landscape) -> None:
    assert sweep_promises(landscape) == []
    assert local_promises(landscape) == []


def test_many_cells_get_fewer_seeds() -> None:
    effort = Effort(seeds=20)
    assert [effort.seeds_of(cells) for cells in (1, 12, 88, 1000)] == [20, 20, 2, 1]


def test_equal_searches_are_drawn_alike(landscape: Landscape, tmp_path: Path) -> None:
    first, second = (draw(landscape, tmp_path / name).read_bytes() for name in ("a", "b"))
    assert first == second
    assert b"node-seconds" in first


def test_files_that_are_no_tables_are_left_out_aloud(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "good.csv").write_text(make_text())
    (tmp_path / "other.csv").write_text("rank,stage\n0,0\n")
    assert [path.stem for path, _ in read_tables(tmp_path)] == ["good"]
    assert "other.csv: the columns cluster" in capsys.readouterr().out


def test_an_exam_is_judged_against_what_was_asked() -> None:
    tables = {"made": read_table(make_text(make_row(), make_row(tp=4, pp=1, step_time_s=0.7)))}
    report = sit(cold_exam("made"), tables)
    assert "| made, cold | 2 | 0 |" in exams_table({"made, cold": report})
    promises = exam_promises(EXAMS[1], report)
    assert [promise.asked for promise in promises] == ["6%", "0.08"]
