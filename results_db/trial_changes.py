"""What becomes of trials by somebody's wish: measured again, tried again, cancelled."""

from __future__ import annotations

from typing import Final

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from results_db.errors import TrialNotFoundError, TrialStateError
from results_db.lifecycle import cancel_trial
from results_db.locks import lock_campaign_of, lock_trial
from results_db.models import Campaign, Trial
from results_db.part import StorePart
from results_db.records import ENDED_TRIAL_STATES, TrialRecord
from results_db.retry import retried
from results_db.rows import WITH_MEASUREMENT, trial_layout, trial_record
from results_db.trials import add_row

MAX_TIMES: Final = 20
"""How often a trial may be measured again at one wish."""

_NOT_MEASURED: Final = frozenset({"FAILED", "INFEASIBLE", "CANCELLED"})


class TrialChanges(StorePart):
    """The part of the store that repeats and cancels trials."""

    @retried
    def repeat_trial(self, trial_id: int) -> TrialRecord:
        """Writes a new trial of the same layout as one that has ended: the search's own repeat.

        Raises:
            TrialNotFoundError: there is no such trial.
            TrialStateError: the trial has not ended.
            CampaignStateError: its campaign has ended.
        """
        with self._db.write() as session:
            campaign, trial = _locked(session, trial_id)
            if trial.state not in ENDED_TRIAL_STATES:
                raise TrialStateError(
                    f"trial {trial_id} is {trial.state}; only an ended trial is repeated"
                )
            return trial_record(self._repeat(session, campaign, trial))

    @retried
    def measure_again(self, trial_id: int, *, times: int = 1) -> list[TrialRecord]:
        """Writes trials that measure the layout of a COMPLETED one again.

        Raises:
            TrialNotFoundError: there is no such trial.
            TrialStateError: it is not COMPLETED.
            CampaignStateError: its campaign has ended.
        """
        assert 1 <= times <= MAX_TIMES, f"{times} times"
        with self._db.write() as session:
            campaign, trial = _locked(session, trial_id)
            if trial.state != "COMPLETED":
                way_out = "requeue it" if trial.state in _NOT_MEASURED else "wait for its end"
                raise TrialStateError(
                    f"trial {trial_id} is {trial.state}; only a COMPLETED one is measured again: {way_out}"
                )
            added = [self._repeat(session, campaign, trial) for _ in range(times)]
            numbers = [each.number for each in added]
            self._audit_trial(session, "trial.repeat", campaign, trial, added=numbers)
            return [trial_record(each) for each in added]

    @retried
    def requeue_trial(self, trial_id: int) -> TrialRecord:
        """Writes a new trial of the layout of one that ended without a measurement that counts.

        Raises:
            TrialNotFoundError: there is no such trial.
            TrialStateError: it is COMPLETED, or has not ended, or the layout is waiting or running.
            CampaignStateError: its campaign has ended.
        """
        with self._db.write() as session:
            campaign, trial = _locked(session, trial_id)
            if trial.state not in _NOT_MEASURED:
                way_out = "repeat it" if trial.state == "COMPLETED" else "it goes on"
                raise TrialStateError(
                    f"trial {trial_id} is {trial.state}; only a FAILED, INFEASIBLE or CANCELLED one is "
                    f"queued again: {way_out}"
                )
            _refuse_open(session, trial)
            added = self._repeat(session, campaign, trial)
            self._audit_trial(session, "trial.requeue", campaign, trial, added=added.number)
            return trial_record(added)

    @retried
    def cancel_trial(self, trial_id: int) -> TrialRecord:
        """Cancels a trial: at once when it waits; one that runs is stopped by its worker. Twice is once.

        Raises:
            TrialNotFoundError: there is no such trial.
            TrialStateError: it has ended in another way.
        """
        with self._db.write() as session:
            campaign, trial = _locked(session, trial_id)
            if trial.state in ENDED_TRIAL_STATES and trial.state != "CANCELLED":
                raise TrialStateError(f"trial {trial_id} has ended: it is {trial.state}")
            if trial.state != "CANCELLED" and not trial.cancel_requested:
                cancel_trial(campaign, trial, self._clock(), "cancelled by the user")
                self._audit_trial(session, "trial.cancel", campaign, trial)
            return trial_record(trial)

    def _repeat(self, session: Session, campaign: Campaign, trial: Trial) -> Trial:
        last = session.scalar(
            select(func.max(Trial.repeat_index)).where(
                Trial.campaign_id == campaign.id, Trial.layout_key == trial.layout_key
            )
        )
        return add_row(
            session,
            campaign,
            trial_layout(trial),
            self._clock(),
            repeat_of=trial.id,
            repeat_index=(last or 0) + 1,
        )

    def _audit_trial(
        self,
        session: Session,
        action: str,
        campaign: Campaign,
        trial: Trial,
        *,
        added: int | list[int] | None = None,
    ) -> None:
        details = {"campaign": campaign.name, "number": trial.number, "added": added}
        given = {name: value for name, value in details.items() if value is not None}
        self._audit(session, action, "trial", trial.id, **given)


def _locked(session: Session, trial_id: int) -> tuple[Campaign, Trial]:
    """A trial and its campaign, both locked; the campaign first, as everywhere.

    Raises:
        TrialNotFoundError: there is no such trial.
    """
    campaign = lock_campaign_of(session, trial_id)
    trial = lock_trial(session, trial_id, WITH_MEASUREMENT)
    if campaign is None or trial is None:
        raise TrialNotFoundError(f"there is no trial {trial_id}")
    return campaign, trial


def _refuse_open(session: Session, trial: Trial) -> None:
    """The wish may have come twice; a second trial of what waits would teach nothing."""
    query = select(Trial.number, Trial.state).where(
        Trial.campaign_id == trial.campaign_id,
        Trial.layout_key == trial.layout_key,
        Trial.state.in_(("PENDING", "RUNNING")),
    )
    row = session.execute(query.order_by(Trial.number).limit(1)).first()
    if row is not None:
        raise TrialStateError(
            f"trial {trial.id} is not queued again: trial number {row.number} is of the same layout, and "
            f"{row.state}"
        )
