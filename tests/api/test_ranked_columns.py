"""Terminal, pages, report, CSV and a trial's figures show layouts by one table of columns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

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


def test_figures_are_at_the_median_of_all_runs_wherever_they_are_shown(
    api: Api, command: Command, trial: int
) -> None:
    (best, _other) = api.get("/campaigns/first/leaderboard")["trials"]
    first_s, median_s = best["measurement"]["step_time_s"], best["step_time_s"]
    assert best["num_runs"] == 2
    assert median_s > first_s
    shown = dict(views(api, command, trial))
    row = shown["terminal"].splitlines()[3]
    mfu = best["measurement"]["mfu"]
    assert f"{median_s:.4g} s" in row
    assert f"{mfu * first_s / median_s:.1%}" in row
    assert f"{median_s:.4g} s" in shown[f"/trials/{trial}"]
    (table, _) = api.table("/campaigns/first/leaderboard", format="csv")
    assert float(table["step_time_s"]) == median_s
    assert float(table["tokens_per_s"]) == pytest.approx(1000.0 * first_s / median_s)
    page = api.http.get("/campaigns/first", params={"column": ["step_time_s", "mfu"]}).text
    assert f"{median_s:.4g} s" in page
    assert f"{first_s:.4g} s" not in page
    assert f"{mfu * first_s / median_s:.1%}" in page


def test_a_layout_has_the_columns_of_the_knobs_with_a_heading() -> None:
    assert headings(LAYOUT) == (
        *(">nodes", ">tp", ">pp", ">dp", ">mbs", ">mb", ">batch", ">zero", "precision", "also"),
    )
