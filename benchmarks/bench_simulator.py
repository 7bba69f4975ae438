"""How fast the simulator is, and how right: every promise beside its value.

Run as `make bench-simulator TABLES=DIR`; `--record` writes the section "Simulator" of
`benchmarks/RESULTS.md`, `--refit` fits the constants of tables anew and prints them. What was
fitted to what is in docs/simulator.md. It ends with 1 where a promise is not kept.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

from benchmarks import results_file
from benchmarks.results_file import table
from benchmarks.search.search_record import Promise, promises_table
from benchmarks.simulator import simulator_frontier as frontier
from benchmarks.simulator.simulator_fit import FITTED_CELLS
from benchmarks.simulator.simulator_tables import cell_rows, judge_table, other_tables, summary
from layout_tuner.array_types import Floats
from layout_tuner.predictions.belief.residual import knob_coordinates
from layout_tuner.predictions.belief.step_belief import StepBelief, StepModel
from layout_tuner.predictions.belief.time_fit import TIME_PRIOR
from layout_tuner.predictions.estimates.step_time import step_time_s, time_terms
from layout_tuner.search_spaces.clusters.cluster_presets import CLUSTER_PRESETS
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.legality_rules import OTHER_TRAINER_SCOPES
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.search_spaces.spaces.search_space import SearchSpace, enumerate_legal
from layout_tuner.workers.simulation.machine import Machine
from layout_tuner.workers.simulation.simulated_cluster import SimulatedCluster
from layout_tuner.workers.simulation.steps import steps
from layout_tuner.workers.simulation.walk import held_passes, rank_runs

ONE_CARD: Final = replace(
    CLUSTER_PRESETS["a100-sxm"], name="one-card", inter_node_bandwidth_bytes_per_s=25e9 / 8
)
"""Nodes of eight devices with one network card of 25 GB/s."""
OTHER_TABLES: Final = "[The simulator](../docs/simulator.md) has the tables by cell, of other tables and of AxoNN's runs."
_ORDER_PROBES: Final = 8
_ORDER_DRAWS: Final = 10


def main() -> None:
    """Prints the tables, and records them where it is asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help="write benchmarks/RESULTS.md")
    parser.add_argument("--refit", action="store_true", help="fit the constants anew")
    parser.add_argument("--tables", type=Path, help="folder with the tables that judge")
    arguments = parser.parse_args()
    if arguments.refit:
        _refit(arguments.tables)
    promises = [*_speed(), *_frontier(), *_rank_order()]
    parts = []
    if arguments.tables:
        ranked, text = _tables(arguments.tables)
        promises += ranked
        parts = [text, _further(arguments.tables)]
    head = f"`make bench-simulator`; {results_file.describe_machine('numpy')}. One thread; seconds of the processor."
    print(head, promises_table(promises), *parts, sep="\n\n")
    if arguments.record:
        asked = promises_table([promise for promise in promises if promise.asked])
        results_file.record("Simulator", f"{head}\n\n{asked}\n\n{OTHER_TABLES}")
    if missed := [promise.what for promise in promises if promise.row()[-1] != "yes"]:
        sys.exit(f"not kept: {'; '.join(missed)}")


def _refit(folder: Path) -> None:
    print(f"frontier: matmul_share {frontier.fitted_share():.4f}")
    for calibration in FITTED_CELLS:
        constants, software, error = calibration.again(folder)
        shown = {name: float(f"{value:.4g}") for name, value in constants.items()}
        print(f"{calibration.title}: {shown}, {software}, mean error {error:.1%}")


def _speed() -> list[Promise]:
    """Seconds of a probe on a cluster whose schedule is new, and again."""
    found = []
    for name, model, layout, most_s in (
        ("175B on 128", frontier.MODEL_175B, frontier.LAYOUT_175B, 0.1),
        ("1T on 3,072", frontier.MODEL_1T, frontier.LAYOUT_1T, 2.0),
    ):
        rank_runs.cache_clear()
        held_passes.cache_clear()
        first_s, *again_s = [_probe_s(model, layout) for _ in range(4)]
        for which, seconds in (("new schedule", first_s), ("known", float(np.median(again_s)))):
            asked = f"{most_s * 1e3:,.0f} ms"
            what = f"a probe of {name}, {which}"
            found.append(
                Promise(what=what, asked=asked, measured=seconds, most=most_s, shown="{:.3f} s")
            )
    return found


