"""What a campaign's trials say about its knobs: importances, and steps around the winner."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from results_db.records import Analysis, CampaignRecord, StepState, TrialRecord
from results_db.standing import Standing
from search_spaces.campaign import CampaignSpec
from search_spaces.layout import Layout
from tuner.calibration.time import TimeCalibration
from tuner.importance import METHOD, importances
from tuner.knowledge import Sample
from tuner.sensitivity import StepTime, Tried, knob_steps

_STATES: Final[dict[str, StepState]] = {
    "COMPLETED": "completed",
    "INFEASIBLE": "out_of_memory",
    "FAILED": "failed",
}


def analyse(
    campaign: CampaignRecord, standings: Sequence[Standing], trials: Sequence[TrialRecord]
) -> Analysis | None:
    """The analysis of a campaign as it stands; None while nothing was measured in full.

    Args:
        campaign: the campaign.
        standings: all of its ranked layouts, the winner first.
        trials: all of its trials.
    """
    if not standings or standings[0].shortened:
        return None
    winner = standings[0]
    spec = CampaignSpec.from_mapping(campaign.spec)
    layouts = spec.legal_set()
    if layouts.index_of(winner.trial.layout) is None:
        return None  # It was brought in from elsewhere: nothing is one step away from it here.
    measured = {standing.trial.layout: standing.value for standing in standings}
    found = importances(layouts, measured, seed=spec.seed)
    return Analysis(
        winner_id=winner.trial.id,
        objective=campaign.objective,
        num_trials=len(standings),
        last_ended_seq=max(trial.ended_seq or 0 for trial in trials),
        method=METHOD if found else "",
        importances=found,
        steps=knob_steps(
            spec,
            layouts,
            winner.trial.layout,
            winner.value,
            _tried(campaign, standings, trials),
            calibrated_step_time(spec, standings),
        ),
    )


def calibrated_step_time(spec: CampaignSpec, standings: Sequence[Standing]) -> StepTime:
    """The closed form, put right by what the campaign itself measured."""
    samples = [
        Sample(
            model=spec.model,
            cluster=spec.cluster,
            layout=standing.trial.layout,
            state="completed",
            step_time_s=standing.step_time_s,
        )
        for standing in standings
    ]
    calibration = TimeCalibration.fit().told(samples, campaign=spec.name)

    def step_time_s(layout: Layout) -> float:
        (log_s,), _ = calibration.predict(layout, spec.model, spec.cluster, campaign=spec.name)
        return math.exp(log_s)

    return step_time_s


def _tried(
    campaign: CampaignRecord, standings: Sequence[Standing], trials: Sequence[TrialRecord]
) -> dict[str, Tried]:
    found = {}
    for trial in trials:
        # node_lost says nothing about the layout; of a repeat, the layout's standing tells.
        if trial.state in _STATES and trial.reason != "node_lost":
            found[trial.layout_key] = Tried(
                trial_id=trial.id,
                state=_STATES[trial.state],
                value=trial.objective(campaign.objective) if trial.state == "COMPLETED" else None,
                is_apart=None,
            )
    for standing in standings:
        found[standing.trial.layout_key] = Tried(
            trial_id=standing.trial.id,
            state="completed",
            value=standing.value,
            is_apart=not standing.is_tied,
        )
    return found
