"""From timed iterations to a measurement: how many, the parts of a step, what is not believed."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import distributed as dist

from layout_tuner.protocol.measurement import Breakdown, Measurement
from layout_tuner.protocol.outcome import ProbeRequest
from layout_tuner.search_spaces.clusters.cluster_presets import CLUSTER_PRESETS
from layout_tuner.search_spaces.clusters.device_peaks import DEVICE_PEAKS, known_device
from layout_tuner.search_spaces.throughput import MEASURED_PEAK
from layout_tuner.workers.trainer import training as training_module
from layout_tuner.workers.trainer.errors import ResultImplausibleError
from layout_tuner.workers.trainer.probe import probe as probe_module
from layout_tuner.workers.trainer.probe import timing
from layout_tuner.workers.trainer.probe.exception_reasons import classify
from layout_tuner.workers.trainer.probe.measured_result import backend_of
from layout_tuner.workers.trainer.probe.timing import (
    TimedStep,
    break_down,
    breakdown_of,
    median_breakdown,
    timed_step,
)
from layout_tuner.workers.trainer.stopwatch import PARTS, Part, Stopwatch, communication, part
from layout_tuner.workers.trainer.training import StepStats, Training
from tests.workers.trainer.cases import (
    CPU,
    DP,
    PP,
    TP,
    ZERO,
    ZERO_3,
    make_layout,
    make_shape,
    make_training,
    over_axes,
)
from tests.workers.trainer.probes import FakeClock, make_request, measured, probe
from tests.workers.trainer.ranks import RanksFailedError, run_ranks

pytestmark = pytest.mark.ranks

NOTHING: dict[Part, float] = dict.fromkeys(PARTS, 0.0)


@over_axes({}, TP | PP | {"recompute": "full"}, ZERO, ZERO_3, {"cp": 2})
def test_the_breakdown_adds_up_to_the_step(axes: dict[str, Any]) -> None:
    layout = make_layout(**axes)
    m = measured(make_request(layout=layout))
    parts = m.breakdown
    assert parts.total_s == pytest.approx(m.step_time_s, rel=1e-9)
    assert min(parts.compute_s, parts.optimizer_s) > 0
    assert parts.unexplained_s >= 0
    for axis in ("tp", "cp", "pp"):
        assert (getattr(parts, f"{axis}_s") > 0) == (getattr(layout, axis) > 1), axis
    assert (parts.dp_s > 0) == (layout.dp_cp > 1), "gradients are summed over cp too"


@pytest.mark.parametrize(
    ("axes", "waiting"),
    [
        ({"tp": 2, "pp": 2, "dp": 2}, "pp_s"),
        ({"tp": 2, "dp": 2}, "dp_s"),
        ({"tp": 2, "cp": 2}, "dp_s"),
        ({"tp": 2}, "tp_s"),
        ({}, "unexplained_s"),
    ],
    ids=str,
)
def test_waiting_at_the_end_of_a_step_has_its_axis(axes: dict[str, int], waiting: str) -> None:
    parts_s: dict[Part, float] = {**NOTHING, "idle": 3.0, "compute": 4.0}
    breakdown = breakdown_of(parts_s, make_layout(**axes), step_time_s=7.0)
    found = {name: value for name, value in dataclasses.asdict(breakdown).items() if value}
    assert found == {"compute_s": 4.0, waiting: 3.0}


def test_a_breakdown_is_the_mean_over_the_ranks_and_adds_up_to_the_slowest() -> None:
    layout = make_layout(dp=2)

    def work(rank: int) -> Breakdown:
        stats = StepStats(loss=1.0, grad_norm=1.0, num_tokens=1)
        parts_s: dict[Part, float] = {**NOTHING, "compute": 1.0 + rank, "dp": 0.5}
        step = TimedStep(step_time_s=2.75, parts_s=parts_s, stats=stats)
        return break_down([step], layout, device=CPU)[0]

    for found in run_ranks(2, work):
        assert (found.compute_s, found.dp_s, found.unexplained_s) == (1.5, 0.5, 0.75)


def test_the_median_breakdown_adds_up_to_the_median_step() -> None:
    """A step that was disturbed moves neither the parts nor their sum."""

    def of(compute_s: float, dp_s: float) -> Breakdown:
        parts_s: dict[Part, float] = {**NOTHING, "compute": compute_s, "dp": dp_s}
        return breakdown_of(parts_s, make_layout(dp=2), step_time_s=compute_s + dp_s)

    found = median_breakdown([of(3.0, 1.0), of(2.0, 2.0), of(90.0, 1.0)], step_time_s=4.0)
    assert (found.compute_s, found.dp_s) == (3.0, 1.0)
    found = median_breakdown([of(3.0, 1.0), of(2.0, 4.0), of(4.0, 3.0)], step_time_s=6.5)
    assert found.total_s == pytest.approx(6.5)
    assert found.compute_s == found.dp_s


def test_a_result_above_the_peak_is_refused() -> None:
    sentence = (
        r"ResultImplausibleError: \S+ TFLOP/s a device were counted, over its peak of 1e-06 "
        r"\(a test's\)"
    )
    with pytest.raises(RanksFailedError, match=sentence):
        probe(make_request(), peak_tflops_per_device=1e-6)
    assert classify(ResultImplausibleError("too fast")) == "implausible"


def test_a_measured_peak_that_is_passed_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine may have been busy the first time; the best of several further ones counts."""
    context = {"peak_tflops_per_device": 1e-6, "peak_source": f"{MEASURED_PEAK} (fp32)"}
    again = "layout_tuner.workers.trainer.device_peak_flops.measured_tflops"
    request = make_request(layout=make_layout(dp=2))
    rates = iter([2e-6, 0.1, 2e-6])
    monkeypatch.setattr(again, lambda device, precision: (next(rates) + dist.get_rank(), 0.0))
    m = measured(request, **context)
    assert m.peak_tflops_per_device == pytest.approx(0.6), "the median of 0.1 and 1.1"
    assert m.mfu == pytest.approx(m.model_tflops_per_device / 0.6)
    assert m.peak_source == context["peak_source"]
    monkeypatch.setattr(again, lambda device, precision: (2e-6, 0.0))
    with pytest.raises(RanksFailedError, match=r"ResultImplausibleError: .* over its peak of 2e-"):
        measured(request, **context)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("AMD Instinct MI250X", "MI250X"),
        ("AMD Instinct MI250X/MI250", "MI250X"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("Tesla V100-SXM2-32GB", "V100"),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_devices_are_known_by_the_names_that_torch_gives_them(name: str, known: str | None) -> None:
    assert known_device(name) == known


def test_every_preset_has_the_peaks_by_which_the_trainer_judges_its_device() -> None:
    for cluster in CLUSTER_PRESETS.values():
        known = known_device(cluster.device)
        assert known is not None, cluster.device
        sheet = DEVICE_PEAKS[known]
        if cluster.name == "h100-hbm2e":  # its power is limited
            assert all(peak < sheet[each] for each, peak in cluster.peak_flops_per_s.items())
        else:
            assert cluster.peak_flops_per_s == sheet


def test_a_rocm_build_says_that_rccl_communicates(monkeypatch: pytest.MonkeyPatch) -> None:
    assert backend_of(CPU) == "gloo"
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.version, "hip", None)
    assert backend_of(device) == "nccl"
    monkeypatch.setattr(torch.version, "hip", "6.2.41133")
    assert backend_of(device) == "rccl"


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
    ("axes", "best_s", "iterations", "timed"),
    [
        pytest.param(TP, 0.30, 10, 3, id="slow"),
        pytest.param({}, 0.30, 3, 3, id="slow-and-at-its-last-iteration"),
        pytest.param(TP | DP, 0.401, 10, 9, id="slower", marks=pytest.mark.slow),
        pytest.param({}, 0.405, 10, 10, id="equal"),
        pytest.param(PP | DP, 0.50, 10, 10, id="faster", marks=pytest.mark.slow),
    ],
)
def test_a_probe_ends_once_its_recorded_iterations_show_that_it_is_slower(
    monkeypatch: pytest.MonkeyPatch,
    axes: dict[str, int],
    best_s: float,
    iterations: int,
    timed: int,
) -> None:
    replayed(monkeypatch, lambda _, place: RECORDED_S[place])
    request = make_request(
        layout=make_layout(**axes), iterations=iterations, stop_above_step_time_s=best_s
    )
    m, num_timed = measured_and_timed(request)
    assert num_timed == timed
    assert (m.shortened, m.iterations_asked) == (timed < iterations, iterations)
    assert len(m.iterations) == 2 + timed
    assert m.step_time_s == pytest.approx(0.408, abs=0.003)


def test_ranks_that_would_judge_otherwise_follow_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    # As if the last bit of a logarithm had tipped the balance on rank 1 alone.
    replayed(monkeypatch, lambda training, _: 0.3 if training.mesh.rank else 0.6)
    request = make_request(layout=make_layout(dp=2), iterations=10, stop_above_step_time_s=0.4)
    assert measured_and_timed(request)[1] == 3
    replayed(monkeypatch, lambda training, _: 0.6 if training.mesh.rank else 0.3)
    assert measured_and_timed(request)[1] == 10


def test_judging_whether_to_stop_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock(monkeypatch)

    def look(_steps: Sequence[float], _than_s: float) -> bool:
        clock.now_s += 1000.0
        return False

    monkeypatch.setattr(timing, "shows_enough", look)
    request = make_request(layout=make_layout(dp=2), iterations=5, stop_above_step_time_s=1.0)
    assert {iteration.step_time_s for iteration in measured(request).iterations} == {7.0}


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
