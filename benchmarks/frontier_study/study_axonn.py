"""AxoNN's runs beside the simulator, and which scheme of parallelism wins where."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.frontier_study import study_page as page
from benchmarks.frontier_study.study_runs import MODELS, StudyEffort, simulate
from benchmarks.frontier_study.study_spaces import rate
from benchmarks.simulator.simulator_frontier import SCALING, SCALING_BATCH, tflops
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.clusters.cluster_presets import CLUSTER_PRESETS
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.legality_rules import OTHER_TRAINER_SCOPES
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.search_spaces.spaces.search_space import SearchSpace, enumerate_legal

_SCHEME_BATCH: Final = 2048
_MACHINES: Final = ("frontier", "perlmutter", "h100-sxm")
_DEVICES: Final = (64, 256, 1024, 4096)
_SHARED: Final[Mapping[str, Any]] = {"micro_batch_size": [1, 2, 4], "recompute": ["none", "full"]}
SCHEMES: Final[Mapping[str, Mapping[str, Any]]] = {
    "pipeline and tensor": {
        "tp": [1, 2, 4, 8],
        "pp": [2, 4, 8, 16],
        "zero_stage": [1],
        "sequence_parallel": [False, True],
    },
    "sharded weights": {"zero_stage": [3], "zero_replicas": [1, 2, 4, 8, 16, 32]},
    "3-D tensor": {
        "tp": [2, 4, 8, 16],
        "tp_columns": [1, 2, 4],
        "zero_stage": [3],
        "zero_replicas": [1, 4, 16],
        "allow_tp_across_nodes": True,
    },
}
"""Knobs by scheme: Megatron's with ZeRO-1; ZeRO-3 alone (FSDP and HSDP); AxoNN's."""


def axonn(effort: StudyEffort, tables: Path | None) -> page.StudyPart:
    """Published runs where there are tables, and the winners."""
    blocks = []
    if tables is None or not (tables / SCALING).exists():
        blocks.append(
            "AxoNN's published runs are left out: this run had no folder of tables "
            "(`make frontier-study TABLES=DIR`)."
        )
    else:
        blocks += _published_runs(tables / SCALING, effort)
    return page.StudyPart(title="AxoNN and its rivals", blocks=(*blocks, *_winners(effort)))


def legal_layouts(
    model: ModelShape, cluster: Cluster, devices: int, batch: int, scheme: Mapping[str, Any]
) -> list[Layout]:
    """The legal layouts of a scheme that fill so many devices."""
    nodes = devices // cluster.devices_per_node
    knobs = {"global_batch_size": batch, "num_nodes": nodes, "precision": "bf16", **_SHARED}
    space = SearchSpace(**knobs | dict(scheme))
    machine = replace(cluster, num_nodes=nodes)
    legal = enumerate_legal(space, model, machine, scopes=OTHER_TRAINER_SCOPES)
    return [legal.layout(position) for position in range(len(legal))]


def _best(
    model: ModelShape, cluster: str, layouts: Sequence[Layout], effort: StudyEffort
) -> tuple[Layout, float, float] | None:
    """The fastest layout with its step time and tokens/s of a device; None: nothing fits."""
    runs = simulate(model, layouts, effort, cluster=cluster)
    fitting = [
        (rate(model, layout, run), run.step_s, layout)
        for layout, run in zip(layouts, runs, strict=True)
        if run.step_s is not None
    ]
    if not fitting:
        return None
    speed, step_s, layout = max(fitting, key=lambda each: each[0])
    return layout, step_s, speed


def _published_runs(path: Path, effort: StudyEffort) -> list[str]:
    scheme = dict(SCHEMES["3-D tensor"]) | {"recompute": ["full"], "tp": [1, 2, 4, 8, 16]}
    with path.open() as lines:
        rows = [row for row in csv.DictReader(lines) if row["framework"] == "AxoNN"]
    weak, found = [], []
    for row in rows:
        if not row["num_layers"] or row["machine"] not in CLUSTER_PRESETS:
            continue
        model, devices = _model(row), int(row["gpus"])
        cluster = CLUSTER_PRESETS[row["machine"]]
        # Devices that are no power of two do not divide the batch: they get a sequence each.
        batch = devices if devices & (devices - 1) else SCALING_BATCH
        layouts = legal_layouts(model, cluster, devices, batch, scheme)
        best = _best(model, cluster.name, layouts, effort)
        name = f"{row['machine']}, {row['model']} on {devices:,}"
        real, peak = float(row["tflops_per_gpu"]), float(row["advertised_peak_tflops"])
        if best is None:
            found.append((name, f"{real / peak:.1%}", "nothing fits", "-", "-"))
            continue
        layout, step_s, _ = best
        ours = tflops(model, layout, step_s)
        way = (
            f"tp {layout.tp}, columns {layout.tp_columns}, shards {layout.zero_group_size}, "
            f"copies {layout.zero_replicas}, mbs {layout.micro_batch_size}"
        )
        error = f"{ours / real - 1:+.0%}"
        found.append((name, f"{real / peak:.1%}", f"{ours / peak:.1%}", error, way))
        if row["machine"] == "frontier" and row["weak_scaling_efficiency"]:
            weak.append((devices, float(row["weak_scaling_efficiency"]), ours))
    header = ("run", "published, of peak", "simulated, of peak", "error", "best layout, simulated")
    about = (
        "AxoNN's runs: share of the advertised peak, recomputation included. Their batches and "
        f"layouts are not published: {SCALING_BATCH:,} sequences a step are assumed at every size (one a "
        "device where the devices do not divide them), and ours is the best simulated layout of rows, columns and sharded replicas. Models and some of the "
        "published figures are second-hand or derived, as the table that was read says."
    )
    return [about, page.rows_table(header, found), *_weak(sorted(weak))]


def _model(row: Mapping[str, str]) -> ModelShape:
    hidden, heads = int(row["hidden_size"]), int(row["num_heads"])
    return replace(
        MODELS["175B"],
        name=row["model"].lower(),
        num_layers=int(row["num_layers"]),
        hidden_size=hidden,
        ffn_hidden_size=4 * hidden,
        num_heads=heads,
        num_kv_heads=heads,
    )


def _weak(weak: Sequence[tuple[int, float, float]]) -> list[str]:
    if not weak:
        return []
    devices = [each[0] for each in weak]
    ours = [100 * each[2] / weak[0][2] for each in weak]
    theirs = [100 * each[1] for each in weak]
    with page.figure("axonn", height=2.6) as axes:
        page.draw_simulated(axes, devices, ours, "simulated")
        page.draw_published(axes, devices, theirs)
        page.counted(axes, devices)
        axes.set(xlabel="GCDs of Frontier", ylabel="weak scaling, %")
        page.from_zero(axes)
        axes.legend()
    header = ("AxoNN, weak scaling on Frontier", *(f"{each:,} GCDs" for each in devices))
    rows = [
        ("published", *(f"{each:.1f} %" for each in theirs)),
        ("simulated", *(f"{each:.1f} %" for each in ours)),
    ]
    sentence = (
        f"Weak scaling of AxoNN from {devices[0]:,} to {devices[-1]:,} GCDs, the model growing with "
        f"them: {theirs[-1]:.0f} % published and {ours[-1]:.0f} % simulated at the end."
    )
    return [page.rows_table(header, rows), page.shown("axonn", sentence)]


def _winners(effort: StudyEffort) -> list[str]:
    sizes = ("22B",) if effort.is_quick else ("22B", "175B")
    counts = (64, 1024) if effort.is_quick else _DEVICES
    rows = []
    with page.figure("schemes", len(_MACHINES)) as every:
        for size in sizes:
            for axes, name in zip(every, _MACHINES, strict=True):
                speeds = [_speeds(size, name, devices, effort) for devices in counts]
                rows += [
                    _winner_row(f"{size}, {name}", devices, each)
                    for devices, each in zip(counts, speeds, strict=True)
                ]
                if size == sizes[-1]:
                    _draw(axes, counts, speeds)
                    axes.set(title=f"{size}, {name}", xlabel="devices")
        every[0].set_ylabel("tokens/s a device, simulated")
        every[0].legend(fontsize=7)
    about = (
        "Which scheme is fastest, by simulation alone, in tokens/s of a device at "
        f"{_SCHEME_BATCH:,} sequences a step: tensor and pipeline parallelism with ZeRO-1 (Megatron), "
        "sharded weights alone (ZeRO-3, FSDP), and AxoNN's tensor parallelism over rows and columns "
        "with sharded weights. Each is its best layout with micro-batches of 1, 2 or 4 sequences and "
        "none or full recomputation; the winner is bold. A lead that is smaller than the simulator's "
        "errors decides nothing."
    )
    sentence = f"Speed of the best layout of each scheme by number of devices, {sizes[-1]}."
    header = ("model, machine", "devices", *SCHEMES, "lead over the second")
    return [about, page.rows_table(header, rows), page.shown("schemes", sentence)]


def _speeds(size: str, name: str, devices: int, effort: StudyEffort) -> dict[str, float]:
    model, cluster, found = MODELS[size], CLUSTER_PRESETS[name], {}
    for scheme, knobs in SCHEMES.items():
        layouts = legal_layouts(model, cluster, devices, _SCHEME_BATCH, knobs)
        best = _best(model, name, layouts, effort)
        found[scheme] = float("nan") if best is None else best[2]
    return found


def _winner_row(name: str, devices: int, speeds: Mapping[str, float]) -> tuple[str, ...]:
    ranked = sorted((speed for speed in speeds.values() if not np.isnan(speed)), reverse=True)
    cells = []
    for speed in speeds.values():
        text = "-" if np.isnan(speed) else f"{speed:,.0f}"
        cells.append(f"**{text}**" if ranked and speed == ranked[0] else text)
    lead = f"{ranked[0] / ranked[1] - 1:.0%}" if len(ranked) > 1 else "-"
    return name, f"{devices:,}", *cells, lead


def _draw(axes: Any, counts: Sequence[int], speeds: Sequence[Mapping[str, float]]) -> None:
    for colour, scheme in enumerate(SCHEMES):
        page.draw_simulated(axes, counts, [each[scheme] for each in speeds], scheme, colour)
    page.counted(axes, counts)
    page.from_zero(axes)
    axes.tick_params(axis="x", labelsize=7)
