"""Outcomes: how a probe's end becomes a trial's, once, however often and late it is posted."""

from __future__ import annotations

import math
from dataclasses import fields
from datetime import datetime
from typing import Final, cast

from sqlalchemy.orm import Session

from results_db.errors import AttemptNotFoundError, MeasurementInvalidError, TrialNotFoundError
from results_db.lifecycle import (
    charge,
    close_attempt,
    count_lost_attempt,
    end_trial,
    locked_campaign,
    put_back_or_cancel,
    running_attempt,
)
from results_db.models import (
    Attempt,
    Campaign,
    EnvironmentRow,
    IterationRow,
    MeasurementRow,
    StageMemory,
    Trial,
    TrialLog,
)
from results_db.part import StorePart
from results_db.records import ENDED_TRIAL_STATES, OutcomeReceipt, TrialState
from results_db.rows import environment_columns, measurement_columns
from search_spaces.outcome import Iteration, Measurement, Outcome

_STATES: Final[dict[str, TrialState]] = {
    "completed": "COMPLETED",
    "infeasible": "INFEASIBLE",
    "failed": "FAILED",
}

_MAX_INTEGER: Final = 2**63 - 1


class Outcomes(StorePart):
    """The outcomes' part of the store."""

    def post_outcome(self, trial_id: int, attempt: int, outcome: Outcome) -> OutcomeReceipt:
        """Takes the outcome of one attempt. Posting it again changes nothing.

        One that arrives after its lease was lost is taken all the same while the trial has not ended: a
        measurement is a measurement. Two kinds teach nothing about the layout and return the trial
        to PENDING instead of ending it: `node_lost` (a lost attempt), and `cancelled` where nobody
        asked for it (the worker gave up its lease).

        Raises:
            TrialNotFoundError: there is no such trial.
            AttemptNotFoundError: the trial never had this attempt.
            MeasurementInvalidError: a number is not finite, or a pipeline stage has no peak.
        """
        now = self._clock()
        with self._db.write() as session:
            trial = session.get(Trial, trial_id, with_for_update=True)
            if trial is None:
                raise TrialNotFoundError(f"there is no trial {trial_id}")
            row = session.get(Attempt, (trial_id, attempt))
            if row is None:
                raise AttemptNotFoundError(
                    f"trial {trial_id} has no attempt {attempt}; its latest is {trial.attempt}"
                )
            if row.ending == "reported":
                return OutcomeReceipt(accepted=True, state=cast("TrialState", trial.state))
            _check(outcome, trial)
            campaign = locked_campaign(session, trial.campaign_id)
            accepted = _take(session, campaign, trial, row, outcome, now)
            return OutcomeReceipt(accepted=accepted, state=cast("TrialState", trial.state))


def _take(
    session: Session,
    campaign: Campaign,
    trial: Trial,
    attempt: Attempt,
    outcome: Outcome,
    now: datetime,
) -> bool:
    # What it really held, in place of what was known before; paid for even when it came too late.
    charge(campaign, trial, attempt, outcome.duration_s * trial.num_nodes)
    if trial.state in ENDED_TRIAL_STATES:
        return False
    current = trial.state == "RUNNING" and trial.attempt == attempt.attempt
    teaches_nothing = outcome.reason in ("node_lost", "cancelled")
    if teaches_nothing and not current:
        return False
    was_lost = attempt.ending == "lost"
    attempt.ending = "reported"
    attempt.ended_at = attempt.seen_at = now
    if teaches_nothing:
        _give_back(campaign, trial, outcome, now)
        return True
    if trial.state == "RUNNING" and not current:
        # A late outcome of an earlier attempt; the worker of this one hears it with its next beat.
        close_attempt(campaign, trial, running_attempt(session, trial), "superseded", now)
    if was_lost:
        # It was not lost after all.
        trial.lost_attempts -= 1
    end_trial(
        campaign,
        trial,
        _STATES[outcome.state],
        now,
        reason=outcome.reason,
        message=outcome.message,
        node=outcome.node,
    )
    _keep(session, trial, outcome)
    return True


def _give_back(campaign: Campaign, trial: Trial, outcome: Outcome, now: datetime) -> None:
    if outcome.reason == "node_lost":
        count_lost_attempt(campaign, trial, now, outcome.message or "a node was lost")
    else:
        put_back_or_cancel(campaign, trial, now, outcome.message or "stopped by its worker")


def _keep(session: Session, trial: Trial, outcome: Outcome) -> None:
    if outcome.log_tail:
        session.add(TrialLog(trial_id=trial.id, tail=outcome.log_tail))
    if outcome.environment is not None:
        session.add(EnvironmentRow(trial_id=trial.id, **environment_columns(outcome.environment)))
    measurement = outcome.measurement
    if measurement is None:
        return
    trial.iterations_done = len(measurement.iterations)
    session.flush()
    session.add(
        MeasurementRow(
            trial_id=trial.id, campaign_id=trial.campaign_id, **measurement_columns(measurement)
        )
    )
    session.flush()
    session.add_all(
        StageMemory(trial_id=trial.id, stage=stage, peak_memory_bytes=peak)
        for stage, peak in enumerate(measurement.peak_memory_bytes_by_stage)
    )
    session.add_all(
        IterationRow(
            trial_id=trial.id,
            index=iteration.index,
            kind=iteration.kind,
            step_time_s=iteration.step_time_s,
            loss=iteration.loss,
            grad_norm=iteration.grad_norm,
        )
        for iteration in measurement.iterations
    )


def _check(outcome: Outcome, trial: Trial) -> None:
    _refuse_impossible("the outcome", outcome)
    if outcome.duration_s < 0:
        raise MeasurementInvalidError(f"the outcome has duration_s={outcome.duration_s}")
    measurement = outcome.measurement
    if measurement is None:
        return
    _refuse_impossible("the measurement", measurement)
    for position, iteration in enumerate(measurement.iterations):
        _refuse_impossible(f"iteration {iteration.index}", iteration)
        if iteration.index != position:
            raise MeasurementInvalidError(
                f"iteration {iteration.index} stands at place {position} of the measurement"
            )
    peaks = measurement.peak_memory_bytes_by_stage
    if len(peaks) != trial.pp:
        raise MeasurementInvalidError(
            f"the measurement has the peak memory of {len(peaks)} stages; "
            f"the layout has pp={trial.pp}"
        )
    if any(abs(peak) > _MAX_INTEGER for peak in peaks):
        raise MeasurementInvalidError(f"the peaks {peaks} do not fit 64 bits")


def _refuse_impossible(what: str, value: Outcome | Measurement | Iteration) -> None:
    """Refuses numbers that a database cannot hold: NaN, infinities, more than 64 bits."""
    for field in fields(value):
        number = getattr(value, field.name)
        if isinstance(number, float) and not math.isfinite(number):
            raise MeasurementInvalidError(f"{what} has {field.name}={number}, which is not finite")
        if isinstance(number, int) and abs(number) > _MAX_INTEGER:
            raise MeasurementInvalidError(f"{what} has {field.name}={number}, over 64 bits")
