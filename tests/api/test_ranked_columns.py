"""Terminal, pages, report, CSV and a trial's figures show layouts by one table of columns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from layout_tuner.api.ranked_columns import COLUMNS, LAYOUT, headings
from layout_tuner.search_spaces.layouts.layout import Layout
from tests.kit.api import Api, Command, answered, ends

pytestmark = pytest.mark.sqlite_is_enough

HELD_BYTES = 7 << 40


@pytest.fixture
def trial(api: Api) -> int:
    """The best trial of a campaign of two; its layout ran twice, the second time slower."""
    worker = api.register()
    api.submit()
    trial = api.complete(worker, "first", Layout(num_microbatches=8), tokens_per_s=1000.0)
    api.complete(worker, "first", Layout(tp=2, num_microbatches=8), tokens_per_s=500.0)
    again = api.store.trials.repeat(trial)
    api.report_measured(worker, api.lease(worker), again.layout, tokens_per_s=900.0)
    return trial


def views(api: Api, command: Command, trial: int) -> Iterator[tuple[str, str]]:
    """The name and the text of everything that shows ranked layouts, less the CSV."""
    yield "terminal", ends(command("leaderboard", "first"), 0).output
    yield "terminal's trial", ends(command("trial", "show", str(trial)), 0).output
    for path in ("/campaigns/first", f"/trials/{trial}", "/v1/campaigns/first/report"):
        yield path, answered(api.http.get(path), 200).text


def test_a_changed_column_is_changed_wherever_ranked_layouts_are_shown(
    api: Api, command: Command, trial: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = replace(
        COLUMNS["peak_memory_bytes"],
        heading="held",
        label="held",
        value=lambda shown: HELD_BYTES,
        text=lambda value: f"{value >> 40} TiB",
    )
    monkeypatch.setitem(COLUMNS, changed.name, changed)
    for name, text in views(api, command, trial):
        assert "held" in text, name
        assert "7 TiB" in text, name
    for row in api.table("/campaigns/first/leaderboard", format="csv"):
        assert row["peak_memory_bytes"] == str(HELD_BYTES)


@dataclass(frozen=True, kw_only=True)
class TwoRuns:
    """What the service says of a layout that ran twice, the second time slower."""

    first_s: float
    """Step time of the first run."""
    median_s: float
    """Median step time of all runs."""
    mfu: float
    """Utilization at the median."""


@pytest.fixture
def runs(api: Api, trial: int) -> TwoRuns:
    (best, _other) = api.get("/campaigns/first/leaderboard")["trials"]
    first_s, median_s = best["measurement"]["step_time_s"], best["step_time_s"]
    assert (best["id"], best["num_runs"]) == (trial, 2)
    assert median_s > first_s
    mfu = best["measurement"]["mfu"] * first_s / median_s
    return TwoRuns(first_s=first_s, median_s=median_s, mfu=mfu)


def test_the_terminal_shows_the_median_of_all_runs(command: Command, runs: TwoRuns) -> None:
    row = ends(command("leaderboard", "first"), 0).output.splitlines()[3]
    assert f"{runs.median_s:.4g} s" in row
    assert f"{runs.mfu:.1%}" in row


def test_the_page_of_a_trial_shows_the_median_of_all_runs(
    api: Api, trial: int, runs: TwoRuns
) -> None:
    assert f"{runs.median_s:.4g} s" in answered(api.http.get(f"/trials/{trial}"), 200).text


def test_a_table_has_the_median_of_all_runs(api: Api, runs: TwoRuns) -> None:
    (row, _) = api.table("/campaigns/first/leaderboard", format="csv")
    assert float(row["step_time_s"]) == runs.median_s
    tokens_per_s = 1000.0 * runs.first_s / runs.median_s
    assert float(row["tokens_per_s"]) == pytest.approx(tokens_per_s)


def test_the_page_of_a_campaign_shows_the_median_alone(api: Api, runs: TwoRuns) -> None:
    page = api.http.get("/campaigns/first", params={"column": ["step_time_s", "mfu"]}).text
    assert f"{runs.median_s:.4g} s" in page
    assert f"{runs.first_s:.4g} s" not in page
    assert f"{runs.mfu:.1%}" in page


def test_a_layout_has_the_columns_of_the_knobs_with_a_heading() -> None:
    assert headings(LAYOUT) == (
        *(">nodes", ">tp", ">pp", ">dp", ">mbs", ">mb", ">batch", ">zero", "precision", "also"),
    )
