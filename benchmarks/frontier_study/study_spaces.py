"""The two spaces of each model: the paper's table V, and a wider one; every layout simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np

from benchmarks.frontier_study.study_runs import (
    MODELS,
    StudyEffort,
    StudyRun,
    simulate,
    tokens,
)
from benchmarks.simulator.simulator_frontier import FRONTIER
from layout_tuner.array_types import Floats
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.legality_rules import OTHER_TRAINER_SCOPES
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.search_spaces.spaces.search_space import SearchSpace, enumerate_legal
from layout_tuner.search_spaces.spaces.space_presets import SPACE_PRESETS
from layout_tuner.search_spaces.tables import CellKey, TableCell, TableRow
from layout_tuner.trainers.simulator import SIMULATED

TABLE_V: Final = "table V"
WIDE: Final = "wider"
NODES: Final = {"22B": 16, "175B": 16, "1T": 384}
BATCHES: Final = {"22B": 640, "175B": 1280, "1T": 9600}
"""Sequences a step of the wider spaces: the published ones; that of 22B is an assumption."""
ROOMY: Final = 0.8
"""Share of a device that a layout with room in memory takes at most."""
_STAGES: Final = {"22B": [1, 2, 4, 8, 16], "175B": [2, 4, 8, 16, 32], "1T": [16, 32, 64, 128]}


def table_v(size: str) -> SearchSpace:
    """The published space of 175B; for 1T on the nodes of its recipe, since 16 cannot hold it."""
    published = SPACE_PRESETS["paper-table-v"]
    if size != "1T":
        return published
    most = NODES[size] * FRONTIER.devices_per_node * 20 * 10
    bounds = {"min": 1, "max": most}
    return replace(published, num_nodes=NODES[size], global_batch_size=bounds)


def wider(size: str, effort: StudyEffort) -> SearchSpace:
    """Micro-batches from one sequence, the accumulation that the batch asks for, and more knobs."""
    knobs: dict[str, Any] = {
        "global_batch_size": BATCHES[size],
        "num_nodes": NODES[size],
        "tp": [1, 2, 4, 8],
        "tp_columns": [1, 2],
        "pp": _STAGES[size],
        "vpp": [1, 2],
        "micro_batch_size": [1, 2, 4],
        "zero_stage": [0, 1, 2, 3],
        "zero_replicas": [1, 2],
        "recompute": ["none", "selective", "full"],
        "sequence_parallel": [False, True],
        "rank_order": ["tp_cp_dp_pp", "tp_cp_pp_dp"],
        "precision": "fp16",
    }
    if effort.is_quick:
        fewer = {"tp_columns": [1], "zero_stage": [0, 1, 3], "rank_order": ["tp_cp_dp_pp"]}
        knobs |= fewer | {"zero_replicas": [1], "vpp": [1] if size == "1T" else [1, 2]}
    return SearchSpace(**knobs)


class MixedCell(TableCell):
    """A cell whose layouts differ in nodes and batch: they compare by tokens/s of a device."""

    __slots__ = ()

    def __post_init__(self) -> None:
        """Nothing is refused: the rows are of one space, each layout once."""


@dataclass(frozen=True, eq=False)
class StudyLandscape:
    """Every legal layout of a space, and what the simulator says of it."""

    size: str
    name: str
    layouts: Sequence[Layout]
    runs: Sequence[StudyRun]

    @property
    def model(self) -> ModelShape:
        return MODELS[self.size]

    @cached_property
    def rates(self) -> Floats:
        """Tokens/s of a GCD; NaN: out of memory. Comparable whatever is recomputed."""
        pairs = zip(self.layouts, self.runs, strict=True)
        return np.array([rate(self.model, layout, run) for layout, run in pairs])

    @property
    def num_fitting(self) -> int:
        return int((~np.isnan(self.rates)).sum())

    def best(self, number: int = 1) -> list[int]:
        """Positions of the fastest layouts."""
        found = np.argsort(-np.nan_to_num(self.rates, nan=-1.0), kind="stable")
        return [int(at) for at in found[: min(number, self.num_fitting)]]

    def roomy_best(self) -> int | None:
        """Position of the fastest layout with room in memory; None: there is none."""
        most = ROOMY * FRONTIER.device_memory_bytes
        roomy = (at for at in self.best(len(self.runs)) if self.runs[at].peak_bytes <= most)
        return next(roomy, None)

    def cell(self) -> TableCell:
        """As a measurement table's cell, whose source says that it is simulated."""
        rows = [self._row(at) for at in range(len(self.layouts))]
        most = max(layout.num_nodes for layout in self.layouts)
        key = CellKey(
            source=f"{SIMULATED} frontier study, {self.name} space",
            cluster=FRONTIER.name,
            model=self.model.name,
            seq_length=self.model.seq_length,
            num_devices=most * FRONTIER.devices_per_node,
            global_batch_size=max(layout.global_batch_size for layout in self.layouts),
        )
        cluster = replace(FRONTIER, num_nodes=most)
        return MixedCell(key=key, model=self.model, cluster=cluster, rows=tuple(rows))

    def _row(self, at: int) -> TableRow:
        layout, run = self.layouts[at], self.runs[at]
        if run.step_s is None:
            return TableRow(layout=layout, status="out_of_memory", number=at + 1)
        return TableRow(
            layout=layout,
            status="completed",
            tokens_per_s=tokens(self.model, layout) / run.step_s,
            step_time_s=run.step_s,
            peak_memory_bytes=round(run.peak_bytes),
            number=at + 1,
        )


def rate(model: ModelShape, layout: Layout, run: StudyRun) -> float:
    """Tokens/s of a device; NaN: it runs out of memory."""
    if run.step_s is None:
        return float("nan")
    return tokens(model, layout) / run.step_s / layout.num_devices


def landscape(size: str, name: str, effort: StudyEffort) -> StudyLandscape:
    """A model's space, simulated."""
    space = table_v(size) if name == TABLE_V else wider(size, effort)
    legal = enumerate_legal(space, MODELS[size], FRONTIER, scopes=OTHER_TRAINER_SCOPES)
    layouts = [legal.layout(position) for position in range(len(legal))]
    runs = simulate(MODELS[size], layouts, effort)
    return StudyLandscape(size=size, name=name, layouts=layouts, runs=runs)
