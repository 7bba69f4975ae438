"""From timed iterations to a measurement: medians, time breakdown, memory and environment."""

from __future__ import annotations

import importlib
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import distributed as dist
from torch.distributed import ReduceOp

from layout_tuner.predictions.statistics.step_times import has_settled, quartiles
from layout_tuner.protocol.measurement import (
    Breakdown,
    Environment,
    Iteration,
    IterationKind,
    Measurement,
)
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.throughput import Throughput
from layout_tuner.workers.trainer.disturbance import (
    CoreWatch,
    Disturbance,
    NvidiaWatch,
    Watch,
    own_processes,
)
from layout_tuner.workers.trainer.probe.timing import TimedStep
from layout_tuner.workers.trainer.rank_memory import LogicalPeak
from layout_tuner.workers.trainer.revision import GIT_REVISION
from layout_tuner.workers.trainer.stopwatch import PARTS, Part
from layout_tuner.workers.trainer.training import Training


def rehearse(training: Training, *, limit_bytes: int | None) -> int:
    """Takes one step that changes nothing, and returns this rank's exact logical peak in bytes.

    The step is complete, but its learning rate is 0, and the optimizer is reset afterwards.

    Raises:
        MemoryLimitExceededError: the live tensors exceeded the limit.
    """
    batch = training.batch(0)
    existing = [*training.persistent_tensors(), batch.ids_MT, batch.targets_MT]
    tracker = LogicalPeak(existing, limit_bytes=limit_bytes, rank=training.mesh.rank)
    with tracker:
        training.step(batch, learning_rate=0.0)
    training.optimizer.forget()
    return tracker.peak_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakMemory:
    """The largest peak of any rank of each pipeline stage, in bytes."""

    kind: Literal["logical", "allocated"]
    """logical: live tensors, on the CPU. allocated: by the GPU's allocator."""
    by_stage: tuple[int, ...]
    reserved_by_stage: tuple[int, ...] = ()
    """What the allocator had reserved on the device, in use or not; empty on the CPU."""


def peak_memory(training: Training, logical_peak_bytes: int | None) -> PeakMemory:
    """The peaks of all ranks: logical ones, or the allocator's since its last reset.

    Communicates: an all-reduce over all ranks for each kind of peak.
    """
    if logical_peak_bytes is not None:
        return PeakMemory(kind="logical", by_stage=_by_stage(training, logical_peak_bytes))
    allocated_bytes = torch.cuda.max_memory_allocated(training.device)
    reserved_bytes = torch.cuda.max_memory_reserved(training.device)
    return PeakMemory(
        kind="allocated",
        by_stage=_by_stage(training, allocated_bytes),
        reserved_by_stage=_by_stage(training, reserved_bytes),
    )


def _by_stage(training: Training, peak_bytes: int) -> tuple[int, ...]:
    """The largest value of any rank of each stage; an all-reduce over all ranks."""
    peaks = torch.zeros(training.mesh.layout.pp, dtype=torch.int64, device=training.device)
    peaks[training.mesh.place.pp_rank] = peak_bytes
    dist.all_reduce(peaks, op=ReduceOp.MAX)
    return tuple(peaks.tolist())


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
    tokens_per_step: int,
    speed: Throughput,
    peak_source: str,
    breakdowns: Sequence[Breakdown],
    memory: PeakMemory,
    oversubscribed: bool,
    disturbance: Disturbance,
    balanced_routing: bool | None = None,
    expert_load: float | None = None,
) -> Measurement:
    """The measurement of a probe, warm-up included: medians over its timed iterations.

    `speed` is the throughput at their median. If fewer than `iterations_asked` were timed, the
    probe stopped early.
    """
    timed_s = step_times_s(iterations, "timed")
    q25_s, median_s, q75_s = quartiles(timed_s)
    return Measurement(
        step_time_s=median_s,
        step_time_q25_s=q25_s,
        step_time_q75_s=q75_s,
        tokens_per_step=tokens_per_step,
        **speed.figures,
        peak_source=peak_source,
        peak_memory_bytes=max(memory.by_stage),
        peak_memory_bytes_by_stage=memory.by_stage,
        memory_kind=memory.kind,
        oversubscribed=oversubscribed,
        iterations=tuple(iterations),
        breakdown=median_breakdown(breakdowns, step_time_s=median_s),
        peak_reserved_bytes_by_stage=memory.reserved_by_stage,
        warmup_settled=has_settled(step_times_s(iterations, "warmup")),
        skipped_steps=sum(iteration.grad_norm is None for iteration in iterations),
        shortened=len(timed_s) < iterations_asked,
        iterations_asked=iterations_asked,
        others_share=disturbance.others_share,
        throttled=disturbance.throttled,
        own_share=disturbance.own_share,
        balanced_routing=balanced_routing,
        expert_load=expert_load,
    )


def step_times_s(iterations: Sequence[Iteration], kind: IterationKind) -> list[float]:
    return [iteration.step_time_s for iteration in iterations if iteration.kind == kind]


def break_down(
    steps: Sequence[TimedStep], layout: Layout, *, device: torch.device
) -> list[Breakdown]:
    """The breakdown of each step; each part is the mean over the ranks.

    The difference to the slowest rank's time is unexplained, so that the parts add up to it.

    Communicates: one all-reduce over all ranks.
    """
    rows = [[step.parts_s[name] for name in PARTS] for step in steps]
    sums = torch.tensor(rows, dtype=torch.float64, device=device)
    dist.all_reduce(sums)
    means = (sums / layout.num_devices).tolist()
    return [
        breakdown_of(dict(zip(PARTS, row, strict=True)), layout, step_time_s=step.step_time_s)
        for row, step in zip(means, steps, strict=True)
    ]


def breakdown_of(parts_s: Mapping[Part, float], layout: Layout, *, step_time_s: float) -> Breakdown:
    """The breakdown of one step.

    The wait for all ranks at the end of the step counts for the axis that makes ranks unequal: pp,
    whose last stages finish first; else dp, else cp, else tp. An axis of one rank has no time,
    except dp under cp, over which gradients are summed too.
    """
    axes: dict[Part, int] = {"pp": layout.pp, "dp": layout.dp_cp, "cp": layout.cp}
    axes |= {"tp": layout.tp_ranks, "ep": layout.ep * layout.etp}
    exposed_s = {name: parts_s[name] if size > 1 else 0.0 for name, size in axes.items()}
    waiting = next((name for name, size in axes.items() if size > 1), None)
    if waiting is not None:
        exposed_s[waiting] += parts_s["idle"]
    compute_s, optimizer_s = parts_s["compute"], parts_s["optimizer"]
    return Breakdown(
        compute_s=compute_s,
        **{f"{name}_s": seconds for name, seconds in exposed_s.items()},
        optimizer_s=optimizer_s,
        unexplained_s=step_time_s - (compute_s + optimizer_s + sum(exposed_s.values())),
    )


def median_breakdown(breakdowns: Sequence[Breakdown], *, step_time_s: float) -> Breakdown:
    """The median of each part, scaled so that the parts add up to the median step time.

    The medians of the parts alone do not add up to it. The factor is close to 1, and a single
    disturbed step changes neither the medians nor the factor much.
    """
    medians = [statistics.median(parts) for parts in zip(*map(astuple, breakdowns), strict=True)]
    scale = step_time_s / sum(medians)
    return Breakdown(
        **{
            name: scale * seconds
            for name, seconds in zip(Breakdown.__slots__, medians, strict=True)
        }
    )


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
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
