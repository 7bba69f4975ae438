"""Timings of a rank's machine, for the health check of nodes and for `layout-tuner calibrate`.

All ranks take the same steps, so that they share clock, memory and links as in a training step.
Collectives are those of the trainer, over groups that communicate at the same time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import Store

from search_spaces.machine import available_memory_bytes, usable_memory_bytes
from search_spaces.spec.layout import Layout, Precision
from search_spaces.statistics.step_times import quartiles
from workers.ranks.json_lines import JsonLines
from workers.ranks.rank_task import RankTask
from workers.trainer.comm.collectives import all_reduce, barrier, gather_rows, scatter_rows
from workers.trainer.comm.mesh import Mesh, build_mesh
from workers.trainer.device_peak import MEASURED, measured_tflops
from workers.trainer.model.matrix_products import (
    add_product,
    input_gradient,
    linear,
    use_layouts,
    weight_gradient,
)
from workers.trainer.model.precision import COMPUTE_DTYPES
from workers.trainer.parallel.pipeline import Message, start_messages
from workers.trainer.products import LAYOUTS, Product

_LEAST_REPEATS: Final = 5
_MOST_REPEATS: Final = 400
_MATMULS: Final = {
    "cpu": ((256, 128, 128), (512, 512, 512), (512, 2048, 512), (1024, 1024, 1024)),
    "cuda": ((2048, 1024, 1024), (4096, 4096, 4096), (4096, 16384, 4096), (8192, 8192, 8192)),
}
"""Rows, output features and input features of the products that are timed."""
_CHAIN: Final = 64
"""Operations that are timed together, since one is shorter than reading a clock."""
_STREAM_BYTES: Final = {"cpu": 64 << 20, "cuda": 1 << 30}
_MESSAGES: Final = {
    "cpu": tuple(1 << power for power in range(10, 25, 2)),
    "cuda": tuple(1 << power for power in range(10, 31, 3)),
}
"""Bytes of the messages that are timed."""

_HEALTH_MESSAGE_BYTES: Final = {"cpu": 4 << 20, "cuda": 256 << 20}
_HEALTH_REPEATS: Final = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """An operation to time."""

    what: dict[str, Any]
    """The "operation" and its sizes."""
    run: Callable[[], object]
    """Runs it once."""


class MachineTimer:
    """Times operations one after the other, for the same time each, on all ranks."""

    def __init__(self, device: torch.device, *, seconds_each: float) -> None:
        self._device, self._seconds_each = device, seconds_each

    def time(self, timing: Timing) -> dict[str, Any]:
        """The lower quartile over the repeats, and their relative spread, of the slowest rank.

        Other processes on the machine make a repeat longer, never shorter; the shortest repeat may
        be an outlier.
        """
        barrier(self._device)
        self._once(timing.run)
        # The same number on every rank, since the ranks of a collective wait for each other.
        wanted = int(self._seconds_each / self._slowest(self._once(timing.run)))
        repeats = min(max(wanted, _LEAST_REPEATS), _MOST_REPEATS)
        low, middle, high = quartiles([self._once(timing.run) for _ in range(repeats)])
        return {
            **timing.what,
            "seconds": self._slowest(low),
            "spread": self._slowest((high - low) / middle),
            "repeats": repeats,
        }

    def _once(self, run: Callable[[], object]) -> float:
        self._wait()
        before = time.perf_counter()
        run()
        self._wait()
        return time.perf_counter() - before

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _slowest(self, value: float) -> float:
        slowest = torch.tensor(value, dtype=torch.float64, device=self._device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return float(slowest.item())


def time_machine(task: RankTask, store: Store, line: JsonLines) -> dict[str, Any]:
    """Times all operations; rank 0 reports each timing at once."""
    device = join_process_group(task, store)
    timings = list(_all_timings(task, device))
    timer = MachineTimer(device, seconds_each=task.job["seconds"] / len(timings))
    timed = []
    for done, timing in enumerate(timings, 1):
        timed.append(timer.time(timing))
        if task.rank == 0:
            line.send({"event": "timed", "done": done, "of": len(timings), **timed[-1]})
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU core"
    return {"timings": timed, "device": name}


def _all_timings(task: RankTask, device: torch.device) -> Iterator[Timing]:
    yield from _matmul_timings(device)
    for fields in task.job.get("products", ()):
        yield from _product_timings(Product(*fields), device)
    yield from _memory_timings(device)
    for ranks in (n for n in range(2, task.world_size + 1) if task.world_size % n == 0):
        yield from _collective_timings(task, device, ranks)
    if task.world_size % 2 == 0:
        yield from _transfer_timings(task, device)


def _matmul_timings(device: torch.device) -> Iterator[Timing]:
    for precision in COMPUTE_DTYPES:
        for rows, columns, inner in _MATMULS[device.type]:
            what = {"operation": "matmul", "precision": precision}
            shape = {"rows": rows, "columns": columns, "inner": inner}
            run = partial(
                linear,
                _filled((rows, inner), precision, device),
                _filled((columns, inner), precision, device),
            )
            yield Timing(what=what | shape, run=run)


def _product_timings(product: Product, device: torch.device) -> Iterator[Timing]:
    """A product of a linear layer in each layout, as the trainer computes it."""
    rows, columns, inner = product.rows, product.columns, product.inner
    shapes: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {
        "output": ((rows, inner), (columns, inner)),
        "input_gradient": ((rows, inner), (inner, columns)),
        "weight_gradient": ((inner, rows), (inner, columns)),
    }
    left, right = (_filled(each, product.precision, device) for each in shapes[product.kind])
    runs: dict[str, Callable[[], object]] = {
        "output": lambda: linear(left, right),
        "input_gradient": lambda: input_gradient(left, right),
        "weight_gradient": lambda: weight_gradient(left.t(), right),
    }
    if product.kind == "weight_gradient" and product.precision == "fp32":
        total = torch.zeros(rows, columns, device=device)
        runs["weight_gradient"] = lambda: add_product(total, left.t(), right, beta=1)

    def run(layout: str) -> None:
        use_layouts({product: layout})
        runs[product.kind]()

    for layout in LAYOUTS:
        what = {"operation": "product", "layout": layout, **product._asdict()}
        yield Timing(what=what, run=partial(run, layout))


def _filled(shape: tuple[int, int], precision: Precision, device: torch.device) -> Tensor:
    return torch.randn(shape, device=device).to(COMPUTE_DTYPES[precision])


def _memory_timings(device: torch.device) -> Iterator[Timing]:
    """Reads and writes of a tensor that fits no cache, and operations that are only overhead."""
    whole = torch.zeros(_STREAM_BYTES[device.type] // 4, device=device)
    tiny = torch.zeros(8, device=device, requires_grad=True)
    moved = 2 * whole.numel() * whole.element_size()
    yield Timing(what={"operation": "stream", "bytes": moved}, run=partial(whole.add_, 1.0))
    operations = 2 * (_CHAIN + 1)
    yield Timing(
        what={"operation": "host", "operations": operations}, run=partial(_forth_and_back, tiny)
    )


def _forth_and_back(tiny: Tensor) -> None:
    """A chain of minimal operations, forward and backward."""
    end = tiny
    for _ in range(_CHAIN):
        end = end + 1.0
    end.sum().backward()  # type: ignore[no-untyped-call]


def _collective_timings(task: RankTask, device: torch.device, ranks: int) -> Iterator[Timing]:
    """The trainer's collectives over groups of neighbours that communicate at the same time."""
    layout = Layout(tp=ranks, dp=task.world_size // ranks)
    group = build_mesh(task.rank, layout, tied_embeddings=False).tp_group
    assert group is not None, f"{layout} has tensor-parallel groups"
    for size in _MESSAGES[device.type]:
        what = {"ranks": ranks, "bytes": size}
        whole = torch.zeros(ranks, size // 4 // ranks, device=device)
        own = torch.zeros(1, size // 4 // ranks, device=device)
        yield Timing(what={"operation": "all_reduce"} | what, run=partial(all_reduce, whole, group))
        yield Timing(
            what={"operation": "reduce_scatter"} | what, run=partial(scatter_rows, whole, group)
        )
        yield Timing(what={"operation": "all_gather"} | what, run=partial(gather_rows, own, group))


def _transfer_timings(task: RankTask, device: torch.device) -> Iterator[Timing]:
    """Transfers in both directions between the stages of two-stage pipelines, all pairs at once."""
    mesh = build_mesh(task.rank, Layout(pp=2, dp=task.world_size // 2), tied_embeddings=False)
    for size in _MESSAGES[device.type]:
        tensor = torch.zeros(size // 4, device=device)
        what = {"operation": "transfer_and_back", "ranks": 2, "bytes": size}
        yield Timing(what=what, run=partial(_there_and_back, tensor, mesh))


def _there_and_back(tensor: Tensor, mesh: Mesh) -> None:
    other = 1 - mesh.place.pp_rank
    for sender in (0, 1):
        is_sent = mesh.place.pp_rank == sender
        for work in start_messages([Message(tensor, other, sender, is_sent)], mesh):
            work.wait()


def measure_node(task: RankTask, store: Store) -> dict[str, Any]:
    """Measures all devices of a node at once: presence, memory, matrix products, and their link."""
    seen = task.device == "cpu" or torch.cuda.device_count() > 0
    measured: dict[str, Any] = {"device": task.device_index, "seen": seen}
    if seen:
        free_bytes, total_bytes = _memory_bytes(task)
        measured |= {"memory_free_bytes": free_bytes, "memory_bytes": total_bytes}
        precision = task.job["precision"]
        best, usual = measured_tflops(task.device, precision)
        measured["gemm_tflops"] = usual
        measured |= {"peak_tflops": best, "peak_source": f"{MEASURED} ({precision})"}
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

    def reduce(message: torch.Tensor) -> None:
        dist.all_reduce(message)

    seconds, size = _best_seconds(task, store, reduce)
    return 2 * (task.world_size - 1) / task.world_size * size / seconds / 1e9


def _best_seconds(
    task: RankTask, store: Store, exchange: Callable[[torch.Tensor], None]
) -> tuple[float, int]:
    """The shortest time of some exchanges, after one for the connections, and the bytes of each."""
    device = join_process_group(task, store)
    size = _HEALTH_MESSAGE_BYTES[device.type]
    message = torch.zeros(size // 4, device=device)
    best_s = float("inf")
    for repeat in range(1 + _HEALTH_REPEATS):
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
