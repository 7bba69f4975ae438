"""Simulated steps and peaks of layouts, kept in `build/` so that an interrupted study goes on.

A layout is walked once, on a machine whose nodes are all alike and without noise. What is kept
belongs to the sources of the simulator: when one of them changes, it is computed anew.
"""

from __future__ import annotations

import json
import multiprocessing
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.simulator.simulator_frontier import (
    FRONTIER,
    LAYOUT_1T,
    LAYOUT_175B,
    MODEL_1T,
    MODEL_22B,
    MODEL_175B,
    tflops,
)
from layout_tuner.array_types import Floats
from layout_tuner.predictions.estimates.step_time import step_time_s
from layout_tuner.search_spaces.clusters.cluster_presets import CLUSTER_PRESETS
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.workers.simulation.machine import Machine
from layout_tuner.workers.simulation.simulated_peaks import device_bytes, rank_memory
from layout_tuner.workers.simulation.steps import steps
from layout_tuner.workers.simulation.walk import Schedule

ROOT: Final = Path(__file__).parents[2]
BUILD: Final = ROOT / "build" / "frontier-study"
MODELS: Final = {"22B": MODEL_22B, "175B": MODEL_175B, "1T": MODEL_1T}
PUBLISHED: Final = {"22B": (38.38, 73.5), "175B": (36.14, 69.2), "1T": (31.96, 61.2)}
"""Per cent of the peak and TFLOP/s of a GCD (arXiv:2312.12705)."""
PEAK_TFLOPS: Final = FRONTIER.peak_flops_per_s["fp16"] / 1e12
_MANY: Final = 40
"""Schedules from which on starting processes pays."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyRun:
    """What the simulator says of one layout."""

    peak_bytes: float
    """Of the fullest device."""
    step_s: float | None
    """None: it runs out of memory."""
    parts_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyEffort:
    """How much is run."""

    is_quick: bool = False
    jobs: int = 2
    """Processes side by side."""

    def seeds(self, number: int) -> int:
        """So many seeds of a search; two of a quick run."""
        return min(number, 2) if self.is_quick else number


RECIPES: Final = {"175B": LAYOUT_175B, "1T": LAYOUT_1T}
"""The published recipes; the one of 22B is not published."""


def words(layout: Layout) -> str:
    """The knobs that tell layouts of one machine apart."""
    parts = [f"tp {layout.tp}", f"pp {layout.pp}", f"dp {layout.dp}"]
    if layout.tp_columns > 1:
        parts.insert(1, f"columns {layout.tp_columns}")
    if layout.vpp > 1:
        parts.append(f"vpp {layout.vpp}")
    parts.append(f"mbs {layout.micro_batch_size} x {layout.num_microbatches:,}")
    copies = f" in {layout.zero_replicas} copies" if layout.zero_replicas > 1 else ""
    parts += [f"ZeRO {layout.zero_stage}{copies}"] if layout.zero_stage else []
    parts.append(f"recompute {layout.recompute}")
    parts += ["sequence parallel"] if layout.sequence_parallel else []
    parts += ["stages side by side"] if layout.rank_order == "tp_cp_pp_dp" else []
    return ", ".join(parts)


def tokens(model: ModelShape, layout: Layout) -> int:
    """Tokens of a step."""
    return layout.global_batch_size * model.seq_length


def estimated(model: ModelShape, layouts: Sequence[Layout]) -> Floats:
    """TFLOP/s of a GCD by the closed forms, before anything is measured."""
    seconds = step_time_s(LayoutColumns.of_each(layouts), model, FRONTIER)
    return np.array([tflops(model, at, float(s)) for at, s in zip(layouts, seconds, strict=True)])


def sources_hash(*folders: str) -> str:
    """Of the Python files of some folders: what computed results belong to."""
    digest = sha256()
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


class Kept:
    """A JSON document in `build/` of results by name."""

    def __init__(self, name: str, *belongs_to: object) -> None:
        digest = sha256(repr(belongs_to).encode()).hexdigest()[:12]
        self._path = BUILD / f"{name}-{digest}.json"
        self.values: dict[str, Any] = {}
        if self._path.exists():
            self.values = json.loads(self._path.read_text())

    def save(self) -> None:
        """Whole or not at all."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        beside = self._path.with_suffix(".part")
        beside.write_text(json.dumps(self.values))
        beside.replace(self._path)


def simulate(
    model: ModelShape,
    layouts: Sequence[Layout],
    effort: StudyEffort,
    *,
    cluster: str = "frontier",
) -> list[StudyRun]:
    """Walks the layouts that were not walked before, a schedule at a time."""
    known = Kept(f"{cluster}-{model.name}", model, sources_hash("workers/simulation"))
    new = [each for each in dict.fromkeys(layouts) if each.key not in known.values]
    groups: dict[Schedule, list[Layout]] = defaultdict(list)
    for each in new:
        groups[Schedule.of(each)].append(each)
    # The longest first, so that no process is left with one at the end.
    ordered = sorted(groups.values(), key=lambda group: -group[0].pp * group[0].num_microbatches)
    for number, found in enumerate(_walked(model, cluster, ordered, effort), 1):
        known.values.update(found)
        if number % 20 == 0:
            known.save()
            print(f"  {model.name}: {number} of {len(ordered)} schedules", flush=True)
    if new:
        known.save()
    return [StudyRun(**known.values[each.key]) for each in layouts]


def _walked(
    model: ModelShape, cluster: str, groups: Sequence[Sequence[Layout]], effort: StudyEffort
) -> Iterator[dict[str, Any]]:
    if effort.jobs == 1 or len(groups) < _MANY:
        for group in groups:
            yield _walk_group(model, cluster, group)
        return
    with ProcessPoolExecutor(effort.jobs, multiprocessing.get_context("spawn")) as pool:
        waiting = [pool.submit(_walk_group, model, cluster, group) for group in groups]
        for done in as_completed(waiting):
            yield done.result()


def _walk_group(model: ModelShape, cluster: str, layouts: Sequence[Layout]) -> dict[str, Any]:
    machine = Machine.of(CLUSTER_PRESETS[cluster])
    capacity = machine.cluster.device_memory_bytes
    peaks = [
        max(device_bytes(each, machine, rank) for rank in rank_memory(each, model, machine, seed=0))
        for each in layouts
    ]
    fitting = [each for each, peak in zip(layouts, peaks, strict=True) if peak <= capacity]
    found = dict(zip(fitting, steps(fitting, model, machine), strict=True)) if fitting else {}
    runs = {}
    for each, peak in zip(layouts, peaks, strict=True):
        step = found.get(each)
        run = StudyRun(
            peak_bytes=float(peak),
            step_s=None if step is None else float(step.step_s),
            parts_s={} if step is None else {n: float(s) for n, s in step.parts_s.items()},
        )
        runs[each.key] = asdict(run)
    return runs


def simulated(model: ModelShape, layouts: Sequence[Layout], effort: StudyEffort) -> Floats:
    """TFLOP/s of a GCD, recomputation included; NaN: it runs out of memory."""
    runs = zip(layouts, simulate(model, layouts, effort), strict=True)
    return np.array([np.nan if r.step_s is None else tflops(model, at, r.step_s) for at, r in runs])
