"""The cost of a probe beside its iterations, the parts of an iteration, and torchrun's start."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.trainer.bare_model import MODEL
from benchmarks.trainer.trainer_cells import make_layout
from benchmarks.trainer.trainer_table import Figure
from layout_tuner.predictions.statistics.step_times import quartiles
from layout_tuner.protocol.measurement import Measurement
from layout_tuner.protocol.outcome import Outcome, ProbeRequest
from layout_tuner.search_spaces.clusters.cluster import detect_local_cpu
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.workers.launchers.group_launcher import GroupLauncher
from layout_tuner.workers.launchers.local import LocalNodes
from layout_tuner.workers.ranks.json_lines import Document

BEYOND_S: Final = 0.5
"""Most seconds of a probe beside its iterations."""
TORCHRUN_TIMES: Final = 5
UNEXPLAINED: Final = 0.05
"""Most of an iteration that its parts may leave unexplained."""


class ProbeNotCompletedError(Exception):
    """A probe of the benchmark did not complete."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeCost:
    """What a probe needs from its request to the end of its last process."""

    wall_s: float
    iterations_s: float
    """Warm-up and timed iterations."""
    memory_iteration_s: float
    """The step that counts memory, of the slowest rank."""
    measurement: Measurement

    @property
    def beyond_s(self) -> float:
        """Everything but iterations: forks, rendezvous, weights, tokens, reports, the end."""
        return self.wall_s - self.iterations_s - self.memory_iteration_s


@contextmanager
def warm_launcher() -> Iterator[GroupLauncher]:
    """The launcher of `layout-tuner probe`, whose ranks also say how long they counted memory."""
    cluster = detect_local_cpu()
    nodes = LocalNodes(
        num_devices=cluster.devices_per_node, rank_entry="benchmarks.workers.clocked_rank:main"
    )
    launcher = GroupLauncher(nodes, cluster, allow_sharing=True)
    try:
        yield launcher
    finally:
        launcher.close()


def probe_cost(
    launcher: GroupLauncher, model: ModelShape, layout: Layout, *, iterations: int, repeats: int
) -> ProbeCost:
    """The probe whose cost is the median of some; one before them makes everything warm.

    Raises:
        ProbeNotCompletedError: it did not complete.
    """
    request = ProbeRequest(model=model, layout=layout, iterations=iterations)
    costs = [_run(launcher, request) for _ in range(repeats + 1)][1:]
    return sorted(costs, key=lambda cost: cost.beyond_s)[len(costs) // 2]


def _run(launcher: GroupLauncher, request: ProbeRequest) -> ProbeCost:
    memory_s: list[float] = []

    def note(event: Document) -> None:
        if event["event"] == "memory_iteration":
            memory_s.append(event["seconds"])

    started = time.perf_counter()
    outcome = launcher.run(request, on_event=note, cancelled=lambda: False)
    wall_s = time.perf_counter() - started
    measurement = _measured(outcome)
    return ProbeCost(
        wall_s=wall_s,
        iterations_s=sum(iteration.step_time_s for iteration in measurement.iterations),
        memory_iteration_s=max(memory_s),
        measurement=measurement,
    )


def _measured(outcome: Outcome) -> Measurement:
    if outcome.measurement is None:
        raise ProbeNotCompletedError(f"a probe ended as {outcome.state}: {outcome.message}")
    return outcome.measurement


def torchrun_start_s(num_ranks: int, *, repeats: int) -> float:
    """Seconds that torchrun needs for an empty job, from its start to its end; the median."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={num_ranks}"]
    job = Path(__file__).with_name("empty_job.py")
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        subprocess.run(
            [*command, "--standalone", str(job)],
            check=True,
            capture_output=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        seconds.append(time.perf_counter() - started)
    return quartiles(seconds)[1]


def start_figures(launcher: GroupLauncher, model: ModelShape) -> list[Figure]:
    """What a probe of two ranks costs beyond its iterations, and torchrun's start beside it."""
    layout = make_layout(precision="fp32", dp=2, num_microbatches=1)
    costs = {
        shape.name: probe_cost(launcher, shape, layout, iterations=1, repeats=3)
        for shape in (model, model_preset("tiny"))
    }
    figures = [
        Figure(
            name=f"a probe beyond its iterations, 2 ranks, warm zygote, {name}",
            asked=f"under {BEYOND_S} s",
            measured=f"{cost.beyond_s:.3f} s of {cost.wall_s:.2f} s",
            reached=cost.beyond_s < BEYOND_S,
        )
        for name, cost in costs.items()
    ]
    torchrun_s, beyond_s = torchrun_start_s(2, repeats=3), costs[model.name].beyond_s
    times = torchrun_s / beyond_s
    torchrun = Figure(
        name="torchrun's start of an empty 2-rank job over that",
        asked=f"{TORCHRUN_TIMES} times",
        measured=f"{times:.1f} times: {torchrun_s:.2f} s",
        reached=times >= TORCHRUN_TIMES,
    )
    return [*figures, torchrun]


def breakdown_figure(launcher: GroupLauncher) -> Figure:
    """The most that the breakdown of an iteration leaves unexplained, of layouts of two ranks."""
    kinds: tuple[tuple[str, dict[str, Any]], ...] = (
        *((f"{axis}=2", {axis: 2}) for axis in ("tp", "pp", "dp")),
        ("pp=2 with zero bubble", {"pp": 2, "schedule": "zero_bubble"}),
    )
    unexplained = {}
    for kind, changes in kinds:
        layout = make_layout(precision="fp32", **changes)
        request = ProbeRequest(model=MODEL, layout=layout, iterations=3)
        breakdown = _run(launcher, request).measurement.breakdown
        if breakdown is None:
            raise ProbeNotCompletedError(f"a probe with {kind} took no breakdown of its steps")
        said = ", ".join(f"{name} {share:.1%}" for name, share in breakdown.shares.items())
        print(f"breakdown of an iteration, {kind}: {said}", flush=True)
        unexplained[kind] = abs(breakdown.shares["unexplained"])
    worst = max(unexplained, key=lambda kind: unexplained[kind])
    return Figure(
        name=f"unexplained by the breakdown of an iteration, most of {', '.join(unexplained)}",
        asked=f"under {UNEXPLAINED:.0%}",
        measured=f"{unexplained[worst]:.2%} ({worst})",
        reached=unexplained[worst] < UNEXPLAINED,
    )
