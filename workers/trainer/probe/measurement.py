"""From timed iterations to a measurement."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import distributed as dist
from torch.distributed import ReduceOp

from search_spaces.measurement import (
    Breakdown,
    Environment,
    Iteration,
    IterationKind,
    Measurement,
)
from workers.trainer.breakdown import median_breakdown
from workers.trainer.memory import LogicalPeak
from workers.trainer.revision import GIT_REVISION
from workers.trainer.throughput import Throughput
from workers.trainer.timing import has_settled
from workers.trainer.training import Training


def rehearse(training: Training, *, limit_bytes: int | None) -> int:
    """Takes one step that changes nothing, and returns this rank's exact logical peak in bytes.

    The step is complete, but its learning rate is 0, and the moments are cleared afterwards.

    Raises:
        MemoryLimitExceededError: the live tensors passed the limit.
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
    """The largest peak of any rank of each stage, in bytes."""

    kind: Literal["logical", "allocated"]
    """Live tensors, on the CPU; else what the device's allocator gave out."""
    by_stage: tuple[int, ...]
    reserved_by_stage: tuple[int, ...] = ()
    """What the allocator had taken from the device, in use or not; empty on the CPU."""


def peak_memory(training: Training, logical_peak_bytes: int | None) -> PeakMemory:
    """The peaks of all ranks: the logical ones, or since the last reset those of the allocator."""
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
    """The largest of any rank of each stage; an all-reduce over all ranks."""
    peaks = torch.zeros(training.mesh.layout.pp, dtype=torch.int64, device=training.device)
    peaks[training.mesh.place.pp_rank] = peak_bytes
    dist.all_reduce(peaks, op=ReduceOp.MAX)
    return tuple(peaks.tolist())


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
) -> Measurement:
    """The measurement of a probe: medians over its timed iterations.

    Args:
        iterations: all of them, in order.
        iterations_asked: how many were to be timed; where fewer were, the probe was stopped early.
        tokens_per_step: of all replicas.
        speed: at the median of the timed ones' step times.
        peak_source: where its peak comes from.
        breakdowns: of each timed iteration.
        memory: of all ranks.
        oversubscribed: whether ranks shared devices.
    """
    timed_s = step_times_s(iterations, "timed")
    q25_s, median_s, q75_s = quartiles(timed_s)
    return Measurement(
        step_time_s=median_s,
        step_time_q25_s=q25_s,
        step_time_q75_s=q75_s,
        tokens_per_step=tokens_per_step,
        tokens_per_s=speed.tokens_per_s,
        tokens_per_s_per_device=speed.tokens_per_s_per_device,
        model_tflops_per_device=speed.model_tflops_per_device,
        hardware_tflops_per_device=speed.hardware_tflops_per_device,
        peak_tflops_per_device=speed.peak_tflops_per_device,
        peak_source=peak_source,
        mfu=speed.mfu,
        hfu=speed.hfu,
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
    )


def step_times_s(iterations: Sequence[Iteration], kind: IterationKind) -> list[float]:
    """The step times of the iterations of one kind."""
    return [iteration.step_time_s for iteration in iterations if iteration.kind == kind]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The three quartiles, interpolated between values; one value is all three."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    q25, median, q75 = statistics.quantiles(values, n=4, method="inclusive")
    return q25, median, q75


def describe_environment(device: torch.device) -> Environment:
    """What this rank runs on."""
    is_cuda = device.type == "cuda"
    return Environment(
        host=platform.node(),
        device=torch.cuda.get_device_name(device) if is_cuda else _cpu_name(),
        backend=backend_of(device),
        python_version=platform.python_version(),
        torch_version=torch.__version__,
        numpy_version=np.__version__,
        git_revision=GIT_REVISION,
    )


def backend_of(device: torch.device) -> str:
    """The library that communicates; a ROCm build of torch calls RCCL by NCCL's name."""
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
