"""The step time of a layout, extrapolated from a cheap probe that ran a part of it.

The measured step time is multiplied by the ratio of the two step times that the closed form
expects, so that only the error of the ratio counts. Its spread was chosen on pairs of rows of one
published table (vTrain, one node of A100s) that differ in one knob: over 504 pairs that differ in
the micro-batches alone, the measured ratios scatter by 1.6 to 2.6 % about their mean; over 240
pairs that differ in the replicas alone, by 0.5 %. No table has pairs that differ in the layers
alone: the figure for these is assumed.
"""

from __future__ import annotations

import math
from typing import Final

from search_spaces.belief.job import predicted_step
from search_spaces.estimates.time import step_time_s
from search_spaces.spec.cluster import Cluster
from search_spaces.spec.fidelity import Fidelity
from search_spaces.spec.layout import Layout
from search_spaces.spec.model_shape import ModelShape
from search_spaces.statistics.training_job import StepInterval

MICROBATCHES_LOG_SD: Final = 0.03
REPLICAS_LOG_SD: Final = 0.01
LAYERS_LOG_SD: Final = 0.04


def extrapolation_log_sd(fidelity: Fidelity, layout: Layout, model: ModelShape) -> float:
    """The standard deviation of the logarithm of an extrapolated step time.

    The errors of the parts that are reduced are taken as independent.

    Args:
        fidelity: the part of the layout that ran.
        layout: the whole layout.
        model: the whole model.
    """
    return math.hypot(
        MICROBATCHES_LOG_SD * (fidelity.num_microbatches < layout.num_microbatches),
        REPLICAS_LOG_SD * (fidelity.dp < layout.dp),
        LAYERS_LOG_SD * (fidelity.num_layers < model.num_layers),
    )


def extrapolated_step(
    measured_s: float, fidelity: Fidelity, layout: Layout, model: ModelShape, cluster: Cluster
) -> StepInterval:
    """The step time of a layout with its 95 % interval, from what a cheap probe of it measured.

    Args:
        measured_s: seconds of a step of the part that ran.
        fidelity: that part.
        layout: the whole layout.
        model: the whole model.
        cluster: the cluster, on which both run.
    """
    ran = fidelity.reduced(layout), fidelity.reduced_model(model)
    here, there = (float(step_time_s(*each, cluster)[0]) for each in (ran, (layout, model)))
    log_sd = extrapolation_log_sd(fidelity, layout, model)
    return predicted_step(math.log(measured_s * there / here), log_sd)
