"""The stopwatch: parts of a step exclude each other, and add up to the whole."""

from __future__ import annotations

import itertools
import threading

import pytest

from tests.workers.trainer.cases import CPU, make_layout, make_shape, make_training
from workers.trainer import training as training_module
from workers.trainer.stopwatch import Stopwatch, communication, part

pytestmark = pytest.mark.ranks


def counting_stopwatch() -> Stopwatch:
    """A second passes from each mark to the next."""
    ticks = itertools.count()
    return Stopwatch(CPU, clock=lambda: float(next(ticks)))


def recorded(stopwatch: Stopwatch) -> dict[str, float]:
    return {name: seconds for name, seconds in stopwatch.seconds().items() if seconds}


def test_an_inner_part_takes_its_time_away_from_the_outer_one() -> None:
    stopwatch = counting_stopwatch()
    with part("compute"), communication:
        pass
    assert recorded(stopwatch) == {}, "it does not run"
    with stopwatch.running(), part("optimizer"), part("dp"):
        pass
    assert recorded(stopwatch) == {"unexplained": 2, "optimizer": 2, "dp": 1}
    with stopwatch.running(), part("compute"):
        pass
    assert recorded(stopwatch) == {"unexplained": 2, "compute": 1}, "it starts from zero again"


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
