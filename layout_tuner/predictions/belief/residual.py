"""The error of the closed form: a Gaussian process over the knobs, of log(measured / predicted).

Rasmussen and Williams 2006, chapter 2. The prior mean is zero. Amplitude, length and noise are the
most likely ones of a small grid, given the measurements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from layout_tuner.array_types import Floats, Ints
from layout_tuner.search_spaces.layouts.job_settings import JobSettings
from layout_tuner.search_spaces.layouts.knobs import TEXT_BITS
from layout_tuner.search_spaces.layouts.layout import COUNT_KNOBS, KNOBS, LAYOUT_FIELDS
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.layouts.recomputation import RECOMPUTE_CHOICES, modules_of

_CODED: Final = tuple(name for name in LAYOUT_FIELDS if name not in COUNT_KNOBS)
COORDINATE_KNOBS: Final = (*COUNT_KNOBS, *_CODED)
"""Knobs of the layout in the order of their coordinates (`knob_coordinates`)."""

_UNIT: Final = {name: float(1 << TEXT_BITS) for name in _CODED if KNOBS[name].is_text}
"""The code that is one doubling away from the default: two free texts differ by at most another."""

_RECOMPUTED: Final = {"core_attention": 1.0, "mlp": 0.6, "moe_act": 0.3, "layernorm": 0.2}
"""How far the recomputation of a module is from none, where all of a layer is at 2."""
_MODES: Final = np.array(
    [
        {"none": 0.0, "selective": 1.0, "full": 2.0}.get(
            choice, sum(_RECOMPUTED.get(module, 0.25) for module in modules_of(choice))
        )
        for choice in RECOMPUTE_CHOICES
    ]
)

_AMPLITUDES: Final = (0.05, 0.1, 0.2, 0.4)
_LENGTHS: Final = (2.0, 4.0)
_NOISES: Final = (0.02, 0.06)
SETTING_DISTANCE: Final = 0.1
"""Distance of two jobs that differ in whether they have a value of a job knob, in doublings of a
knob of the layout. The residuals of two such jobs of a layout then differ by 1 %, one standard
deviation: what a value does is learnt as factors (`job_knobs.knob_step_time`). At a distance of
0.5, 4 %, a search tried one setting after the other of the best layout that it had."""
_LIKELY_AMPLITUDE: Final = 0.2
"""Closed forms are off by 15 to 19 % on the mean of 109 published multi-node runs (Calculon,
vTrain, llm-analysis)."""
_AMPLITUDE_LOG_SD: Final = 0.7


def knob_coordinates(columns: LayoutColumns, jobs: Sequence[JobSettings] = ()) -> Floats:
    """Layouts as points, one row each: log2 of numeric knobs, and the codes of the other knobs.

    Each value of a job knob that is not the default has a coordinate of its own: those that occur
    in `jobs`, or in the columns where `jobs` is empty.
    """
    doubling = [
        np.log2(np.asarray(getattr(columns, name), dtype=np.float64)) for name in COUNT_KNOBS
    ]
    coded = [_coded(name, getattr(columns, name)) for name in _CODED]
    every = [*doubling, *coded, *_setting_coordinates(columns, jobs or columns.jobs)]
    return np.stack(np.broadcast_arrays(*every), axis=-1)


def _coded(name: str, codes: Ints) -> Floats:
    """The coordinate of each code of a knob that is no count."""
    if name == "recompute":
        return np.asarray(_MODES[codes], dtype=np.float64)
    return np.asarray(codes, dtype=np.float64) / _UNIT.get(name, 1.0)


def _setting_coordinates(columns: LayoutColumns, jobs: Sequence[JobSettings]) -> Iterator[Floats]:
    """A coordinate for each value of a job knob that occurs in `jobs`."""
    values = {(name, type(value), value) for settings in jobs for name, value in settings.items()}
    for name, kind, value in sorted(values, key=repr):
        has = [type(of := each.get(name)) is kind and of == value for each in columns.jobs]
        yield np.where(np.array(has)[columns.job], SETTING_DISTANCE, 0.0)


class KnobPoints:
    """The points of many layouts in the knobs in which they differ, in a few bytes a layout.

    An index returns the exact coordinates of those rows, as `knob_coordinates` does.
    """

    def __init__(self, columns: LayoutColumns) -> None:
        self._num_layouts = columns.tp.size
        self._knobs: list[tuple[Floats, NDArray[np.unsignedinteger[Any]]]] = []
        """The coordinate of each value of a knob, and the place of each layout's value."""
        for name in (*COUNT_KNOBS, *_CODED):
            values, places = np.unique(getattr(columns, name), return_inverse=True)
            if len(values) > 1:
                coordinates = np.log2(values) if name in COUNT_KNOBS else _coded(name, values)
                self._knobs.append((coordinates, places.astype(np.min_scalar_type(len(values)))))
        for coordinate in _setting_coordinates(columns, columns.jobs):
            values, places = np.unique(coordinate, return_inverse=True)
            self._knobs.append((values, places.astype(np.uint8)))

    def __len__(self) -> int:
        return self._num_layouts

    def __getitem__(self, rows: Ints | list[int]) -> Floats:
        points = np.empty((len(rows), len(self._knobs)))
        for knob, (coordinates, places) in enumerate(self._knobs):
            points[:, knob] = coordinates[places[rows]]
        return points


