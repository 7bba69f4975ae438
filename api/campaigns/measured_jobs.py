"""The training jobs of a campaign's best layouts, with the measured step times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from search_spaces.belief.job import JobEstimate, estimate_job, extrapolated
from search_spaces.spec.cluster import Cluster
from search_spaces.spec.layout import Layout
from search_spaces.spec.model_shape import ModelShape
from search_spaces.statistics.job_duration import StepInterval, TrainingJob


class RankedStep(NamedTuple):
    """A layout on the leaderboard."""

    rank: int
    layout: Layout
    step_time_s: float
    """The median over all of its runs."""
    value: float
    """Its throughput, which is inverse to the step time."""
    low: float | None
    """Lower end of the throughput's 95 % interval; None: unknown, and the median is the end."""
    high: float | None


def measured_jobs(
    job: TrainingJob, spec: Mapping[str, Any], ranked: Iterable[RankedStep]
) -> list[tuple[str, JobEstimate]]:
    """The job with each layout, by the name of its rank."""
    model = ModelShape.from_mapping(spec["model"])
    cluster = Cluster.from_mapping(spec["cluster"])
    across = bool(spec["space"].get("allow_tp_across_nodes", False))
    found = []
    for rank, layout, step_time_s, value, low, high in ranked:
        measured = StepInterval(
            expected_s=step_time_s,
            low_s=step_time_s * value / (high or value),
            high_s=step_time_s * value / (low or value),
        )
        step = extrapolated(measured, layout, model, cluster)
        estimate = estimate_job(
            job, layout, model, cluster, step, is_measured=True, allow_tp_across_nodes=across
        )
        found.append((f"rank {rank}", estimate))
    return found
