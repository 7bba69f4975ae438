"""This rank's place, as torchrun or srun states it in the environment."""

from __future__ import annotations

import os
import socket

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from search_spaces.machine import usable_cores
from workers.trainer.context import RankContext
from workers.trainer.launched import is_rank, slurm_meeting_point, slurm_tasks


def context_from_environment() -> RankContext:
    """This rank's place under torchrun or srun; alone, where neither has started it.

    Raises:
        RankContextInvalidError: srun's variables are there and do not say where the ranks meet.
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
    """Whether the ranks of rank 0's host are more than the devices that they may use; told to rank 0.

    A launcher may show all of a host's devices to each rank, or its own alone, so what counts is
    all that they see together.
    """
    seen = _devices(device)
    store.set(f"devices/{rank}", f"{socket.gethostname()} {' '.join(sorted(seen))}")
    if rank > 0:
        return False
    told = [store.get(f"devices/{other}").decode().split(" ") for other in range(world_size)]
    here = [set(devices) for host, *devices in told if host == socket.gethostname()]
    together = set().union(*here)
    is_whole_view = device == "cpu" and together == seen
    # A container's quota may be less than the cores that its processes see.
    return len(here) > (usable_cores() if is_whole_view else len(together))


def _devices(device: str) -> set[str]:
    if device == "cpu":
        return {str(core) for core in os.sched_getaffinity(0)}
    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {str(getattr(found, "uuid", index)) for index, found in enumerate(properties)}
