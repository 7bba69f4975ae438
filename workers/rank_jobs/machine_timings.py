"""Timings of a rank for `layout-tuner calibrate`: matrix products, memory, collectives.

All ranks take the same steps, so that they share clock, memory and links as in a training step.
Collectives are those of the trainer, over groups that communicate at the same time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import Store

from layout_tuner.predictions.statistics.step_times import quartiles
from layout_tuner.search_spaces.layouts.layout import Layout, Precision
from layout_tuner.workers.rank_jobs.health_job import join_process_group
from layout_tuner.workers.ranks.json_lines import JsonLines
from layout_tuner.workers.ranks.rank_task import RankTask
from layout_tuner.workers.trainer.comm.collectives import (
    all_reduce,
    barrier,
    gather_rows,
    scatter_rows,
)
from layout_tuner.workers.trainer.comm.mesh import Mesh, build_mesh
from layout_tuner.workers.trainer.model.matrix_products import (
    add_product,
    input_gradient,
    linear,
    use_layouts,
    weight_gradient,
)
from layout_tuner.workers.trainer.model.precision import COMPUTE_DTYPES
from layout_tuner.workers.trainer.parallel.pipeline import Message, start_messages
from layout_tuner.workers.trainer.product_layouts import LAYOUTS, Product

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
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
    return {"timings": timed}


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
