"""The progress of a campaign, its remaining time, and why it waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from layout_tuner.api.leases.why_not_leased import why_nowhere
from layout_tuner.api.schemas.campaigns_and_trials import Progress
from layout_tuner.protocol.states import TrialState
from layout_tuner.results_db.allocations.allocations import AllocationRecord, WaitingTrial
from layout_tuner.results_db.leaderboard.leaderboard_records import BaselineRead, Winner
from layout_tuner.results_db.records import CampaignRecord, WorkerRecord
from layout_tuner.results_db.store import Store
from layout_tuner.terminal.plurals import counted

DRIVER_ALIVE_S: Final = 15.0
"""A driver that was active within this many seconds counts as running."""

TRIALS_LOOKED_AT: Final = 100
"""Waiting trials that are checked when none is running."""


def driver_is_alive(seen_at: datetime | None, now: datetime) -> bool:
    return seen_at is not None and now - seen_at < timedelta(seconds=DRIVER_ALIVE_S)


def progress_of(
    store: Store,
    campaigns: Sequence[CampaignRecord],
    baselines: Mapping[int, BaselineRead],
    now: datetime,
) -> dict[int, Progress]:
    """The progress of campaigns by their ids, with one query of counts and one of winners."""
    ids = [campaign.id for campaign in campaigns]
    counts, winners = store.campaigns.count_trials_of(ids), store.leaderboard.winners(ids)
    service = _Service(store, now, store.driver.lease().seen_at, store.workers.find())
    return {
        campaign.id: _progress(
            service,
            campaign,
            counts[campaign.id],
            winners.get(campaign.id),
            baselines.get(campaign.id),
        )
        for campaign in campaigns
    }


class _Service(NamedTuple):
    """What is read once for all campaigns."""

    store: Store
    now: datetime
    driver_seen_at: datetime | None
    workers: list[WorkerRecord]


def _progress(
    service: _Service,
    campaign: CampaignRecord,
    counts: dict[TrialState, int],
    best: Winner | None,
    baseline: BaselineRead | None,
) -> Progress:
    ended = counts["COMPLETED"] + counts["INFEASIBLE"] + counts["FAILED"]
    planned = trials_planned(campaign, counts, baseline)
    return Progress(
        trials=counts,
        trials_ended=ended,
        trials_planned=planned,
        best=None if best is None else best.value,
        best_trial=None if best is None else best.trial_number,
        best_layout=None if best is None else best.layout_key,
        best_disturbed=best is not None and best.disturbed,
        seconds_left=seconds_left(campaign, ended, planned),
        waiting_reason=_waiting_reason(service, campaign, counts),
    )


def trials_planned(
    campaign: CampaignRecord, counts: Mapping[TrialState, int], baseline: BaselineRead | None
) -> int | None:
    """The number of trials after which the campaign ends; None: their number does not end it."""
    budgeted = campaign.stored.budget.trials
    if budgeted is None and campaign.strategy != "exhaustive":
        return None
    num_layouts = campaign.num_legal_layouts + (baseline is not None and baseline.outside_space)
    planned = num_layouts if budgeted is None else min(budgeted, num_layouts)
    # Repeats exceed the number of legal layouts where that is below the budget.
    return max(planned, sum(counts.values()) - counts["CANCELLED"])


def node_seconds_left(campaign: CampaignRecord) -> float | None:
    """What the budget leaves for probes; None: it does not bound them."""
    bound = campaign.stored.budget.node_hours
    return None if bound is None else max(bound * 3600 - campaign.node_seconds, 0.0)


def seconds_left(campaign: CampaignRecord, ended: int, planned: int | None) -> float | None:
    """An estimate from the pace so far, by the part of the budget that runs out first."""
    if campaign.ended_at is not None:
        return 0.0
    estimates, bound_s = [], campaign.stored.budget.wall_time_s
    if bound_s is not None:
        estimates.append(bound_s - campaign.wall_time_s)
    if planned is not None and ended and campaign.wall_time_s:
        estimates.append((planned - ended) * campaign.wall_time_s / ended)
    node_seconds = node_seconds_left(campaign)
    if node_seconds is not None and campaign.node_seconds and campaign.wall_time_s:
        estimates.append(node_seconds * campaign.wall_time_s / campaign.node_seconds)
    return max(min(estimates), 0.0) if estimates else None


def _waiting_reason(
    service: _Service, campaign: CampaignRecord, counts: Mapping[TrialState, int]
) -> str | None:
    """Why no trial of the campaign runs, and what to do; None: the campaign does not wait."""
    if campaign.state == "PAUSED":
        return f"the campaign is {campaign.message or 'paused; resume it'}"
    if campaign.state != "RUNNING":
        return None
    store = service.store
    if counts["RUNNING"]:
        return store.allocations.waiting_reason(campaign.id)
    seen_at = service.driver_seen_at
    if not counts["PENDING"] and not driver_is_alive(seen_at, service.now):
        seen = f"the last was seen at {seen_at:%H:%M:%S} UTC" if seen_at else "none yet"
        return f"no driver is at work ({seen}); start one with `layout-tuner driver`"
    if counts["PENDING"] and (why := store.quotas.why_waits(campaign)):
        return why
    workers = [w for w in service.workers if w.cluster == campaign.cluster_name]
    workers = [w for w in workers if w.is_simulated == campaign.is_simulated]
    if campaign.is_simulated and not any(w.runs(campaign.trainer) for w in workers):
        return (
            f"no worker simulates cluster {campaign.cluster_name} with {campaign.trainer}; start one "
            f"with `layout-tuner worker --simulate {campaign.cluster_name}`"
        )
    if not workers:
        return (
            f"no worker of cluster {campaign.cluster_name} is there; start one with "
            f"`layout-tuner worker --cluster {campaign.cluster_name}`"
        )
    workers = [w for w in workers if w.runs(campaign.trainer)]
    if not workers:
        return (
            f"no worker of cluster {campaign.cluster_name} lists the trainer {campaign.trainer!r}; "
            "start one with `layout-tuner worker --trainers FILE`, where FILE describes it"
        )
    if not counts["PENDING"] and campaign.waiting_because:
        return campaign.waiting_because
    waiting = store.allocations.waiting_trials(
        campaign.cluster_name,
        is_simulated=campaign.is_simulated,
        campaign_id=campaign.id,
        limit=TRIALS_LOOKED_AT,
    )
    if not waiting:
        return None
    if 0 < counts["PENDING"] <= store.workers.count_too_large(campaign.id):
        return _too_small(waiting, workers)
    allocations = [
        each
        for each in store.allocations.find(cluster=campaign.cluster_name)
        if each.worker.is_simulated == campaign.is_simulated
    ]
    return _nowhere(waiting, allocations, service.now) or store.shares.why_waits(campaign)


def _nowhere(
    waiting: Sequence[WaitingTrial], allocations: Sequence[AllocationRecord], now: datetime
) -> str | None:
    """Why no allocation in its current state will lease any of the first waiting trials."""
    first = why_nowhere(waiting[0], allocations, now)
    # The check of an allocation of 1,000 nodes is slow: it ends at the first trial that may run.
    if first is None or any(why_nowhere(other, allocations, now) is None for other in waiting[1:]):
        return None
    return f"trial {waiting[0].number} waits: {first}"


def _too_small(waiting: list[WaitingTrial], workers: list[WorkerRecord]) -> str:
    smallest = min(waiting, key=lambda trial: trial.num_devices)
    largest = max(workers, key=lambda worker: worker.num_nodes * worker.devices_per_node)
    return (
        f"no worker is large enough: the smallest waiting layout needs "
        f"{counted(smallest.num_devices, 'device')} on {counted(smallest.num_nodes, 'node')}, the largest worker ({largest.name}) has "
        f"{counted(largest.num_nodes, 'node')} of {counted(largest.devices_per_node, 'device')}"
    )
