"""Times plans and proposals in spaces of up to a million layouts, and measures their memory.

Run as `make bench-plan`, or `python -m benchmarks.bench_plan`; it writes the section "Plan" of
`benchmarks/RESULTS.md`. Each plan or search runs in a process of its own, on one core, so that the
peak of resident memory is its own, with Python and numpy. Seconds are of the processor, which other
work on the machine changes least.

`python -m benchmarks.bench_plan over ROOT` runs the largest plans and searches in pairs with those
of another working tree, the one or the other first in turns, and writes "Plan over before".
`python -m benchmarks.bench_plan knobs` runs plans of about a million layouts with 64 combinations
of job knobs and without, and proposals of searches, in turns, and writes "Plan of jobs".
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
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
from layout_tuner.search_spaces.spaces.search_space import SearchSpace
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
PROMISED_JOBS: Final = 1.5
PROMISED_JOBS_MEMORY: Final = 1.3
"""Most times the seconds and the memory of a plan with 64 combinations of job knobs."""
_LEVERS: Final[Mapping[str, Any]] = {
    "num_nodes": [2, 4, 8, 16],
    "recompute": ["none", "selective", "full", "layernorm"],
    "recompute_layers": ["all", 6, 12, [12, 8, 4, 0], 24, [24, 0]],
}
"""What `auto` makes of the levers of memory in that space (`recompute_layers: auto`), without
`moe_act`, which is no other job for the embedded trainer."""
_LEVERS_SIZE: Final = 12
"""Numbers of micro-batches of the space with levers: about a million legal layouts."""
_OF_MIXTURES: Final = ("mixture", "levers", "jobs")
_MEASURED: Final = (0, 500)
_NUM_TOLD: Final = 100
_NUM_ASKED: Final = 9
_NUM_PAIRS: Final = 5
_ROOT: Final = Path(__file__).resolve().parents[1]
_BLAS: Final = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def main() -> None:
    """Measures each space with and without measurements, and records the table."""
    if sys.argv[1:] == ["knobs"]:
        _over_no_knobs()
        return
    if sys.argv[1:2] == ["over"]:
        _over(Path(sys.argv[2]).resolve())
        return
    if len(sys.argv) > 1:
        what, size, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
        levers = _LEVERS if what == "levers" else {}
        spec = _mixture(size, levers) if what in _OF_MIXTURES else _campaign(size)
        if what in ("jobs", "plan-jobs", "search-jobs"):
            spec = replace(spec, space=_with_knobs(spec.space.to_mapping()))
        searches = what in ("search", "search-jobs")
        print(_searched(spec, count) if searches else _measured(spec, count))
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
        f"`make bench-plan`; {describe_machine('numpy')}. One core; seconds of the processor. The "
        "plan lists 10 layouts of gpt-22b on Frontier, or of qwen3-30b-a3b on H100 (with `ep`), with "
        f"a training job; without measurements / with {_MEASURED[-1]} of other layouts of the space. Asked for 10^6 layouts: "
        f"{PROMISED_S:g} s and {PROMISED_MB:g} MB, with `ep` {PROMISED_MIXTURE_S:g} s and "
        f"{PROMISED_MIXTURE_MB:g} MB. Proposals of `guided` with {_NUM_TOLD} told (median of "
        f"{_NUM_ASKED}): {PROMISED_ASK_S:g} s and {PROMISED_MB:g} MB.\n\n{table(header, rows)}",
    )
    if broken:
        sys.exit(
            f"a promise is broken: {PROMISED_S} s, {PROMISED_ASK_S} s or {PROMISED_MB} MB; with "
            f"experts {PROMISED_MIXTURE_S} s or {PROMISED_MIXTURE_MB} MB"
        )


def _over_no_knobs() -> None:
    """Records what 64 combinations of job knobs add to plans and proposals of a million layouts."""
    rows, broken = [], False
    for without, with_knobs, size, count in (
        ("plan", "plan-jobs", 64, 0),
        ("mixture", "jobs", _MIXTURE_SIZE, 0),
        ("search", "search-jobs", 64, _NUM_TOLD),
    ):
        pairs = [
            [_in_a_process(what, size, count) for what in (without, with_knobs)]
            for _ in range(_NUM_PAIRS)
        ]
        plain, jobs = np.array(pairs).transpose(1, 0, 2)
        times = np.median(jobs[:, 2] / plain[:, 2])
        memory = np.median(jobs[:, 3] / plain[:, 3])
        broken |= times > PROMISED_JOBS or memory > PROMISED_JOBS_MEMORY
        seconds, mb = (
            " / ".join(f"{np.median(each[:, at]):.{digits}f}" for each in (plain, jobs))
            for at, digits in ((2, 2), (3, 0))
        )
        of = f"{without}, {plain[0, 0]:,.0f}"
        rows.append((of, seconds, f"{times:.2f}", mb, f"{memory:.2f}"))
        print(rows[-1], flush=True)
    header = ("what, legal layouts", "s", "ratio", "peak memory, MB", "ratio")
    record(
        "Plan of jobs",
        f"`python -m benchmarks.bench_plan knobs`; {describe_machine('numpy')}. One core; "
        "seconds of the processor. "
        'Plans, and proposals of searches, as in "Plan over before", without job knobs / with six '
        f"switches of 64 combinations; medians of {_NUM_PAIRS} pairs of processes. Asked for: {PROMISED_JOBS:g} times the seconds, "
        f"{PROMISED_JOBS_MEMORY:g} times the memory.\n\n{table(header, rows)}",
    )
    if broken:
        sys.exit(f"a promise is broken: {PROMISED_JOBS} times the time or {PROMISED_JOBS_MEMORY}")


def _with_knobs(space: dict[str, Any]) -> SearchSpace:
    """The space with six switches, on different terms and on memory."""
    effects = (
        *({"touches": [group], "factor": 0.8} for group in ("tp", "dp", "pp", "ep")),
        {"touches": ["compute"], "factor": 0.95, "memory_factor": 0.95, "memory_log_sd": 0.03},
        {"touches": ["optimizer"], "memory_bytes": 1e9, "memory_log_sd": 0.02},
    )
    job = {
        f"knob_{place}": {
            "search": [False, True],
            "kind": "switch",
            "values": [False, True],
            "default": False,
            "when": "pp > 1 or dp > 1",
            "effects": [{"value": True, **effect}],
        }
        for place, effect in enumerate(effects)
    }
    return SearchSpace.from_mapping({**space, "job": job})


def _over(before: Path) -> None:
    """Records the ratios of this tree over another one, with the medians of both."""
    rows = []
    for what, size, count in (
        *(("plan", 64, count) for count in _MEASURED),
        ("mixture", _MIXTURE_SIZE, 0),
        ("levers", _LEVERS_SIZE, 0),
        ("search", 64, _NUM_TOLD),
    ):
        roots, found = [before, _ROOT], dict[Path, list[tuple[float, ...]]]()
        for turn in range(_NUM_PAIRS):
            for root in roots if turn % 2 else reversed(roots):
                is_old = what == "levers" and root == before  # without levers, of as many layouts
                asked = ("mixture", _MIXTURE_SIZE) if is_old else (what, size)
                found.setdefault(root, []).append(_in_a_process(*asked, count, root))
        seconds, peaks = (
            [np.array([each[place] for each in found[root]]) for root in roots] for place in (2, 3)
        )
        cells = [f"{what}, {found[_ROOT][0][0]:,.0f} layouts, {count} measured"]
        for (old, new), shown in ((seconds, ".2f"), (peaks, ".0f")):
            ratio = float(np.median(new / old))
            cells += [f"{np.median(old):{shown}} / {np.median(new):{shown}}", f"{ratio:.2f}"]
        rows.append(tuple(cells))
        print(rows[-1], flush=True)
    commit = subprocess.check_output(["git", "rev-parse", "--short=8", "HEAD"], cwd=before)
    record(
        "Plan over before",
        f"`python -m benchmarks.bench_plan over ROOT`; {describe_machine('numpy')}. One core; "
        f"seconds of the processor. Before: commit {commit.decode().strip()}. Medians of "
        f"{_NUM_PAIRS} pairs, before / now, and of the ratios of pairs. A search's seconds are "
        "those of one proposal.\n\n"
        + table(("what", "s", "ratio", "peak memory, MB", "ratio"), rows),
    )


def _in_a_process(what: str, size: int, count: int, root: Path = _ROOT) -> tuple[float, ...]:
    """The figures of `_measured` or `_searched` of a tree in a new process with one thread."""
    done = subprocess.run(
        [sys.executable, "-P", __file__, what, str(size), str(count)],
        env=os.environ | dict.fromkeys(_BLAS, "1") | {"PYTHONPATH": f"{root / 'src'}:{root}"},
        capture_output=True,
        check=True,
        text=True,
    )
    return tuple(float(figure) for figure in done.stdout.split())


def _measured(spec: CampaignSpec, count: int) -> str:
    """Layouts, seconds of enumeration, seconds of the plan, and the peak of memory in MB."""
    started = time.process_time()
    legal = spec.legal_set()
    enumerated = time.process_time()
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
    begun = time.process_time()
    knowledge = Knowledge(samples=tuple(samples))
    make_plan(spec, legal=legal, knowledge=knowledge, job=TrainingJob(tokens=10**12))
    ended = time.process_time()
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    return f"{len(legal)} {enumerated - started} {ended - begun} {peak_mb}"


def _searched(spec: CampaignSpec, num_told: int) -> str:
    """Layouts, seconds to the first proposal and of a later one, and the peak of memory in MB."""
    from layout_tuner.tuner.strategies.registry import make_strategy
    from layout_tuner.tuner.strategies.search_problem import SearchProblem

    legal = spec.legal_set()
    rng = np.random.default_rng(0)
    started = time.process_time()
    problem = SearchProblem(layouts=spec.jobs(legal), model=spec.model, cluster=spec.cluster)
    search = make_strategy("guided", problem, seed=0)
    for place in rng.choice(len(legal), num_told, replace=False).tolist():
        _tell(search, legal.layout(place), spec, rng)
    asked = search.ask()
    open_s = time.process_time() - started
    taken = []
    for _ in range(_NUM_ASKED):
        assert asked is not None, "the space is not exhausted"
        _tell(search, asked, spec, rng)
        begun = time.process_time()
        asked = search.ask()
        taken.append(time.process_time() - begun)
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


def _mixture(size: int, levers: Mapping[str, Any]) -> CampaignSpec:
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
                **levers,
            },
        }
    )


if __name__ == "__main__":
    main()