def relative_coordinates(columns: LayoutColumns, jobs: Sequence[JobSettings] = ()) -> Floats:
    """The same, of layouts of jobs of different size: alike are those that divide a job alike.

    dp counts as a share of the devices, and the micro-batches count relative to the sequences of a
    device; nodes do not count.
    """
    points = knob_coordinates(columns, jobs)
    devices, batch = (np.log2(n) for n in (columns.num_devices, columns.global_batch_size))
    points[:, COUNT_KNOBS.index("num_nodes")] = 0.0
    points[:, COUNT_KNOBS.index("dp")] -= devices
    points[:, COUNT_KNOBS.index("num_microbatches")] -= batch - devices
    return points


@dataclass(frozen=True, kw_only=True, slots=True)
class ResidualKernel:
    """Covariance of the residuals of two layouts: Matern 5/2 of their distance, plus noise."""

    amplitude: float = _LIKELY_AMPLITUDE
    """Standard deviation of the residual, in logarithms of the step time."""
    length: float = 3.0
    """Distance, in doublings of one knob, over which the residual changes."""
    noise: float = 0.02
    """Standard deviation of a measurement: the steps of one probe agree within 1 to 3 %."""

    def between(self, points: Floats, others: Floats) -> Floats:
        """Covariance of the residuals of points (rows) and of others (columns), without noise."""
        return self.amplitude**2 * similarity(points, others, self.length)

    def of_measured(self, points: Floats, weights: Floats) -> Floats:
        """Covariance of measurements of the points, noise included.

        A layout that ran twice has two points; `weights` says how much each measurement counts
        (`predictions.belief.slow_runs`).
        """
        return self.between(points, points) + np.diag(self.noise**2 / weights)

    @property
    def log_prior(self) -> float:
        """Log prior of the amplitude, up to a constant."""
        off = np.log(self.amplitude / _LIKELY_AMPLITUDE) / _AMPLITUDE_LOG_SD
        return float(-0.5 * off**2)


def similarity(points: Floats, others: Floats, length: float) -> Floats:
    """Matern 5/2 of the distances: 1 at distance 0, towards 0 beyond a few lengths."""
    squares = (points**2).sum(axis=1)[:, None] + (others**2).sum(axis=1)[None, :]
    distance = np.sqrt(np.maximum(squares - 2.0 * points @ others.T, 0.0))
    scaled = np.sqrt(5.0) / length * distance
    return np.asarray((1.0 + scaled + scaled**2 / 3.0) * np.exp(-scaled))


def candidate_kernels() -> Iterator[ResidualKernel]:
    """The kernels among which the likelihood chooses."""
    for amplitude, length, noise in product(_AMPLITUDES, _LENGTHS, _NOISES):
        yield ResidualKernel(amplitude=amplitude, length=length, noise=noise)


def log_likelihood(covariance: Floats, residuals: Floats) -> float:
    """Log density of residuals under a normal distribution of mean 0, up to a constant."""
    factor = np.linalg.cholesky(covariance)
    white = np.linalg.solve(factor, residuals)
    return float(-0.5 * white @ white - np.log(np.diagonal(factor)).sum())
