"""Times plans and proposals in spaces of up to a million layouts, and measures their memory.

Run as `make bench-plan`, or `python -m benchmarks.bench_plan`; it writes the section "Plan" of
`benchmarks/RESULTS.md`. Each plan or search runs in a process of its own, on one core, so that the
peak of resident memory is its own, with Python and numpy.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import time
from typing import Any, Final

import numpy as np

from benchmarks.results_file import describe_machine, record, table
from layout_tuner.predictions.belief.known_measurements import Knowledge, Sample
from layout_tuner.predictions.belief.observation import Observation
from layout_tuner.predictions.belief.plan import make_plan
from layout_tuner.predictions.estimates.step_time import step_time_s
from layout_tuner.predictions.statistics.job_duration import TrainingJob
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.tuner.strategies.ask_and_tell import LayoutSearch

PROMISED_S: Final = 3.0
PROMISED_ASK_S: Final = 0.3
PROMISED_MB: Final = 600.0
"""Most seconds and megabytes for 10^6 layouts."""
_SIZES: Final = (1, 8, 64, 200)
"""Numbers of micro-batches a step of the spaces; each number has 15,792 legal layouts."""
PROMISED_MIXTURE_S: Final = 2.0
PROMISED_MIXTURE_MB: Final = 200.0
"""The same of a plan of a mixture of experts."""
_MIXTURE_SIZE: Final = 41
"""Numbers of micro-batches of the space of a mixture: about a million legal layouts."""
_MEASURED: Final = (0, 500)
_NUM_TOLD: Final = 100
_NUM_ASKED: Final = 9
_BLAS: Final = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def main() -> None:
    """Measures each space with and without measurements, and records the table."""
    if len(sys.argv) > 1:
        what, size, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
        spec = _campaign(size) if what != "mixture" else _mixture(size)
        print(_searched(spec, count) if what == "search" else _measured(spec, count))
        return
    rows, broken = [], False
    for what, size in (*(("plan", size) for size in _SIZES), ("mixture", _MIXTURE_SIZE)):
        is_mixture = what == "mixture"
        plans = [_in_a_process(what, size, count) for count in _MEASURED]
        num_layouts = plans[0][0]
        scale = max(num_layouts, 1e6) / 1e6
        most_s = PROMISED_MIXTURE_S if is_mixture else PROMISED_S * scale
        most_mb = PROMISED_MIXTURE_MB if is_mixture else PROMISED_MB * scale
        broken |= is_mixture and num_layouts < 1e6
        broken |= any(each[1] + each[2] > most_s or each[3] > most_mb for each in plans)
        cells = [f"{num_layouts:,.0f}{', with `ep`' if is_mixture else ''}"]
        for place, shown in ((1, "{:.2f}"), (2, "{:.2f}"), (3, "{:.0f}")):
            cells.append(" / ".join(shown.format(each[place]) for each in plans))
        if is_mixture:
            cells += ["-"] * 3
        else:
            _, open_s, ask_s, peak_mb = _in_a_process("search", size, _NUM_TOLD)
            cells += f"{open_s:.2f}", f"{ask_s:.2f}", f"{peak_mb:.0f}"
            broken |= ask_s > PROMISED_ASK_S * scale or peak_mb > PROMISED_MB * scale
        rows.append(tuple(cells))
        print(rows[-1], flush=True)
    header = (
        *("legal layouts", "enumerate, s", "plan, s", "peak memory, MB"),
        *("open and first proposal, s", "proposal, s", "peak memory, MB"),
    )
    record(
        "Plan",
        f"`make bench-plan`; {describe_machine('numpy')}. One core.\n\nThe plan lists 10 layouts of "
        "gpt-22b on Frontier, or of qwen3-30b-a3b on H100 (with `ep`), with a training job; without "
        f"measurements / with {_MEASURED[-1]} of other layouts of the space. Asked for 10^6 layouts: "
        f"{PROMISED_S:g} s and {PROMISED_MB:g} MB, with `ep` {PROMISED_MIXTURE_S:g} s and "
        f"{PROMISED_MIXTURE_MB:g} MB. Proposals of `guided` with {_NUM_TOLD} told (median of "
        f"{_NUM_ASKED}): {PROMISED_ASK_S:g} s and {PROMISED_MB:g} MB.\n\n{table(header, rows)}",
    )
    if broken:
        sys.exit(
            f"a promise is broken: {PROMISED_S} s, {PROMISED_ASK_S} s or {PROMISED_MB} MB; with "
            f"experts {PROMISED_MIXTURE_S} s or {PROMISED_MIXTURE_MB} MB"
        )


def _in_a_process(what: str, size: int, count: int) -> tuple[float, ...]:
    """The figures of `_measured` or `_searched` in a new process with one thread."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.bench_plan", what, str(size), str(count)],
        env=os.environ | dict.fromkeys(_BLAS, "1"),
        capture_output=True,
        check=True,
        text=True,
    )
    return tuple(float(figure) for figure in done.stdout.split())


