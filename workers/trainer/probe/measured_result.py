"""From timed iterations to a measurement: medians, disturbance, load of experts, environment."""

from __future__ import annotations

import importlib
import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed as dist
from torch.distributed import ReduceOp

from layout_tuner.predictions.statistics.step_times import has_settled, quartiles
from layout_tuner.process_resources import kernel_text
from layout_tuner.protocol.measurement import (
    Breakdown,
    Environment,
    Iteration,
    IterationKind,
    Measurement,
)
from layout_tuner.search_spaces.throughput import Throughput
from layout_tuner.workers.trainer.disturbance import (
    CoreWatch,
    Disturbance,
    NvidiaWatch,
    Watch,
    own_processes,
)
from layout_tuner.workers.trainer.probe.measured_memory import PeakMemory
from layout_tuner.workers.trainer.probe.timing import median_breakdown
from layout_tuner.workers.trainer.revision import GIT_REVISION
from layout_tuner.workers.trainer.training import Training


def watch_device(device: torch.device, *, oversubscribed: bool) -> Watch:
    """Watches this rank's device. The ranks of an oversubscribed probe are others to each other."""
    if device.type == "cpu" and not oversubscribed:
        return CoreWatch(os.sched_getaffinity(0), own=own_processes)
    with suppress(ImportError, AttributeError):  # no management library, or an old torch
        if device.type == "cuda" and torch.version.hip is None and not oversubscribed:
            uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            return NvidiaWatch(uuid, importlib.import_module("pynvml"))
    return Disturbance


def largest_disturbance(here: Disturbance, device: torch.device) -> Disturbance:
    """The largest figures of any rank: ranks wait for the one that is disturbed most.

    What the product itself took is of the rank of which others took most.

    Communicates: all-reduces of two numbers and of one over all ranks.
    """
    share, throttled = _largest((here.others_share, here.throttled), device)
    (own,) = _largest((here.own_share if here.others_share == share else None,), device)
    throttled = None if throttled is None else throttled > 0
    return Disturbance(others_share=share, throttled=throttled, own_share=own)


def _largest(figures: Sequence[float | None], device: torch.device) -> list[float | None]:
    """The largest of each of some figures, from 0 on, of any rank; None: no rank knows it."""
    told = [-1.0 if each is None else float(each) for each in figures]
    largest = torch.tensor(told, dtype=torch.float64, device=device)
    dist.all_reduce(largest, op=ReduceOp.MAX)
    return [None if each < 0 else each for each in largest.tolist()]


def mean_expert_load(training: Training) -> float | None:
    """Tokens of the fullest expert over the mean, since the sums were last set to 0.

    The mean over layers, micro-batches and steps. None: the model has no experts.

    Communicates: an all-reduce of two numbers over all ranks; a stage may have no experts.
    """
    if training.expert_loads is None:
        return None
    sums = training.expert_loads.double()
    dist.all_reduce(sums)
    total, passes = sums.tolist()
    return total / passes  # type: ignore[no-any-return]


def summarise(
    iterations: Sequence[Iteration],
    *,
    iterations_asked: int,
    speed: Throughput,
    breakdowns: Sequence[Breakdown],
    memory: PeakMemory,
    disturbance: Disturbance,
    **figures: Any,
) -> Measurement:
    """The measurement of a probe, warm-up included: medians over its timed iterations.

    `speed` is the throughput at their median. If fewer than `iterations_asked` were timed, the
    probe stopped early. `figures` are further fields of the measurement.
    """
    timed_s = step_times_s(iterations, "timed")
    q25_s, median_s, q75_s = quartiles(timed_s)
    return Measurement(
        step_time_s=median_s,
        step_time_q25_s=q25_s,
        step_time_q75_s=q75_s,
        **speed.figures,
        peak_memory_bytes=max(memory.by_stage),
        peak_memory_bytes_by_stage=memory.by_stage,
        memory_kind=memory.kind,
        iterations=tuple(iterations),
        breakdown=median_breakdown(breakdowns, step_time_s=median_s),
        peak_reserved_bytes_by_stage=memory.reserved_by_stage,
        warmup_settled=has_settled(step_times_s(iterations, "warmup")),
        skipped_steps=sum(iteration.grad_norm is None for iteration in iterations),
        shortened=len(timed_s) < iterations_asked,
        iterations_asked=iterations_asked,
        **asdict(disturbance),
        **figures,
    )


def step_times_s(iterations: Sequence[Iteration], kind: IterationKind) -> list[float]:
    return [iteration.step_time_s for iteration in iterations if iteration.kind == kind]


def describe_environment(device: torch.device) -> Environment:
    """The machine and the software that this rank runs on."""
    is_cuda = device.type == "cuda"
    return Environment.described(
        host=platform.node(),
        device=torch.cuda.get_device_name(device) if is_cuda else _cpu_name(),
        backend=backend_of(device),
        python_version=platform.python_version(),
        torch_version=torch.__version__,
        numpy_version=np.__version__,
        git_revision=GIT_REVISION,
    )


def backend_of(device: torch.device) -> str:
    """The communication library; a ROCm build of torch calls RCCL "nccl"."""
    if device.type != "cuda":
        return "gloo"
    return "nccl" if torch.version.hip is None else "rccl"


def _cpu_name() -> str:
    for line in kernel_text(Path("/proc/cpuinfo")).splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
