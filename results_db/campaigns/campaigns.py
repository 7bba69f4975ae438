"""Campaigns: created, listed, changed, paused, resumed, cancelled, ended, deleted.

The wall time of a campaign is the time that it is RUNNING with an active driver. The driver's ticks
advance it; a gap, because the driver or the service is down, counts for at most `MAX_CLOCK_GAP_S`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from datetime import datetime
from typing import Any, Final, cast

from sqlalchemy import ColumnElement, String, delete, false, func, or_, select, update
from sqlalchemy import cast as sql_cast
from sqlalchemy.orm import Session
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt

from layout_tuner.documents.reading import MAX_TEXT_LENGTH
from layout_tuner.errors import CampaignInvalidError
from layout_tuner.protocol.measurement import IMPORTED_TRAINER
from layout_tuner.protocol.states import TRIAL_STATES, TrialState
from layout_tuner.results_db.access.owners_and_groups import DEFAULT_SHARING, Sharing, share
from layout_tuner.results_db.access.quotas import refuse_beyond
from layout_tuner.results_db.access.tokens import note_owner
from layout_tuner.results_db.access.visibility import may_see
from layout_tuner.results_db.access.webhooks import notify
from layout_tuner.results_db.campaigns.filter import EVERY_CAMPAIGN, CampaignFilter
from layout_tuner.results_db.campaigns.idempotency_keys import RequestKey, campaign_of_key, keep_key
from layout_tuner.results_db.campaigns.start_from import dependents, may_calibrate
from layout_tuner.results_db.database.database import EYES_OF, refused_unless_unique
from layout_tuner.results_db.database.events import emit
from layout_tuner.results_db.database.locks import lock_campaign, lock_rows
from layout_tuner.results_db.database.retry import retried
from layout_tuner.results_db.database.store_base import StoreSection
from layout_tuner.results_db.errors import (
    CampaignDuplicateError,
    CampaignStateError,
    campaign_not_found,
)
from layout_tuner.results_db.models.service_tables import EventRow
from layout_tuner.results_db.models.tables import AnalysisRow, Campaign, Trial
from layout_tuner.results_db.records import (
    ENDED_CAMPAIGN_STATES,
    CampaignRecord,
    CampaignState,
    EventKind,
)
from layout_tuner.results_db.rows import campaign_record, own_first
from layout_tuner.results_db.trials.lifecycle import cancel_trial
from layout_tuner.results_db.usage import note_saved, set_use
from layout_tuner.results_db.wall_time import stop_clock
from layout_tuner.search_spaces.campaigns.campaign_settings import Budget, changed_budget
from layout_tuner.search_spaces.campaigns.stored_campaign import OBJECTIVES_FIELD, StoredCampaign
from layout_tuner.terminal.plurals import counted


def conditions(chosen: CampaignFilter) -> list[ColumnElement[bool]]:
    equal = {
        Campaign.model_name: chosen.model,
        Campaign.cluster_name: chosen.cluster,
        Campaign.strategy: chosen.strategy,
        Campaign.created_by: chosen.created_by,
        Campaign.visibility: chosen.visibility,
        Campaign.group: chosen.group,
    }
    found = [column == value for column, value in equal.items() if value is not None]
    if chosen.states:
        found.append(Campaign.state.in_(chosen.states))
    if chosen.objective is not None:
        # The first objective has a column; the others are in the description, in quotes.
        listed = sql_cast(Campaign.spec[OBJECTIVES_FIELD], String)
        in_spec = listed.contains(f'"{chosen.objective}"', autoescape=True)
        found.append(or_(Campaign.objective == chosen.objective, in_spec))
    if chosen.name_contains is not None:
        # In lower case: LIKE is case-sensitive on PostgreSQL, and not on SQLite.
        wanted = chosen.name_contains.lower()
        found.append(func.lower(Campaign.name).contains(wanted, autoescape=True))
    if chosen.created_after is not None:
        found.append(Campaign.created_at >= chosen.created_after)
    if chosen.created_before is not None:
        found.append(Campaign.created_at < chosen.created_before)
    return found


MOST_CHOICES: Final = 100
"""How often a free name is chosen again if another request takes it at the same moment. Each time
one request succeeds, so that this many campaigns can be created at once."""


def name_taken(name: str) -> CampaignDuplicateError:
    return CampaignDuplicateError(
        f"a campaign named {name!r} exists already; choose another name: `name` in the document, or "
        "--name of `campaign import` and `campaign clone`"
    )


def add_campaign(session: Session, row: Campaign, sharing: Sharing) -> None:
    """Writes a campaign, whose row gets an id.

    Raises:
        CampaignDuplicateError: the name is taken.
        CampaignInvalidError: its owner is not in its group.
    """
    share(session, row, sharing)
    taken = name_taken(row.name)
    if session.scalar(select(Campaign.id).where(Campaign.name == row.name).limit(1)) is not None:
        raise taken
    session.add(row)
    with (
        refused_unless_unique(taken, "campaigns", "created_by", "name"),
        refused_unless_unique(taken, "campaigns", "name", only="everyone"),
    ):
        session.flush()


class _NameTakenMeanwhileError(CampaignDuplicateError):
    """A name that was free when it was chosen was taken meanwhile; another can be chosen."""


def _first_free(session: Session, names: Sequence[str]) -> str:
    taken = set(session.scalars(select(Campaign.name).where(Campaign.name.in_(names))))
    free = next((name for name in names if name not in taken), None)
    if free is None:
        raise CampaignDuplicateError(
            f"all {len(names)} names from {names[0]!r} to {names[-1]!r} are taken; give the campaign a "
            "name of its own"
        )
    return free


class Campaigns(StoreSection):
    """The store's methods for campaigns; `CampaignNotFoundError` says that there is no such one."""

    @retried
    def create(
        self,
        spec: Mapping[str, Any],
        *,
        num_legal_layouts: int,
        request: RequestKey | None = None,
        notes: str = "",
        names: Sequence[str] = (),
        sharing: Sharing = DEFAULT_SHARING,
    ) -> CampaignRecord:
        """Creates a campaign, RUNNING.

        It has the first free one of `names`, if there are any, instead of the name in its
        description, which is resolved in full. A repeated request creates no second campaign.

        Raises:
            CampaignDuplicateError: the name is taken, or all of the names are.
            CampaignInvalidError: a campaign that it starts from does not exist, or was measured
                with another trainer, or its owner is not in its group.
            QuotaExceededError: it may use more than a quota leaves.
            IdempotencyKeyInUseError: the same request has just created one.
        """
        choosing = Retrying(
            retry=retry_if_exception_type(_NameTakenMeanwhileError),
            stop=stop_after_attempt(MOST_CHOICES),
            reraise=True,
        )
        return choosing(
            self._create_campaign, spec, num_legal_layouts, request, notes, names, sharing
        )

    def _create_campaign(
        self,
        spec: Mapping[str, Any],
        num_legal_layouts: int,
        request: RequestKey | None,
        notes: str,
        names: Sequence[str],
        sharing: Sharing,
    ) -> CampaignRecord:
        now = self._clock()
        stored = StoredCampaign(document=spec)
        row = Campaign(
            **stored.columns(),
            state="RUNNING",
            num_legal_layouts=num_legal_layouts,
            created_at=now,
            created_by=self._actor.owner,
            notes=notes,
        )
        with self._db.write() as session:
            note_owner(session, self._actor.owner, now, self._actor.name)
            _hold_sources(session, stored.start_from, row)
            if names:
                row.name = _first_free(session, names)
                row.spec = {**spec, "name": row.name}
            try:
                add_campaign(session, row, sharing)
            except CampaignDuplicateError as error:
                if not names:
                    raise
                # On PostgreSQL another transaction may have taken the name since the query.
                raise _NameTakenMeanwhileError(str(error)) from error
            refuse_beyond(session, row, now)
            if request is not None:
                keep_key(session, self._actor.owner, request, row.id, now)
            emit(session, row.id, "campaign.created", now=now, state=row.state)
            self._audit(session, "campaign.create", "campaign", row.name)
            return campaign_record(row, now)

    def get(self, campaign_id: int) -> CampaignRecord:
        with self._db.read() as session:
            return _shown(session, by_id(session, campaign_id), self._clock())

    def of_request(self, request: RequestKey) -> CampaignRecord | None:
        """The campaign that an earlier request of this sender and key created; None: there is none.

        Raises:
            IdempotencyKeyReusedError: the key was sent with another request.
        """
        with self._db.read() as session:
            row = campaign_of_key(session, self._actor.owner, request)
            return None if row is None else campaign_record(row, self._clock())

    def own_warnings(self, texts: Sequence[str]) -> set[str]:
        """Those of some texts that stored campaigns have as warnings, which the service wrote."""
        spec = sql_cast(Campaign.spec, String)
        # SQLite refuses a pattern that is much longer than any warning.
        sought = {text for text in texts if len(text) <= MAX_TEXT_LENGTH}
        holding = (spec.contains(json.dumps(text), autoescape=True) for text in sought)
        with self._db.read() as session:
            rows = session.scalars(select(Campaign.spec).where(or_(false(), *holding))).all()
        found = (StoredCampaign(document=row).warnings for row in rows)
        return {text for warnings in found for text in warnings if text in sought}

    def by_name(self, name: str) -> CampaignRecord:
        with self._db.read() as session:
            query = select(Campaign).where(Campaign.name == name)
            row = session.scalar(query.order_by(*own_first(self._actor.owner)).limit(1))
            if row is None:
                raise campaign_not_found(name)
            return _shown(session, row, self._clock())

    def find(
        self,
        *,
        chosen: CampaignFilter = EVERY_CAMPAIGN,
        before_id: int | None = None,
        limit: int | None = None,
        offset: int = 0,
    ) -> list[CampaignRecord]:
        """Campaigns that match the filter, the newest first; `offset` of them are skipped."""
        query = select(Campaign).where(*conditions(chosen)).order_by(Campaign.id.desc())
        if before_id is not None:
            query = query.where(Campaign.id < before_id)
        query = query.limit(limit).offset(offset or None)
        now = self._clock()
        with self._db.read() as session:
            return [_shown(session, row, now) for row in session.scalars(query).all()]

    def to_drive(self) -> list[CampaignRecord]:
        """The RUNNING campaigns, the oldest first."""
        return self.find(chosen=CampaignFilter(states=("RUNNING",)))[::-1]

    def count_trials(self, campaign_id: int) -> dict[TrialState, int]:
        """The number of the campaign's trials in each state, including zeros."""
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

    def pause(self, campaign_id: int) -> CampaignRecord:
        """Stops leasing trials; running ones finish. CampaignStateError if it has ended."""
        return self._switch(campaign_id, "RUNNING", "PAUSED", "pause", "campaign.paused")

    def resume(self, campaign_id: int) -> CampaignRecord:
        """Resumes a paused campaign; can be repeated. CampaignStateError if it has ended.

        Trials that fail because a host lacks a resource are counted anew.
        """
        return self._switch(campaign_id, "PAUSED", "RUNNING", "resume", "campaign.resumed")

    @retried
    def _switch(
        self,
        campaign_id: int,
        before: CampaignState,
        after: CampaignState,
        action: str,
        kind: EventKind,
    ) -> CampaignRecord:
        now = self._clock()
        with self._db.write() as session:
            campaign = lock_campaign(session, campaign_id)
            _refuse_if_ended(campaign, kind.removeprefix("campaign."))
            if campaign.state == before:
                stop_clock(campaign, now)
                campaign.state = after
                if after == "RUNNING":
                    campaign.host_failures, campaign.message = 0, ""
                emit(session, campaign.id, kind, now=now, state=campaign.state)
                self._audit(session, f"campaign.{action}", "campaign", campaign.name)
            return campaign_record(campaign, now)

    @retried
    def cancel(self, campaign_id: int) -> CampaignRecord:
        """Ends a campaign: waiting trials are cancelled at once, running ones by their workers.

        Repeating it changes nothing; CampaignStateError if the campaign has ended in another way.
        """
        now = self._clock()
        with self._db.write() as session:
            campaign = lock_campaign(session, campaign_id)
            if campaign.state != "CANCELLED":
                _refuse_if_ended(campaign, "cancelled")
                message = "cancelled by the user"
                _end(session, campaign, "CANCELLED", now, reason="cancelled", message=message)
                self._audit(session, "campaign.cancel", "campaign", campaign.name)
            return campaign_record(campaign, now)

    @retried
    def end(
        self,
        campaign_id: int,
        state: CampaignState,
        reason: str,
        message: str,
        *,
        budget: Budget | None = None,
    ) -> CampaignRecord:
        """Ends a RUNNING campaign; open trials are cancelled as by `cancel_campaign`.

        The decision to end it may rest on a budget, which a user may have changed meanwhile.

        Raises:
            CampaignStateError: it is not RUNNING, or its budget was changed meanwhile by a user, or
                the state is not final.
        """
        if state not in ENDED_CAMPAIGN_STATES:
            raise CampaignStateError(f"{state} does not end a campaign")
        now = self._clock()
        with self._db.write() as session:
            campaign = lock_campaign(session, campaign_id)
            if campaign.state != "RUNNING":
                raise CampaignStateError(
                    f"campaign {campaign.name!r} is {campaign.state}, not RUNNING; it is left as it is"
                )
            _refuse_other_budget(campaign, budget)
            _end(session, campaign, state, now, reason=reason, message=message)
            return campaign_record(campaign, now)

    @retried
    def note_waiting(self, campaign_id: int, why: str) -> None:
        """Stores why the driver has not opened a campaign's search; empty: it has, or need not."""
        with self._db.write() as session:
            session.execute(
                update(Campaign).where(Campaign.id == campaign_id).values(waiting_because=why)
            )

    @retried
    def cancel_pending(self, campaign_id: int, why: str, *, budget: Budget | None = None) -> int:
        """Cancels the campaign's waiting trials, and returns their number; running ones continue.

        Raises:
            CampaignStateError: the budget was changed meanwhile by a user.
        """
        now = self._clock()
        with self._db.write() as session:
            campaign = lock_campaign(session, campaign_id)
            _refuse_other_budget(campaign, budget)
            waiting = lock_rows(
                session, Trial, Trial.campaign_id == campaign_id, Trial.state == "PENDING"
            )
            for trial in waiting:
                cancel_trial(campaign, trial, now, why)
            return len(waiting)

    @retried
    def update(
        self,
        campaign_id: int,
        *,
        budget: Mapping[str, Any] | None = None,
        notes: str | None = None,
        sharing: Mapping[str, Any] | None = None,
    ) -> CampaignRecord:
        """Changes a campaign's notes and sharing, and its budget while it is open; all or nothing.

        Bounds that are not named stay, and None removes one; a budget or notes that are None stay.
        `sharing` has the fields of a `Sharing` that change.

        Raises:
            CampaignStateError: it has ended, and the budget is to be changed.
            CampaignInvalidError: a bound is unknown or out of range, or none would be left, or its
                owner is not in its group.
            CampaignDuplicateError: everyone is to see it, and sees another one of its name.
        """
        now = self._clock()
        with self._db.write() as session:
            campaign = lock_campaign(session, campaign_id)
            changes: dict[str, Any] = {}
            if budget is not None:
                before, after = _change_budget(campaign, budget)
                if before != after:
                    changes["budget"] = {"from": before, "to": after}
            if notes is not None and notes != campaign.notes:
                campaign.notes = notes
                changes["notes"] = len(notes)
            if sharing:
                changes |= _change_sharing(session, campaign, sharing)
            if changes:
                emit(session, campaign.id, "campaign.changed", now=now, fields=sorted(changes))
                self._audit(session, "campaign.update", "campaign", campaign.name, **changes)
            return campaign_record(campaign, now)

    @retried
    def delete(self, campaign_id: int) -> None:
        """Deletes a campaign that has ended, with all of its measurements.

        Raises:
            CampaignStateError: it has not ended, a worker still has one of its trials, or an open
                campaign starts from it.
        """
        now = self._clock()
        with self._db.write() as session:
            campaign = lock_campaign(session, campaign_id)
            _refuse_deletion(session, campaign)
            of_it = Trial.campaign_id == campaign_id
            num_trials = session.scalar(select(func.count()).where(of_it))
            set_use(session, campaign, visibility=campaign.visibility)
            # Before the trials, to which its rows refer.
            session.execute(delete(AnalysisRow).where(AnalysisRow.campaign_id == campaign_id))
            session.execute(delete(EventRow).where(EventRow.campaign_id == campaign_id))
            session.execute(delete(Campaign).where(Campaign.id == campaign_id))
            emit(session, campaign_id, "campaign.deleted", now=now, of=campaign, name=campaign.name)
            self._audit(
                session,
                "campaign.delete",
                "campaign",
                campaign.name,
                id=campaign_id,
                trials=num_trials,
                created_by=campaign.created_by,
            )


