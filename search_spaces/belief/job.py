"""How long the training job of a layout takes, on more nodes than the layout's where asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from search_spaces.errors import SearchSpaceError
from search_spaces.estimates.time import step_time_s
from search_spaces.spec.cluster import Cluster
from search_spaces.spec.layout import Layout
from search_spaces.spec.model_shape import ModelShape
from search_spaces.spec.scaling import scaled
from search_spaces.statistics.training_job import JobDuration, StepInterval, TrainingJob

StepSource = Literal["predicted", "measured", "measured and extrapolated"]
"""The source of a job's step time; extrapolated: measured on fewer nodes, and multiplied by the
ratio of the predicted step times."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobEstimate:
    """The training job with one layout."""

    layout_key: str
    """The layout on the job's nodes; empty: the layout cannot be used on so many nodes."""
    duration: JobDuration | None
    """None: see `problem`."""
    step_source: StepSource
    """Where its step time comes from."""
    problem: str = ""
    """Why the layout cannot be used on so many nodes, or why the job would never end."""


def predicted_job(
    job: TrainingJob,
    layout: Layout,
    model: ModelShape,
    cluster: Cluster,
    step_of: Callable[[Layout], StepInterval],
    *,
    allow_tp_across_nodes: bool = False,
) -> JobEstimate:
    """The job with a layout whose step time is predicted.

    Args:
        job: tokens, nodes and failures.
        layout: the layout, on its own nodes.
        model: the model to train.
        cluster: the cluster; it may have fewer nodes than the job.
        step_of: predicts the step time of the scaled layout.
        allow_tp_across_nodes: whether a tensor-parallel group may span nodes.
    """
    try:
        larger = _on_its_nodes(job, layout, model, cluster, allow_tp_across_nodes)
        duration = _duration(job, larger, model, step_of(larger))
    except SearchSpaceError as error:
        return JobEstimate(
            layout_key="", duration=None, step_source="predicted", problem=error.problem
        )
    return JobEstimate(layout_key=larger.key, duration=duration, step_source="predicted")


def measured_job(
    job: TrainingJob,
    layout: Layout,
    model: ModelShape,
    cluster: Cluster,
    step: StepInterval,
    *,
    allow_tp_across_nodes: bool = False,
) -> JobEstimate:
    """The job with a layout whose step time was measured on the layout's own nodes.

    On more nodes the measured step time is multiplied by the ratio of the predicted ones; the
    interval stays that of the measurement, and does not hold the error of the ratio.
    """
    source: StepSource = "measured"
    try:
        larger = _on_its_nodes(job, layout, model, cluster, allow_tp_across_nodes)
        if larger != layout:
            source = "measured and extrapolated"
            step = step.times(
                float(step_time_s(larger, model, cluster)[0])
                / float(step_time_s(layout, model, cluster)[0])
            )
        duration = _duration(job, larger, model, step)
    except SearchSpaceError as error:
        return JobEstimate(layout_key="", duration=None, step_source=source, problem=error.problem)
    return JobEstimate(layout_key=larger.key, duration=duration, step_source=source)


def _on_its_nodes(
    job: TrainingJob,
    layout: Layout,
    model: ModelShape,
    cluster: Cluster,
    allow_tp_across_nodes: bool,
) -> Layout:
    if job.num_nodes in (None, layout.num_nodes):
        return layout
    assert job.num_nodes is not None, "it is not None above"
    return scaled(
        layout,
        job.num_nodes,
        model=model,
        cluster=cluster,
        allow_tp_across_nodes=allow_tp_across_nodes,
    )


def _duration(
    job: TrainingJob, layout: Layout, model: ModelShape, step: StepInterval
) -> JobDuration:
    tokens = layout.global_batch_size * model.seq_length
    return job.duration(step, tokens_per_step=tokens, num_nodes=layout.num_nodes)
