"""The stopwatch: parts of a step exclude each other, and add up to the whole."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest

from tests.workers.trainer.cases import CPU, make_layout, make_shape, make_training
from tests.workers.trainer.ranks import run_ranks
from workers.trainer import training as training_module
from workers.trainer.comm.mesh import build_mesh
from workers.trainer.probe.timing import timed_step
from workers.trainer.stopwatch import PARTS, Stopwatch, communication, part

pytestmark = pytest.mark.ranks


def counting_stopwatch() -> Stopwatch:
    """A second passes from each mark to the next."""
    ticks = itertools.count()
    return Stopwatch(CPU, clock=lambda: float(next(ticks)))


def recorded(stopwatch: Stopwatch) -> dict[str, float]:
    return {name: seconds for name, seconds in stopwatch.seconds().items() if seconds}


def test_an_inner_part_takes_its_time_away_from_the_outer_one() -> None:
    stopwatch = counting_stopwatch()
    with stopwatch.running(), part("optimizer"), part("dp"):
        pass
    assert recorded(stopwatch) == {"unexplained": 2, "optimizer": 2, "dp": 1}
    with stopwatch.running(), part("compute"):
        pass
    assert recorded(stopwatch) == {"unexplained": 2, "compute": 1}, "it starts from zero again"


def test_without_a_stopwatch_nothing_is_recorded() -> None:
    stopwatch = counting_stopwatch()
    with part("compute"), communication:
        pass
    assert recorded(stopwatch) == {}


def test_a_collective_belongs_to_tensor_parallelism_inside_a_pass_alone() -> None:
    stopwatch = counting_stopwatch()
    with stopwatch.running():
        with part("compute"), communication:
            pass
        with part("compute"), part("dp"), communication:
            pass
        with part("pp"), communication:
            pass
    assert recorded(stopwatch) == {"unexplained": 4, "compute": 4, "tp": 1, "dp": 3, "pp": 3}


def test_an_error_closes_the_parts_that_it_leaves() -> None:
    stopwatch = counting_stopwatch()
    with (
        pytest.raises(ValueError, match="told to fail"),
        stopwatch.running(),
        part("compute"),
        part("tp"),
    ):
        raise ValueError("told to fail")
    with stopwatch.running(), part("pp"):
        pass
    assert recorded(stopwatch) == {"unexplained": 2, "pp": 1}


def test_the_parts_of_a_thread_that_is_waited_for_are_seen() -> None:
    """Autograd runs the backward pass of a GPU in a thread of its own, which knows no context."""

    def backward() -> None:
        with communication:
            pass

    stopwatch = counting_stopwatch()
    with stopwatch.running(), part("compute"):
        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()
    assert recorded(stopwatch) == {"unexplained": 2, "compute": 2, "tp": 1}


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_waiting_for_the_other_ranks_sums_is_idle_and_no_part_of_the_update(
    monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    """Else the bubble of a pipeline's last stages, which are done first, is the optimizer's."""
    now = 0.0

    class Late:
        def wait(self) -> None:
            nonlocal now
            now += 100.0

    monkeypatch.setattr(training_module, "start_all_reduce", lambda *_: Late())
    training = make_training(make_shape(), make_layout(precision=precision))
    training.stopwatch = Stopwatch(CPU, clock=lambda: now)
    with training.stopwatch.running():
        training.step(training.batch(0))
    assert recorded(training.stopwatch) == {"idle": 100.0}


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        ({}, set()),
        ({"tp": 2}, {"tp"}),
        ({"tp": 2, "sequence_parallel": True}, {"tp"}),
        ({"pp": 2}, {"pp"}),
        ({"dp": 2}, {"dp"}),
        ({"tp": 2, "dp": 2, "zero_stage": 1}, {"tp", "dp"}),
    ],
    # Not a set's own words: they differ from process to process, and ids must not.
    ids=lambda value: "+".join(sorted(value)),
)
def test_every_step_is_taken_apart(axes: dict[str, Any], expected: set[str]) -> None:
    layout = make_layout(**axes)

    def work(rank: int) -> list[tuple[float, dict[str, float]]]:
        mesh = build_mesh(rank, layout, tied_embeddings=False)
        training = make_training(make_shape(), mesh=mesh)
        steps = [timed_step(training, index) for index in range(3)]
        return [(step.step_time_s, dict(step.parts_s)) for step in steps]

    for steps in run_ranks(layout.num_devices, work):
        for step_time_s, parts_s in steps:
            assert set(parts_s) == set(PARTS)
            assert min(parts_s["compute"], parts_s["optimizer"], parts_s["idle"]) > 0
            assert all(parts_s[name] > 0 for name in expected)
            # Of the slowest rank it is the step; the others' clocks stop a moment earlier.
            assert 0 < sum(parts_s.values()) <= step_time_s * (1 + 1e-9)
