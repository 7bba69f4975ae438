"""Measurements of a rank for the health check: its device, and the links to other ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import Store

from layout_tuner.process_resources import available_memory_bytes, usable_memory_bytes
from layout_tuner.search_spaces.throughput import MEASURED_PEAK
from layout_tuner.workers.ranks.rank_task import RankTask
from layout_tuner.workers.trainer.device_peak_flops import measured_tflops

_MESSAGE_BYTES: Final = {"cpu": 4 << 20, "cuda": 256 << 20}
_REPEATS: Final = 4


def measure_node(task: RankTask, store: Store) -> dict[str, Any]:
    """Measures all devices of a node at once: presence, memory, matrix products, and their link."""
    seen = task.device == "cpu" or torch.cuda.device_count() > 0
    measured: dict[str, Any] = {"seen": seen}
    if seen:
        free_bytes, total_bytes = _memory_bytes(task)
        measured |= {"memory_free_bytes": free_bytes, "memory_bytes": total_bytes}
        precision = task.job["precision"]
        best, usual = measured_tflops(task.device, precision)
        measured["gemm_tflops"] = usual
        measured |= {"peak_tflops": best, "peak_source": f"{MEASURED_PEAK} ({precision})"}
    if _all_say(task, store, seen) and task.world_size > 1:
        measured["link_gbytes_per_s"] = _all_reduce_rate(task, store)
    return measured


def measure_between(task: RankTask, store: Store) -> dict[str, Any]:
    """Measures transfers between the devices of two nodes, both ways, all pairs at once."""
    half = task.world_size // 2
    is_first = task.rank < half
    other = task.rank + half if is_first else task.rank - half

    def there_and_back(message: torch.Tensor) -> None:
        for is_sender in (is_first, not is_first):
            if is_sender:
                dist.send(message, other)
            else:
                dist.recv(message, other)

    seconds, size = _best_seconds(task, store, there_and_back)
    return {"between_gbytes_per_s": 2 * size / seconds / 1e9}


def _memory_bytes(task: RankTask) -> tuple[int, int]:
    """Free and total memory of the device; a CPU rank has its share of the node's."""
    if task.device == "cuda":
        free_bytes, total_bytes = torch.cuda.mem_get_info(0)
        return free_bytes, total_bytes
    return available_memory_bytes() // task.world_size, usable_memory_bytes() // task.world_size


def _all_say(task: RankTask, store: Store, yes: bool) -> bool:
    """Whether all ranks say yes; by the store, so that a rank without a device blocks none."""
    store.set(f"health/{task.rank}", "yes" if yes else "no")
    keys = [f"health/{rank}" for rank in range(task.world_size)]
    store.wait(keys)
    return all(store.get(key) == b"yes" for key in keys)


def _all_reduce_rate(task: RankTask, store: Store) -> float:
    """Gigabytes a second that each rank sends, in a ring (2 (n - 1) / n of the message)."""
    seconds, size = _best_seconds(task, store, dist.all_reduce)
    return 2 * (task.world_size - 1) / task.world_size * size / seconds / 1e9


def _best_seconds(
    task: RankTask, store: Store, exchange: Callable[[torch.Tensor], object]
) -> tuple[float, int]:
    """The shortest time of some exchanges, after one for the connections, and the bytes of each."""
    device = join_process_group(task, store)
    size = _MESSAGE_BYTES[device.type]
    message = torch.zeros(size // 4, device=device)
    best_s = float("inf")
    for repeat in range(1 + _REPEATS):
        before = time.perf_counter()
        exchange(message)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if repeat:
            best_s = min(best_s, time.perf_counter() - before)
    return best_s, size


def join_process_group(task: RankTask, store: Store) -> torch.device:
    """Joins the ranks of a task without the trainer in the default group; returns the device.

    The deadline of the task is the timeout of the group.
    """
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