def _measured(spec: CampaignSpec, count: int) -> str:
    """Layouts, seconds of enumeration, seconds of the plan, and the peak of memory in MB."""
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


def _searched(spec: CampaignSpec, num_told: int) -> str:
    """Layouts, seconds to the first proposal and of a later one, and the peak of memory in MB."""
    from layout_tuner.tuner.strategies.registry import make_strategy
    from layout_tuner.tuner.strategies.search_problem import SearchProblem

    legal = spec.legal_set()
    rng = np.random.default_rng(0)
    started = time.perf_counter()
    problem = SearchProblem(layouts=legal, model=spec.model, cluster=spec.cluster)
    search = make_strategy("guided", problem, seed=0)
    for place in rng.choice(len(legal), num_told, replace=False).tolist():
        _tell(search, legal.layout(place), spec, rng)
    asked = search.ask()
    open_s = time.perf_counter() - started
    taken = []
    for _ in range(_NUM_ASKED):
        assert asked is not None, "the space is not exhausted"
        _tell(search, asked, spec, rng)
        begun = time.perf_counter()
        asked = search.ask()
        taken.append(time.perf_counter() - begun)
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    return f"{len(legal)} {open_s} {statistics.median(taken)} {peak_mb}"


def _tell(
    search: LayoutSearch, layout: Layout, spec: CampaignSpec, rng: np.random.Generator
) -> None:
    step_s = float(step_time_s(layout, spec.model, spec.cluster)[0]) * rng.lognormal(0.2, 0.1)
    rate = layout.global_batch_size * spec.model.seq_length / step_s
    search.tell(layout, Observation.completed(rate / layout.num_devices, step_time_s=step_s))


def frontier_space(num_sizes: int, *, most_micro_batch: int = 8) -> dict[str, Any]:
    """A space of gpt-22b on Frontier; it grows with the numbers of micro-batches, from 1."""
    return {
        "global_batch_size": {"min": 1, "max": 1 << 20},
        "num_nodes": [3, 6, 12, 24, 48, 96],
        "tp": [1, 2, 4, 8],
        "pp": [1, 2, 3, 4, 6, 8, 12, 16, 24, 48],
        "micro_batch_size": {"from": 1, "to": most_micro_batch},
        "num_microbatches": {"from": 1, "to": num_sizes},
        "zero_stage": [0, 1],
        "recompute": ["none", "selective", "full"],
        "sequence_parallel": [False, True],
        "precision": "bf16",
    }


def _campaign(size: int) -> CampaignSpec:
    return CampaignSpec.from_mapping(
        {
            "name": "bench",
            "model": "gpt-22b",
            "cluster": "frontier",
            "budget": {"node_hours": 1000},
            "space": frontier_space(size),
        }
    )


def _mixture(size: int) -> CampaignSpec:
    return CampaignSpec.from_mapping(
        {
            "name": "bench",
            "model": "qwen3-30b-a3b",
            "cluster": "h100-sxm",
            "budget": {"node_hours": 1000},
            "space": {
                "global_batch_size": {"min": 1, "max": 1 << 20},
                "num_nodes": [2, 4, 8, 16, 32],
                "tp": [1, 2, 4],
                "pp": [1, 2, 4],
                "ep": [1, 2, 4, 8, 16, 32, 64],
                "micro_batch_size": {"from": 1, "to": 8},
                "num_microbatches": {"from": 1, "to": size},
                "zero_stage": [0, 1, 2, 3],
                "recompute": ["none", "selective", "full"],
                "sequence_parallel": [False, True],
                "precision": "bf16",
            },
        }
    )


if __name__ == "__main__":
    main()
