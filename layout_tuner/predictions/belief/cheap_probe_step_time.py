"""The step time of a layout, extrapolated from a cheap probe that ran a part of it.

The measured step time is multiplied by the ratio of the two step times that the closed form
expects, so that only the error of the ratio counts. Part of that error follows from the priors of
the costs (`ratio_log_sd`). The rest was chosen on pairs of rows of one published table (vTrain, one
node of A100s) that differ in one knob: over 504 pairs that differ in the micro-batches alone,
extrapolated steps are 4 % too short on average, and scatter about that by 1.9 to 2.6 %; over 240
pairs that differ in the replicas alone, they are right and scatter by 0.5 %. No table has pairs
that differ in the layers alone: the figure for these is assumed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from layout_tuner.predictions.statistics.job_duration import StepInterval
from layout_tuner.search_spaces.layouts.layout import Layout

if TYPE_CHECKING:  # clients read `CheapProbe`, and need none of these, which import numpy
    from layout_tuner.array_types import Floats
    from layout_tuner.predictions.estimates.step_time import TimeTerms
    from layout_tuner.predictions.estimates.trainer_kernels import TrainerKernels
    from layout_tuner.search_spaces.campaigns.fidelity import Fidelity
    from layout_tuner.search_spaces.clusters.cluster import Cluster
    from layout_tuner.search_spaces.models.model_shape import ModelShape

MICROBATCHES_LOG_SD: Final = 0.02
REPLICAS_LOG_SD: Final = 0.01
LAYERS_LOG_SD: Final = 0.04
COMMON_LOG_SD: Final = 0.05
"""Standard deviation of an error that all cheap probes of a campaign share, in logarithms."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheapProbe:
    """What of a layout a cheap probe runs, and the step time of the layout that follows from it."""

    full_layout: Layout
    """The layout that it stands for."""
    full_layout_key: str
    """The canonical key of that layout."""
    num_layers: int
    """Layers of the model that it runs."""
    runs: str
    """What it runs, such as "16 of 640 micro-batches, 1 of 2 replicas"."""
    measures_memory: bool
    """Whether its peak memory is that of the layout: it runs all layers."""
    full_step: StepInterval | None
    """The extrapolated step time of the layout; null: the probe has not completed."""

    @classmethod
    def of(
        cls,
        layout: Layout,
        probed: Layout,
        num_layers: int,
        model: ModelShape,
        cluster: Cluster,
        *,
        software: str,
        measured_s: float | None,
    ) -> CheapProbe:
        """A probe of a part of a layout.

        The layout is the one that it stands for, and the model the whole one; `software` ran it
        (`CampaignSpec.software`); `measured_s` is of a step of the part, None where it was not
        measured.
        """
        from layout_tuner.predictions.estimates.trainer_kernels import kernels_of
        from layout_tuner.search_spaces.campaigns.fidelity import fidelity_of

        part = fidelity_of(layout, probed, num_layers)
        return cls(
            full_layout=layout,
            full_layout_key=layout.key,
            num_layers=num_layers,
            runs=part.words(layout, model),
            measures_memory=part.keeps_memory(model),
            full_step=None
            if measured_s is None
            else extrapolated_step(
                measured_s, part, layout, model, cluster, kernels_of(software, cluster)
            ),
        )


def extrapolation_log_sd(
    fidelity: Fidelity, layout: Layout, model: ModelShape, part: TimeTerms, whole: TimeTerms
) -> float:
    """The standard deviation of the logarithm of an extrapolated step time, of its own error.

    Beside it there is the error that all cheap probes share (`COMMON_LOG_SD`). The errors of the
    parts that are reduced, and that of the ratio, are taken as independent.

    The layout and the model are the whole ones; `part` and `whole` are the terms of a step of what
    runs and of the layout, one row each.
    """
    return math.hypot(independent_log_sd(fidelity, layout, model), ratio_log_sd(part, whole))


def independent_log_sd(fidelity: Fidelity, layout: Layout, model: ModelShape) -> float:
    """Standard deviation of the part of the error that other probes do not share, in logarithms."""
    return math.hypot(
        MICROBATCHES_LOG_SD * (fidelity.num_microbatches < layout.num_microbatches),
        REPLICAS_LOG_SD * (fidelity.dp < layout.dp),
        LAYERS_LOG_SD * (fidelity.num_layers < model.num_layers),
    )


def ratio_log_sd(part: TimeTerms, whole: TimeTerms) -> float:
    """How unsure the estimates are of the ratio of two steps, before any measurement."""
    return math.sqrt(ratio_covariance(part, whole)[0, 0])


def ratio_covariance(parts: TimeTerms, wholes: TimeTerms) -> Floats:
    """Covariance of the errors of the ratios of steps, in logarithms; shape [probes, probes].

    A cost that is a larger share of the part than of the whole, such as the reduction of gradients
    after few micro-batches, may take longer or shorter than the estimates expect
    (`predictions.estimates.step_time.FACTOR_PRIORS`). It does so in all probes, so their errors are
    correlated as far as the same costs cause them. Linear in the logarithms of the factors.
    """
    from layout_tuner.predictions.belief.factor_regression import slopes
    from layout_tuner.predictions.belief.time_fit import TIME_PRIOR

    prior = TIME_PRIOR.factors
    differ = slopes(parts, prior.mean) - slopes(wholes, prior.mean)
    covariance: Floats = differ @ prior.covariance @ differ.T
    return covariance


def extrapolated_step(
    measured_s: float,
    fidelity: Fidelity,
    layout: Layout,
    model: ModelShape,
    cluster: Cluster,
    kernels: TrainerKernels,
) -> StepInterval:
    """The step time of a layout with its 95 % interval, from what a cheap probe of it measured.

    `measured_s` is of a step of the part; layout and model are the whole ones; `kernels` are those
    of the trainer that ran it.
    """
    from layout_tuner.predictions.belief.job import predicted_step
    from layout_tuner.predictions.estimates.step_time import time_terms

    whole = time_terms(layout, model, cluster, kernels=kernels)
    layout_part, model_part = fidelity.reduced(layout), fidelity.reduced_model(model)
    part = time_terms(layout_part, model_part, cluster, kernels=kernels)
    ratio = float(whole.step_time_s()[0] / part.step_time_s()[0])
    log_sd = math.hypot(extrapolation_log_sd(fidelity, layout, model, part, whole), COMMON_LOG_SD)
    return predicted_step(math.log(measured_s * ratio), log_sd)
