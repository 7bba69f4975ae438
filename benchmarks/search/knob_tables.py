"""Judges what is believed of job knobs before any measurement, by tables with columns of knobs.

Run as `python -m benchmarks.search.knob_tables DIR`; it writes the section "Job knobs in tables" of
`benchmarks/RESULTS.md`. The declarations are those of the trainers' catalogues. Judged are the
order of the jobs of one batch, and the sign of the difference of two rows that differ in knobs.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Final

import numpy as np
from scipy.stats import kendalltau

from benchmarks.results_file import describe_machine, record, table
from benchmarks.tables.described_rows import SAID_NOW
from benchmarks.tables.judged_tables import LACKS, table_cells
from layout_tuner.predictions.belief.corrected_step_time import TimeCalibration
from layout_tuner.predictions.belief.job_knobs.knob_step_time import KnownKnobs
from layout_tuner.search_spaces.layouts.job_settings import NO_SETTINGS, JobSettings, JobValue
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.trainers.registry import ADAPTERS

JOBS: Final = "qwen3_235b_jobs.csv"
RECIPES: Final = "bridge_recipes_2026.csv"
_MODELS: Final = ("DeepSeekV3", "Nemotron_3_Nano")
_BATCH: Final = "2048"
_KNOB_COLUMNS: Final = (
    *("cuda_graph", "dispatcher", "tp_overlap", "ep_overlap", "recompute_modules", "offload"),
    *("recompute_layers", "pipeline_layout", "paged_stash", "rank_capacity_factor", "recompute"),
)
_OF_THE_RUN: Final = (
    *("source", "release", "tokens_per_s", "step_time_s", "tflops_per_device", "recipe"),
    *("recipe_differs", "states", LACKS, "in_moe_recipes", "peak_memory_bytes", "status", SAID_NOW),
)
"""Columns in which a pair may differ: the results, and the release of the trainer."""
_GRAPHS: Final[Mapping[str, str]] = {
    "full_iteration": "full_iteration",
    "transformer_engine: attn moe_router moe_preprocess": "attn_moe_router",
    "transformer_engine: moe_router moe_preprocess": "moe_router",
}
_EVEN: Final = 1e-6
"""Change of a logarithm below which two rows are predicted to be alike."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgedRun:
    """A row of a table with the settings of its knobs."""

    columns: Mapping[str, str]
    step_s: float
    predicted_s: float
    plain_s: float
    """Predicted without the settings."""


def runs(path: Path, trainer: str) -> Iterator[JudgedRun]:
    """The completed rows of a table, by the catalogue of a trainer."""
    knobs = ADAPTERS[trainer].job_knobs
    for cell, texts in table_cells(path.read_text()):
        software = cell.key.software
        known = TimeCalibration.fit(known=KnownKnobs(software=software, knobs=knobs))
        for row in cell.rows:
            if row.step_time_s is None:
                continue
            columns = texts[row.number - 1]
            jobs = (NO_SETTINGS, settings_of(columns))
            both = LayoutColumns.of_each(replace(row.layout, job=job) for job in jobs)
            log_s, _ = known.predict(both, cell.model, cell.cluster, software=software)
            plain_s, predicted_s = np.exp(log_s).tolist()
            yield JudgedRun(
                columns=columns,
                step_s=row.step_time_s,
                predicted_s=predicted_s,
                plain_s=plain_s,
            )


def settings_of(columns: Mapping[str, str]) -> JobSettings:
    """The settings that columns of the two tables state, in the words of the catalogue."""
    settings: dict[str, JobValue] = {}
    if columns.get("dispatcher") not in (None, "", "alltoall"):
        settings["moe_dispatcher"] = columns["dispatcher"]
    if columns.get("ep_overlap") == "1" or "ep" in columns.get("overlap", ""):
        settings["ep_overlap"] = True
    if columns.get("tp_overlap") == "1" or "tp" in columns.get("overlap", ""):
        settings["tp_overlap"] = True
    if "zero" in columns.get("overlap", ""):
        settings |= {"grad_overlap": True, "param_gather_overlap": True}
    if columns.get("cuda_graph") in _GRAPHS:
        settings["cuda_graphs"] = _GRAPHS[columns["cuda_graph"]]
    return JobSettings(settings)


def pairs(rows: list[JudgedRun]) -> Iterator[tuple[JudgedRun, JudgedRun]]:
    """Rows that differ in knobs and in the release alone, of which something else is predicted."""
    alike: dict[tuple[tuple[str, str], ...], list[JudgedRun]] = defaultdict(list)
    apart = {*_KNOB_COLUMNS, *_OF_THE_RUN}
    for row in rows:
        alike[tuple(each for each in row.columns.items() if each[0] not in apart)].append(row)
    for group in alike.values():
        for one, other in combinations(group, 2):
            if abs(np.log(one.predicted_s / other.predicted_s)) > _EVEN:
                yield one, other


def _errors(model: str, judged: Sequence[JudgedRun]) -> tuple[str, str, str]:
    """Mean errors of a model's recipes, and the order of their seconds a token."""
    own = [each for each in judged if each.columns["model"] == model and not each.columns[LACKS]]
    batch = np.array([float(each.columns["global_batch_size"]) for each in own])
    measured = np.array([each.step_s for each in own])
    figures = []
    for name in ("plain_s", "predicted_s"):
        predicted = np.array([getattr(each, name) for each in own])
        tau = kendalltau(predicted / batch, measured / batch).statistic
        figures.append(f"{np.abs(predicted / measured - 1.0).mean():.1%}, tau {tau:.2f}")
    title = f"{RECIPES}: {model}, mean error of {len(own)} recipes, and their order"
    return title, figures[0], figures[1]


def main() -> None:
    folder = Path(sys.argv[1])
    jobs = [
        each
        for each in runs(folder / JOBS, "megatron-lm")
        if each.columns["global_batch_size"] == _BATCH and not each.columns[LACKS]
    ]
    measured_s = np.array([each.step_s for each in jobs])
    figures = []
    for name in ("plain_s", "predicted_s"):
        predicted_s = np.array([getattr(each, name) for each in jobs])
        regret = measured_s[predicted_s.argmin()] / measured_s.min() - 1.0
        figures.append((f"{kendalltau(measured_s, predicted_s)[0]:.2f}", f"{regret:.1%}"))
    judged = list(runs(folder / RECIPES, "megatron-bridge"))
    recipes = list(pairs(judged))
    right = [
        np.sign(np.log(one.predicted_s / other.predicted_s))
        == np.sign(np.log(one.step_s / other.step_s))
        for one, other in recipes
    ]
    same = sum(one.columns["release"] == other.columns["release"] for one, other in recipes)
    rows = [
        (f"{JOBS}: tau of {len(jobs)} jobs of one batch", *(tau for tau, _ in figures)),
        (f"{JOBS}: regret of the first", *(regret for _, regret in figures)),
        (f"{RECIPES}: sign right, {len(right)} pairs", "-", f"{np.mean(right):.0%}"),
    ]
    rows += [_errors(model, judged) for model in _MODELS]
    for row in rows:
        print(row)
    record(
        "Job knobs in tables",
        f"`python -m benchmarks.search.knob_tables DIR`; {describe_machine('numpy')}. Cold, with the "
        f"priors of the catalogues. Of the pairs of recipes, {same} are of one release: the others "
        "also differ in the release of the trainer.\n\n"
        f"{table(('table', 'without knobs', 'with knobs'), rows)}",
    )


if __name__ == "__main__":
    main()
