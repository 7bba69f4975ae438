"""How long the training job of a layout takes, on more nodes than the layout's where asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from layout_tuner.errors import SearchSpaceError
from layout_tuner.predictions.estimates.step_time import step_time_s
from layout_tuner.predictions.estimates.trainer_kernels import TrainerKernels
from layout_tuner.predictions.statistics.job_duration import JobDuration, StepInterval, TrainingJob
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.search_spaces.node_scaling import scaled
from layout_tuner.units import NORMAL_95

StepSource = Literal["predicted", "measured", "measured and extrapolated"]
"""The source of a job's step time; extrapolated: measured on fewer nodes, and multiplied by the
ratio of the predicted step times."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobEstimate:
    """The training job with one layout."""

    layout_key: str
    """The layout on the job's nodes; empty: the layout cannot be used on so many nodes."""
    duration: JobDuration | None
    """Null: see `problem`."""
    step_source: StepSource
    """Where its step time comes from."""
    problem: str = ""
    """Why the layout cannot be used on so many nodes, or why the job would never end."""


def estimate_job(
    job: TrainingJob,
    layout: Layout,
    model: ModelShape,
    cluster: Cluster,
    step_of: Callable[[Layout], StepInterval],
    *,
    is_measured: bool = False,
    allow_tp_across_nodes: bool = False,
) -> JobEstimate:
    """The training job with one layout.

    The layout is on its own nodes, and the cluster may have fewer nodes than the job. `step_of`
    gives the step time of a layout on the job's nodes; `is_measured` says whether it was measured
    on the layout's own.
    """
    source: StepSource = "measured" if is_measured else "predicted"
    try:
        if job.num_nodes not in (None, layout.num_nodes):
            source = "measured and extrapolated" if is_measured else source
            layout = scaled(
                layout,
                job.num_nodes or layout.num_nodes,
                model=model,
                cluster=cluster,
                allow_tp_across_nodes=allow_tp_across_nodes,
            )
        tokens = layout.global_batch_size * model.seq_length
        duration = job.duration(step_of(layout), tokens_per_step=tokens, num_nodes=layout.num_nodes)
    except SearchSpaceError as error:
        return JobEstimate(layout_key="", duration=None, step_source=source, problem=error.problem)
    return JobEstimate(layout_key=layout.key, duration=duration, step_source=source)


def predicted_step(log_mean: float, log_sd: float) -> StepInterval:
    """The median and the 95 % interval of a step from the logarithm of its seconds."""
    low, middle, high = np.exp(log_mean + NORMAL_95 * log_sd * np.array([-1.0, 0.0, 1.0]))
    return StepInterval(expected_s=float(middle), low_s=float(low), high_s=float(high))


def extrapolated(
    step: StepInterval,
    measured: Layout,
    model: ModelShape,
    cluster: Cluster,
    kernels: TrainerKernels,
) -> Callable[[Layout], StepInterval]:
    """The step time of a measured layout on other nodes, as a function of the scaled layout.

    The measured step time is multiplied by the ratio of the predicted ones; the interval is that of
    the measurement, and does not hold the error of the ratio.
    """

    def on(layout: Layout) -> StepInterval:
        there, here = (
            float(step_time_s(each, model, cluster, kernels=kernels)[0])
            for each in (layout, measured)
        )
        return step.times(there / here)

    return on
