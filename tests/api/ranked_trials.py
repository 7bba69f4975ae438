"""A page of the leaderboard made of records: what the service writes as plain values is held against it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from api.schemas import RankedTrial
from api.views import trial_read
from results_db.records import CampaignRecord
from results_db.standing import Standing
from search_spaces.objectives import OBJECTIVES


def ranked_trials(
    campaign: CampaignRecord,
    standings: Sequence[Standing],
    *,
    after: int,
    ranked_by: str,
    front: Collection[int],
) -> list[RankedTrial]:
    """A page of the leaderboard, which begins after so many layouts."""
    return [
        _ranked_trial(
            campaign,
            standing,
            rank=rank,
            ranked_by=ranked_by,
            on_front=standing.trial.id in front,
        )
        for rank, standing in enumerate(standings, after + 1)
    ]


def _ranked_trial(
    campaign: CampaignRecord, standing: Standing, *, rank: int, ranked_by: str, on_front: bool
) -> RankedTrial:
    """A layout on the leaderboard, by its first trial."""
    trial = standing.trial
    memory = campaign.spec["cluster"].get("device_memory_bytes")
    names = dict.fromkeys((*campaign.objectives, ranked_by))
    values = {name: trial.objective(name, device_memory_bytes=memory) for name in names}
    measured = trial.measurement
    assert measured is not None  # it is ranked
    for name, value in values.items():
        # Every objective that ranks is a rate.
        if name in OBJECTIVES and value is not None:
            values[name] = value * (measured.step_time_s / standing.step_time_s)
    values[ranked_by] = standing.value
    return RankedTrial(
        **dict(trial_read(trial)),
        rank=rank,
        objectives=values,
        on_front=on_front,
        value=standing.value,
        value_low=standing.low,
        value_high=standing.high,
        step_time_s=standing.step_time_s,
        num_runs=standing.num_runs,
        shortened=standing.shortened,
        tied_with_first=standing.is_tied,
    )
