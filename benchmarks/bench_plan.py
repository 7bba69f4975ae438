"""Times the plan of spaces of up to a million layouts, and measures its memory.

Run as `make bench-plan`, or `python -m benchmarks.bench_plan`; it writes the section "Plan" of
`benchmarks/RESULTS.md`. Each plan is made in a process of its own, on one core, so that the peak of
resident memory is that of the plan with Python and numpy.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from typing import Final

from benchmarks.results_file import describe_machine, record, table
from search_spaces.belief.known_measurements import Knowledge, Sample
from search_spaces.belief.plan import make_plan
from search_spaces.estimates.time import step_time_s
from search_spaces.spec.campaign import CampaignSpec
from search_spaces.statistics.training_job import TrainingJob

PROMISED_S: Final = 3.0
PROMISED_MB: Final = 600.0
"""Most seconds and megabytes for 10^6 layouts."""
_SIZES: Final = (1, 8, 64, 200)
"""Numbers of micro-batches a step of the spaces; each number has 15,792 legal layouts."""
_MEASURED: Final = (0, 500)
_BLAS: Final = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def main() -> None:
    """Measures each space with and without measurements, and records the table."""
    if len(sys.argv) > 1:
        print(_measured(int(sys.argv[1]), int(sys.argv[2])))
        return
    rows, broken = [], False
    for size in _SIZES:
        for count in _MEASURED:
            num_layouts, enumerate_s, plan_s, peak_mb = _in_a_process(size, count)
            rows.append(
                (
                    f"{num_layouts:,.0f}",
                    str(count),
                    f"{enumerate_s:.2f} s",
                    f"{plan_s:.2f} s",
                    f"{peak_mb:.0f} MB",
                )
            )
            print(rows[-1], flush=True)
            scale = max(num_layouts, 1e6) / 1e6
            broken |= enumerate_s + plan_s > PROMISED_S * scale or peak_mb > PROMISED_MB * scale
    header = ("legal layouts", "measurements", "enumerate", "plan", "peak memory")
    record(
        "Plan",
        f"`make bench-plan`; {describe_machine('numpy')}. One core.\n\n{_text(header, rows)}",
    )
    if broken:
        sys.exit(f"10^6 layouts took more than {PROMISED_S} s or {PROMISED_MB} MB")


def _text(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    return (
        f"{table(header, rows)}\n\nThe plan lists 10 layouts of gpt-22b on Frontier, with a training job. "
        "Measurements: made-up step times of\nother layouts of the same space. Peak memory: of the process, "
        f"Python and numpy included. The promise for 10^6\nlayouts is {PROMISED_S:g} s and "
        f"{PROMISED_MB:g} MB."
    )


def _in_a_process(size: int, count: int) -> tuple[float, ...]:
    """The figures of `_measured` in a new process with one thread."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.bench_plan", str(size), str(count)],
        env=os.environ | dict.fromkeys(_BLAS, "1"),
        capture_output=True,
        check=True,
        text=True,
    )
    return tuple(float(figure) for figure in done.stdout.split())


def _measured(size: int, count: int) -> str:
    """Layouts, seconds of enumeration, seconds of the plan, and the peak of memory in MB."""
    spec = _campaign(size)
    started = time.perf_counter()
    legal = spec.legal_set()
    enumerated = time.perf_counter()
    samples = []
    for place in range(count):
        layout = legal.layout(place * (len(legal) // count))
        step_s = 1.3 * float(step_time_s(layout, spec.model, spec.cluster)[0])
        sample = Sample(
            model=spec.model,
            cluster=spec.cluster,
            layout=layout,
            state="completed",
            step_time_s=step_s,
        )
        samples.append(sample)
    begun = time.perf_counter()
    knowledge = Knowledge(samples=tuple(samples))
    make_plan(spec, legal=legal, knowledge=knowledge, job=TrainingJob(tokens=10**12))
    ended = time.perf_counter()
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    return f"{len(legal)} {enumerated - started} {ended - begun} {peak_mb}"


def _campaign(size: int) -> CampaignSpec:
    return CampaignSpec.from_mapping(
        {
            "name": "bench",
            "model": "gpt-22b",
            "cluster": "frontier",
            "budget": {"node_hours": 1000},
            "space": {
                "global_batch_size": {"min": 1, "max": 1 << 20},
                "num_nodes": [3, 6, 12, 24, 48, 96],
                "tp": [1, 2, 4, 8],
                "pp": [1, 2, 3, 4, 6, 8, 12, 16, 24, 48],
                "micro_batch_size": {"from": 1, "to": 8},
                "num_microbatches": {"from": 1, "to": size},
                "zero_stage": [0, 1],
                "recompute": ["none", "selective", "full"],
                "sequence_parallel": [False, True],
                "precision": "bf16",
            },
        }
    )


if __name__ == "__main__":
    main()
