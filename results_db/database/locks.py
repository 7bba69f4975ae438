"""Row locks, taken in one order everywhere, so that no two transactions wait for each other.

First the driver's lease, then campaigns by id, then trials by id, with a trial its attempts, and workers at
the end. A lease alone begins with its worker: it takes trials that nobody holds, and waits for none.

A transaction that changes a trial's state holds the campaign; the campaign's counters and places follow. A
worker's beats change only what is its own, and leave the campaign alone. SQLite has one writer at a time,
and no locks of rows.

What is locked is read anew: what the transaction saw before may have changed while it waited.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

from sqlalchemy import ColumnElement, select
from sqlalchemy.orm import Session

from results_db.models import Campaign, Trial
from results_db.worker_tables import Worker

FOR_CHANGE: Final = {"key_share": True}
"""FOR NO KEY UPDATE: ids never change, so rows that refer to a locked one can be added meanwhile."""

_NOW: Final = {"populate_existing": True}


def lock_campaign(session: Session, campaign_id: int) -> Campaign | None:
    """The campaign's row, locked; None when there is none."""
    return session.get(Campaign, campaign_id, with_for_update=FOR_CHANGE)


def lock_campaign_of(session: Session, trial_id: int) -> Campaign | None:
    """The row of a trial's campaign, locked; None when there is no such trial."""
    of_trial = select(Trial.campaign_id).where(Trial.id == trial_id).scalar_subquery()
    query = select(Campaign).where(Campaign.id == of_trial).with_for_update(key_share=True)
    return session.scalar(query, execution_options=_NOW)


def lock_campaigns(session: Session, which: ColumnElement[bool]) -> Sequence[Campaign]:
    """Rows of campaigns, locked in their order."""
    query = select(Campaign).where(which).order_by(Campaign.id).with_for_update(key_share=True)
    return session.scalars(query, execution_options=_NOW).all()


def lock_trials(session: Session, *which: ColumnElement[bool]) -> Sequence[Trial]:
    """Rows of trials, locked in their order; those that no longer match when they are locked are left out."""
    query = select(Trial).where(*which).order_by(Trial.id)
    locked = query.with_for_update(key_share=True, of=Trial)
    return session.scalars(locked, execution_options=_NOW).all()


def lock_trial(session: Session, trial_id: int, *options: Any) -> Trial | None:
    """A trial's row, locked; None when there is none. Its campaign's is locked already."""
    return session.get(
        Trial, trial_id, with_for_update={**FOR_CHANGE, "of": Trial}, options=options
    )


def lock_leased(
    session: Session, worker_ids: Collection[str]
) -> list[tuple[Campaign, Sequence[Trial]]]:
    """The RUNNING trials of workers with their campaigns, all locked.

    One that is leased in between is missed: ask again once the workers are locked.
    """
    leased = (Trial.worker_id.in_(worker_ids), Trial.state == "RUNNING")
    campaign_ids = session.scalars(select(Trial.campaign_id).where(*leased).distinct()).all()
    if not campaign_ids:
        return []
    campaigns = lock_campaigns(session, Campaign.id.in_(campaign_ids))
    trials = lock_trials(session, *leased, Trial.campaign_id.in_(campaign_ids))
    return [
        (campaign, [trial for trial in trials if trial.campaign_id == campaign.id])
        for campaign in campaigns
    ]


def lock_workers(session: Session, *which: ColumnElement[bool]) -> Sequence[Worker]:
    """Rows of workers, locked in their order."""
    query = select(Worker).where(*which).order_by(Worker.id).with_for_update(key_share=True)
    return session.scalars(query, execution_options=_NOW).all()
