"""Judges the estimate of each stage's peak by the peaks that the ranks of a run had.

`make bench-memory TABLE=PEAKS.csv`: a row a rank, with the columns rank, stage, and of the peaks
(MiB) those that are judged. By default the run is the one of 175B on 128 devices of Frontier that
arXiv:2312.12705 reports; the flags say another. Nothing is fitted to the table beforehand: the
uncalibrated estimate knows the layout and that Megatron's like ran it, the calibrated one two ranks
besides, and is judged on the stages that those are not of.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import mean, median
from typing import Any, Final

import numpy as np

from layout_tuner.predictions.belief.peaks.corrected_peak import MemoryBelief, StagePeak
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.clusters.cluster_presets import resolve_cluster
from layout_tuner.search_spaces.layouts.layout import PRECISIONS, Layout
from layout_tuner.search_spaces.layouts.recomputation import RECOMPUTE_MODES
from layout_tuner.search_spaces.models.model_presets import resolve_model
from layout_tuner.search_spaces.models.model_shape import ModelShape

MIB: Final = 1 << 20


class PeaksInvalidError(Exception):
    """The table of peaks cannot be used; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryRun:
    """What ran, where, by what software."""

    model: ModelShape
    """What was trained."""
    cluster: Cluster
    """Where."""
    layout: Layout
    """How."""
    software: str
    """By what."""

    @property
    def belief(self) -> MemoryBelief:
        """What is believed of its memory before any of it was measured."""
        return MemoryBelief.prior(self.cluster, software=self.software)

    def peak(self, stage: int, mib: float) -> StagePeak:
        """What a rank of the stage tells."""
        return StagePeak(
            model=self.model,
            cluster=self.cluster,
            layout=self.layout,
            stage=stage,
            peak_memory_bytes=round(mib * MIB),
            software=self.software,
        )


def read_peaks(path: Path, column: str, num_stages: int) -> list[float]:
    """The highest peak of each stage's ranks, in MiB.

    Raises:
        PeaksInvalidError: the file cannot be read, a column is missing, or a stage is.
    """
    by_stage: dict[int, list[float]] = defaultdict(list)
    try:
        with path.open(newline="") as file:
            rows = csv.DictReader(file)
            missing = {"rank", "stage", column} - set(rows.fieldnames or ())
            if missing:
                raise PeaksInvalidError(f"{path}: has no column {', '.join(sorted(missing))}")
            for row in rows:
                by_stage[int(row["stage"])].append(float(row[column]))
    except (OSError, ValueError, TypeError) as error:
        raise PeaksInvalidError(f"{path}: cannot be read as a table of peaks: {error}") from error
    if sorted(by_stage) != list(range(num_stages)):
        raise PeaksInvalidError(
            f"{path}: has peaks of {len(by_stage)} stages, and pp={num_stages}; give the run's --pp"
        )
    return [max(by_stage[stage]) for stage in range(num_stages)]


def judge(run: MemoryRun, peaks_mib: Sequence[float]) -> dict[str, Any]:
    """Errors over stages: uncalibrated, and calibrated on one rank each of two stages."""
    measured = np.array(peaks_mib) * MIB
    expected, deviation = run.belief.stage_peak_bytes(run.layout, run.model)
    pairs = {}
    for pair in combinations(range(len(peaks_mib)), 2):
        told = run.belief.updated(run.peak(stage, peaks_mib[stage]) for stage in pair)
        found, _ = told.stage_peak_bytes(run.layout, run.model)
        others = np.delete(found / measured - 1.0, pair)
        pairs[pair] = found, summary(others)
    ends = pairs[0, len(peaks_mib) - 1]
    return {
        "stages": [
            {
                "stage": stage,
                "measured_mib": peaks_mib[stage],
                "uncalibrated_mib": expected[stage] / MIB,
                "deviation_mib": deviation[stage] / MIB,
                "calibrated_mib": ends[0][stage] / MIB,
            }
            for stage in range(len(peaks_mib))
        ],
        "uncalibrated": summary(expected / measured - 1.0),
        "calibrated_on_first_and_last_stage": ends[1],
        "calibrated_on_any_two_stages": {
            "median": median(errors["median"] for _, errors in pairs.values()),
            "mean": mean(errors["mean"] for _, errors in pairs.values()),
            "worst": max(errors["worst"] for _, errors in pairs.values()),
        },
    }


def summary(errors: np.ndarray[Any, np.dtype[np.float64]]) -> dict[str, float]:
    """Median, mean and worst of the relative errors' sizes."""
    sizes = np.abs(errors)
    return {
        "median": float(np.median(sizes)),
        "mean": float(np.mean(sizes)),
        "worst": float(np.max(sizes)),
    }


def default_run() -> MemoryRun:
    """The run that is judged if no flag says another."""
    return _run(_parser().parse_args(["--table", ""]))


def _run(options: argparse.Namespace) -> MemoryRun:
    return MemoryRun(
        model=resolve_model(options.model),
        cluster=resolve_cluster(options.cluster)[0],
        layout=Layout(
            num_nodes=-(-options.tp * options.pp * options.dp // 8),
            tp=options.tp,
            pp=options.pp,
            dp=options.dp,
            micro_batch_size=options.micro_batch_size,
            num_microbatches=options.num_microbatches,
            zero_stage=options.zero_stage,
            recompute=options.recompute,
            precision=options.precision,
        ),
        software=options.software,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    run, report = _run(options), {}
    try:
        for column in options.columns.split(","):
            report[column] = judge(run, read_peaks(options.table, column, run.layout.pp))
    except PeaksInvalidError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(report))
    else:
        for column, judged in report.items():
            _print(column, judged)
    return 0


def _print(column: str, judged: dict[str, Any]) -> None:
    print(f"{column}: peak of each stage's fullest rank, MiB")
    print(f"{'stage':>6} {'measured':>10} {'estimate':>10} {'+-':>8} {'on two ranks':>13}")
    for row in judged.pop("stages"):
        print(
            f"{row['stage']:>6} {row['measured_mib']:>10.0f} {row['uncalibrated_mib']:>10.0f} "
            f"{row['deviation_mib']:>8.0f} {row['calibrated_mib']:>13.0f}"
        )
    for name, errors in judged.items():
        listed = ", ".join(f"{which} {error:.1%}" for which, error in errors.items())
        print(f"{name.replace('_', ' ')}: {listed}")
    print()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", type=Path, required=True, help="Peaks, a row a rank.")
    parser.add_argument("--columns", default="max_allocated_mib,max_reserved_mib")
    parser.add_argument("--model", default="gpt-175b")
    parser.add_argument("--cluster", default="frontier")
    parser.add_argument("--software", default="Megatron-DeepSpeed")
    for name, default in (("tp", 4), ("pp", 16), ("dp", 2), ("micro-batch-size", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--num-microbatches", type=int, default=640)
    parser.add_argument("--zero-stage", type=int, default=1)
    parser.add_argument("--recompute", choices=RECOMPUTE_MODES, default="full")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp16")
    parser.add_argument("--json", action="store_true")
    return parser


if __name__ == "__main__":
    sys.exit(main())
