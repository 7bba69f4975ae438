"""The simulator against what was published of Frontier (arXiv:2312.12705, arXiv:2502.08145)."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from layout_tuner.array_types import Floats
from layout_tuner.search_spaces.clusters.cluster_presets import CLUSTER_PRESETS
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.legality_rules import OTHER_TRAINER_SCOPES
from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.search_spaces.spaces.search_space import SearchSpace, enumerate_legal
from layout_tuner.workers.simulation.machine import Machine
from layout_tuner.workers.simulation.simulated_peaks import device_bytes, rank_memory
from layout_tuner.workers.simulation.steps import steps

FRONTIER: Final = CLUSTER_PRESETS["frontier"]
MODEL_22B, MODEL_175B, MODEL_1T = (model_preset(f"gpt-{size}") for size in ("22b", "175b", "1t"))
CALIBRATED_TFLOPS: Final = 69.2
"""Of 175B: the row that Frontier's share of the peak is fitted to."""
MEMORY: Final = "frontier_175b_memory.csv"
SCALING: Final = "axonn_scaling.csv"
BATCHES_22B: Final = ((3, 960), (8, 640), (16, 640))
"""Assumed nodes and sequences a step of the 22B row, whose source states neither: the first is that
of the scenario frontier-22b, by which the promise is judged."""
SCALING_BATCH: Final = 8192
"""Assumed sequences a step of AxoNN's runs, 16.8 million tokens, of every number of devices."""


def frontier_layout(tp: int, pp: int, dp: int, num_microbatches: int, **others: Any) -> Layout:
    """A layout as published: micro-batches of one sequence, ZeRO-1, everything recomputed."""
    return Layout(
        **{
            "num_nodes": tp * pp * dp // FRONTIER.devices_per_node,
            "tp": tp,
            "pp": pp,
            "dp": dp,
            "num_microbatches": num_microbatches,
            "zero_stage": 1,
            "recompute": "full",
            "precision": "fp16",
            **others,
        }
    )


CONSUMED: Final = 4
"""A log of these authors (175B on 128 GCDs, whose peaks of memory are published) claims 150 TFLOP/s
of a GCD, four times what its step times allow: the engine consumed one of so many samples that the
flags stated. Whether their tables come from such runs is not known."""
LAYOUT_175B: Final = frontier_layout(4, 16, 2, 640)
LAYOUT_1T: Final = frontier_layout(8, 64, 6, 1600)


def tflops(model: ModelShape, layout: Layout, step_s: float) -> float:
    """Hardware TFLOP/s of a device, recomputation included, as the papers count."""
    tokens = layout.global_batch_size * model.seq_length
    flops = tokens * model.hardware_flops_per_token(layout.recompute)
    return flops / layout.num_devices / step_s / 1e12


def simulated_tflops(model: ModelShape, layout: Layout, machine: Machine) -> float:
    return tflops(model, layout, steps([layout], model, machine)[0].step_s)


def fitted_share(layout: Layout = LAYOUT_175B) -> float:
    """The share of the peak with which 175B has its published speed; by bisection."""
    low, high = 0.2, 0.9
    for _ in range(20):
        share = (low + high) / 2
        reached = simulated_tflops(MODEL_175B, layout, Machine.of(FRONTIER, matmul_share=share))
        low, high = (share, high) if reached < CALIBRATED_TFLOPS else (low, share)
    return share


