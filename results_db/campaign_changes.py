"""Campaigns after their submission: another budget, notes, and their deletion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from results_db.analysis_tables import AnalysisRow
from results_db.campaigns import by_id
from results_db.errors import CampaignStateError
from results_db.event_tables import EventRow
from results_db.events import emit
from results_db.models import Campaign, Trial
from results_db.part import StorePart
from results_db.records import ENDED_CAMPAIGN_STATES, CampaignRecord
from results_db.retry import retried
from results_db.rows import campaign_record
from search_spaces.campaign import changed_budget
from search_spaces.counting import counted

_OPEN: Final = ("RUNNING", "PAUSED")


class CampaignChanges(StorePart):
    """The part of the store that changes what was submitted."""

    @retried
    def update_campaign(
        self,
        campaign_id: int,
        *,
        budget: Mapping[str, Any] | None = None,
        notes: str | None = None,
    ) -> CampaignRecord:
        """Changes a campaign's notes, and its budget while it is open. All of it, or nothing.

        Args:
            campaign_id: of the campaign.
            budget: bounds by name as a campaign's file has them; those that are not named stay, None
                takes one away. None: it stays as it is.
            notes: in place of those that were there; None: they stay.

        Raises:
            CampaignNotFoundError: there is no such campaign.
            CampaignStateError: it has ended, and the budget is to be changed.
            CampaignInvalidError: a bound is unknown or out of range, or none would be left.
        """
        now = self._clock()
        with self._db.write() as session:
            campaign = by_id(session, campaign_id, lock=True)
            changes: dict[str, Any] = {}
            if budget is not None:
                before, after = _change_budget(campaign, budget)
                if before != after:
                    changes["budget"] = {"from": before, "to": after}
            if notes is not None and notes != campaign.notes:
                campaign.notes = notes
                changes["notes"] = len(notes)
            if changes:
                emit(session, campaign.id, "campaign.changed", now=now, fields=sorted(changes))
                self._audit(session, "campaign.update", "campaign", campaign.name, **changes)
            return campaign_record(campaign, now)

    @retried
    def delete_campaign(self, campaign_id: int) -> None:
        """Deletes a campaign that has ended, with everything that was measured for it.

        Raises:
            CampaignNotFoundError: there is no such campaign.
            CampaignStateError: it has not ended, a worker still has one of its trials, or an open
                campaign starts from it.
        """
        now = self._clock()
        with self._db.write() as session:
            campaign = by_id(session, campaign_id, lock=True)
            _refuse_deletion(session, campaign)
            num_trials = session.scalar(
                select(func.count()).where(Trial.campaign_id == campaign_id)
            )
            # Before its trials: they are what it refers to, row by row.
            session.execute(delete(AnalysisRow).where(AnalysisRow.campaign_id == campaign_id))
            session.execute(delete(EventRow).where(EventRow.campaign_id == campaign_id))
            session.execute(delete(Campaign).where(Campaign.id == campaign_id))
            emit(session, campaign_id, "campaign.deleted", now=now, name=campaign.name)
            self._audit(
                session,
                "campaign.delete",
                "campaign",
                campaign.name,
                id=campaign_id,
                trials=num_trials,
                created_by=campaign.created_by,
            )


def _change_budget(
    campaign: Campaign, changes: Mapping[str, Any]
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Sets the new budget; returns the old one and the new one."""
    if campaign.state in ENDED_CAMPAIGN_STATES:
        raise CampaignStateError(
            f"campaign {campaign.name!r} is {campaign.state} and is not reopened: its budget stays; "
            "clone it with another one (`layout-tuner campaign clone`, POST "
            f"/v1/campaigns/{campaign.name}/clone), and the clone starts from what it measured"
        )
    before = campaign.spec["budget"]
    after = changed_budget(before, changes, strategy=campaign.strategy)
    # A new mapping: a change inside the old one would not be noticed.
    campaign.spec = {**campaign.spec, "budget": after}
    return before, after


def _refuse_deletion(session: Session, campaign: Campaign) -> None:
    if campaign.state not in ENDED_CAMPAIGN_STATES:
        raise CampaignStateError(
            f"campaign {campaign.name!r} is {campaign.state}; cancel it before it is deleted"
        )
    num_running = session.scalar(
        select(func.count()).where(Trial.campaign_id == campaign.id, Trial.state == "RUNNING")
    )
    if num_running:
        raise CampaignStateError(
            f"workers are still stopping {counted(num_running, 'trial')} of campaign {campaign.name!r}; delete "
            "the campaign when they have (a moment, or until their leases run out)"
        )
    others = session.execute(select(Campaign.name, Campaign.spec).where(Campaign.state.in_(_OPEN)))
    for name, spec in others:
        if campaign.name in spec.get("start_from", ()):
            raise CampaignStateError(
                f"campaign {name!r} starts from {campaign.name!r} and has not ended; delete it "
                "when that has"
            )
