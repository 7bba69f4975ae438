"""The training jobs of a campaign's best layouts, with the measured step times."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from layout_tuner.predictions.belief.job import JobEstimate, estimate_job, extrapolated
from layout_tuner.predictions.statistics.job_duration import StepInterval, TrainingJob
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec
from layout_tuner.search_spaces.layouts.layout import Layout


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
    job: TrainingJob, spec: CampaignSpec, ranked: Iterable[RankedStep]
) -> list[tuple[str, JobEstimate]]:
    """The job with each layout, by the name of its rank."""
    model, cluster, across = spec.model, spec.cluster, spec.space.allow_tp_across_nodes
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
