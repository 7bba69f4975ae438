"""How much of a campaign's variance each knob explains: fANOVA, from Optuna.

Functional ANOVA decomposes the variance of a random forest's predictions over the whole space
(Hutter, Hoos and Leyton-Brown, ICML 2014). Optuna's version is pure Python on scikit-learn. The
fanova package needs a compiled forest that is no longer maintained; shap explains single
predictions and needs numba.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Final

import numpy as np
from numpy.typing import NDArray

from layout_tuner.search_spaces.layouts.job_settings import JobValue
from layout_tuner.search_spaces.layouts.layout import LAYOUT_FIELDS, Layout
from layout_tuner.search_spaces.spaces.job_set import JobSet
from layout_tuner.timing_mark import wait_while_timing
from layout_tuner.tuner.strategies.ask_and_tell import LayoutSet

METHOD: Final = "fANOVA (Optuna), of the logarithm of the objective"
LEAST_LAYOUTS: Final = 8
"""Layouts that must have completed: with fewer, the forest depends on its seed."""
MOST_LAYOUTS: Final = 1000
"""Most layouts that are used, the best ones: a forest over more takes seconds."""
LONGEST_PAUSE_S: Final = 60.0
"""Most seconds for which the import of a package waits for ranks that time iterations."""
_PACKAGES: Final = ("pandas", "scipy.stats", "sklearn.ensemble", "optuna.importance")
_MOST_KEYS: Final = 1 << 62
"""Keys of rows that a 64-bit integer tells apart."""
FOLLOWERS: Final = ("num_microbatches", "dp", "num_nodes")
"""Knobs that mostly follow from others: each is left out where the other knobs identify the
layout."""


def load() -> None:
    """Imports what `importances` needs, 140 MiB in 4 s: a package at a time, while none is timed.

    It runs on a thread of its own, long before the first analysis.
    """

    def pause(pause_s: float) -> bool:
        time.sleep(pause_s)
        return False

    for name in _PACKAGES:
        wait_while_timing(pause, longest_s=LONGEST_PAUSE_S)
        import_module(name)


def knobs_of(layouts: LayoutSet) -> dict[str, NDArray[np.int32]]:
    """The independent knobs that vary: each layout's rank among the values of the knob.

    Of jobs they are those of their layouts; `job_values` has the jobs' own.
    """
    layouts = layouts.legal if isinstance(layouts, JobSet) else layouts
    columns = {name: layouts.column(name) for name in LAYOUT_FIELDS}
    # Sorting takes time with millions of layouts, and most columns have one value.
    varying = {name: column for name, column in columns.items() if (column != column[0]).any()}
    knobs = {
        name: np.unique(column, return_inverse=True)[1].astype(np.int32)
        for name, column in varying.items()
    }
    for name in FOLLOWERS:
        others = [rank for other, rank in knobs.items() if other != name]
        if name in knobs and _num_distinct(others) == len(layouts):
            del knobs[name]
    return knobs


def job_values(layouts: LayoutSet) -> dict[str, tuple[JobValue, ...]]:
    """The values of the job knobs that vary: counts ascending, others as they are searched."""
    if not isinstance(layouts, JobSet):
        return {}
    values = {}
    for name, knob in layouts.choices.knobs.items():
        occur = set(map(knob.value_of, layouts.settings))
        stated = dict.fromkeys((*layouts.choices.values(name), knob.default))
        found = [value for value in stated if value is not None and value in occur]
        values[name] = tuple(sorted(found) if knob.kind == "count" else found)
    return {name: each for name, each in values.items() if len(each) > 1}


def _num_distinct(columns: Sequence[NDArray[np.int32]]) -> int:
    """Number of different rows of some columns."""
    if not columns:
        return 1
    key, num_keys = np.zeros(len(columns[0]), dtype=np.int64), 1
    for ranks in columns:
        num_ranks = int(ranks.max()) + 1
        if num_keys * num_ranks > _MOST_KEYS:
            found, key = np.unique(key, return_inverse=True)
            num_keys = len(found)
        key, num_keys = key * num_ranks + ranks, num_keys * num_ranks
    return len(np.unique(key))


def importances(
    layouts: LayoutSet,
    knobs: Mapping[str, NDArray[np.int32]],
    measured: Mapping[Layout, float],
    *,
    seed: int,
) -> dict[str, float]:
    """The share of the objective's variance that each knob explains by itself; the shares sum to 1.

    `knobs` are those of the layouts (`knobs_of`).

    Returns:
        Nothing where fewer than `LEAST_LAYOUTS` completed, or all objectives are equal.
    """
    # Imported here: the driver starts faster without it, and most rounds do not need it.
    import optuna

    best = sorted(measured.items(), key=lambda item: -item[1])[:MOST_LAYOUTS]
    known = [(layout, value) for layout, value in best if layouts.index_of(layout) is not None]
    ranks = _ranks_of(layouts, knobs, [layout for layout, _ in known])
    varying = {name: of for name, (of, _) in ranks.items() if len(set(of)) > 1}
    values = [math.log(value) for _, value in known]
    if len(known) < LEAST_LAYOUTS or not varying or max(values) == min(values):
        return {}
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize")
    distributions: dict[str, optuna.distributions.BaseDistribution] = {
        name: optuna.distributions.IntDistribution(0, ranks[name][1]) for name in varying
    }
    for row, value in enumerate(values):
        params = {name: of[row] for name, of in varying.items()}
        study.add_trial(
            optuna.trial.create_trial(params=params, distributions=distributions, value=value)
        )
    evaluator = optuna.importance.FanovaImportanceEvaluator(seed=seed)
    found = optuna.importance.get_param_importances(study, evaluator=evaluator)
    return {name: min(max(float(share), 0.0), 1.0) for name, share in found.items()}


def _ranks_of(
    layouts: LayoutSet, knobs: Mapping[str, NDArray[np.int32]], measured: Sequence[Layout]
) -> dict[str, tuple[list[int], int]]:
    """By knob, the ranks of some layouts' values, and the largest rank."""
    legal = layouts.legal if isinstance(layouts, JobSet) else layouts
    rows = [
        legal.index_of(layout.without_job if legal is not layouts else layout)
        for layout in measured
    ]
    found = {
        name: ([int(ranks[row]) for row in rows if row is not None], int(ranks.max()))
        for name, ranks in knobs.items()
    }
    for name, values in job_values(layouts).items():
        assert isinstance(layouts, JobSet), "job knobs vary"
        jobs = layouts
        of_jobs = [jobs.choices.knobs[name].value_of(layout.job) for layout in measured]
        found[name] = (
            [values.index(each) for each in of_jobs if each is not None],
            len(values) - 1,
        )
    return found