def _shown(session: Session, row: Campaign, now: datetime) -> CampaignRecord:
    """A campaign's record; of those that it starts from, with the names that the reader sees."""
    record = campaign_record(row, now)
    names = record.stored.start_from
    if not names or not session.info[EYES_OF]:
        return record
    # Not one of the same name that is not the source: it would tell of the hidden one.
    is_source = (may_see(row.created_by), Campaign.created_at <= row.created_at)
    named = select(Campaign.name).where(Campaign.name.in_(names), *is_source)
    seen = set(session.scalars(named))
    shown = {**row.spec, "start_from": [name for name in names if name in seen]}
    return replace(record, stored=StoredCampaign(document=shown))


def _hold_sources(session: Session, names: Sequence[str], campaign: Campaign) -> None:
    """Locks the campaigns that a new one starts from, so that none is deleted meanwhile.

    They are those that its owner sees as a member: an administrator sees more.
    """
    if not names:
        return
    owner, trainer = campaign.created_by, campaign.trainer
    is_named = Campaign.name.in_(names) & may_see(owner)
    locked = sorted(lock_rows(session, Campaign, is_named), key=lambda row: row.created_by != owner)
    there = {row.name: row for row in reversed(locked)}
    usable_ids = set(session.scalars(select(Campaign.id).where(is_named, may_calibrate(trainer))))
    usable = {row.name for row in there.values() if row.id in usable_ids}
    for name in names:
        if name not in there:
            raise CampaignInvalidError(f"there is no campaign named {name!r}", field="start_from")
        if name not in usable and there[name].trainer == IMPORTED_TRAINER:
            raise CampaignInvalidError(
                f"the imported table of campaign {name!r} is simulated: it calibrates no campaign",
                field="start_from",
            )
        if name not in usable:
            raise CampaignInvalidError(
                f"campaign {name!r} measured with trainer {there[name].trainer!r}, and this one would "
                f"with {trainer!r}: what one trainer measured says nothing certain about another",
                field="start_from",
            )


