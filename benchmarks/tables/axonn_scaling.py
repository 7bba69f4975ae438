"""AxoNN's published scaling runs against the estimates: `axonn_scaling.csv`.

The table states neither batch nor layout. All rows take the one batch of `SEQUENCES` (16.8 million
tokens), so that on Frontier the work of a device stays equal while model and machine grow; this was
chosen before the first result was seen. (On 6,144 devices, which have a factor of three, it is an
eighth more.) The layout of a row is the one that the estimates rank
first. No constant was fitted to these rows. FLOPs are those of the hardware, with full
recomputation.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np

from benchmarks.results_file import table
from layout_tuner.predictions.belief.layout_predictions import LayoutPredictions, RankedLayouts
from layout_tuner.predictions.estimates import time_terms
from layout_tuner.predictions.estimates.links import CARDS_EXPONENT
from layout_tuner.predictions.estimates.step_time import PRIOR, TERM_NAMES, step_time_s
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.clusters.cluster_presets import CLUSTER_PRESETS
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.legality_rules import OTHER_TRAINER_SCOPES
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.search_spaces.spaces.search_space import LegalSet

ROWS: Final = "axonn_scaling.csv"
SEQUENCES: Final = 8192
KNOWN: Final = "as AxoNN's code and logs say"
"""No pipelines and 16-bit gradients, as in the code of their record runs; links as measured, and no
congestion: in their logs bandwidth is the same on 2 to 64 nodes."""
SENSITIVITY: Final[Mapping[str, Mapping[str, Any]]] = {
    "half of the batch": {"batch": SEQUENCES // 2},
    "twice the batch": {"batch": SEQUENCES * 2},
    "a sequence a device": {"batch": None},
    "without pipelines": {"pp": [1]},
    "without pipelines and columns": {"pp": [1], "tp_columns": [1]},
    "links as measured": {"links": True},
    "links as measured, without pipelines": {"links": True, "pp": [1]},
    "links as measured, twice the batch": {"links": True, "batch": SEQUENCES * 2},
    KNOWN: {"known": True},
    f"{KNOWN}, half of the batch": {"known": True, "batch": SEQUENCES // 2},
    f"{KNOWN}, twice the batch": {"known": True, "batch": SEQUENCES * 2},
}
"""Other assumptions than `SEQUENCES`, the presets' links, and all of `_SPACE`."""
OTHER_ASSUMPTIONS: Final = (
    "[The weak scaling under other assumptions]"
    "(../docs/explanation/estimates.md#weak-scaling-of-axonn)."
)
LINKS: Final = "collectives_frontier_perlmutter.csv"
_LARGE_MB: Final = 4.0
"""Share of a rank from which bandwidth hardly grows."""
MOST_POINTS: Final = 5.0
"""Between published and predicted efficiency at `JUDGED` devices."""
JUDGED: Final = (8192, 16384)
_WEAK: Final = "frontier"
"""The machine of the weak scaling."""
_POWERS: Final = [2**power for power in range(14)]
_SPACE: Final[Mapping[str, Any]] = {
    "tp": [1, 2, 4, 8],
    "tp_columns": [1, 2, 4, 8, 16],
    "allow_tp_across_nodes": True,
    "pp": [1, 2, 4, 8, 16],
    "micro_batch_size": [1, 2, 4, 8, 16],
    "zero_stage": [0, 1, 3],
    "zero_replicas": _POWERS,
    "recompute": "full",
    "precision": "bf16",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingRun:
    """A published run."""

    machine: str
    devices: int
    model: ModelShape
    tflops: float
    """Of the hardware, a device."""
    share: float
    """Of the advertised peak."""
    efficiency: float | None
    """Of weak scaling, where it is published."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Predicted:
    """The layout that the estimates rank first for a run."""

    layout: Layout
    step_s: float
    tflops: float
    """Of the hardware, a device."""


def judge(folder: Path | None) -> tuple[str, str, bool]:
    """Rows for the results, what is below them, and whether the orders are as published.

    The weak scaling is shown beside what was asked, and not promised: the batch alone moves it by
    more (docs/explanation/estimates.md, "Accuracy of step times").
    """
    if folder is None or not (folder / ROWS).exists():
        return "", "", True
    rows = read_rows(folder / ROWS)
    found = [predict(row, folder) for row in rows]
    off = _points_off(rows, found)
    are_in_order = [
        _order([row.tflops * row.devices for row in rows])
        == _order([each.tflops * row.devices for row, each in zip(rows, found, strict=True)]),
        _machines([row.share for row in rows], rows)
        == _machines(_shares_of_peak(rows, found), rows),
    ]
    weak = [row for row in rows if row.efficiency]
    base = [each for row, each in zip(rows, found, strict=True) if row.efficiency]
    cases, known = _weak_cases(weak, base, folder), ""
    if KNOWN in cases:
        points = _points(_points_off(weak, cases[KNOWN]))
        known = f"| the same, {KNOWN} | {MOST_POINTS:g} | {points} |\n"
    said = ["as published" if is_so else "another" for is_so in are_in_order]
    text = (
        f"| {ROWS}: weak scaling at {JUDGED[0]:,} and {JUDGED[1]:,} GCDs, points off | "
        f"{MOST_POINTS:g} | {_points(off)} |\n{known}"
        f"| the same: order of the {len(rows)} runs by FLOP/s | as published | {said[0]} |\n"
        "| the same: order of the machines by the largest run's share of the peak | as published | "
        f"{said[1]} |\n"
    )
    print(f"{_sensitivity_table(weak, cases)}\n\n{_runs_table(rows, found)}\n")
    return text, f"\n{OTHER_ASSUMPTIONS}\n", all(are_in_order)


def _points(off: Mapping[int, float]) -> str:
    return ", ".join(f"{off[devices]:+.1f}" for devices in JUDGED)


def read_rows(path: Path) -> list[ScalingRun]:
    """The runs of AxoNN whose shape is stated."""
    with path.open(newline="") as lines:
        every = list(csv.DictReader(lines))
    return [_row(row) for row in every if row["framework"] == "AxoNN"]


def _row(row: Mapping[str, str]) -> ScalingRun:
    hidden, heads = int(row["hidden_size"]), int(row["num_heads"])
    model = ModelShape(
        name=row["model"],
        family="gpt",
        num_layers=int(row["num_layers"]),
        hidden_size=hidden,
        ffn_hidden_size=4 * hidden,
        num_heads=heads,
        num_kv_heads=heads,
        seq_length=int(row["seq_length"]),
        vocab_size=51200,
        tied_embeddings=True,
    )
    return ScalingRun(
        machine=row["machine"],
        devices=int(row["gpus"]),
        model=model,
        tflops=float(row["tflops_per_gpu"]),
        share=float(row["pct_advertised_peak"]) / 100,
        efficiency=float(row["weak_scaling_efficiency"] or "nan")
        if row["machine"] == _WEAK
        else None,
    )


def measured_links(cluster: Cluster, path: Path) -> Cluster:
    """The cluster with the bandwidth between nodes of large gathers and scatters, their median.

    The rows are of RCCL and NCCL, on groups of all devices of some nodes. A gather's message is
    that of all ranks. What a device has follows as in `GroupLinks`.
    """
    speeds = []
    with path.open(newline="") as lines:
        for row in csv.DictReader(lines):
            ranks, size = int(row["gpus"]), float(row["message_mb"])
            share = size / ranks if row["collective"] == "all-gather" else size
            is_far = ranks > cluster.devices_per_node and row["machine"] == cluster.name
            if is_far and row["library"] == "nccl" and share >= _LARGE_MB:
                speeds.append(float(row["busbw_gbps"]) * 1e9)
    far = statistics.median(speeds) / cluster.devices_per_node**CARDS_EXPONENT
    return replace(cluster, inter_node_bandwidth_bytes_per_s=far)


def predict(
    row: ScalingRun,
    folder: Path,
    *,
    batch: int | None = SEQUENCES,
    links: bool = False,
    known: bool = False,
    **space: Any,
) -> Predicted:
    """The estimates' first layout of a run.

    Args:
        row: the run.
        folder: has the table of measured links.
        batch: sequences a step; None: one a device.
        links: whether links are as measured, not as in the preset.
        known: whether to assume what is known of AxoNN (`KNOWN`).
        space: knobs in place of those of `_SPACE`.
    """
    cluster = CLUSTER_PRESETS[row.machine]
    if links or known:
        cluster = measured_links(cluster, folder / LINKS)
    spec = CampaignSpec.from_mapping(
        {
            "name": "run",
            "model": row.model.to_mapping(),
            "cluster": cluster.to_mapping(),
            "budget": {"trials": 1},
            "space": {
                **_SPACE,
                "global_batch_size": (batch or row.devices) * 9 // 8
                if row.devices % 3 == 0
                else batch or row.devices,
                "num_nodes": row.devices // cluster.devices_per_node,
            }
            | ({"pp": [1]} if known else {})
            | space,
        }
    )
    legal = spec.legal_set(OTHER_TRAINER_SCOPES)
    ranked = _known_ranking(spec, legal) if known else _predictions(spec).rank(legal)
    layout, step_s = legal.layout(int(ranked.order[0])), float(ranked.step_time_s[0])
    tokens = layout.global_batch_size * row.model.seq_length / step_s / row.devices
    return Predicted(
        layout=layout, step_s=step_s, tflops=tokens * _hardware_flops(row.model) / 1e12
    )


def _predictions(spec: CampaignSpec) -> LayoutPredictions:
    return LayoutPredictions(spec=spec, software="")


def _known_ranking(spec: CampaignSpec, legal: LegalSet) -> RankedLayouts:
    """The ranking with 16-bit gradients and without congestion."""
    calm = PRIOR * np.where(np.array(TERM_NAMES) == "data_congestion", 0.0, 1.0)
    predictions, columns = _predictions(spec), legal.columns()
    with mock.patch.object(time_terms, "GRADIENT_BYTES", 2.0):
        step_s = step_time_s(columns, spec.model, spec.cluster, calm)
    fits = predictions.fits(columns)
    score = np.log(fits) - np.log(step_s)
    order = np.argsort(-score, kind="stable")
    return RankedLayouts(
        order=order, step_time_s=step_s[order], fits=fits[order], score=score[order]
    )


def _hardware_flops(model: ModelShape) -> float:
    """FLOPs of a token with the blocks' forward pass twice (arXiv:2104.04473, equation 3)."""
    return model.model_flops_per_token + float(model.layers_forward_flops_per_token)


def _order(values: Sequence[float]) -> list[int]:
    return sorted(range(len(values)), key=lambda place: values[place])


def _machines(shares: Sequence[float], rows: Sequence[ScalingRun]) -> list[str]:
    """The machines by the share of the peak in their largest run."""
    ordered = sorted(zip(rows, shares, strict=True), key=lambda each: each[0].devices)
    largest = {row.machine: share for row, share in ordered}
    return sorted(largest, key=lambda machine: largest[machine])


def _shares_of_peak(rows: Sequence[ScalingRun], found: Sequence[Predicted]) -> list[float]:
    peaks = [CLUSTER_PRESETS[row.machine].peak_flops_per_s["bf16"] / 1e12 for row in rows]
    return [each.tflops / peak for each, peak in zip(found, peaks, strict=True)]


def _efficiencies(rows: Sequence[ScalingRun], found: Sequence[Predicted]) -> dict[int, float]:
    """Predicted efficiency by devices, against the smallest of the weak scaling's runs."""
    weak = {row.devices: each for row, each in zip(rows, found, strict=True) if row.efficiency}
    base = weak[min(weak)].tflops
    return {devices: each.tflops / base for devices, each in weak.items()}


def _points_off(rows: Sequence[ScalingRun], found: Sequence[Predicted]) -> dict[int, float]:
    published = {row.devices: row.efficiency for row in rows if row.efficiency}
    return {
        devices: 100 * (share - (published[devices] or 0.0))
        for devices, share in _efficiencies(rows, found).items()
    }


def _runs_table(rows: Sequence[ScalingRun], found: Sequence[Predicted]) -> str:
    shares = _efficiencies(rows, found)
    header = ("run", "% of peak: published", "predicted", "weak scaling: published", "predicted")
    lines = []
    for row, each, share in zip(rows, found, _shares_of_peak(rows, found), strict=True):
        weak = ("", "")
        if row.efficiency:
            weak = f"{row.efficiency:.1%}", f"{shares[row.devices]:.1%}"
        name = f"{row.model.name}, {row.devices:,} of {row.machine}"
        lines.append((name, f"{row.share:.1%}", f"{share:.1%}", *weak, each.layout.key))
    return table((*header, "layout"), lines)


def _weak_cases(
    weak: Sequence[ScalingRun], base: list[Predicted], folder: Path
) -> dict[str, list[Predicted]]:
    """The runs of the weak scaling under each assumption, where its table is there."""
    cases = {f"{SEQUENCES:,} sequences": base}
    for name, changes in SENSITIVITY.items():
        if not changes.keys() & {"links", "known"} or (folder / LINKS).exists():
            cases[name] = [predict(row, folder, **changes) for row in weak]
    return cases


def _sensitivity_table(weak: Sequence[ScalingRun], cases: Mapping[str, list[Predicted]]) -> str:
    """Predicted weak scaling under other assumptions."""
    lines = [
        (name, *(f"{share:.1%}" for share in _efficiencies(weak, each).values()))
        for name, each in cases.items()
    ]
    lines.insert(0, ("published", *(f"{row.efficiency:.1%}" for row in weak)))
    return table(("assumption", *(f"{row.devices:,}" for row in weak)), lines)
