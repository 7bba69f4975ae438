"""The training jobs of a campaign's best layouts, with the measured step times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from search_spaces.belief.job import JobEstimate, estimate_job, extrapolated
from search_spaces.spec.cluster import Cluster
from search_spaces.spec.layout import Layout
from search_spaces.spec.model_shape import ModelShape
from search_spaces.statistics.job_duration import StepInterval, TrainingJob


def step_interval(
    step_time_s: float, value: float, low: float | None, high: float | None
) -> StepInterval:
    """A ranked layout's step time with its 95 % interval.

    Args:
        step_time_s: the median over all of its runs.
        value: its throughput, which is inverse to the step time.
        low: lower end of the throughput's interval; None: unknown, and the median is the end.
        high: upper end of it.
    """
    return StepInterval(
        expected_s=step_time_s,
        low_s=step_time_s * value / (high or value),
        high_s=step_time_s * value / (low or value),
    )


def measured_jobs(
    job: TrainingJob,
    spec: Mapping[str, Any],
    ranked: Iterable[tuple[int, Layout, StepInterval]],
) -> list[tuple[str, JobEstimate]]:
    """The job with each layout, by the name of its rank.

    Args:
        job: tokens, nodes and failures.
        spec: the stored description of the campaign.
        ranked: rank, layout and measured step time of each.
    """
    model = ModelShape.from_mapping(spec["model"])
    cluster = Cluster.from_mapping(spec["cluster"])
    across = bool(spec["space"].get("allow_tp_across_nodes", False))
    return [
        (
            f"rank {rank}",
            estimate_job(
                job,
                layout,
                model,
                cluster,
                extrapolated(step, layout, model, cluster),
                is_measured=True,
                allow_tp_across_nodes=across,
            ),
        )
        for rank, layout, step in ranked
    ]
