"""Campaigns: made, listed, paused, resumed, cancelled, ended; and the driver's clock.

A campaign's wall time is the time it is RUNNING while a driver is at work. The driver's beats move the
clock; a silence of the driver, or the service being down, counts for at most `MAX_CLOCK_GAP_S`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, cast

from sqlalchemy import func, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from results_db.campaign_conditions import conditions
from results_db.campaign_filter import EVERY_CAMPAIGN, CampaignFilter
from results_db.errors import CampaignDuplicateError, CampaignNotFoundError, CampaignStateError
from results_db.events import emit
from results_db.idempotency import RequestKey, keep_key
from results_db.lifecycle import cancel_trial
from results_db.locks import lock_campaign, lock_campaigns, lock_trials
from results_db.models import Campaign, Trial
from results_db.part import StorePart
from results_db.records import TRIAL_STATES, CampaignRecord, CampaignState, TrialState
from results_db.retry import retried
from results_db.rows import (
    campaign_record,
    clock_seconds,
    max_peak_memory_bytes,
    objectives_of,
    probe_deadline_s,
)
from results_db.session import breaks_unique
from results_db.standing_tables import STANDINGS_VERSION
from search_spaces.errors import CampaignInvalidError


def add_campaign(session: Session, row: Campaign) -> None:
    """Writes a campaign, which has its id from then on.

    Raises:
        CampaignDuplicateError: the name is taken.
    """
    session.add(row)
    try:
        session.flush()
    except IntegrityError as error:
        if not breaks_unique(error, "campaigns", "name"):
            raise
        raise CampaignDuplicateError(
            f"a campaign named {row.name!r} exists already; choose another name"
        ) from error


class Campaigns(StorePart):
    """The campaigns' part of the store."""

    @retried
    def create_campaign(
        self,
        spec: Mapping[str, Any],
        *,
        num_legal_layouts: int,
        request: RequestKey | None = None,
        notes: str = "",
    ) -> CampaignRecord:
        """Keeps a new campaign, RUNNING.

        Args:
            spec: `CampaignSpec.to_mapping()`, fully resolved.
            num_legal_layouts: size of its legal set.
            request: by which its sender names the request, so that it makes no second campaign.
            notes: what its users wrote beside it.

        Raises:
            CampaignDuplicateError: the name is taken.
            CampaignInvalidError: a campaign that it starts from is not there.
            IdempotencyKeyInUseError: the same request has just made one.
        """
        now = self._clock()
        row = Campaign(
            name=spec["name"],
            state="RUNNING",
            spec=dict(spec),
            model_name=spec["model"]["name"],
            cluster_name=spec["cluster"]["name"],
            objective=objectives_of(spec)[0],
            strategy=spec["strategy"],
            num_legal_layouts=num_legal_layouts,
            max_peak_memory_bytes=max_peak_memory_bytes(spec),
            probe_deadline_s=probe_deadline_s(spec),
            created_at=now,
            created_by=self._actor.name,
            notes=notes,
            clock_at=now,
            standings_version=STANDINGS_VERSION,
        )
        with self._db.write() as session:
            _hold_sources(session, spec.get("start_from", ()))
            add_campaign(session, row)
            if request is not None:
                keep_key(session, self._actor.name, request, row.id, now)
            emit(session, row.id, "campaign.created", now=now, state=row.state)
            self._audit(session, "campaign.create", "campaign", row.name)
            return campaign_record(row, now)

    def campaign(self, campaign_id: int) -> CampaignRecord:
        """One campaign.

        Raises:
            CampaignNotFoundError: there is none with this id.
        """
        with self._db.read() as session:
            return campaign_record(by_id(session, campaign_id), self._clock())

    def campaign_by_name(self, name: str) -> CampaignRecord:
        """One campaign by its name.

        Raises:
            CampaignNotFoundError: there is none with this name.
        """
        with self._db.read() as session:
            row = session.scalar(select(Campaign).where(Campaign.name == name))
            if row is None:
                raise campaign_not_found(name)
            return campaign_record(row, self._clock())

    def campaigns(
        self,
        *,
        chosen: CampaignFilter = EVERY_CAMPAIGN,
        before_id: int | None = None,
        limit: int | None = None,
    ) -> list[CampaignRecord]:
        """Campaigns that meet the filter, the youngest first."""
        query = select(Campaign).where(*conditions(chosen)).order_by(Campaign.id.desc())
        if before_id is not None:
            query = query.where(Campaign.id < before_id)
        if limit is not None:
            query = query.limit(limit)
        now = self._clock()
        with self._db.read() as session:
            return [campaign_record(row, now) for row in session.scalars(query)]

    def campaigns_to_drive(self) -> list[CampaignRecord]:
        """The RUNNING campaigns, the oldest first."""
        query = select(Campaign).where(Campaign.state == "RUNNING").order_by(Campaign.id)
        now = self._clock()
        with self._db.read() as session:
            return [campaign_record(row, now) for row in session.scalars(query)]

    def count_trials(self, campaign_id: int) -> dict[TrialState, int]:
        """The number of the campaign's trials in each state, zeros included."""
        return self.count_trials_of([campaign_id])[campaign_id]

    def count_trials_of(self, campaign_ids: Sequence[int]) -> dict[int, dict[TrialState, int]]:
        """The same of several campaigns, by their ids."""
        query = (
            select(Trial.campaign_id, Trial.state, func.count())
            .where(Trial.campaign_id.in_(campaign_ids))
            .group_by(Trial.campaign_id, Trial.state)
        )
        counts = {id_: dict.fromkeys(TRIAL_STATES, 0) for id_ in campaign_ids}
        with self._db.read() as session:
            for campaign_id, state, number in session.execute(query):
                counts[campaign_id][cast("TrialState", state)] = number
        return counts

    @retried
    def pause_campaign(self, campaign_id: int) -> CampaignRecord:
        """Stops handing out the campaign's trials; the running ones finish. Twice is once.

        Raises:
            CampaignStateError: it has ended.
        """
        now = self._clock()
        with self._db.write() as session:
            campaign = _open_campaign(session, campaign_id, "paused")
            if campaign.state == "RUNNING":
                _stop_clock(campaign, now)
                campaign.state = "PAUSED"
                emit(session, campaign.id, "campaign.paused", now=now, state=campaign.state)
                self._audit(session, "campaign.pause", "campaign", campaign.name)
            return campaign_record(campaign, now)

    @retried
    def resume_campaign(self, campaign_id: int) -> CampaignRecord:
        """Takes a paused campaign up again. Twice is once.

        Raises:
            CampaignStateError: it has ended.
        """
        now = self._clock()
        with self._db.write() as session:
            campaign = _open_campaign(session, campaign_id, "resumed")
            if campaign.state == "PAUSED":
                campaign.state = "RUNNING"
                campaign.clock_at = now
                emit(session, campaign.id, "campaign.resumed", now=now, state=campaign.state)
                self._audit(session, "campaign.resume", "campaign", campaign.name)
            return campaign_record(campaign, now)

    @retried
    def cancel_campaign(self, campaign_id: int) -> CampaignRecord:
        """Ends a campaign: waiting trials are cancelled at once, running ones through their workers.

        Twice is once.

        Raises:
            CampaignStateError: it has ended in another way.
        """
        now = self._clock()
        with self._db.write() as session:
            campaign = by_id(session, campaign_id, lock=True)
            if campaign.state != "CANCELLED":
                _refuse_if_ended(campaign, "cancelled")
                message = "cancelled by the user"
                _end(session, campaign, "CANCELLED", now, reason="cancelled", message=message)
                self._audit(session, "campaign.cancel", "campaign", campaign.name)
            return campaign_record(campaign, now)

    @retried
    def end_campaign(
        self,
        campaign_id: int,
        state: CampaignState,
        reason: str,
        message: str,
        *,
        budget: Mapping[str, Any] | None = None,
    ) -> CampaignRecord:
        """Ends a RUNNING campaign; trials still open are cancelled as by `cancel_campaign`.

        Args:
            campaign_id: of the campaign.
            state: how it ends.
            reason: why, in a word.
            message: why, in a sentence.
            budget: the one that was looked at, where the ending rests on it; None: it does not.

        Raises:
            CampaignStateError: it is not RUNNING, or its budget was changed (the user was quicker); or
                the state is no ending.
        """
        if state not in ("COMPLETED", "FAILED", "CANCELLED"):
            raise CampaignStateError(f"{state} does not end a campaign")
        now = self._clock()
        with self._db.write() as session:
            campaign = by_id(session, campaign_id, lock=True)
            if campaign.state != "RUNNING":
                raise CampaignStateError(
                    f"campaign {campaign.name!r} is {campaign.state}, not RUNNING; it is left as it is"
                )
            _refuse_other_budget(campaign, budget)
            _end(session, campaign, state, now, reason=reason, message=message)
            return campaign_record(campaign, now)

    @retried
    def cancel_pending(
        self, campaign_id: int, why: str, *, budget: Mapping[str, Any] | None = None
    ) -> int:
        """Cancels the campaign's waiting trials and says how many; the running ones go on.

        Raises:
            CampaignStateError: the budget is not the one that was looked at (the user was quicker).
        """
        now = self._clock()
        with self._db.write() as session:
            campaign = by_id(session, campaign_id, lock=True)
            _refuse_other_budget(campaign, budget)
            waiting = lock_trials(
                session, Trial.campaign_id == campaign_id, Trial.state == "PENDING"
            )
            for trial in waiting:
                cancel_trial(campaign, trial, now, why)
            return len(waiting)


