"""From timed iterations to a measurement."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import distributed as dist
from torch.distributed import ReduceOp

from search_spaces.layout import Layout
from search_spaces.model_shape import ModelShape
from search_spaces.outcome import Environment, Iteration, Measurement
from workers.trainer.memory import LogicalPeak
from workers.trainer.revision import GIT_REVISION
from workers.trainer.throughput import Throughput
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


def peak_by_stage(training: Training, peak_bytes: int) -> tuple[int, ...]:
    """The largest peak of any rank of each stage; an all-reduce over all ranks."""
    peaks = torch.zeros(training.mesh.layout.pp, dtype=torch.int64, device=training.device)
    peaks[training.mesh.place.pp_rank] = peak_bytes
    dist.all_reduce(peaks, op=ReduceOp.MAX)
    return tuple(peaks.tolist())


def summarise(
    iterations: Sequence[Iteration],
    *,
    model: ModelShape,
    layout: Layout,
    tokens_per_step: int,
    peak_tflops: float,
    peak_source: str,
    peak_memory_bytes_by_stage: tuple[int, ...],
    memory_kind: str,
    oversubscribed: bool,
) -> Measurement:
    """The measurement of a probe: medians over its timed iterations."""
    times_s = [iteration.step_time_s for iteration in iterations if iteration.kind == "timed"]
    q25_s, median_s, q75_s = quartiles(times_s)
    speed = Throughput(
        model=model,
        layout=layout,
        tokens_per_s=tokens_per_step / median_s,
        peak_tflops_per_device=peak_tflops,
    )
    return Measurement(
        step_time_s=median_s,
        step_time_q25_s=q25_s,
        step_time_q75_s=q75_s,
        tokens_per_step=tokens_per_step,
        tokens_per_s=speed.tokens_per_s,
        tokens_per_s_per_device=speed.tokens_per_s_per_device,
        model_tflops_per_device=speed.model_tflops_per_device,
        hardware_tflops_per_device=speed.hardware_tflops_per_device,
        peak_tflops_per_device=peak_tflops,
        peak_source=peak_source,
        mfu=speed.mfu,
        hfu=speed.hfu,
        peak_memory_bytes=max(peak_memory_bytes_by_stage),
        peak_memory_bytes_by_stage=peak_memory_bytes_by_stage,
        memory_kind=memory_kind,
        oversubscribed=oversubscribed,
        iterations=tuple(iterations),
    )


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The three quartiles, interpolated between values; one value is all three."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    q25, median, q75 = statistics.quantiles(values, n=4, method="inclusive")
    return q25, median, q75


def describe_environment(device: torch.device) -> Environment:
    """What this rank runs on."""
    cuda = device.type == "cuda"
    return Environment(
        host=platform.node(),
        device=torch.cuda.get_device_name(device) if cuda else _cpu_name(),
        backend="nccl" if cuda else "gloo",
        python_version=platform.python_version(),
        torch_version=torch.__version__,
        numpy_version=np.__version__,
        git_revision=GIT_REVISION,
    )


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
