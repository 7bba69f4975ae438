"""The time of a training step in closed form, over one layout or over columns of many."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, get_args

import numpy as np
from numpy.typing import NDArray

from search_spaces.cluster import Cluster
from search_spaces.columns import LayoutColumns
from search_spaces.estimates.time_factors import FACTOR_PRIORS, TERM_NAMES, Kind, terms_of
from search_spaces.estimates.time_sums import StepSums
from search_spaces.estimates.time_terms import StepShape, all_terms
from search_spaces.layout import Layout
from search_spaces.model_shape import ModelShape

Floats = NDArray[np.float64]

PRIOR: Final = np.array([prior.median for prior in FACTOR_PRIORS.values()])
"""Every term's factor as it is believed to be before any measurement."""

_EXPECTED: Final = {prior.name: prior.median for prior in FACTOR_PRIORS.values()}

_CHUNK: Final = 4096
"""Layouts at once: what a term makes on the way then stays in the processor's cache."""

_DEVICE: Final = terms_of("device")
_HOST: Final = terms_of("host")
_REDUCTION: Final = terms_of("reduction")
_ODDS: Final = terms_of("odds")
_REST: Final = terms_of("rest")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TimeTerms:
    """The step of each layout taken apart: seconds under the cluster's own constants."""

    names: tuple[str, ...]
    """What each term is, as `time_factors` explains."""
    seconds: Floats
    """One row a layout, one column a term; of the odds, the seconds that they are about."""
    backward_share: Floats
    """Share of the blocks' work in a step that the backward pass of the last micro-batch is."""

    def step_time_s(self, factors: Floats = PRIOR) -> Floats:
        """Seconds of a step of each layout, each term times its factor (or its row of factors)."""
        return self._sums(factors).total

    def shares(self, factors: Floats = PRIOR) -> Floats:
        """By how much the step grows with each factor: d log(step) / d log(factor), a row a layout."""
        sums = self._sums(factors)
        grown = self.seconds * factors
        grown[:, _DEVICE] *= sums.device_weight[:, None]
        grown[:, _HOST] *= sums.host_weight[:, None]
        grown[:, _REDUCTION] *= sums.reduction_weight[:, None]
        grown[:, _ODDS] = np.where(self.seconds[:, _ODDS] > 0, sums.odds_weight[:, None], 0.0)
        return np.asarray(grown / sums.total[:, None], dtype=np.float64)

    def _sums(self, factors: Floats) -> StepSums:
        seconds = self.seconds * factors
        sums = {
            kind: seconds[:, places].sum(axis=1)
            for kind, places in (("device", _DEVICE), ("host", _HOST), ("reduction", _REDUCTION))
        }
        odds = np.where(self.seconds[:, _ODDS] > 0, np.atleast_2d(factors)[:, _ODDS], 0.0)
        return StepSums(
            **sums,
            rest=seconds[:, _REST].sum(axis=1),
            odds=odds.sum(axis=1),
            backward_share=self.backward_share,
        )


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
    """Every term of every layout's step.

    Columns are taken as broadcast against each other, and flattened.
    """
    columns = LayoutColumns.of(layouts).flattened()
    seconds = np.empty((len(TERM_NAMES), columns.tp.size))
    backward_share = np.empty(columns.tp.size)
    for rows, step in _steps(columns, model, cluster):
        backward_share[rows] = step.backward_share
        for place, (_, term) in enumerate(_terms(step)):
            seconds[place, rows] = term
    return TimeTerms(names=TERM_NAMES, seconds=seconds.T, backward_share=backward_share)


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
    columns = LayoutColumns.of(layouts).flattened()
    total = np.empty(columns.tp.size)
    for rows, step in _steps(columns, model, cluster):
        sums = {kind: np.zeros(step.tp.shape) for kind in get_args(Kind)}
        for factor, (name, term) in zip(factors, _terms(step), strict=True):
            kind = FACTOR_PRIORS[name].kind
            sums[kind] += factor * (term > 0 if kind == "odds" else term)
        total[rows] = StepSums(**sums, backward_share=step.backward_share).total
    return total


def step_time_parts(
    layout: Layout, model: ModelShape, cluster: Cluster, factors: Floats = PRIOR
) -> list[TimePart]:
    """What one layout's step is expected to be made of, for people; the parts add up to it.

    The host's work counts as far as the devices wait for it, and a reduction as far as no backward
    pass hides it.
    """
    terms = time_terms(layout, model, cluster)
    seconds = (terms.seconds * factors)[0]
    sums = terms._sums(factors)
    seconds[_HOST] *= (sums.busy - sums.device) / sums.host
    seconds[_REDUCTION] *= sums.waited / np.maximum(sums.reduction, np.finfo(float).tiny)
    seconds[_ODDS] = 0.0
    return [
        TimePart(name=name, meaning=FACTOR_PRIORS[name].meaning, seconds=float(part))
        for name, part in zip(TERM_NAMES, seconds, strict=True)
        if part > 0
    ]


def _steps(
    columns: LayoutColumns, model: ModelShape, cluster: Cluster
) -> Iterator[tuple[slice, StepShape]]:
    for start in range(0, columns.tp.size, _CHUNK):
        rows = slice(start, start + _CHUNK)
        yield rows, StepShape.of(columns.rows(rows), model, cluster)


def _terms(step: StepShape) -> Iterator[tuple[str, Floats]]:
    return all_terms(step, _EXPECTED)
