"""A probe: a short training run that is measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from layout_tuner.predictions.statistics.step_times import is_warm
from layout_tuner.protocol.measurement import Environment, Iteration, IterationKind, Measurement
from layout_tuner.protocol.outcome import ProbeRequest
from layout_tuner.search_spaces.throughput import Throughput
from layout_tuner.timing_mark import timing
from layout_tuner.workers.trainer.comm.collectives import barrier
from layout_tuner.workers.trainer.device_peak_flops import refuse_implausible
from layout_tuner.workers.trainer.errors import LossDivergedError
from layout_tuner.workers.trainer.open_training import (
    RankContext,
    TrainingSettings,
    open_training,
    peak_of,
)
from layout_tuner.workers.trainer.parallel.optimizer import OptimizerSettings
from layout_tuner.workers.trainer.probe.measured_memory import peak_memory, rehearse
from layout_tuner.workers.trainer.probe.measured_result import (
    describe_environment,
    largest_disturbance,
    mean_expert_load,
    summarise,
    watch_device,
)
from layout_tuner.workers.trainer.probe.timing import TimedStep, break_down, stops_early, timed_step
from layout_tuner.workers.trainer.trainer_options import TrainerOptions
from layout_tuner.workers.trainer.training import Training

Report = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankResult:
    """The result of a successful probe, on rank 0."""

    measurement: Measurement
    environment: Environment


def run_probe(request: ProbeRequest, ctx: RankContext, report: Report) -> RankResult | None:
    """Runs one rank of a probe, from the process group to the measurement.

    1. On the CPU the first step is a rehearsal that changes nothing. It counts memory and fails at
       the limit before time is spent on iterations.
    2. Warm-up iterations: the requested number, and more until their times settle.
    3. Timed iterations: the requested number, or fewer if they show that the layout is slower than
       the campaign's best.

    Rank 0 reports each iteration as it ends, and returns the result. End the process with
    `os._exit` afterwards, since destroying a gloo group can hang.

    Raises:
        LayoutUnsupportedError: the trainer cannot run the layout.
        CompilerMissingError: compilation was requested, and torch has no compiler.
        TrainerOptionInvalidError: a knob is unknown or wrong, changes nothing in this layout, or
            asks for more threads than there are cores.
        MemoryLimitExceededError: a rank needs more than `request.memory_limit_bytes`.
        LossDivergedError: the loss or the gradient norm is not finite; or fp16 skipped every timed
            step.
        ResultImplausibleError: the result is above the device's peak.
    """
    settings = _settings(request)
    training = open_training(settings, ctx)
    peak_tflops, peak_source = peak_of(ctx, settings)
    environment = describe_environment(training.device) if ctx.rank == 0 else None
    logical_peak_bytes = _begin_memory(training, request)
    warmups = _warm_up(training, request, report)
    indices = range(len(warmups), len(warmups) + request.iterations)
    if training.expert_loads is not None:
        training.expert_loads.zero_()
    with timing():
        watch = watch_device(training.device, oversubscribed=ctx.oversubscribed)
        timed = _time(training, indices, request.stop_above_step_time_s, report)
        disturbance = largest_disturbance(watch(), training.device)
    _refuse_all_skipped(timed)
    memory = peak_memory(training, logical_peak_bytes)
    expert_load = mean_expert_load(training)
    breakdowns = break_down(timed, request.layout, device=training.device)
    speed = Throughput(
        model=request.model,
        layout=request.layout,
        tokens_per_s=timed[-1].stats.num_tokens / median(step.step_time_s for step in timed),
        peak_tflops_per_device=peak_tflops,
    )
    speed = refuse_implausible(speed, peak_source, device=training.device)
    barrier(training.device)
    if environment is None:
        return None
    measurement = summarise(
        [
            _iteration(index, "timed" if index in indices else "warmup", step)
            for index, step in enumerate([*warmups, *timed])
        ],
        iterations_asked=request.iterations,
        tokens_per_step=timed[-1].stats.num_tokens,
        speed=speed,
        peak_source=peak_source,
        breakdowns=breakdowns,
        memory=memory,
        oversubscribed=ctx.oversubscribed,
        disturbance=disturbance,
        balanced_routing=None if expert_load is None else request.balanced_routing,
        expert_load=expert_load,
    )
    return RankResult(measurement=measurement, environment=environment)


def _settings(request: ProbeRequest) -> TrainingSettings:
    return TrainingSettings(
        model=request.model,
        layout=request.layout,
        seed=request.seed,
        optimizer=OptimizerSettings(),
        memory_limit_bytes=request.memory_limit_bytes,
        timeout_s=request.deadline_s,
        options=TrainerOptions.from_knobs(request.layout.job, compiled=request.compile),
        balanced_routing=request.balanced_routing,
    )


def _warm_up(training: Training, request: ProbeRequest, report: Report) -> list[TimedStep]:
    steps: list[TimedStep] = []
    while not is_warm([step.step_time_s for step in steps], at_least=request.warmup):
        steps.append(_iterate(training, len(steps), "warmup", report))
    return steps


def _time(
    training: Training, indices: range, stop_above_s: float | None, report: Report
) -> list[TimedStep]:
    """Takes the timed iterations: all of them, or fewer if they show that the layout is slower."""
    steps: list[TimedStep] = []
    for index in indices:
        steps.append(_iterate(training, index, "timed", report))
        is_last = len(steps) == len(indices)
        if stop_above_s is not None and not is_last and stops_early(steps, stop_above_s, training):
            break
    return steps


def _iterate(training: Training, index: int, kind: IterationKind, report: Report) -> TimedStep:
    step = timed_step(training, index)
    if training.mesh.rank == 0:
        report({"event": "iteration", **asdict(_iteration(index, kind, step))})
    return step


def _refuse_all_skipped(timed: list[TimedStep]) -> None:
    """Raises LossDivergedError if fp16 skipped every timed step: then nothing was trained."""
    if all(step.stats.is_skipped for step in timed):
        raise LossDivergedError(
            f"the gradients of all {len(timed)} timed steps overflowed in fp16, down to a loss scale "
            f"of {timed[-1].stats.loss_scale:g}; ask for more warm-up, or for precision=bf16"
        )


def _iteration(index: int, kind: IterationKind, step: TimedStep) -> Iteration:
    return Iteration(
        index=index,
        kind=kind,
        step_time_s=step.step_time_s,
        loss=step.stats.loss,
        grad_norm=None if step.stats.is_skipped else step.stats.grad_norm,
    )


def _begin_memory(training: Training, request: ProbeRequest) -> int | None:
    """The logical peak of a rehearsal; None on a GPU, whose allocator records the peak."""
    if training.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(training.device)
        return None
    return rehearse(training, limit_bytes=request.memory_limit_bytes)
