from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from api.dashboard.figures.time_parts import (
    LABEL,
    MOST_LANES,
    MeasuredStep,
    time_chart,
    timeline_chart,
)
from results_db.campaigns.charts import TimelineAttempt
from search_spaces.protocol.outcome import Breakdown
from tests.results_db.factories import START, make_breakdown


def make_step(step_time_s: float = 0.1, **changes: object) -> MeasuredStep:
    step = MeasuredStep(
        rank=1,
        trial_id=107,
        number=7,
        mark="",
        layout_key="key",
        step_time_s=step_time_s,
        breakdown=make_breakdown(step_time_s),
    )
    return replace(step, **changes)  # type: ignore[arg-type]


def test_the_parts_of_a_step_follow_each_other_and_fill_it() -> None:
    (bar,) = time_chart([make_step()]).bars
    assert [box.part for box in bar.boxes] == [1, 2, 3, 4, 5, 6]
    for box, following in zip(bar.boxes, bar.boxes[1:], strict=False):
        assert box.x + box.width == pytest.approx(following.x)
    assert bar.boxes[0].x == LABEL
    last = bar.boxes[-1]
    assert last.x + last.width == pytest.approx(bar.step_x)
    assert bar.boxes[0].says == "compute: 50 ms (50.0%)"
    assert bar.total == "100 ms, 50.0%"


def test_bars_have_one_scale() -> None:
    short, long = time_chart([make_step(0.1), make_step(0.4)]).bars
    assert (long.step_x - LABEL) == pytest.approx(4 * (short.step_x - LABEL))


def test_parts_that_add_up_to_more_than_the_step_go_back_to_its_end() -> None:
    parts = Breakdown(
        compute_s=0.08, tp_s=0.04, pp_s=0.0, dp_s=0.0, optimizer_s=0.0, unexplained_s=-0.02
    )
    (bar,) = time_chart([make_step(breakdown=parts)]).bars
    last = bar.boxes[-1]
    assert last.negative
    assert last.part == 6
    assert last.x == pytest.approx(bar.step_x)
    assert bar.seconds[-1] == "-20 ms"


def test_the_estimate_is_on_the_scale_of_the_bars() -> None:
    (bar,) = time_chart([make_step(0.1, estimated_s=0.05)]).bars
    assert bar.estimate_x is not None
    assert (bar.estimate_x - LABEL) == pytest.approx((bar.step_x - LABEL) / 2)


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
        num_devices=8,
        started_at=START + timedelta(seconds=begin),
        ended_at=None if end is None else START + timedelta(seconds=end),
        ending=None if end is None else "reported",
        state="RUNNING" if end is None else "COMPLETED",
        reason=None,
    )
    return attempt._replace(**changes)  # type: ignore[arg-type]


NOW = START + timedelta(seconds=100)


def test_attempts_are_bars_from_their_start_to_their_end() -> None:
    chart = timeline_chart([make_attempt(1, 0, 50), make_attempt(2, 50, 100)], NOW, {101: "winner"})
    assert chart is not None
    first, second = chart.bars
    assert first.x == LABEL
    assert first.x + first.width == pytest.approx(second.x)
    assert first.y == second.y
    assert len(chart.lanes) == 1
    assert (first.kind, first.label, first.mark) == ("completed", "1 COMPLETED", "winner")


def test_running_attempts_last_until_now() -> None:
    chart = timeline_chart([make_attempt(1, 0, 20), make_attempt(2, 20, None)], NOW, {})
    assert chart is not None
    assert chart.end == NOW
    assert chart.bars[1].width == pytest.approx(4 * chart.bars[0].width)
    assert (chart.bars[1].kind, chart.bars[1].words) == ("running", "RUNNING")


def test_attempts_at_one_time_have_rows_of_their_own() -> None:
    attempts = [
        make_attempt(1, 0, 50),
        make_attempt(2, 10, 60),
        make_attempt(3, 55, 90),
        make_attempt(4, 0, 30, worker_id="b", worker_name="worker b"),
    ]
    chart = timeline_chart(attempts, NOW, {})
    assert chart is not None
    assert [lane.label for lane in chart.lanes] == ["worker a", "", "worker b"]
    y = {bar.attempt.number: bar.y for bar in chart.bars}
    assert y[1] == y[3]
    assert y[1] < y[2] < y[4]


def test_attempts_beyond_the_rows_are_counted() -> None:
    attempts = [make_attempt(n, 0, 50, worker_id=f"w{n}") for n in range(MOST_LANES + 5)]
    chart = timeline_chart(attempts, NOW, {})
    assert chart is not None
    assert (len(chart.lanes), len(chart.bars), chart.num_beyond) == (MOST_LANES, MOST_LANES, 5)


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"state": "FAILED", "reason": "crashed"}, "failed", "FAILED (crashed)"),
        ({"ending": "lost", "state": "RUNNING"}, "lost", "LOST"),
        ({"ending": "superseded"}, "lost", "SUPERSEDED"),
    ],
)
def test_states_have_a_word(changes: dict[str, object], kind: str, words: str) -> None:
    chart = timeline_chart([make_attempt(1, 0, 50, **changes)], NOW, {})
    assert chart is not None
    assert (chart.bars[0].kind, chart.bars[0].words) == (kind, words)


def test_a_narrow_bar_of_a_failure_has_no_number_alone() -> None:
    attempts = [make_attempt(1, 0, 2, state="FAILED", reason="crashed"), make_attempt(2, 2, 100)]
    chart = timeline_chart(attempts, NOW, {})
    assert chart is not None
    assert chart.bars[0].label == ""


def test_a_campaign_without_attempts_has_no_timeline() -> None:
    assert timeline_chart([], NOW, {}) is None
