"""How likely each layout is the best of a plan, and how many of them to probe.

Step times, fitting and stalls of all layouts are drawn together: layouts are alike as far as they
spend their time on the same terms and differ in few knobs, and all run under one trainer. Nothing
of the campaign has been measured yet.
"""

# ruff: noqa: N803, N806 (arrays carry their shape in the name: S draws, N layouts)

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from layout_tuner.array_types import Bools, Floats, Ints
from layout_tuner.predictions.belief.corrected_step_time import TimeCalibration
from layout_tuner.predictions.belief.factor_regression import drawn_log_step_s
from layout_tuner.predictions.belief.peaks.trainer_hypotheses import TrainerMemory
from layout_tuner.predictions.belief.pipeline_stalls import PipelineStalls
from layout_tuner.predictions.belief.residual import ResidualKernel, knob_coordinates
from layout_tuner.predictions.belief.slow_runs import MEAN_EXCESS
from layout_tuner.predictions.belief.step_belief import normal_draws
from layout_tuner.predictions.estimates.distinct_rows import different
from layout_tuner.predictions.estimates.step_time import time_terms
from layout_tuner.predictions.estimates.trainer_kernels import kernels_of
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.models.model_shape import ModelShape

NUM_DRAWS: Final = 1000
_TOGETHER: Final = 50
"""Draws that are computed together."""
MAX_COMPARED: Final = 300
"""Layouts that are drawn together: the best of a plan."""
NEAR: Final = 0.05
"""A layout within this share of the best objective is as good as the best."""
ENOUGH: Final = 0.9
"""Chance of such a layout at which no more probes are needed."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BestChances:
    """The chances of some layouts, in the order of the plan, given that one of them runs."""

    best: Floats
    """Probability of each layout that it is the best of them; shape [layouts]."""
    near: Floats
    """Probability that the n most likely ones hold one within `NEAR` of the best; [layouts]."""
    found: Floats
    """The same, where probes that do not end in time find nothing; [layouts]."""
    order: Ints
    """The positions of the layouts, the most likely first."""
    runs: float
    """Probability that at least one of them runs."""

    @classmethod
    def of(
        cls, objectives_SN: Floats, runs_SN: Bools, in_time_SN: Bools | None = None
    ) -> BestChances:
        """The chances by joint draws.

        Of the logarithms of the objective, more is better. Draws in which no layout runs say
        nothing. A layout whose probe does not end in time may be the best, and is not found.
        """
        some_S = runs_SN.any(axis=1)
        found_SN = np.where(runs_SN, objectives_SN, -np.inf)[some_S]
        num_draws = max(len(found_SN), 1)
        winners = np.bincount(found_SN.argmax(axis=1), minlength=runs_SN.shape[1])
        order = np.argsort(-winners, kind="stable")
        near_S = found_SN.max(axis=1) + np.log1p(-NEAR)

        def held(measured_SN: Floats) -> Floats:
            leading_SN = np.maximum.accumulate(measured_SN[:, order], axis=1)
            return np.asarray((leading_SN >= near_S[:, None]).sum(axis=0) / num_draws)

        near = found = held(found_SN)
        if in_time_SN is not None and not in_time_SN.all():
            found = held(np.where(in_time_SN[some_S], found_SN, -np.inf))
        return cls(
            best=winners / num_draws,
            near=near,
            found=found,
            order=order,
            runs=float(some_S.mean()),
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayoutDraws:
    """What is known of the layouts of one model on one cluster before anything of them ran."""

    model: ModelShape
    cluster: Cluster
    software: str
    time: TimeCalibration
    memory: TrainerMemory

    def chances(
        self,
        columns: LayoutColumns,
        log_factors: Floats,
        capacity_bytes: float,
        *,
        most_step_s: float = np.inf,
        seed: int = 0,
    ) -> BestChances:
        """The chances of some layouts.

        `log_factors` are logarithms of what each layout divides by its step time for its objective;
        `capacity_bytes` is the memory of a device, beside the headroom; `most_step_s` the longest
        step with which a probe ends before its deadline.
        """
        log_s_SN, runs_SN = self.joint(columns, capacity_bytes, seed=seed)
        in_time_SN = np.exp(log_s_SN) <= most_step_s
        return BestChances.of(log_factors - log_s_SN, runs_SN, in_time_SN)

    def joint(
        self, columns: LayoutColumns, capacity_bytes: float, *, seed: int = 0
    ) -> tuple[Floats, Bools]:
        """Logarithms of step times in seconds, and whether each layout runs; [draws, layouts]."""
        rng = np.random.default_rng(seed)
        return self._step_times(columns, rng), self._runs(columns, capacity_bytes, rng)

    def _step_times(self, columns: LayoutColumns, rng: np.random.Generator) -> Floats:
        """Logarithms of step times: terms at drawn factors, residuals, and stalls."""
        num_devices = np.asarray(columns.num_devices)
        log_s_SN = np.empty((NUM_DRAWS, num_devices.size))
        seed = int(rng.integers(1 << 32))
        for count in different(num_devices):
            rows = np.flatnonzero(num_devices == count)
            factors = self.time.factors(
                self.model, self.cluster, num_devices=int(count), software=self.software
            )
            here = columns.rows(rows)
            factors, settings = self.time.with_settings(factors, here, self.software)
            # The same draws for every number of devices.
            same = np.random.default_rng(seed)
            drawn_SF = factors.mean + normal_draws(factors.covariance, NUM_DRAWS, same)
            terms = time_terms(
                here,
                self.model,
                self.cluster,
                kernels=kernels_of(self.software, self.cluster),
            )
            # There are few layouts with the same settings.
            together = _TOGETHER if settings is None else NUM_DRAWS
            for start in range(0, NUM_DRAWS, together):
                some = slice(start, start + together)
                log_s_SN[some, rows] = drawn_log_step_s(terms, drawn_SF[some], settings)
        points = knob_coordinates(columns)
        kernel = ResidualKernel()
        log_s_SN += normal_draws(kernel.between(points, points), NUM_DRAWS, rng)
        log_s_SN += kernel.noise * rng.standard_normal(log_s_SN.shape)
        risk_N = PipelineStalls(columns, self.cluster, self.software).prior
        stalls_SN = rng.random(log_s_SN.shape) < risk_N
        excess_SN = rng.exponential(MEAN_EXCESS, log_s_SN.shape)
        return np.asarray(log_s_SN + np.where(stalls_SN, excess_SN, 0.0))

    def _runs(
        self, columns: LayoutColumns, capacity_bytes: float, rng: np.random.Generator
    ) -> Bools:
        """Which layouts fit: one hypothesis a draw, and one error of the peaks of all layouts."""
        weights = self.memory.weights
        fits_HN = np.zeros((len(weights), np.asarray(columns.num_devices).size))
        for place, belief in self.memory.counting:
            fits_HN[place] = belief.fits(columns, self.model, capacity_bytes)
        chosen_S = rng.choice(len(weights), NUM_DRAWS, p=weights)
        return np.asarray(rng.random((NUM_DRAWS, 1)) < fits_HN[chosen_S])
