"""A probe: a short training run that is measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from search_spaces.outcome import Environment, Iteration, IterationKind, Measurement, ProbeRequest
from workers.trainer.breakdown import break_down
from workers.trainer.collectives import barrier
from workers.trainer.context import RankContext
from workers.trainer.early_stop import stops_here
from workers.trainer.errors import LossDivergedError
from workers.trainer.measure import describe_environment, peak_memory, rehearse, summarise
from workers.trainer.optimizer import OptimizerSettings
from workers.trainer.plausibility import plausible
from workers.trainer.session import SessionSettings, open_training, peak_of
from workers.trainer.throughput import Throughput
from workers.trainer.timing import TimedStep, is_warm, timed_step
from workers.trainer.training import Training

__all__ = ["RankContext", "RankResult", "run_probe"]

Report = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankResult:
    """What rank 0 knows when a probe has ended well."""

    measurement: Measurement
    environment: Environment


def run_probe(request: ProbeRequest, ctx: RankContext, report: Report) -> RankResult | None:
    """Runs one rank of a probe, from the process group to the measurement.

    On the CPU the first step is a rehearsal that changes nothing: it counts memory, and meets the
    limit before any time is spent. Then come warm-up iterations, as many as were asked for and
    more until their times settle, and timed ones, fewer than were asked for where it shows that the
    layout is slower than the campaign's best; rank 0 reports each as it ends. The process is spent
    afterwards: end it with `os._exit`, since tearing a gloo group down can hang.

    Raises:
        LayoutUnsupportedError: the trainer cannot run the layout.
        CompilerMissingError: compilation was asked for, and torch has nothing to compile with.
        MemoryLimitExceededError: a rank needs more than `request.memory_limit_bytes`.
        LossDivergedError: the loss or the gradient norm is not finite; or fp16 skipped every timed
            step.
        ResultImplausibleError: the result is above the device's peak.
    """
    training = open_training(_settings(request), ctx)
    peak_tflops, peak_source = peak_of(ctx, request.layout)
    environment = describe_environment(training.device) if ctx.rank == 0 else None
    logical_peak_bytes = _begin_memory(training, request)
    warmups = _warm_up(training, request, report)
    indices = range(len(warmups), len(warmups) + request.iterations)
    timed = _time(training, indices, request.stop_above_step_time_s, report)
    _refuse_all_skipped(timed)
    memory = peak_memory(training, logical_peak_bytes)
    breakdowns = break_down(timed, request.layout, device=training.device)
    speed = plausible(_speed(request, timed, peak_tflops), peak_source, device=training.device)
    barrier(training.device)
    if environment is None:
        return None
    measurement = summarise(
        [
            *(_iteration(index, "warmup", step) for index, step in enumerate(warmups)),
            *(
                _iteration(index, "timed", step)
                for index, step in zip(indices, timed, strict=False)
            ),
        ],
        iterations_asked=request.iterations,
        tokens_per_step=timed[-1].stats.num_tokens,
        speed=speed,
        peak_source=peak_source,
        breakdowns=breakdowns,
        memory=memory,
        oversubscribed=ctx.oversubscribed,
    )
    return RankResult(measurement=measurement, environment=environment)


def _settings(request: ProbeRequest) -> SessionSettings:
    return SessionSettings(
        model=request.model,
        layout=request.layout,
        seed=request.seed,
        optimizer=OptimizerSettings(),
        memory_limit_bytes=request.memory_limit_bytes,
        timeout_s=request.deadline_s,
        compile=request.compile,
    )


def _speed(request: ProbeRequest, timed: list[TimedStep], peak_tflops: float) -> Throughput:
    return Throughput(
        model=request.model,
        layout=request.layout,
        tokens_per_s=timed[-1].stats.num_tokens / median(step.step_time_s for step in timed),
        peak_tflops_per_device=peak_tflops,
    )


def _warm_up(training: Training, request: ProbeRequest, report: Report) -> list[TimedStep]:
    steps: list[TimedStep] = []
    while not is_warm([step.step_time_s for step in steps], at_least=request.warmup):
        steps.append(_iterate(training, len(steps), "warmup", report))
    return steps


def _time(
    training: Training, indices: range, stop_above_s: float | None, report: Report
) -> list[TimedStep]:
    """Timed iterations: all of them, or as many as it takes to show that the layout is slower."""
    steps: list[TimedStep] = []
    for index in indices:
        steps.append(_iterate(training, index, "timed", report))
        is_last = len(steps) == len(indices)
        if stop_above_s is not None and not is_last and stops_here(steps, stop_above_s, training):
            break
    return steps


def _iterate(training: Training, index: int, kind: IterationKind, report: Report) -> TimedStep:
    step = timed_step(training, index)
    if training.mesh.rank == 0:
        iteration = _iteration(index, kind, step)
        report(
            {
                "event": "iteration",
                "index": index,
                "kind": iteration.kind,
                "step_time_s": iteration.step_time_s,
                "loss": iteration.loss,
                "grad_norm": iteration.grad_norm,
            }
        )
    return step


def _refuse_all_skipped(timed: list[TimedStep]) -> None:
    """Raises LossDivergedError where fp16 never took a step: nothing was trained, or timed."""
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
    """The logical peak of a rehearsal; None on a GPU, whose allocator knows its own."""
    if training.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(training.device)
        return None
    return rehearse(training, limit_bytes=request.memory_limit_bytes)
