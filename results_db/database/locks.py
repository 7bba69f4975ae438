"""Row locks, taken in one order everywhere, so that transactions cannot deadlock.

The order: the driver's lease, campaigns by id, trials by id (a trial's lock covers its attempts),
then workers. One exception: leasing locks the worker first, then quotas, then trials that are not
locked, without waiting.

A transaction that changes the state of a trial holds the lock of its campaign, since the campaign's
counters change too. Heartbeats change rows of their worker only, without the campaign. SQLite has
one writer at a time, and no row locks.

Locked rows are read again, since they may have changed while the transaction waited.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final, TypeVar

from sqlalchemy import ColumnElement, select
from sqlalchemy.orm import Session

from layout_tuner.results_db.errors import TrialNotFoundError, campaign_not_found
from layout_tuner.results_db.models.service_tables import WorkerRow
from layout_tuner.results_db.models.tables import Campaign, Trial

FOR_CHANGE: Final = {"key_share": True}
"""FOR NO KEY UPDATE: rows that refer to a locked one can be added, since ids never change."""

_NOW: Final = {"populate_existing": True}

R = TypeVar("R", Campaign, Trial, WorkerRow)


def lock_campaign(session: Session, campaign_id: int) -> Campaign:
    """The campaign's row, locked; CampaignNotFoundError when there is none."""
    campaign = session.get(Campaign, campaign_id, with_for_update=FOR_CHANGE)
    if campaign is None:
        raise campaign_not_found(campaign_id)
    return campaign


def lock_rows(session: Session, kind: type[R], *which: ColumnElement[bool]) -> Sequence[R]:
    """Rows of a table, locked in their order, without those that no longer match once locked."""
    query = select(kind).where(*which).order_by(kind.id)
    locked = query.with_for_update(key_share=True, of=kind)
    return session.scalars(locked, execution_options=_NOW).all()


def lock_trial(session: Session, trial_id: int, *options: Any) -> tuple[Campaign, Trial]:
    """A trial's campaign and the trial, both locked; TrialNotFoundError when there is none."""
    of_trial = select(Trial.campaign_id).where(Trial.id == trial_id).scalar_subquery()
    campaigns = lock_rows(session, Campaign, Campaign.id == of_trial)
    lock = {**FOR_CHANGE, "of": Trial}
    trial = session.get(Trial, trial_id, with_for_update=lock, options=options)
    if not campaigns or trial is None:
        raise TrialNotFoundError(f"there is no trial {trial_id}")
    return campaigns[0], trial


def lock_leased(
    session: Session, worker_ids: Collection[str]
) -> list[tuple[Campaign, Sequence[Trial]]]:
    """The RUNNING trials of workers with their campaigns, all locked.

    A trial that is leased in between is missed: call it again once the workers are locked.
    """
    leased = (Trial.worker_id.in_(worker_ids), Trial.state == "RUNNING")
    campaign_ids = session.scalars(select(Trial.campaign_id).where(*leased).distinct()).all()
    if not campaign_ids:
        return []
    campaigns = lock_rows(session, Campaign, Campaign.id.in_(campaign_ids))
    trials = lock_rows(session, Trial, *leased, Trial.campaign_id.in_(campaign_ids))
    return [
        (campaign, [trial for trial in trials if trial.campaign_id == campaign.id])
        for campaign in campaigns
    ]
