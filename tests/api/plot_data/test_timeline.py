from __future__ import annotations

from datetime import timedelta
from typing import Any

from api.plot_data.plot_data import PlottedData
from api.plot_data.timeline import MOST_ROWS_DRAWN, timeline
from results_db.campaigns.history_and_timeline import CampaignTimeline, TimelineAttempt
from tests.api.plot_data.layout_points import named
from tests.kit.store import START


def make_attempt(
    number: int, begin: float, end: float | None, **changes: object
) -> TimelineAttempt:
    """An attempt between seconds after START."""
    attempt = TimelineAttempt(
        trial_id=100 + number,
        number=number,
        attempt=1,
        worker_id="a",
        worker_name="worker a",
        num_nodes=1,
        started_at=START + timedelta(seconds=begin),
        ended_at=None if end is None else START + timedelta(seconds=end),
        ending=None if end is None else "reported",
        state="RUNNING" if end is None else "COMPLETED",
        reason=None,
    )
    return attempt._replace(**changes)  # type: ignore[arg-type]


NOW = START + timedelta(seconds=100)


def draw(*attempts: TimelineAttempt, left_out: int = 0, **marks: str) -> PlottedData:
    """The timeline; `marks` are names by trials, such as trial_101="winner"."""
    found = CampaignTimeline(attempts=attempts, num_attempts=len(attempts) + left_out)
    return timeline(found, NOW, {int(name[6:]): mark for name, mark in marks.items()})


def kinds(plot: PlottedData) -> dict[str, Any]:
    return {trace["name"]: trace for trace in plot.traces if trace["type"] == "bar"}


def test_attempts_are_bars_from_their_start_to_their_end_or_until_now() -> None:
    plot = draw(make_attempt(1, 0, 50), make_attempt(2, 50, 100), trial_101="winner")
    bars = kinds(plot)["completed"]
    assert (bars["base"], bars["x"], bars["y"]) == ([0, 50], [50, 50], [0, 0])
    assert bars["text"] == ["1", "2"]
    assert bars["customdata"] == plot.row_ids == [101, 102]
    assert plot.layout["xaxis"]["range"] == [0, 100]
    assert named(plot.traces, "winner")["x"] == [25]
    assert plot.rows[0][-1] == "winner"
    plot = draw(make_attempt(1, 0, 20), make_attempt(2, 20, None))
    running = kinds(plot)["running"]
    assert (running["base"], running["x"], plot.rows[1][3]) == ([20], [80], "RUNNING")
    plot = draw(make_attempt(1, 0, 20), make_attempt(2, 20, None, phase="waiting"))
    assert "running" not in kinds(plot)
    assert kinds(plot)["waiting"]["marker"]["color"] == "--ground"
    assert plot.rows[1][3] == "waiting for devices"
    attempts = [make_attempt(1, 0, 20, ending="lost"), make_attempt(1, 20, 60, attempt=2)]
    assert named(draw(*attempts, trial_101="baseline").traces, "baseline")["x"] == [10, 40]
    for seconds, unit, length in (
        (299, "seconds", 299),
        (600, "minutes", 10),
        (36000, "hours", 10),
    ):
        axis = draw(make_attempt(1, 0, seconds)).layout["xaxis"]
        assert axis["range"] == [0, length]
        assert axis["title"]["text"].startswith(f"{unit} since 20"), "it suits the length"


def test_attempts_at_one_time_have_rows_of_their_own_up_to_a_number() -> None:
    attempts = [make_attempt(*each) for each in ((1, 0, 50), (2, 10, 60), (3, 55, 90))]
    plot = draw(*attempts, make_attempt(4, 0, 30, worker_id="b", worker_name="<b>"))
    axis = plot.layout["yaxis"]
    assert (axis["tickvals"], axis["ticktext"]) == ([0, 2], ["worker a", "&lt;b&gt;"])
    assert kinds(plot)["completed"]["y"] == [0, 1, 0, 2]
    attempts = [make_attempt(n, 0, 50, worker_id=f"w{n}") for n in range(MOST_ROWS_DRAWN + 5)]
    plot = draw(*attempts, left_out=7)
    assert len(kinds(plot)["completed"]["y"]) == MOST_ROWS_DRAWN
    assert "5 attempts beyond 60 rows are not drawn." in plot.says
    assert "7 older attempts are left out." in plot.says
    assert plot.hides


def test_no_kind_of_bar_has_a_colour_alone() -> None:
    states = ("COMPLETED", "FAILED", "INFEASIBLE", "CANCELLED")
    attempts = [make_attempt(n, n, n + 1, state=state) for n, state in enumerate(states)]
    found = kinds(draw(*attempts, make_attempt(9, 9, None), make_attempt(8, 8, 9, ending="lost")))
    markers = [bars["marker"] for bars in found.values()]
    looks = {
        (each.get("pattern", {}).get("shape"), each.get("line", {}).get("color"))
        for each in markers
    }
    assert len(looks) == 6
