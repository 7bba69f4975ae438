"""The best jobs of a campaign: layouts with the settings of their knobs.

Settings are chosen for the best layouts only. First all layouts are ranked without settings. Then
the jobs of some thousand layouts are ranked: of those that are the best without settings, and of
those that some settings are expected to lift among them. What settings lift is computed for the
best layout of each group of layouts that divide the work alike, and is taken for all of its group.
"""

# ruff: noqa: N806 (shapes in names: N layouts, S settings, J jobs)

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from layout_tuner.array_types import Floats, Ints
from layout_tuner.predictions.belief.factor_regression import drawn_log_step_s
from layout_tuner.predictions.belief.layout_predictions import (
    LEAST_FIT,
    LayoutPredictions,
    RankedLayouts,
)
from layout_tuner.predictions.estimates.step_time import time_terms
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.objectives import objective_factors
from layout_tuner.search_spaces.spaces.job_set import JobSet

MAX_JOBS: Final = 50_000
"""Jobs that are ranked. Where a campaign has no more, all are."""
_EXACT: Final = 1000
"""Of the best jobs, how many have settings that widen the spread of their peaks in P(fits) too."""
_LOOKED_AT: Final = 100_000
"""Layouts, the best without settings, among which settings may lift one to the best."""
_GROUPED_BY: Final = (
    *("num_nodes", "tp", "tp_columns", "cp", "pp", "dp", "ep", "etp", "vpp"),
    *("micro_batch_size", "zero_stage", "recompute", "sequence_parallel", "precision"),
)
"""The fields in which layouts of a group are alike: the shares of the terms in their steps hardly
depend on the others."""
_MOST_CODES: Final = 1 << 60
"""Codes of groups that fit into a number."""
_SHARE_FOR_GROUPS: Final = 0.25
"""Share of the ranked jobs that are those of the best layouts of groups."""


def rank_jobs(
    predictions: LayoutPredictions, jobs: JobSet, ranked: RankedLayouts, most: int = MAX_JOBS
) -> RankedLayouts:
    """The best jobs, by their positions in `jobs`; `ranked` are all layouts without settings."""
    count = max(most // len(jobs.settings), 1)
    rows = ranked.order[:count]
    if len(ranked.order) > count:
        rows = _likely_layouts(predictions, jobs, ranked, count)
    positions, log_s, fits, score = _scored(predictions, jobs, np.sort(rows))
    best = np.argsort(-score, kind="stable")[:_EXACT]
    exact = predictions.fits(jobs.columns(positions[best]))
    score[best] += np.log(np.maximum(exact, LEAST_FIT) / np.maximum(fits[best], LEAST_FIT))
    fits[best] = exact
    order = np.argsort(-score, kind="stable")
    return RankedLayouts(
        order=positions[order],
        step_time_s=np.exp(log_s[order]),
        fits=fits[order],
        score=score[order],
    )


def _likely_layouts(
    predictions: LayoutPredictions, jobs: JobSet, ranked: RankedLayouts, count: int
) -> Ints:
    """So many layouts, by their score without settings and what settings lift of their group."""
    looked_at = ranked.order[:_LOOKED_AT]
    score = ranked.score[:_LOOKED_AT]
    group_of, firsts = _groups(predictions, jobs, looked_at)
    firsts = firsts[: max(int(_SHARE_FOR_GROUPS * count), 1)]
    lift = np.zeros(int(group_of.max()) + 1)
    rows = np.sort(looked_at[firsts])
    positions, _, _, of_jobs = _scored(predictions, jobs, rows)
    best = np.full(len(rows), -np.inf)
    np.maximum.at(best, np.searchsorted(rows, jobs.layout_rows(positions)), of_jobs)
    lift[group_of[firsts]] = best[np.searchsorted(rows, looked_at[firsts])] - score[firsts]
    likely = np.argsort(-(score + lift[group_of]), kind="stable")[: max(count - len(firsts), 1)]
    return np.union1d(looked_at[firsts], looked_at[likely])


def _groups(predictions: LayoutPredictions, jobs: JobSet, rows: Ints) -> tuple[Ints, Ints]:
    """The group of each layout, and the first layout of each group, in the order of `rows`."""
    codes, most = np.zeros(len(rows), dtype=np.int64), 1
    for name in _GROUPED_BY:
        if len(predictions.spec.space.values(name)) != 1:
            values = jobs.legal.column(name, rows)
            count = int(values.max()) + 1
            if most * count > _MOST_CODES:
                found, codes = np.unique(codes, return_inverse=True)
                most = len(found)
            codes, most = codes * count + values, most * count
    _, firsts, group_of = np.unique(codes, return_index=True, return_inverse=True)
    return group_of.reshape(-1), np.sort(firsts)


def _scored(
    predictions: LayoutPredictions, jobs: JobSet, rows: Ints
) -> tuple[Ints, Floats, Floats, Floats]:
    """All jobs of some layouts: positions, logarithms of seconds, P(fits), and what ranks."""
    spec, positions = predictions.spec, jobs.jobs_of(rows)
    layouts = jobs.legal.columns(rows)
    of_row = np.searchsorted(rows, jobs.layout_rows(positions))
    places = jobs.setting_places(positions)
    log_s = _log_step_s(predictions, jobs, layouts)[places, of_row]
    fits = _fits(predictions, jobs, layouts)[places, of_row]
    factors = objective_factors(spec.objective, layouts, spec.model)
    score = np.log(factors)[of_row] - log_s + np.log(np.maximum(fits, LEAST_FIT))
    return positions, log_s, fits, score


def _fits(predictions: LayoutPredictions, jobs: JobSet, layouts: LayoutColumns) -> Floats:
    """Probabilities that layouts fit with all settings; shape [settings, layouts].

    Settings that are not expected to change a peak are left out: they widen its spread alone.
    """
    distinct, place_of = predictions.knob_memory.expected(predictions.software, jobs.settings)
    fits_SN = np.empty((len(distinct), layouts.tp.size))
    for place in range(len(distinct)):
        job = np.full(layouts.tp.shape, place)
        fits_SN[place] = predictions.fits(replace(layouts, job=job, jobs=distinct))
    return np.asarray(fits_SN[place_of])


def _log_step_s(predictions: LayoutPredictions, jobs: JobSet, layouts: LayoutColumns) -> Floats:
    """Logarithms of the steps of layouts with all settings; shape [settings, layouts]."""
    spec = predictions.spec
    log_s_SN = np.empty((len(jobs.settings), layouts.tp.size))
    every = np.arange(len(jobs.settings))
    settings = predictions.time.knobs.settings(predictions.software, jobs.settings, every)
    devices = np.asarray(layouts.num_devices)
    for count in np.unique(devices):
        rows = np.flatnonzero(devices == count)
        terms = time_terms(
            layouts.rows(rows), spec.model, spec.cluster, kernels=predictions.kernels
        )
        deviations = settings.deviations(predictions.deviations(int(count)))
        log_s_SN[:, rows] = drawn_log_step_s(terms, deviations)
    return log_s_SN
