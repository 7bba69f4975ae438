"""How far a campaign is, how long it will take, and why nothing moves if nothing does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from api.schemas import Progress
from api.waiting import why_nowhere
from results_db.records import CampaignRecord, TrialRecord, TrialState, WorkerRecord
from results_db.standing import Winner
from results_db.store import Store
from search_spaces.counting import counted

DRIVER_ALIVE_S: Final = 15.0
"""A driver that was at work within this many seconds counts as there."""

TRIALS_LOOKED_AT: Final = 100
"""Waiting trials that are looked at when none is leased."""


def driver_is_alive(seen_at: datetime | None, now: datetime) -> bool:
    """Whether a driver is at work."""
    return seen_at is not None and now - seen_at < timedelta(seconds=DRIVER_ALIVE_S)


def progress_of(
    store: Store, campaigns: Sequence[CampaignRecord], now: datetime
) -> dict[int, Progress]:
    """The progress of campaigns by their ids; trials are counted and winners found for all at once."""
    ids = [campaign.id for campaign in campaigns]
    counts, winners = store.count_trials_of(ids), store.winners(ids)
    return {
        campaign.id: _progress(store, campaign, counts[campaign.id], winners.get(campaign.id), now)
        for campaign in campaigns
    }


def _progress(
    store: Store,
    campaign: CampaignRecord,
    counts: dict[TrialState, int],
    best: Winner | None,
    now: datetime,
) -> Progress:
    ended = counts["COMPLETED"] + counts["INFEASIBLE"] + counts["FAILED"]
    planned = trials_planned(campaign)
    if planned is not None:
        # Repeats come on top of a legal set that is smaller than the budget.
        planned = max(planned, sum(counts.values()) - counts["CANCELLED"])
    return Progress(
        trials=counts,
        trials_ended=ended,
        trials_planned=planned,
        best=None if best is None else best.value,
        best_trial=None if best is None else best.trial_number,
        best_layout=None if best is None else best.layout_key,
        seconds_left=seconds_left(campaign, ended, planned),
        waiting_reason=waiting_reason(store, campaign, counts, now),
    )


def trials_planned(campaign: CampaignRecord) -> int | None:
    """How many trials end the campaign, where their number does."""
    budgeted: int | None = campaign.spec["budget"]["trials"]
    if budgeted is not None:
        return min(budgeted, campaign.num_legal_layouts)
    return campaign.num_legal_layouts if campaign.strategy == "exhaustive" else None


def seconds_left(campaign: CampaignRecord, ended: int, planned: int | None) -> float | None:
    """Estimate from the pace so far; the budget that runs out first decides."""
    if campaign.ended_at is not None:
        return 0.0
    budget: Mapping[str, Any] = campaign.spec["budget"]
    estimates = []
    if budget["wall_time_s"] is not None:
        estimates.append(budget["wall_time_s"] - campaign.wall_time_s)
    if planned is not None and ended and campaign.wall_time_s:
        estimates.append((planned - ended) * campaign.wall_time_s / ended)
    if budget["node_hours"] is not None and campaign.node_seconds and campaign.wall_time_s:
        pace = campaign.node_seconds / campaign.wall_time_s
        estimates.append((budget["node_hours"] * 3600 - campaign.node_seconds) / pace)
    return max(min(estimates), 0.0) if estimates else None


def waiting_reason(
    store: Store, campaign: CampaignRecord, counts: Mapping[TrialState, int], now: datetime
) -> str | None:
    """Why none of the campaign's trials is running, and what to do; None when nothing is amiss."""
    if campaign.state == "PAUSED":
        return "the campaign is paused; resume it"
    if campaign.state != "RUNNING":
        return None
    if counts["RUNNING"]:
        return store.all_wait_because(campaign.id)
    driver_seen_at = store.driver_seen_at()
    if not counts["PENDING"] and not driver_is_alive(driver_seen_at, now):
        seen = (
            f"the last was seen at {driver_seen_at:%H:%M:%S} UTC" if driver_seen_at else "none yet"
        )
        return f"no driver is at work ({seen}); start one with `layout-tuner driver`"
    workers = [w for w in store.workers() if w.cluster == campaign.cluster_name]
    if not workers:
        return (
            f"no worker of cluster {campaign.cluster_name} is there; start one with "
            f"`layout-tuner worker --cluster {campaign.cluster_name}`"
        )
    if counts["PENDING"] and store.count_too_large(campaign.id) >= counts["PENDING"]:
        waiting = store.trials(campaign.id, states=("PENDING",), limit=TRIALS_LOOKED_AT)
        return _too_small(waiting, workers) if waiting else None
    return _nowhere(store, campaign, now)


def _nowhere(store: Store, campaign: CampaignRecord, now: datetime) -> str | None:
    """Why no allocation as it is will take any of the waiting trials that were looked at."""
    waiting = store.waiting_trials(
        campaign.cluster_name, campaign_id=campaign.id, limit=TRIALS_LOOKED_AT
    )
    if not waiting:
        return None
    allocations = store.allocations(cluster=campaign.cluster_name)
    first = why_nowhere(waiting[0], allocations, now)
    # An allocation may have a thousand nodes: the first trial that one may run ends the search.
    if first is None or any(why_nowhere(other, allocations, now) is None for other in waiting[1:]):
        return None
    return f"trial {waiting[0].number} waits: {first}"


def _too_small(waiting: list[TrialRecord], workers: list[WorkerRecord]) -> str:
    smallest = min((t.layout for t in waiting), key=lambda layout: layout.num_devices)
    largest = max(workers, key=lambda worker: worker.num_nodes * worker.devices_per_node)
    return (
        f"no worker is large enough: the smallest waiting layout needs "
        f"{counted(smallest.num_devices, 'device')} on {counted(smallest.num_nodes, 'node')}, the largest worker ({largest.name}) has "
        f"{counted(largest.num_nodes, 'node')} of {counted(largest.devices_per_node, 'device')}"
    )
