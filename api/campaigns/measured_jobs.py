"""The training jobs of a campaign's best layouts, with the measured step times."""

from __future__ import annotations

from collections.abc import Iterable

from layout_tuner.api.schemas.campaigns_and_trials import RankedTrial
from layout_tuner.predictions.belief.job import JobEstimate, estimate_job, extrapolated
from layout_tuner.predictions.estimates.trainer_kernels import kernels_of
from layout_tuner.predictions.statistics.job_duration import StepInterval, TrainingJob
from layout_tuner.results_db.leaderboard.leaderboard_records import RankedLayout
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec


def measured_jobs(
    job: TrainingJob, spec: CampaignSpec, ranked: Iterable[RankedLayout | RankedTrial]
) -> list[tuple[str, JobEstimate]]:
    """The job with each layout of a leaderboard, by the name of its rank."""
    model, cluster, across = spec.model, spec.cluster, spec.space.allow_tp_across_nodes
    found, kernels = [], kernels_of(spec.software, cluster)
    for each in ranked:
        # The value is a throughput, which is inverse to the step time.
        measured = StepInterval(
            expected_s=each.step_time_s,
            low_s=each.step_time_s * each.value / each.value_high,
            high_s=each.step_time_s * each.value / each.value_low,
        )
        step = extrapolated(measured, each.layout, model, cluster, kernels)
        estimate = estimate_job(
            job, each.layout, model, cluster, step, is_measured=True, allow_tp_across_nodes=across
        )
        found.append((f"rank {each.rank}", estimate))
    return found
