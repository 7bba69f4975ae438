"""From the store's records to the API's documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from api.progress import progress_of
from api.schemas import (
    CampaignDetail,
    CampaignRead,
    CostRead,
    Progress,
    TrialDetailRead,
    TrialRead,
)
from results_db.cost import Cost
from results_db.records import CampaignRecord, TrialDetail, TrialRecord
from results_db.store import Store


def campaigns_read(store: Store, campaigns: Sequence[CampaignRecord]) -> list[CampaignRead]:
    """Campaigns as lists show them."""
    progress = progress_of(store, campaigns, store.now())
    return [
        CampaignRead(**_campaign_fields(campaign, progress[campaign.id])) for campaign in campaigns
    ]


def campaign_detail(store: Store, campaign: CampaignRecord) -> CampaignDetail:
    """A campaign with its description."""
    progress = progress_of(store, [campaign], store.now())
    return CampaignDetail(
        **_campaign_fields(campaign, progress[campaign.id]),
        starts_from=store.count_known_trials(campaign),
        spec=dict(campaign.spec),
    )


def _campaign_fields(campaign: CampaignRecord, progress: Progress) -> dict[str, Any]:
    return {
        "id": campaign.id,
        "name": campaign.name,
        "state": campaign.state,
        "reason": campaign.reason,
        "message": campaign.message,
        "model": campaign.model_name,
        "cluster": campaign.cluster_name,
        "objective": campaign.objective,
        "objectives": list(campaign.objectives),
        "strategy": campaign.strategy,
        "num_legal_layouts": campaign.num_legal_layouts,
        "created_at": campaign.created_at,
        "started_at": campaign.started_at,
        "ended_at": campaign.ended_at,
        "node_seconds": campaign.node_seconds,
        "cost": cost_read(campaign.cost),
        "wall_time_s": campaign.wall_time_s,
        "created_by": campaign.created_by,
        "notes": campaign.notes,
        "progress": progress,
        "warnings": list(campaign.spec.get("warnings", ())),
    }


def cost_read(cost: Cost) -> CostRead:
    """A cost with its total."""
    return CostRead(**asdict(cost), total=cost.total)


def trial_read(trial: TrialRecord) -> TrialRead:
    """A trial as lists show it."""
    return TrialRead(**_trial_fields(trial))


def trial_detail_read(detail: TrialDetail) -> TrialDetailRead:
    """A trial with everything that is kept about it."""
    return TrialDetailRead(
        **_trial_fields(detail.trial),
        iterations=list(detail.iterations),
        environment=detail.environment,
        log_tail=detail.log_tail,
        attempts=list(detail.attempts),
    )


def _trial_fields(trial: TrialRecord) -> dict[str, Any]:
    return {
        "id": trial.id,
        "number": trial.number,
        "campaign_id": trial.campaign_id,
        "layout": trial.layout,
        "layout_key": trial.layout_key,
        "num_devices": trial.layout.num_devices,
        "global_batch_size": trial.layout.global_batch_size,
        "state": trial.state,
        "reason": trial.reason,
        "message": trial.message,
        "node": trial.node,
        "attempt": trial.attempt,
        "lost_attempts": trial.lost_attempts,
        "iterations_done": trial.iterations_done,
        "repeat_of": trial.repeat_of,
        "node_seconds": trial.node_seconds,
        "cost": cost_read(trial.cost),
        "measurement": trial.measurement,
        "created_at": trial.created_at,
        "started_at": trial.started_at,
        "ended_at": trial.ended_at,
    }
