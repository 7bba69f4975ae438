"""What a rank knows of its place: handed in by whoever started the process."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.distributed_c10d import Store


@dataclass(frozen=True, kw_only=True, slots=True)
class RankContext:
    """One rank's place in the job."""

    rank: int
    """Global rank, from 0."""
    world_size: int
    """Ranks of the job; the layout's num_devices."""
    local_rank: int
    """Position on its node; on GPUs the device it uses."""
    store: Store
    """Where the ranks meet. A store is used up by one job: give the next one a new prefix."""
    device: str
    """"cpu" or "cuda" (also ROCm)."""
    oversubscribed: bool
    """Whether ranks share devices: then the measurement is never ranked."""
    peak_tflops_per_device: float | None
    """The denominator of mfu; None: rank 0 looks it up or measures it before the first iteration."""
    peak_source: str
    """Where the peak comes from; kept with the measurement."""
