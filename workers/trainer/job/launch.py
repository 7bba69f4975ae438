"""A rank's context from the environment that torchrun or srun sets."""

from __future__ import annotations

import os
import socket

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from layout_tuner.process_resources import usable_cores
from layout_tuner.workers.trainer.job.launcher_environment import (
    is_rank,
    slurm_meeting_point,
    slurm_tasks,
)
from layout_tuner.workers.trainer.open_training import RankContext


def context_from_environment() -> RankContext:
    """This rank's context under torchrun or srun; else that of a job with one rank.

    Raises:
        RankContextInvalidError: srun's variables do not name a rendezvous address.
    """
    environment = os.environ
    store: Store
    if "RANK" in environment:
        store, rank, world_size = next(iter(rendezvous("env://")))
        local_rank = int(environment.get("LOCAL_RANK", "0"))
    elif is_rank(environment):
        rank, world_size = int(environment["SLURM_PROCID"]), slurm_tasks(environment)
        host, port = slurm_meeting_point(environment)
        address = f"tcp://{host}:{port}?rank={rank}&world_size={world_size}"
        store, _, _ = next(iter(rendezvous(address)))
        local_rank = int(environment.get("SLURM_LOCALID", "0"))
    else:
        store, rank, world_size, local_rank = HashStore(), 0, 1, 0
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return RankContext(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        store=store,
        device=device,
        oversubscribed=shares_devices(store, rank, world_size, device),
        peak_tflops_per_device=None,
        peak_source="",
    )


def shares_devices(store: Store, rank: int, world_size: int, device: str) -> bool:
    """Whether rank 0's host runs more ranks than they have devices; only rank 0 gets the answer.

    A launcher shows each rank all devices of a host, or only its own. The union of what the ranks
    see is therefore counted. Communicates: through the store.
    """
    seen = _devices(device)
    store.set(f"devices/{rank}", f"{socket.gethostname()} {' '.join(sorted(seen))}")
    if rank > 0:
        return False
    views = [store.get(f"devices/{other}").decode().split(" ") for other in range(world_size)]
    here = [set(devices) for host, *devices in views if host == socket.gethostname()]
    together = set().union(*here)
    is_whole_view = device == "cpu" and together == seen
    # A container's CPU quota may be below the number of cores that its processes see.
    return len(here) > (usable_cores() if is_whole_view else len(together))


def _devices(device: str) -> set[str]:
    if device == "cpu":
        return {str(core) for core in os.sched_getaffinity(0)}
    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {str(getattr(found, "uuid", index)) for index, found in enumerate(properties)}
