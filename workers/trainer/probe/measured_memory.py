"""Peak memory of a probe's ranks: of a rehearsal on the CPU, of the allocator on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import distributed as dist
from torch.distributed import ReduceOp

from layout_tuner.workers.trainer.rank_memory import LogicalPeak
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
