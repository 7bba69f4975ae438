"""The time of a training step in closed form, over one layout or over columns of many."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Final

import numpy as np
from numpy.typing import NDArray

from search_spaces.cluster import Cluster
from search_spaces.columns import LayoutColumns
from search_spaces.estimates.time_factors import FACTOR_PRIORS, TERM_NAMES, terms_of
from search_spaces.estimates.time_terms import StepShape, all_terms
from search_spaces.layout import Layout
from search_spaces.model_shape import ModelShape

Floats = NDArray[np.float64]

PRIOR: Final = np.array([prior.median for prior in FACTOR_PRIORS.values()])
"""Every term's factor as it is believed to be before any measurement."""

_CHUNK: Final = 4096
"""Layouts at once: what a term makes on the way then stays in the processor's cache."""

_DEVICE: Final = terms_of("device")
_HOST: Final = terms_of("host")
_REDUCTION: Final = terms_of("reduction")
_REST: Final = terms_of("rest")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TimeTerms:
    """The step of each layout taken apart: seconds under the cluster's own constants."""

    names: tuple[str, ...]
    """What each term is, as `time_factors` explains."""
    seconds: Floats
    """One row a layout, one column a term."""
    backward_share: Floats
    """Share of the devices' work in a step that the backward pass of the last micro-batch is."""

    def step_time_s(self, factors: Floats = PRIOR) -> Floats:
        """Seconds of a step of each layout, each term times its factor (or its row of factors)."""
        return _Sums.of(self.seconds * factors, self.backward_share).total

    def shares(self, factors: Floats = PRIOR) -> Floats:
        """By how much the step grows with each factor: d log(step) / d log(factor), a row a layout."""
        seconds = self.seconds * factors
        sums = _Sums.of(seconds, self.backward_share)
        weights = np.ones_like(seconds)
        weights[:, _DEVICE] = sums.device_weight[:, None]
        weights[:, _HOST] = sums.host_weight[:, None]
        weights[:, _REDUCTION] = sums.reduction_weight[:, None]
        return np.asarray(weights * seconds / sums.total[:, None], dtype=np.float64)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Sums:
    """The terms summed by kind, and the step that they come to.

    Two things at once take as long as the longer one, a little more where they are about equal: their
    4-norm, 1.19 times either then.
    """

    device: Floats
    host: Floats
    reduction: Floats
    rest: Floats
    backward_share: Floats

    @classmethod
    def of(cls, seconds: Floats, backward_share: Floats) -> _Sums:
        return cls(
            device=seconds[:, _DEVICE].sum(axis=1),
            host=seconds[:, _HOST].sum(axis=1),
            reduction=seconds[:, _REDUCTION].sum(axis=1),
            rest=seconds[:, _REST].sum(axis=1),
            backward_share=backward_share,
        )

    @property
    def busy(self) -> Floats:
        return _longer(self.device, self.host)

    @property
    def window(self) -> Floats:
        """What a reduction can hide behind."""
        return self.backward_share * self.busy

    @property
    def exposed(self) -> Floats:
        """What a reduction takes beyond the pass that it runs beside."""
        return _longer(self.reduction, self.window) - self.window

    @property
    def total(self) -> Floats:
        return self.busy + self.exposed + self.rest

    @property
    def busy_weight(self) -> Floats:
        """Growth of the total with busy: a longer backward pass hides more."""
        gained = (self.window / _longer(self.reduction, self.window)) ** 3 - 1.0
        return 1.0 + self.backward_share * gained

    @property
    def device_weight(self) -> Floats:
        return self.busy_weight * (self.device / self.busy) ** 3

    @property
    def host_weight(self) -> Floats:
        return self.busy_weight * (self.host / self.busy) ** 3

    @property
    def reduction_weight(self) -> Floats:
        return (self.reduction / _longer(self.reduction, self.window)) ** 3


def _longer(first: Floats, second: Floats) -> Floats:
    squares = np.square(np.square(first)) + np.square(np.square(second))
    return np.asarray(np.sqrt(np.sqrt(squares)), dtype=np.float64)


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
    columns = flattened(LayoutColumns.of(layouts))
    seconds = np.empty((len(TERM_NAMES), columns.tp.size))
    backward_share = np.empty(columns.tp.size)
    for rows, step in _steps(columns, model, cluster):
        backward_share[rows] = _backward_share(step)
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
    columns = flattened(LayoutColumns.of(layouts))
    total = np.empty(columns.tp.size)
    for rows, step in _steps(columns, model, cluster):
        sums = {kind: np.zeros(step.tp.shape) for kind in ("device", "host", "reduction", "rest")}
        for factor, (name, term) in zip(factors, _terms(step), strict=True):
            sums[FACTOR_PRIORS[name].kind] += factor * term
        total[rows] = _Sums(**sums, backward_share=_backward_share(step)).total
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
    sums = _Sums.of(seconds[None], terms.backward_share)
    seconds[_HOST] *= (sums.busy - sums.device) / sums.host
    seconds[_REDUCTION] *= sums.exposed / np.maximum(sums.reduction, np.finfo(float).tiny)
    return [
        TimePart(name=name, meaning=FACTOR_PRIORS[name].meaning, seconds=float(part))
        for name, part in zip(TERM_NAMES, seconds, strict=True)
        if part > 0
    ]


def flattened(columns: LayoutColumns) -> LayoutColumns:
    """The same layouts as columns with one axis, of equal length."""
    names = [field.name for field in fields(LayoutColumns)]
    arrays = np.broadcast_arrays(*(np.atleast_1d(getattr(columns, name)) for name in names))
    flat = {name: array.reshape(-1) for name, array in zip(names, arrays, strict=True)}
    return LayoutColumns(**flat)


def _steps(
    columns: LayoutColumns, model: ModelShape, cluster: Cluster
) -> Iterator[tuple[slice, StepShape]]:
    names = [field.name for field in fields(LayoutColumns)]
    for start in range(0, columns.tp.size, _CHUNK):
        rows = slice(start, start + _CHUNK)
        part = LayoutColumns(**{name: getattr(columns, name)[rows] for name in names})
        yield rows, StepShape.of(part, model, cluster)


def _backward_share(step: StepShape) -> Floats:
    passes = 1.0 + step.forward_passes
    return np.asarray(passes / (1.0 + passes) / step.slots, dtype=np.float64)


def _terms(step: StepShape) -> Iterator[tuple[str, Floats]]:
    """Every term; the backward pass that hides a reduction is taken at the matrices' own prior."""
    matrices = FACTOR_PRIORS["matrices"].median
    flops = 2.0 * step.model.layer_forward_flops_per_token * step.tokens / step.tp
    backward_s = matrices * flops * step.model.num_layers / step.pp / step.peak_flops_per_s
    return all_terms(step, backward_s)
