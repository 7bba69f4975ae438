"""How the ranks of a job that is no training become one process group."""

from __future__ import annotations

from datetime import timedelta

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import Store

from workers.rank_task import RankTask


def join_process_group(task: RankTask, store: Store) -> torch.device:
    """Makes all ranks of the task the default group, each with its device, which it returns."""
    device = torch.device("cpu")
    if task.device == "cuda":
        device = torch.device("cuda", 0)  # a rank sees its own device alone
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "nccl",
        store=store,
        rank=task.rank,
        world_size=task.world_size,
        timeout=timedelta(seconds=task.deadline_s),
    )
    return device
