"""The keys and figures of the report that `replay --json` prints."""

from __future__ import annotations

from typing import Any

import pytest

from tests.tuner.replay.test_replay import printed, write_two_cells

SHARES = ["0.05", "0.02", "0"]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_two_cells(tmp_path_factory.mktemp("table"))


@pytest.fixture(scope="module")
def report(table: str) -> Any:
    return printed(table, "--strategy", "random,exhaustive", "--seeds", "3", "--probes", "20")


@pytest.fixture(scope="module")
def summaries(report: Any) -> list[Any]:
    """Of each strategy over all cells, and in each cell."""
    cells = [summary for cell in report["cells"] for summary in cell["strategies"].values()]
    return [*report["strategies"].values(), *cells]


def test_a_report_says_what_was_asked(table: str, report: Any) -> None:
    assert report["table"] == table
    assert list(report["strategies"]) == ["random", "exhaustive"]
    assert report["settings"]["probes"] == 20


def test_a_report_has_the_probes_to_each_share(summaries: list[Any]) -> None:
    figures = ["median", "mean", "q25", "q75", "reached"]
    for summary in summaries:
        found = {share: list(each) for share, each in summary["probes_to"].items()}
        assert list(found.items()) == [(share, figures) for share in SHARES]


def test_a_report_has_the_regret_after_some_probes(summaries: list[Any]) -> None:
    for summary in summaries:
        assert list(summary["regret_after"]) == ["1", "3", "5", "10", "20"]


def test_a_report_has_the_cost_of_probes(summaries: list[Any]) -> None:
    for summary in summaries:
        assert summary["failed_probes"] >= 0
        assert summary["seconds_per_probe"] >= 0


def test_a_report_counts_the_layouts_of_each_cell(report: Any) -> None:
    counts = [(cell["num_layouts"], cell["num_completed"]) for cell in report["cells"]]
    assert counts == [(40, 40), (3, 2)]
    assert report["cells"][0]["num_within"] == {"0.05": 1, "0.02": 1, "0": 1}


def test_a_report_has_the_figures_of_each_cell(report: Any) -> None:
    first, second = (cell["strategies"]["exhaustive"] for cell in report["cells"])
    assert [each["probes_to"]["0"]["median"] for each in (first, second)] == [21, 3]
    assert second["failed_probes"] == 1
