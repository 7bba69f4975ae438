"""Memory by model, and the peak of each rank of the published run of 175B."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.frontier_study import study_page as page
from benchmarks.frontier_study.study_runs import MODELS, RECIPES, StudyEffort
from benchmarks.simulator.simulator_frontier import FRONTIER, MEMORY
from layout_tuner.array_types import Floats
from layout_tuner.predictions.estimates.peak_memory import stage_memory
from layout_tuner.predictions.estimates.trainer_storage import storage_of
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.units import GIB
from layout_tuner.workers.simulation.machine import Machine
from layout_tuner.workers.simulation.simulated_peaks import rank_memory

_PUBLISHED_GB: Final = {"22B": 440, "175B": 3_500, "1T": 20_000}
_PAPER_BYTES: Final = 20
_OURS: Final = (("weights", 2), ("gradients", 4), ("states", 12))
"""Bytes a parameter with 16-bit products: weights; fp32 gradients; fp32 masters and two moments."""


def memory(_effort: StudyEffort, tables: Path | None) -> page.StudyPart:
    """The table of memory by model; the peaks of a run where there are tables."""
    about = (
        f"Weights, gradients and optimizer states of a whole model. The paper counts {_PAPER_BYTES} "
        "bytes a parameter of a rounded number of parameters; ours are those of the shape, at "
        f"{sum(each for _, each in _OURS)} bytes as the embedded trainer holds them."
    )
    header = ("model", "parameters", "published", "at the paper's bytes")
    rows = [_model_row(size, model) for size, model in MODELS.items()]
    blocks = [about, page.rows_table([*header, *(name for name, _ in _OURS), "our sum"], rows)]
    if tables is None or not (tables / MEMORY).exists():
        blocks.append(
            "The published peaks of ranks are left out: this run had no folder of tables "
            "(`make frontier-study TABLES=DIR`)."
        )
    else:
        blocks += _stages(tables / MEMORY)
    return page.StudyPart(title="Memory", blocks=tuple(blocks))


def _model_row(size: str, model: ModelShape) -> tuple[str, ...]:
    count = model.num_parameters
    ours = [each * count / 1e9 for _, each in _OURS]
    return (
        size,
        f"{count / 1e9:,.1f} billion",
        f"{_PUBLISHED_GB[size]:,} GB",
        f"{_PAPER_BYTES * count / 1e9:,.0f} GB",
        *(f"{each:,.0f} GB" for each in ours),
        f"{sum(ours):,.0f} GB",
    )


def _stages(path: Path) -> list[str]:
    layout = RECIPES["175B"]
    with path.open() as lines:
        ranks = list(csv.DictReader(lines))
    used, reserved = (_measured(ranks, f"max_{kind}_mib") for kind in ("allocated", "reserved"))
    walked, blocks, estimates = _ours()
    stages = range(layout.pp)
    with page.figure("memory") as axes:
        page.draw_published(axes, stages, used, "published, in use")
        page.draw_published(axes, stages, reserved, "published, reserved", marker="s")
        page.draw_simulated(axes, stages, walked, "simulated, in use")
        page.draw_simulated(axes, stages, blocks, "simulated, reserved", 1)
        page.draw_estimated(axes, stages, estimates, "estimated, in use", 2)
        axes.set(xlabel="pipeline stage", ylabel="GiB of a rank")
        page.from_zero(axes)
        axes.legend(ncols=2)
    header = ("175B, peak of a rank", "published, mean", "ours, mean", "mean error", "worst stage")
    rows = [
        _error_row("in use, simulated", used, walked),
        _error_row("in use, estimated", used, estimates),
        _error_row("reserved, simulated", reserved, blocks),
    ]
    about = (
        f"Peaks of the {len(ranks)} ranks whose log was published ({layout.num_devices} GCDs; tp "
        f"{layout.tp}, pp {layout.pp}, dp {layout.dp}), mean of each stage. That run kept gradients "
        "in 16 bits, so that 2 bytes a parameter of a stage's layers are taken off ours; the "
        "estimate's allowance for workspaces is left out."
    )
    sentence = (
        "Peak memory by pipeline stage of the published run of 175B: published, simulated and "
        "estimated."
    )
    return [about, page.rows_table(header, rows), page.shown("memory", sentence)]


def _measured(ranks: Sequence[Mapping[str, str]], column: str) -> Floats:
    """Mean of each stage, in GiB."""
    return np.array(
        [
            np.mean([float(row[column]) / 1024 for row in ranks if int(row["stage"]) == stage])
            for stage in range(RECIPES["175B"].pp)
        ]
    )


def _ours() -> tuple[Floats, ...]:
    """GiB by stage, with gradients in 16 bits: simulated in use and reserved, and estimated."""
    model, layout = MODELS["175B"], RECIPES["175B"]
    less = 2.0 * model.num_layers / layout.pp * model.num_layer_parameters / layout.tp
    ranks = rank_memory(layout, model, Machine.of(FRONTIER), seed=0)
    storage = storage_of("", FRONTIER)
    stages = stage_memory(layout, model, storage)
    found = (
        [rank.allocated_bytes for rank in ranks],
        [rank.reserved_bytes for rank in ranks],
        [stage.total_bytes - storage.workspace_bytes for stage in stages],
    )
    return tuple((np.array(each) - less) / GIB for each in found)


def _error_row(name: str, measured: Floats, ours: Floats) -> tuple[str, ...]:
    errors = ours / measured - 1
    return (
        name,
        f"{measured.mean():.1f} GiB",
        f"{ours.mean():.1f} GiB",
        f"{np.abs(errors).mean():.0%}",
        f"{errors[np.abs(errors).argmax()]:+.0%}",
    )
