"""A probe slower than the campaign's best stops early: all ranks stop at the same iteration."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from results_db.trials.loss_check import first_difference
from search_spaces.protocol.measurement import Measurement
from search_spaces.protocol.outcome import ProbeRequest
from tests.workers.trainer.cases import DP, PP, TP, make_layout
from tests.workers.trainer.probes import FakeClock, make_request, measured, probe
from workers.trainer.probe import probe as probe_module
from workers.trainer.probe import timing
from workers.trainer.probe.timing import TimedStep, timed_step
from workers.trainer.training import StepStats, Training

pytestmark = pytest.mark.ranks

RECORDED_S = (0.412, 0.405, 0.409, 0.421, 0.407, 0.406, 0.411, 0.404, 0.408, 0.406)
"""Timed iterations of one layout, as a probe on a loaded machine recorded them."""


def replayed(monkeypatch: pytest.MonkeyPatch, times_s: Callable[[Training, int], float]) -> None:
    """Steps are taken as ever, and last as long as was recorded; warm-up is settled at once."""

    def step(training: Training, index: int) -> TimedStep:
        seconds = RECORDED_S[0] if index < 2 else times_s(training, index - 2)
        return dataclasses.replace(timed_step(training, index), step_time_s=seconds)

    monkeypatch.setattr(probe_module, "timed_step", step)


def measured_and_timed(request: ProbeRequest) -> tuple[Measurement, int]:
    """The measurement, and how many timed iterations rank 0 reported, whom all ranks followed."""
    result, events = probe(request)[0]
    return result.measurement, sum(event["kind"] == "timed" for event in events)


@pytest.mark.parametrize(
    ("axes", "best_s", "timed"),
    [
        pytest.param({}, 0.30, 3, id="slow"),
        pytest.param(TP | DP, 0.401, 9, id="slower", marks=pytest.mark.slow),
        pytest.param({}, 0.405, 10, id="equal"),
        pytest.param(PP | DP, 0.50, 10, id="faster", marks=pytest.mark.slow),
    ],
)
def test_a_probe_ends_once_its_recorded_iterations_show_that_it_is_slower(
    monkeypatch: pytest.MonkeyPatch, axes: dict[str, int], best_s: float, timed: int
) -> None:
    replayed(monkeypatch, lambda _, place: RECORDED_S[place])
    request = make_request(layout=make_layout(**axes), iterations=10, stop_above_step_time_s=best_s)
    m, num_timed = measured_and_timed(request)
    assert num_timed == timed
    assert (m.shortened, m.iterations_asked) == (timed < 10, 10)
    assert len(m.iterations) == 2 + timed
    assert m.step_time_s == pytest.approx(0.408, abs=0.003)


@pytest.mark.parametrize(
    ("iterations", "above_s", "timed"),
    [(50, 1e-6, 3), (3, 1e-6, 3)],
    ids=["a-slow-layout", "at-the-last-iteration"],
)
def test_a_slow_layout_is_really_stopped_and_shortened_if_iterations_were_left(
    iterations: int, above_s: float, timed: int
) -> None:
    layout = make_layout(tp=2)
    request = make_request(layout=layout, iterations=iterations, stop_above_step_time_s=above_s)
    m, num_timed = measured_and_timed(request)
    assert num_timed == timed
    assert (m.shortened, m.iterations_asked) == (timed < iterations, iterations)


def test_ranks_that_would_judge_otherwise_follow_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    # As if the last bit of a logarithm had tipped the balance on rank 1 alone.
    replayed(monkeypatch, lambda training, _: 0.3 if training.mesh.rank else 0.6)
    request = make_request(layout=make_layout(dp=2), iterations=10, stop_above_step_time_s=0.4)
    assert measured_and_timed(request)[1] == 3
    replayed(monkeypatch, lambda training, _: 0.6 if training.mesh.rank else 0.3)
    assert measured_and_timed(request)[1] == 10


def test_losses_of_a_shortened_probe_can_be_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    # The number of warm-up iterations depends on measured times; recorded ones make it the same.
    replayed(monkeypatch, lambda _, place: RECORDED_S[place])
    whole, part = (
        measured(
            make_request(layout=make_layout(tp=2), iterations=8, stop_above_step_time_s=above)
        ).iterations
        for above in (None, 1e-6)
    )
    assert (len(part), len(whole)) == (2 + 3, 2 + 8)
    assert first_difference(part, whole, "fp32") is None
    off = tuple(dataclasses.replace(i, loss=i.loss + 0.3 * (i.index > 1)) for i in part)
    assert first_difference(off, whole, "fp32") is not None


def test_judging_whether_to_stop_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, step = FakeClock(monkeypatch), Training.step

    def look(_steps: Sequence[float], _than_s: float) -> bool:
        clock.now_s += 1000.0
        return False

    def seven_seconds(self: Training, *args: Any, **kwargs: Any) -> StepStats:
        clock.now_s += 7.0
        return step(self, *args, **kwargs)

    monkeypatch.setattr(timing, "shows_enough", look)
    monkeypatch.setattr(Training, "step", seven_seconds)
    request = make_request(layout=make_layout(dp=2), iterations=5, stop_above_step_time_s=1.0)
    assert {iteration.step_time_s for iteration in measured(request).iterations} == {7.0}
