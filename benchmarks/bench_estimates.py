"""Measures how many layouts a second the step-time estimate judges on one core, and a refit.

Run as `make bench-estimates`, or `python -m benchmarks.bench_estimates`; `--record` writes the
section "Estimates" of `benchmarks/RESULTS.md`. It fails below 10^6 layouts a second, and if a refit
on 500 samples takes more than 30 ms. `--tables DIR` also judges what
`bench_tables` does not: the order of FSDP runs over many models, the places of recipes of mixtures
of experts in a plan (`mixture_recipes`), and AxoNN's scaling (`axonn_scaling`).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Final

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from scipy.stats import spearmanr

from benchmarks import results_file
from benchmarks.tables import axonn_scaling, mixture_recipes
from benchmarks.tables.judged_tables import cells_by_memory
from benchmarks.timing import median_s
from layout_tuner.predictions.belief.corrected_step_time import TimeCalibration
from layout_tuner.predictions.belief.known_measurements import Sample
from layout_tuner.predictions.estimates.peak_memory import peak_memory_bytes
from layout_tuner.predictions.estimates.step_time import PRIOR, step_time_s, time_terms
from layout_tuner.search_spaces.clusters.cluster_presets import CLUSTER_PRESETS
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.models.model_presets import model_preset

REPEATS = 5
_median_s = partial(median_s, repeats=REPEATS)
LAYOUTS = 1_000_000
SAMPLES = 500
PROMISED_LAYOUTS_PER_S = 1e6
PROMISED_REFIT_S = 0.03
SHARDED: Final = "mpt_fsdp_a100.csv"
"""MPT of 125M to 70B with FSDP on 8 to 128 A100, of 40 and of 80 GB."""
LEAST_CORRELATION: Final = 0.7
FRONTIER = CLUSTER_PRESETS["frontier"]
GPT_175B = model_preset("gpt-175b")


def main() -> None:
    """Prints the table, and records it where it is asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help="write benchmarks/RESULTS.md")
    parser.add_argument("--tables", type=Path, help="folder with the tables that judge")
    arguments = parser.parse_args()
    is_recorded = arguments.record
    judged, is_good = judge_sharded(arguments.tables)
    scaling, below, is_ordered = axonn_scaling.judge(arguments.tables)
    recipes, are_good = mixture_recipes.judge(arguments.tables)
    columns = _columns(LAYOUTS)
    judging_s = _median_s(lambda: step_time_s(columns, GPT_175B, FRONTIER))
    terms_s = _median_s(lambda: time_terms(columns, GPT_175B, FRONTIER))
    memory_s = _median_s(lambda: peak_memory_bytes(columns, GPT_175B))
    refit_s, predict_s = _calibration_s()
    table = f"""\
`make bench-estimates`; {results_file.describe_machine("numpy", "scipy")}. One thread; medians of {REPEATS}.

| what | asked | measured |
| --- | --: | --: |
| step time, layouts a second | 1,000,000 | {LAYOUTS / judging_s:,.0f} |
| calibration with one more sample, {SAMPLES} before | 30 ms | {refit_s * 1e3:.1f} ms |
{judged}{scaling}{recipes}{below}"""
    print(table)
    print(
        f"layouts a second: every term of the step {LAYOUTS / terms_s:,.0f}, peak memory "
        f"{LAYOUTS / memory_s:,.0f}; mean and spread over 100,000 layouts: {predict_s * 1e3:.0f} ms"
    )
    if is_recorded:
        results_file.record("Estimates", table)
    if LAYOUTS / judging_s < PROMISED_LAYOUTS_PER_S or refit_s > PROMISED_REFIT_S:
        sys.exit("slower than promised")
    if not (is_good and is_ordered and are_good):
        sys.exit("the estimates are further from the tables than promised")


