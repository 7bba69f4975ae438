"""The process group of ranks that do not run the trainer; their deadline is its timeout."""

from __future__ import annotations

from datetime import timedelta

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import Store

from workers.ranks.rank_task import RankTask


def join_process_group(task: RankTask, store: Store) -> torch.device:
    """Joins all ranks of the task in the default group; returns this rank's device."""
    device = torch.device("cpu")
    if task.device == "cuda":
        device = torch.device("cuda", 0)  # a rank sees only its own device
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "nccl",
        store=store,
        rank=task.rank,
        world_size=task.world_size,
        timeout=timedelta(seconds=task.deadline_s),
    )
    return device