def rate_of_1t_where_less_was_consumed() -> float:
    """TFLOP/s of 1T, fitted to 175B, if both runs consumed one of `CONSUMED` samples."""
    small, large = (
        replace(each, num_microbatches=each.num_microbatches // CONSUMED)
        for each in (LAYOUT_175B, LAYOUT_1T)
    )
    machine = Machine.of(FRONTIER, matmul_share=fitted_share(small))
    return simulated_tflops(MODEL_1T, large, machine)


def strong_scaling(model: ModelShape, few: Layout, many: Layout) -> float:
    """Efficiency of more devices at the same batch."""
    machine = Machine.of(FRONTIER)
    few_s, many_s = (steps([each], model, machine)[0].step_s for each in (few, many))
    return few_s * few.num_devices / (many_s * many.num_devices)


def weak_scaling(model: ModelShape, few: Layout, many: Layout) -> float:
    """Speed of a device of more replicas over that of fewer, with the same batch a replica."""
    few_rate, many_rate = (
        simulated_tflops(model, each, Machine.of(FRONTIER)) for each in (few, many)
    )
    return many_rate / few_rate


def legal_speeds(nodes: int, batch: int) -> Floats:
    """TFLOP/s of every layout of 22B that is legal and fits, everything recomputed."""
    machine = Machine.of(FRONTIER)
    space = SearchSpace(
        global_batch_size=batch,
        num_nodes=nodes,
        tp=[1, 2, 4, 8],
        pp=[1, 2, 3, 4, 6, 8, 12, 16, 24],
        vpp=[1],
        micro_batch_size=[1, 2, 4, 8, 16],
        zero_stage=[0, 1],
        recompute="full",
        sequence_parallel=[False],
        precision="fp16",
    )
    legal = enumerate_legal(space, MODEL_22B, FRONTIER, scopes=OTHER_TRAINER_SCOPES)
    layouts = [legal.layout(position) for position in range(len(legal))]
    fitting = [each for each in layouts if fits(each, MODEL_22B, machine)]
    found = steps(fitting, MODEL_22B, machine)
    pairs = zip(fitting, found, strict=True)
    return np.array([tflops(MODEL_22B, layout, step.step_s) for layout, step in pairs])


def fits(layout: Layout, model: ModelShape, machine: Machine) -> bool:
    """Whether no simulated rank runs out of memory."""
    ranks = rank_memory(layout, model, machine, seed=0)
    most = max(device_bytes(layout, machine, rank) for rank in ranks)
    return most <= machine.cluster.device_memory_bytes


def memory_errors(folder: Path) -> tuple[Floats, Floats]:
    """Of each stage of the 175B run: simulated peak over measured, less 1; in use, and reserved.

    The run kept gradients in 16 bits, the embedded trainer keeps them in 32: the difference is
    taken off.
    """
    with (folder / MEMORY).open() as lines:
        rows = list(csv.DictReader(lines))
    held = rank_memory(LAYOUT_175B, MODEL_175B, Machine.of(FRONTIER), seed=0)
    parameters = MODEL_175B.num_layers / 16 * MODEL_175B.num_layer_parameters / 4
    used, reserved = [], []
    for row in rows:
        rank = held[int(row["stage"])]
        less = 2.0 * parameters
        used.append((rank.allocated_bytes - less) / (float(row["max_allocated_mib"]) * (1 << 20)))
        reserved.append((rank.reserved_bytes - less) / (float(row["max_reserved_mib"]) * (1 << 20)))
    return np.array(used) - 1, np.array(reserved) - 1


def axonn_rows(folder: Path) -> Iterator[tuple[str, float, float]]:
    """Run, published and simulated TFLOP/s of a device; of the best of `_speeds`."""
    with (folder / SCALING).open() as lines:
        rows = [row for row in csv.DictReader(lines) if row["framework"] == "AxoNN"]
    for row in rows:
        if row["num_layers"] and row["machine"] in CLUSTER_PRESETS:
            model = replace(
                MODEL_175B,
                name=row["model"],
                num_layers=int(row["num_layers"]),
                hidden_size=int(row["hidden_size"]),
                ffn_hidden_size=4 * int(row["hidden_size"]),
                num_heads=int(row["num_heads"]),
                num_kv_heads=int(row["num_heads"]),
            )
            machine = Machine.of(CLUSTER_PRESETS[row["machine"]])
            best = max(_speeds(model, machine, int(row["gpus"])), default=float("nan"))
            yield (
                f"{row['machine']}, {row['model']} on {row['gpus']}",
                float(row["tflops_per_gpu"]),
                best,
            )


def _speeds(model: ModelShape, machine: Machine, devices: int) -> list[float]:
    """Of AxoNN's layouts, rows and columns and sharded replicas, that fit."""
    per_node = machine.cluster.devices_per_node
    layouts: Sequence[Layout] = [
        Layout(
            num_nodes=devices // per_node,
            tp=tp,
            tp_columns=columns,
            dp=dp,
            num_microbatches=max(SCALING_BATCH // dp, 1),
            zero_stage=3,
            zero_replicas=dp // shards,
            recompute="full",
            precision="bf16",
        )
        for tp in (1, 2, 4, 8, 16)
        for columns in (1, 2, 4)
        for dp in [devices // (tp * columns)]
        for shards in (8, 16, 32, 64, 128, 256)
        if dp <= SCALING_BATCH and dp % shards == 0 and model.num_heads % tp == 0
    ]
    fitting = [each for each in layouts if fits(each, model, machine)]
    found = steps(fitting, model, machine)
    return [tflops(model, at, step.step_s) for at, step in zip(fitting, found, strict=True)]