def _hold_sources(session: Session, names: Sequence[str]) -> None:
    """Locks the campaigns that a new one starts from: whoever deletes one waits, and sees the new one then.

    Raises:
        CampaignInvalidError: one is not there, or no more.
    """
    if not names:
        return
    there = {campaign.name for campaign in lock_campaigns(session, Campaign.name.in_(names))}
    for name in names:
        if name not in there:
            raise CampaignInvalidError(f"there is no campaign named {name!r}", field="start_from")


def by_id(session: Session, campaign_id: int, *, lock: bool = False) -> Campaign:
    """A campaign's row.

    Raises:
        CampaignNotFoundError: there is none with this id.
    """
    campaign = (lock_campaign if lock else _get)(session, campaign_id)
    if campaign is None:
        raise campaign_not_found(campaign_id)
    return campaign


def campaign_not_found(reference: int | str) -> CampaignNotFoundError:
    """What is raised where no campaign has this id, or this name."""
    named = f"named {reference!r}" if isinstance(reference, str) else str(reference)
    return CampaignNotFoundError(f"there is no campaign {named}")


def _get(session: Session, campaign_id: int) -> Campaign | None:
    return session.get(Campaign, campaign_id)


def _open_campaign(session: Session, campaign_id: int, done: str) -> Campaign:
    campaign = by_id(session, campaign_id, lock=True)
    _refuse_if_ended(campaign, done)
    return campaign