def by_id(session: Session, campaign_id: int) -> Campaign:
    campaign = session.get(Campaign, campaign_id)
    if campaign is None:
        raise campaign_not_found(campaign_id)
    return campaign


def _refuse_if_ended(campaign: Campaign, done: str) -> None:
    if campaign.ended_at is not None:
        raise CampaignStateError(
            f"campaign {campaign.name!r} is {campaign.state} and cannot be {done}"
        )


def _refuse_other_budget(campaign: Campaign, budget: Budget | None) -> None:
    if budget is not None and campaign.stored.budget != budget:
        raise CampaignStateError(
            f"the budget of campaign {campaign.name!r} was changed meanwhile; it goes on"
        )


def _end(
    session: Session,
    campaign: Campaign,
    state: CampaignState,
    now: datetime,
    *,
    reason: str,
    message: str,
) -> None:
    stop_clock(campaign, now)
    campaign.state = state
    campaign.reason = reason
    campaign.message = message
    campaign.ended_at = now
    emit(session, campaign.id, "campaign.ended", now=now, state=state, reason=reason)
    said = f"Campaign {campaign.name} is {state}: {message or reason}"
    data = {"state": state, "reason": reason, "text": said}
    notify(session, "campaign.ended", now=now, campaign=campaign, data=data)
    still_open = Trial.state.in_(("PENDING", "RUNNING"))
    for trial in lock_rows(session, Trial, Trial.campaign_id == campaign.id, still_open):
        cancel_trial(campaign, trial, now, f"the campaign ended: {message or reason}")
    note_saved(session, campaign, now)


