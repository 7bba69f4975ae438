"""A probe slower than the campaign's best stops early: all ranks stop at the same iteration."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from results_db.trials.loss_comparison import first_difference
from tests.workers.trainer.cases import make_layout
from tests.workers.trainer.probes import FakeClock, make_request, probe
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


def num_timed(results: Sequence[tuple[Any, list[dict[str, Any]]]]) -> int:
    """How many timed iterations rank 0 reported; every rank has ended, since all have answered."""
    return sum(event["kind"] == "timed" for event in results[0][1])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("axes", [{}, {"tp": 2, "dp": 2}, {"pp": 2, "dp": 2}], ids=str)
@pytest.mark.parametrize(
    ("best_s", "timed"),
    [(0.30, 3), (0.401, 9), (0.405, 10), (0.50, 10)],
    ids=["slow", "slower", "equal", "faster"],
)
def test_a_probe_ends_once_its_recorded_iterations_show_that_it_is_slower(
    monkeypatch: pytest.MonkeyPatch, axes: dict[str, int], best_s: float, timed: int
) -> None:
    replayed(monkeypatch, lambda _, place: RECORDED_S[place])
    request = make_request(layout=make_layout(**axes), iterations=10, stop_above_step_time_s=best_s)
    results = probe(request)
    assert num_timed(results) == timed
    assert results[0][0] is not None
    measured = results[0][0].measurement
    assert (measured.shortened, measured.iterations_asked) == (timed < 10, 10)
    assert len(measured.iterations) == 2 + timed
    assert measured.step_time_s == pytest.approx(0.408, abs=0.003)


def test_a_slow_layout_is_really_stopped() -> None:
    results = probe(
        make_request(layout=make_layout(tp=2), iterations=50, stop_above_step_time_s=1e-6)
    )
    assert num_timed(results) == 3
    assert results[0][0] is not None
    assert results[0][0].measurement.shortened


def test_ranks_that_would_judge_otherwise_follow_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    # As if the last bit of a logarithm had tipped the balance on rank 1 alone.
    replayed(monkeypatch, lambda training, _: 0.3 if training.mesh.rank else 0.6)
    request = make_request(layout=make_layout(dp=2), iterations=10, stop_above_step_time_s=0.4)
    assert num_timed(probe(request)) == 3
    replayed(monkeypatch, lambda training, _: 0.6 if training.mesh.rank else 0.3)
    assert num_timed(probe(request)) == 10


def test_without_a_step_time_to_beat_a_probe_runs_to_its_end() -> None:
    results = probe(make_request(iterations=4))
    assert results[0][0] is not None
    measured = results[0][0].measurement
    assert (measured.shortened, measured.iterations_asked) == (False, 4)


def test_the_last_iteration_is_no_reason_to_call_a_probe_shortened() -> None:
    results = probe(make_request(iterations=3, stop_above_step_time_s=1e-6))
    assert results[0][0] is not None
    assert not results[0][0].measurement.shortened


def test_losses_of_a_shortened_probe_are_compared_as_far_as_they_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The number of warm-up iterations depends on measured times; recorded ones make it the same.
    replayed(monkeypatch, lambda _, place: RECORDED_S[place])
    layout = make_layout(tp=2)
    full, short = (
        probe(make_request(layout=layout, iterations=8, stop_above_step_time_s=above))[0][0]
        for above in (None, 1e-6)
    )
    assert full is not None
    assert short is not None
    whole, part = full.measurement.iterations, short.measurement.iterations
    assert (len(part), len(whole)) == (2 + 3, 2 + 8)
    assert first_difference(part, whole, "fp32") is None
    off = tuple(dataclasses.replace(i, loss=i.loss + 0.3 * (i.index > 1)) for i in part)
    assert first_difference(off, whole, "fp32") is not None


def test_looking_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, step = FakeClock(monkeypatch), Training.step

    def look(_steps: Sequence[float], _than_s: float) -> bool:
        clock.now_s += 1000.0
        return False

    def seven_seconds(self: Training, *args: Any, **kwargs: Any) -> StepStats:
        clock.now_s += 7.0
        return step(self, *args, **kwargs)

    monkeypatch.setattr(timing, "shows_enough", look)
    monkeypatch.setattr(Training, "step", seven_seconds)
    results = probe(
        make_request(layout=make_layout(dp=2), iterations=5, stop_above_step_time_s=1.0)
    )
    assert results[0][0] is not None
    measurement = results[0][0].measurement
    assert {iteration.step_time_s for iteration in measurement.iterations} == {7.0}
