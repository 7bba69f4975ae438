"""The time of a training step in closed form, over one layout or over columns of many."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Final

import numpy as np
from numpy.typing import NDArray

from search_spaces.cluster import Cluster
from search_spaces.columns import LayoutColumns
from search_spaces.estimates.time_factors import FACTOR_PRIORS, TERM_NAMES
from search_spaces.estimates.time_terms import StepShape, all_terms
from search_spaces.layout import Layout
from search_spaces.model_shape import ModelShape

Floats = NDArray[np.float64]

PRIOR: Final = np.array([prior.median for prior in FACTOR_PRIORS.values()])
"""Every term's factor as it is believed to be before any measurement."""

_CHUNK: Final = 8192
"""Layouts at once: what a term makes on the way then stays in the processor's cache."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TimeTerms:
    """The step of each layout taken apart: seconds under the cluster's own constants."""

    names: tuple[str, ...]
    """What each term is, as `time_factors` explains."""
    seconds: Floats
    """One row a layout, one column a term."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimePart:
    """One part of a layout's step."""

    name: str
    """The term."""
    meaning: str
    """The term, for people."""
    seconds: float
    """What it is expected to take."""


def time_terms(layouts: Layout | LayoutColumns, model: ModelShape, cluster: Cluster) -> TimeTerms:
    """Every term of every layout's step; the step is the sum of terms times factors.

    Columns are taken as broadcast against each other, and flattened.
    """
    columns = flattened(LayoutColumns.of(layouts))
    seconds = np.empty((len(TERM_NAMES), columns.tp.size))
    for rows, step in _steps(columns, model, cluster):
        for place, (_, term) in enumerate(_terms(step)):
            seconds[place, rows] = term
    return TimeTerms(names=TERM_NAMES, seconds=seconds.T)


def step_time_s(
    layouts: Layout | LayoutColumns,
    model: ModelShape,
    cluster: Cluster,
    factors: Floats = PRIOR,
) -> Floats:
    """Expected seconds of a step of each layout.

    Args:
        layouts: the layouts; columns are taken as broadcast against each other, and flattened.
        model: what they would train.
        cluster: where they would run.
        factors: each term's factor, in the order of `TERM_NAMES`.
    """
    columns = flattened(LayoutColumns.of(layouts))
    total = np.zeros(columns.tp.size)
    for rows, step in _steps(columns, model, cluster):
        for factor, (_, term) in zip(factors, _terms(step), strict=True):
            total[rows] += factor * term
    return total


def step_time_parts(
    layout: Layout, model: ModelShape, cluster: Cluster, factors: Floats = PRIOR
) -> list[TimePart]:
    """What one layout's step is expected to be made of, for people: every part that takes time."""
    seconds = time_terms(layout, model, cluster).seconds[0] * factors
    return [
        TimePart(name=name, meaning=FACTOR_PRIORS[name].meaning, seconds=float(part))
        for name, part in zip(TERM_NAMES, seconds, strict=True)
        if part > 0
    ]


def flattened(columns: LayoutColumns) -> LayoutColumns:
    """The same layouts as columns with one axis, of equal length."""
    names = [field.name for field in fields(LayoutColumns)]
    arrays = np.broadcast_arrays(*(np.atleast_1d(getattr(columns, name)) for name in names))
    return LayoutColumns(
        **{name: array.reshape(-1) for name, array in zip(names, arrays, strict=True)}
    )


def _steps(
    columns: LayoutColumns, model: ModelShape, cluster: Cluster
) -> Iterator[tuple[slice, StepShape]]:
    names = [field.name for field in fields(LayoutColumns)]
    for start in range(0, columns.tp.size, _CHUNK):
        rows = slice(start, start + _CHUNK)
        part = LayoutColumns(**{name: getattr(columns, name)[rows] for name in names})
        yield rows, StepShape.of(part, model, cluster)


def _terms(step: StepShape) -> Iterator[tuple[str, Floats]]:
    """Every term; the backward pass that hides a reduction is taken at the matrices' own prior."""
    matrices = FACTOR_PRIORS["matrices"].median
    flops = 2.0 * step.model.layer_forward_flops_per_token * step.tokens / step.tp
    backward_s = matrices * flops * step.model.num_layers / step.pp / step.peak_flops_per_s
    return all_terms(step, backward_s)
