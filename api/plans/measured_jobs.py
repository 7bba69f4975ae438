"""The training jobs of a campaign's best layouts, with the measured step times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from search_spaces.belief.job import JobEstimate, measured_job
from search_spaces.spec.cluster import Cluster
from search_spaces.spec.layout import Layout
from search_spaces.spec.model_shape import ModelShape
from search_spaces.statistics.training_job import StepInterval, TrainingJob


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredLayout:
    """A layout of a leaderboard."""

    rank: int
    layout: Layout
    step_time_s: float
    """Median over all of its runs."""
    value: float
    """Its throughput, which is inverse to the step time."""
    low: float | None
    """Lower end of the 95 % interval of the throughput; None: unknown."""
    high: float | None
    """Upper end of it."""

    @property
    def step(self) -> StepInterval:
        """Its step time; without an interval of the throughput the ends are the median."""
        low, high = self.low or self.value, self.high or self.value
        return StepInterval(
            expected_s=self.step_time_s,
            low_s=self.step_time_s * self.value / high,
            high_s=self.step_time_s * self.value / low,
        )


def measured_jobs(
    job: TrainingJob, spec: Mapping[str, Any], ranked: Iterable[MeasuredLayout]
) -> list[tuple[str, JobEstimate]]:
    """The job with each layout, by the name of its rank.

    Args:
        job: tokens, nodes and failures.
        spec: the stored description of the campaign.
        ranked: the layouts.
    """
    model = ModelShape.from_mapping(spec["model"])
    cluster = Cluster.from_mapping(spec["cluster"])
    across = bool(spec["space"].get("allow_tp_across_nodes", False))
    return [
        (
            f"rank {each.rank}",
            measured_job(job, each.layout, model, cluster, each.step, allow_tp_across_nodes=across),
        )
        for each in ranked
    ]
