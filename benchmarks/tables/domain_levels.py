"""Rows of machines with NVLink domains: the domain as a level beside one as a node.

`bridge_recipes_2026.csv` has 64 devices a "node" for GB200 and GB300, the part of a domain that its
jobs use. Here the same rows are also read with the nodes of the preset, with its levels and without
them. All narrow precisions count as fp8, so that the rows of a model compare.
"""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.tables.judged_tables import BLOCKS, ColdEstimates, table_cells
from layout_tuner.search_spaces.clusters.cluster_presets import CLUSTER_PRESETS

RECIPES: Final = "bridge_recipes_2026.csv"
HEADER: Final = (
    "model on GB200 and GB300",
    "rows",
    "error: the domain as a node",
    "as a level",
    "trays alone",
)


def domain_rows(folder: Path) -> list[tuple[str, ...]]:
    """Mean error of the step time by model, and of all rows; none without the table."""
    path = folder / RECIPES
    if not path.exists():
        return []
    every = list(csv.DictReader(io.StringIO(path.read_text())))
    texts = [{**row, BLOCKS: ""} for row in every if _has_domain(row["cluster"])]
    trays = [
        {**row, "devices_per_node": str(CLUSTER_PRESETS[row["cluster"]].devices_per_node)}
        for row in texts
    ]
    columns = [_errors(texts), _errors(trays), _errors(trays, without_levels=True)]
    models = dict.fromkeys(columns[0])
    return [
        (model, f"{len(columns[0][model])}", *(f"{np.mean(each[model]):.1%}" for each in columns))
        for model in models
    ]


def _has_domain(name: str) -> bool:
    preset = CLUSTER_PRESETS.get(name)
    return preset is not None and preset.domain_devices > preset.devices_per_node


def _errors(
    texts: Sequence[dict[str, str]], *, without_levels: bool = False
) -> dict[str, list[float]]:
    written = io.StringIO()
    writer = csv.DictWriter(written, list(texts[0]))
    writer.writeheader()
    writer.writerows(texts)
    errors: defaultdict[str, list[float]] = defaultdict(list)
    for cell, _ in table_cells(written.getvalue()):
        cluster = replace(cell.cluster, levels=()) if without_levels else cell.cluster
        estimates = ColdEstimates(model=cell.model, cluster=cluster, software=cell.key.software)
        timed = [row for row in cell.merged if row.step_time_s]
        for row, predicted in zip(timed, estimates.of([r.layout for r in timed]), strict=True):
            error = abs(float(np.exp(predicted["log_s"])) / (row.step_time_s or 1.0) - 1.0)
            errors[cell.key.model].append(error)
            errors["all"].append(error)
    return errors