def judge_sharded(folder: Path | None) -> tuple[str, bool]:
    """Rows of the table for FSDP runs, by the priors alone, and whether they are as promised."""
    path = None if folder is None else folder / SHARDED
    if path is None or not path.exists():
        return "", True
    shares = []
    for cell in cells_by_memory(path.read_text()):
        for row in cell.rows:
            log_s, _ = TimeCalibration().predict(
                row.layout, cell.model, cell.cluster, software=cell.key.source
            )
            tokens = row.layout.global_batch_size * cell.model.seq_length
            flops = tokens * cell.model.model_flops_per_token / row.layout.num_devices
            assert row.step_time_s is not None
            shares.append((flops / row.step_time_s, flops / float(np.exp(log_s[0]))))
    correlation = float(spearmanr(*zip(*shares, strict=True)).statistic)
    text = (
        f"| ZeRO-3, {len(shares)} runs of {SHARDED}: rank correlation of the share of the peak | "
        f"{LEAST_CORRELATION} | {correlation:.3f} |\n"
    )
    return text, correlation >= LEAST_CORRELATION


def _columns(count: int) -> LayoutColumns:
    rng = np.random.default_rng(0)

    def power(most: int) -> np.ndarray:
        return 2 ** rng.integers(0, most + 1, count)

    return LayoutColumns(
        num_nodes=np.full(count, 1024),
        tp=power(3),
        tp_columns=np.ones(count, dtype=np.int64),
        cp=np.ones(count, dtype=np.int64),
        cp_comm_type=np.zeros(count, dtype=np.int64),
        pp=power(4),
        dp=power(6),
        ep=np.ones(count, dtype=np.int64),
        etp=np.ones(count, dtype=np.int64),
        vpp=power(1),
        schedule=np.zeros(count, dtype=np.int64),
        pipeline_split=np.zeros(count, dtype=np.int64),
        rank_order=np.zeros(count, dtype=np.int64),
        micro_batch_size=power(3),
        num_microbatches=power(7),
        zero_stage=rng.integers(0, 4, count),
        zero_replicas=np.ones(count, dtype=np.int64),
        recompute=rng.integers(0, 3, count),
        sequence_parallel=rng.integers(0, 2, count),
        precision=np.ones(count, dtype=np.int64),
    )


def _calibration_s() -> tuple[float, float]:
    """Seconds of a refit after one more sample, and of a prediction."""
    columns = _columns(SAMPLES + REPEATS + 1)
    rng = np.random.default_rng(1)
    off = np.exp(rng.normal(0, 0.3, PRIOR.size))
    times_s = step_time_s(columns, GPT_175B, FRONTIER, PRIOR * off)
    times_s *= np.exp(rng.normal(0, 0.02, times_s.size))
    samples = [
        Sample(
            model=GPT_175B,
            cluster=FRONTIER,
            layout=_layout(columns, row),
            state="completed",
            step_time_s=float(times_s[row]),
        )
        for row in range(times_s.size)
    ]
    calibration = TimeCalibration.fit().updated(samples[:SAMPLES], campaign="bench")
    refits = []
    for sample in samples[SAMPLES:]:
        assert calibration.posterior is not None
        start = time.perf_counter()
        calibration = calibration.updated([sample], campaign="bench")
        assert calibration.posterior is not None
        refits.append(time.perf_counter() - start)
    asked = _columns(100_000)
    predict_s = _median_s(lambda: calibration.predict(asked, GPT_175B, FRONTIER, campaign="bench"))
    return statistics.median(refits), predict_s


def _layout(columns: LayoutColumns, row: int) -> Layout:
    # One number of devices, as in a campaign: dp takes what the others leave.
    tp, pp = int(columns.tp[row]), int(columns.pp[row])
    return Layout(
        num_nodes=64,
        tp=tp,
        pp=pp,
        dp=512 // (tp * pp),
        micro_batch_size=int(columns.micro_batch_size[row]),
        num_microbatches=int(columns.num_microbatches[row]),
        zero_stage=int(columns.zero_stage[row]),
        precision="bf16",
    )


if __name__ == "__main__":
    main()
