"""Jobs of the embedded trainer on this machine: layouts with knobs, measured, then searched.

Run as `python -m benchmarks.bench_job_knobs TABLE.csv --jobs 240 --record`: about half an hour on
two quiet cores. It draws jobs of tiny-llama on two ranks by a seed, measures each twice, in another
order each time, and writes the table after every probe; started again, it measures what the table
lacks. Then it replays `guided` over the table, cold, one probe at a time.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.arguments import count
from benchmarks.results_file import describe_machine, record, table
from benchmarks.workers.forked_ranks import (
    RankFailedError,
    restart_with_rank_environment,
    run_ranks,
)
from layout_tuner.process_resources import usable_cores
from layout_tuner.protocol.outcome import ProbeRequest
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec
from layout_tuner.search_spaces.clusters.cluster import detect_local_cpu
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.spaces.search_space import enumerate_legal
from layout_tuner.search_spaces.tables.reading import read_table
from layout_tuner.search_spaces.tables.table import TableCell, own_source
from layout_tuner.search_spaces.tables.writing import (
    layout_values,
    machine_values,
    model_values,
    table_text,
)
from layout_tuner.trainers.embedded import EMBEDDED_TRAINER
from layout_tuner.tuner.replay.run import ReplayTask
from layout_tuner.workers.trainer.open_training import RankContext
from layout_tuner.workers.trainer.probe.probe import run_probe

CAMPAIGN: Final[dict[str, Any]] = {
    "name": "bench-job-knobs",
    "model": "tiny-llama",
    "space": {
        "global_batch_size": 16,
        "tp": [1, 2],
        "pp": [1, 2],
        "dp": [1, 2],
        "vpp": [1, 2],
        "micro_batch_size": [1, 2, 4, 8],
        "zero_stage": [0, 1, 2, 3],
        "recompute": ["none", "selective"],
        "sequence_parallel": [False, True],
        "precision": "fp32",
        "job": {
            "compile": [False, True],
            "attention": ["own", "fused", "math"],
            "overlap_all_reduce": [True, False],
            "overlap_scatter": [True, False],
            "overlap_gather": [True, False],
            "bucket_elements": [1 << 22, 1 << 16],
        },
    },
    "budget": {"trials": 24},
}
"""A device of local-cpu is one core, so that `threads` has no second value here."""
NUM_RANKS: Final = 2
RUNS: Final = 2
REPLAY_SEEDS: Final = range(10)
PROBES: Final = 60
WITHIN: Final = 0.05


def main() -> None:
    """Measures, replays, and prints or records."""
    arguments = _arguments()
    restart_with_rank_environment()
    cluster = replace(detect_local_cpu(), devices_per_node=NUM_RANKS)
    spec = CampaignSpec.from_document({**CAMPAIGN, "cluster": cluster.to_mapping()})
    if usable_cores() < NUM_RANKS:
        sys.exit(f"{NUM_RANKS} ranks need as many cores; this machine has {usable_cores()}")
    try:
        about = measure(spec, arguments.table, num_jobs=arguments.jobs, seed=arguments.seed)
    except RankFailedError as error:
        sys.exit(str(error))
    machine = describe_machine("torch", "numpy")
    (cell,) = read_table(arguments.table).cells
    text = f"{about}\n\n{replayed(cell)}"
    print(f"{machine}\n\n{text}")
    if arguments.record:
        record("Job knobs", f"`python -m benchmarks.bench_job_knobs`; {machine}.\n\n{text}")


def measure(spec: CampaignSpec, path: Path, *, num_jobs: int, seed: int) -> str:
    """Measures jobs that the table at the path lacks; returns a sentence about all."""
    jobs = spec.jobs(enumerate_legal(spec.space, spec.model, spec.cluster))
    every = [jobs.layout(at) for at in range(len(jobs))]
    every = [layout for layout in every if layout.num_devices == NUM_RANKS]
    if num_jobs > len(every):
        sys.exit(f"--jobs {num_jobs}: there are {len(every)} jobs; ask for fewer")
    rng = np.random.default_rng(seed)
    drawn = [every[at] for at in rng.permutation(len(every))[:num_jobs]]
    done = _measured(path)
    had = Counter(layout for layout, _ in done)
    if foreign := had.keys() - set(drawn):
        sys.exit(f"{path} has {len(foreign)} jobs of another draw; name another file")
    turns = [drawn[at] for _ in range(RUNS) for at in rng.permutation(num_jobs)]
    for number, layout in enumerate(turns, 1):
        if had[layout]:  # measured before this program was started again
            had[layout] -= 1
            continue
        figures = _probe(spec, layout)
        done.append((layout, figures))
        path.write_text(table_text(_row(spec, *each) for each in done))
        print(
            f"{number}/{len(turns)} {layout.key}: {figures['step_time_s'] * 1e3:.1f} ms", flush=True
        )
    times_s: dict[Layout, list[float]] = {}
    for layout, figures in done:
        times_s.setdefault(layout, []).append(figures["step_time_s"])
    apart = [abs(math.log(one / other)) for one, other in times_s.values()]
    return (
        f"{num_jobs} of {len(every)} jobs of {spec.model.title} on two ranks, drawn with seed {seed}, "
        f"each measured {RUNS} times. Two runs of a job differ by {statistics.median(apart):.1%} in "
        f"the median and {max(apart):.1%} at most."
    )


def replayed(cell: TableCell) -> str:
    """How many probes a search takes to a job within 5 % of the best, or within the spread."""
    spread = _spread(cell)
    rows = []
    for strategy in ("guided", "random"):
        runs = [
            ReplayTask(
                cell=cell, strategy=strategy, seed=seed, pending=1, probes=PROBES, stop_within=None
            ).run()
            for seed in REPLAY_SEEDS
        ]
        for share in dict.fromkeys((WITHIN, max(WITHIN, spread))):
            probes = [run.probes_to(share) or math.inf for run in runs]
            figures = (statistics.median(probes), min(probes), max(probes))
            rows.append((strategy, f"{share:.1%}", *(f"{each:g}" for each in figures)))
    best = min(row.step_time_s for row in cell.merged if row.step_time_s is not None)
    header = ("strategy", "within", "median probes", "least", "most")
    return (
        f"The best job takes {best * 1e3:.1f} ms a step. Replay over {len(REPLAY_SEEDS)} seeds, cold, "
        f"one probe at a time:\n\n{table(header, rows)}"
    )


def _spread(cell: TableCell) -> float:
    """Median difference of two runs of a job, as a share."""
    times_s: dict[Layout, list[float]] = {}
    for row in cell.rows:
        times_s.setdefault(row.layout, []).append(row.step_time_s or math.nan)
    return statistics.median(abs(math.log(each[0] / each[-1])) for each in times_s.values())


def _probe(spec: CampaignSpec, layout: Layout) -> dict[str, Any]:
    request = ProbeRequest(model=spec.model, layout=layout)

    def work(ctx: RankContext) -> dict[str, Any] | None:
        result = run_probe(request, ctx, lambda _: None)
        if result is None:
            return None
        measured = result.measurement
        return {
            "tokens_per_s": measured.tokens_per_s,
            "step_time_s": measured.step_time_s,
            "peak_memory_bytes": measured.peak_memory_bytes,
        }

    figures = run_ranks(layout.num_devices, work)[0]
    assert figures is not None, "rank 0 has the measurement"
    return figures


def _row(spec: CampaignSpec, layout: Layout, figures: dict[str, Any]) -> dict[str, Any]:
    return {
        "source": own_source(spec.name, EMBEDDED_TRAINER),
        **machine_values(spec.cluster),
        **model_values(spec.model),
        **layout_values(layout),
        "status": "completed",
        **figures,
    }


def _measured(path: Path) -> list[tuple[Layout, dict[str, Any]]]:
    """What an earlier run has measured."""
    if not path.exists():
        return []
    names = ("tokens_per_s", "step_time_s", "peak_memory_bytes")
    return [
        (row.layout, {name: getattr(row, name) for name in names}) for row in read_table(path).rows
    ]


def _arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_job_knobs")
    parser.add_argument("table", type=Path, help="the measurement table that is written")
    parser.add_argument("--jobs", type=count, default=240, help="jobs to draw")
    parser.add_argument("--seed", type=int, default=46, help="of the draw and the order")
    parser.add_argument("--record", action="store_true", help="write benchmarks/RESULTS.md")
    return parser.parse_args(given)


if __name__ == "__main__":
    main()
