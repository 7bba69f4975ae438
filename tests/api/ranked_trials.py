"""A page of the leaderboard built from records, to compare with the service's plain values."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from api.schemas.campaigns_and_trials import RankedTrial
from results_db.leaderboard.ranked_layout import RankedLayout
from results_db.records import CampaignRecord
from search_spaces.spec.objectives import OBJECTIVES


def ranked_trials(
    campaign: CampaignRecord,
    standings: Sequence[RankedLayout],
    *,
    ranked_by: str,
    front: Collection[int],
) -> list[RankedTrial]:
    """A page of the leaderboard."""
    return [
        _ranked_trial(
            campaign,
            standing,
            ranked_by=ranked_by,
            on_front=standing.trial.id in front,
        )
        for standing in standings
    ]


def _ranked_trial(
    campaign: CampaignRecord, standing: RankedLayout, *, ranked_by: str, on_front: bool
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
    return RankedTrial.of(
        trial,
        num_devices=trial.layout.num_devices,
        global_batch_size=trial.layout.global_batch_size,
        rank=standing.rank,
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