def _refuse_if_ended(campaign: Campaign, done: str) -> None:
    if campaign.ended_at is not None:
        raise CampaignStateError(
            f"campaign {campaign.name!r} is {campaign.state} and cannot be {done}"
        )


def _refuse_other_budget(campaign: Campaign, budget: Mapping[str, Any] | None) -> None:
    if budget is not None and campaign.spec["budget"] != budget:
        raise CampaignStateError(
            f"the budget of campaign {campaign.name!r} was changed meanwhile; it goes on"
        )


def _stop_clock(campaign: Campaign, now: datetime) -> None:
    campaign.wall_time_s += clock_seconds(campaign, now)
    campaign.clock_at = None


def _end(
    session: Session,
    campaign: Campaign,
    state: CampaignState,
    now: datetime,
    *,
    reason: str,
    message: str,
) -> None:
    _stop_clock(campaign, now)
    campaign.state = state
    campaign.reason = reason
    campaign.message = message
    campaign.ended_at = now
    emit(session, campaign.id, "campaign.ended", now=now, state=state, reason=reason)
    still_open = Trial.state.in_(("PENDING", "RUNNING"))
    for trial in lock_trials(session, Trial.campaign_id == campaign.id, still_open):
        cancel_trial(campaign, trial, now, f"the campaign ended: {message or reason}")
