"""Converts the store's records to the documents of the API."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Final

from layout_tuner.api.campaigns.progress_and_waiting import progress_of
from layout_tuner.api.campaigns.trials import cheap_probes
from layout_tuner.api.leases.why_not_leased import why_not_leased
from layout_tuner.api.schemas.allocations import AllocationRead, NotLeasedRead
from layout_tuner.api.schemas.campaigns_and_trials import (
    CampaignDetail,
    CampaignRead,
    LeaderboardPage,
    RankedTrial,
    TrialDetailRead,
    TrialRead,
)
from layout_tuner.results_db.allocations.allocations import AllocationRecord, WaitingTrial
from layout_tuner.results_db.leaderboard.leaderboard_records import PageOfLayouts, RankedLayout
from layout_tuner.results_db.records import CampaignRecord, TrialDetail, TrialRecord
from layout_tuner.results_db.store import Store
from layout_tuner.results_db.trials.filter import LeaderboardListing
from layout_tuner.search_spaces.objectives import OBJECTIVES

NOT_LEASED_SHOWN: Final = 20
"""Unleased trials for which an allocation states the reason."""


def campaigns_read(store: Store, campaigns: Sequence[CampaignRecord]) -> list[CampaignRead]:
    baselines = store.baselines.of_campaigns(campaigns)
    progress = progress_of(store, campaigns, baselines, store.now())
    return [
        CampaignRead.of(
            campaign,
            model=campaign.model_name,
            cluster=campaign.cluster_name,
            progress=progress[campaign.id],
            baseline=baselines.get(campaign.id),
            warnings=campaign.stored.warnings,
        )
        for campaign in campaigns
    ]


def campaign_detail(store: Store, campaign: CampaignRecord) -> CampaignDetail:
    (read,) = campaigns_read(store, [campaign])
    cheap = store.trials.ended_probes(campaign.id, cheap=True)
    return CampaignDetail.of(
        read,
        campaign,
        starts_from=store.plans.count_known_trials(campaign),
        cheap_probes=cheap.number,
        cheap_probe_node_seconds=cheap.node_seconds,
    )


def trials_read(store: Store, trials: Sequence[TrialRecord]) -> list[TrialRead]:
    probes = cheap_probes(store, trials)
    campaigns = {each.campaign_id for each in trials}
    simulated = {id_ for id_ in campaigns if store.campaigns.get(id_).is_simulated}
    return [
        TrialRead.of(
            trial,
            trial.layout,
            simulated=trial.campaign_id in simulated,
            cheap_probe=probes.get(trial.id),
        )
        for trial in trials
    ]


def trial_detail_read(store: Store, detail: TrialDetail) -> TrialDetailRead:
    """A trial with everything that is stored about it."""
    (read,) = trials_read(store, [detail.trial])
    return TrialDetailRead.of(read, detail)


def leaderboard_page(
    campaign: CampaignRecord,
    page: PageOfLayouts,
    listing: LeaderboardListing,
    *,
    ranked_by: str,
    offset: int,
) -> LeaderboardPage:
    end = offset + len(page.layouts)
    # A list of layouts near the best is in the order of this one.
    cheapest = () if listing.within_percent is None else ("tokens_per_node_hour",)
    shown = tuple(dict.fromkeys((*campaign.objectives, ranked_by, *cheapest)))
    return LeaderboardPage.of(
        page,
        campaign,
        objective=ranked_by,
        trials=[_ranked_trial(campaign, page, each, shown) for each in page.layouts],
        next_offset=end if page.layouts and end < page.total else None,
    )


def _ranked_trial(
    campaign: CampaignRecord, page: PageOfLayouts, ranked: RankedLayout, shown: Sequence[str]
) -> RankedTrial:
    trial = ranked.trial
    measured = trial.measurement
    assert measured is not None  # it is ranked
    memory = campaign.stored.device_memory_bytes
    values = {name: trial.objective(name, device_memory_bytes=memory) for name in shown}
    for name, value in values.items():
        # Every objective that ranks is a rate.
        if name in OBJECTIVES and value is not None:
            values[name] = value * (measured.step_time_s / ranked.step_time_s)
    return RankedTrial.of(
        ranked,
        trial,
        trial.layout,
        simulated=campaign.is_simulated,
        objectives=values,
        on_front=trial.id in page.front,
    )


def allocation_reads(store: Store, allocations: Iterable[AllocationRecord]) -> list[AllocationRead]:
    """Allocations, each with the trials that wait for it."""
    now = store.now()
    by_kind: dict[tuple[str, bool], tuple[list[WaitingTrial], int]] = {}
    reads = []
    for allocation in allocations:
        kind = cluster, is_simulated = allocation.worker.cluster, allocation.worker.is_simulated
        if kind not in by_kind:
            waiting = store.allocations.waiting_trials(
                cluster, is_simulated=is_simulated, limit=NOT_LEASED_SHOWN
            )
            number = store.allocations.count_waiting_trials(cluster, is_simulated=is_simulated)
            by_kind[kind] = waiting, number
        reads.append(_allocation_read(allocation, *by_kind[kind], now))
    return reads


def _allocation_read(
    allocation: AllocationRecord, waiting: list[WaitingTrial], num_waiting: int, now: datetime
) -> AllocationRead:
    worker = allocation.worker
    ends_at = worker.ends_at
    has_ended = worker.ended_at is not None
    state = worker.state if allocation.is_there else "silent"
    return AllocationRead.of(
        worker,
        allocation,
        state="ended" if has_ended else state,
        seconds_left=None if ends_at is None else max((ends_at - now).total_seconds(), 0.0),
        running=[trial for trial in allocation.trials if trial.phase != "waiting"],
        waiting=[trial for trial in allocation.trials if trial.phase == "waiting"],
        num_not_leased=0 if has_ended else num_waiting,
        not_leased=[
            NotLeasedRead.of(trial, reason=why_not_leased(trial, allocation, now))
            for trial in ([] if has_ended else waiting)
        ],
    )