def _change_sharing(
    session: Session, campaign: Campaign, changes: Mapping[str, Any]
) -> dict[str, Any]:
    """Sets what changes of a campaign's sharing; returns the old and the new value of each."""
    before = {each.name: getattr(campaign, each.name) for each in fields(Sharing)}
    changes = {name: value for name, value in changes.items() if value != before[name]}
    wanted = Sharing(**{**before, **changes})
    if "group" in changes or changes.get("visibility") == "group":
        share(session, campaign, wanted)
        set_use(session, campaign, group=campaign.group)
    campaign.visibility, campaign.priority = wanted.visibility, wanted.priority
    with refused_unless_unique(name_taken(campaign.name), "campaigns", "name", only="everyone"):
        session.flush()
    after = {name: getattr(campaign, name) for name in before}
    return {k: {"from": v, "to": after[k]} for k, v in before.items() if v != after[k]}


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
    stored = campaign.stored
    before = asdict(stored.budget)
    after = changed_budget(
        before,
        changes,
        strategy=campaign.strategy,
        is_simulated=stored.simulated is not None,
    )
    # A new mapping: SQLAlchemy does not detect a change inside the old one.
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
    for _, name, state in dependents(session, campaign.id):
        if state not in ENDED_CAMPAIGN_STATES:
            raise CampaignStateError(
                f"campaign {name!r} starts from {campaign.name!r} and has not ended; delete it "
                "when that has"
            )