def _probe_s(model: ModelShape, layout: Layout) -> float:
    cluster = SimulatedCluster.of("frontier", num_nodes=layout.num_nodes, seed=0)
    began = time.process_time()
    cluster.run(
        layout,
        model,
        nodes=range(layout.num_nodes),
        warmup_iterations=2,
        timed_iterations=10,
        started_s=0.0,
        run_seed=0,
        deadline_s=1e6,
    )
    return time.process_time() - began


def _near(what: str, asked: float, measured: float, within: float) -> Promise:
    """A share that is asked for, in points."""
    return Promise(
        what=what,
        asked=f"{asked:.2%} +- {within:.0%}",
        measured=measured,
        least=asked - within,
        most=asked + within,
        shown="{:.2%}",
    )


def _frontier() -> list[Promise]:
    machine, layout = Machine.of(frontier.FRONTIER), frontier.frontier_layout
    one_t = frontier.simulated_tflops(frontier.MODEL_1T, frontier.LAYOUT_1T, machine)
    found = [_near("1T over the published 61.2 TFLOP/s", 1.0, one_t / 61.2, 0.1)]
    for at, (nodes, batch) in enumerate(frontier.BATCHES_22B):
        speeds = frontier.legal_speeds(nodes, batch)
        what = f"22B, {nodes} nodes, batch {batch}, {len(speeds)} layouts"
        published = 73.5 if at == 0 else None
        found += [
            Promise(
                what=f"{what}: {name} TFLOP/s",
                asked=f"{side} {published}" if published else "",
                measured=value,
                least=published if published and side == "at least" else -np.inf,
                most=published if published and side == "at most" else np.inf,
                shown="{:.1f}",
            )
            for name, side, value in (
                ("median", "at most", float(np.median(speeds))),
                ("best", "at least", float(speeds.max())),
            )
        ]
    big, huge = frontier.MODEL_175B, frontier.MODEL_1T
    for name, model, few, many in (
        ("175B, 128 to 1,024", big, layout(4, 16, 2, 640), layout(4, 16, 16, 640)),
        ("1T, 512 to 3,072", huge, layout(8, 64, 1, 1600), layout(8, 64, 6, 1600)),
    ):
        value = frontier.weak_scaling(model, few, many)
        found.append(_near(f"weak scaling, {name}", 1.0, value, 0.05))
    for name, model, published, few, many in (
        ("175B, 128 to 1,024", big, 0.8993, layout(4, 16, 2, 4000), layout(4, 16, 16, 500)),
        ("1T, 1,024 to 3,072", huge, 0.8705, layout(8, 64, 2, 4008), layout(8, 64, 6, 1336)),
    ):
        for of, what in ((1, "the stated batch"), (frontier.CONSUMED, "a quarter of it")):
            smaller = (
                replace(at, num_microbatches=at.num_microbatches // of) for at in (few, many)
            )
            value = frontier.strong_scaling(model, *smaller)
            found.append(_near(f"strong scaling, {name}, {what}", published, value, 0.05))
    return found


def _rank_order() -> list[Promise]:
    """The gain of stages as neighbours, by the estimates and by the simulator, of legal layouts."""
    model = frontier.MODEL_22B
    machine = Machine.of(ONE_CARD)
    network = replace(machine.collectives.fabric, node_cards=1)
    machine = replace(machine, collectives=replace(machine.collectives, fabric=network))
    space = SearchSpace(
        global_batch_size=256,
        num_nodes=16,
        tp=[1, 2, 4, 8],
        pp=[2, 4, 8, 16],
        vpp=[1],
        micro_batch_size=[1, 2, 4],
        zero_stage=[0, 1],
        recompute="none",
        sequence_parallel=[False],
        precision="bf16",
    )
    legal = enumerate_legal(space, model, ONE_CARD, scopes=OTHER_TRAINER_SCOPES)
    every = [legal.layout(position) for position in range(len(legal))]
    usual = [at for at in every if at.dp > 1 and frontier.fits(at, model, machine)]
    other = [replace(at, rank_order="tp_cp_pp_dp") for at in usual]
    both = [s.step_s for each in (usual, other) for s in steps(each, model, machine)]
    columns = LayoutColumns.of_each(usual + other)
    simulated = _gains(np.array(both))
    drawn = [
        _order_errors(simulated, _gains(each))
        for each in _calibrated(columns, model, np.array(both[: len(usual)]))
    ]
    cold = _order_errors(simulated, _gains(step_time_s(columns, model, ONE_CARD)))
    what = f"order of ranks, 22B on 16 nodes with one card, {len(usual)} layouts"
    return [
        Promise(
            what=f"{what}, {when}: {name}",
            asked="all",
            measured=share,
            most=1.0,
            least=1.0,
            shown="{:.0%}",
        )
        for when, shares in (
            ("before any probe", cold),
            (f"after {_ORDER_PROBES} probes of the usual one", np.median(drawn, axis=0)),
        )
        for name, share in zip(("same sign", "within 5 points"), shares, strict=True)
    ]


def _gains(seconds: Floats) -> Floats:
    """What the second half of the layouts gains over the first."""
    usual, other = np.split(seconds, 2)
    return usual / other - 1


def _order_errors(simulated: Floats, estimated: Floats) -> tuple[float, float]:
    """Shares of the gains, where either is over 2 %, of the same sign and within 5 points."""
    counts = (np.abs(simulated) > 0.02) | (np.abs(estimated) > 0.02)
    alike = np.sign(simulated)[counts] == np.sign(estimated)[counts]
    near = np.abs(simulated - estimated)[counts] <= 0.05
    return float(np.mean(alike)), float(np.mean(near))


def _calibrated(columns: LayoutColumns, model: ModelShape, usual_s: Floats) -> Iterator[Floats]:
    """Step times of all layouts after probes of a few of the first ones, drawn anew each time."""
    points = knob_coordinates(columns)
    known = StepModel(
        terms=time_terms(columns, model, ONE_CARD),
        points=points[:, np.ptp(points, axis=0) > 0],
        residual=np.zeros(len(points)),
    )
    for seed in range(_ORDER_DRAWS):
        rows = np.random.default_rng(seed).choice(len(usual_s), _ORDER_PROBES, replace=False)
        belief = StepBelief(known, TIME_PRIOR.factors, rows, np.log(usual_s[rows]))
        yield np.exp(belief.physical_mean(np.arange(len(points))))


def _tables(folder: Path) -> tuple[list[Promise], str]:
    """Order and first choice in the cells of tables, with constants from one cell of them."""
    promises, texts = [], []
    for calibration in FITTED_CELLS:
        judged = judge_table(folder, calibration)
        correlation, worst, good, count = summary(judged)
        promises += [
            Promise(
                what=f"{calibration.title}: order of pairs over 5 % apart, median of {count} cells",
                asked="0.8",
                measured=correlation,
                least=0.8,
                most=1.0,
                shown="{:.2f}",
            ),
            Promise(
                what=f"{calibration.title}: worst first choice ({good} of {count} cells within 10 %)",
                asked="10 %",
                measured=worst,
                most=0.1,
                shown="{:.0%}",
            ),
        ]
        shown = judged if len(judged) < 20 else [j for j in judged if len(j.errors) >= 15]
        header = (
            "cell",
            "rows",
            "order",
            "loss of the first choice",
            "mean error",
            "median",
            "over 2.5x slower than simulated",
        )
        texts.append(f"{calibration.title}\n\n{table(header, cell_rows(shown))}")
    return promises, "\n\n".join(texts)


def _further(folder: Path) -> str:
    """Tables that nothing was fitted to, with the presets' constants."""
    header = ("table", "rows", "mean error", "median error", "order")
    used, reserved = frontier.memory_errors(folder)
    memory = [
        (
            f"{frontier.MEMORY}, {name}",
            f"{len(e)}",
            f"{np.abs(e).mean():.0%}",
            f"{np.median(e):+.0%}",
            "",
        )
        for name, e in (("in use", used), ("reserved", reserved))
    ]
    scaling = [
        (name, f"{published:.1f}", f"{found:.1f}", f"{found / published - 1:+.0%}")
        for name, published, found in frontier.axonn_rows(folder)
    ]
    return "\n\n".join(
        [
            "Step times of tables that nothing was fitted to, and peaks of memory, simulated over measured.",
            table(header, [*other_tables(folder), *memory]),
            f"AxoNN's runs, {frontier.SCALING_BATCH:,} sequences a step assumed: TFLOP/s a device, "
            "recomputation included, of the best layout that was simulated.",
            table(("run", "published", "simulated", "error"), scaling),
        ]
    )


if __name__ == "__main__":
    main()
