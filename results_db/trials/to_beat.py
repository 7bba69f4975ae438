"""Whether new runs change what the probes of their campaign must beat: `Campaign.to_beat`.

It is computed from the whole leaderboard, and only after runs that may change it, once they are
committed. A probe that is leased meanwhile gets the value of before. A value that may have become
too high is removed in the transaction of the runs: the process may end before the next one is
computed. A value that is missing or too low stops fewer probes, and the next run that reaches it
has it computed.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from sqlalchemy import select
from sqlalchemy.orm import Session

from layout_tuner.protocol.measurement import Measurement
from layout_tuner.results_db.models.tables import Campaign, MeasurementRow, Trial
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec
from layout_tuner.search_spaces.objectives import measured_objective, pareto_front


def may_change_to_beat(
    session: Session,
    campaign: Campaign,
    spec: CampaignSpec,
    runs: Mapping[Trial, Measurement],
    *,
    others_changed: bool,
) -> bool:
    """Whether new runs may change what must be beaten; removes what may have become too high.

    Called in the transaction that stores the runs, once their losses are compared. Other runs
    change if the comparison rejects or restores them.
    """
    if not spec.stops_some_early:
        return False
    ranked = {trial: run for trial, run in runs.items() if _is_ranked(campaign, trial, run)}
    is_repeat = any(trial.repeat_of is not None for trial in ranked)
    if others_changed or is_repeat or _are_first_counted(session, campaign, runs):
        campaign.to_beat = None
        return True
    return any(_reaches(campaign, spec, trial, run) for trial, run in ranked.items())


def _is_ranked(campaign: Campaign, trial: Trial, run: Measurement) -> bool:
    limit = campaign.max_peak_memory_bytes
    keeps_limit = limit is None or run.peak_memory_bytes <= limit
    is_whole = trial.state == "COMPLETED" and trial.num_layers is None
    return is_whole and keeps_limit and not run.oversubscribed


def _are_first_counted(
    session: Session, campaign: Campaign, runs: Mapping[Trial, Measurement]
) -> bool:
    """Whether the first runs with counted tokens are among these: others are not ranked then."""
    counted = [trial.id for trial, run in runs.items() if run.tokens == "counted"]
    if campaign.to_beat is None or not counted:
        return False
    earlier = select(MeasurementRow.trial_id).where(
        MeasurementRow.campaign_id == campaign.id,
        MeasurementRow.tokens == "counted",
        MeasurementRow.trial_id.not_in(counted),
    )
    return session.scalar(earlier.limit(1)) is None


def _reaches(campaign: Campaign, spec: CampaignSpec, trial: Trial, run: Measurement) -> bool:
    """Whether the first run of a layout may be on the front, or better than the winner may be."""
    if campaign.to_beat is None:
        return True
    if run.shortened:
        return False
    memory_bytes = spec.cluster.device_memory_bytes
    values = [
        measured_objective(name, run, num_nodes=trial.num_nodes, device_memory_bytes=memory_bytes)
        for name in spec.objectives
    ]
    front = campaign.to_beat if isinstance(campaign.to_beat, list) else [[campaign.to_beat]]
    return bool(pareto_front(np.array([*front, values], dtype=np.float64))[-1])
