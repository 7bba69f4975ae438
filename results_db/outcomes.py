"""Outcomes: how a probe's end becomes a trial's, once, however often and late it is posted."""

from __future__ import annotations

import math
from dataclasses import asdict
from datetime import datetime
from typing import Final, cast

from sqlalchemy.orm import Session

from results_db.cost import Cost
from results_db.divergence import settle
from results_db.errors import AttemptNotFoundError, MeasurementInvalidError, TrialNotFoundError
from results_db.lifecycle import (
    charge,
    close_attempt,
    count_lost_attempt,
    end_trial,
    nodes_of,
    put_back_or_cancel,
    running_attempt,
)
from results_db.locks import lock_campaign_of, lock_trial
from results_db.models import (
    Attempt,
    BreakdownRow,
    Campaign,
    EnvironmentRow,
    IterationRow,
    MeasurementRow,
    Trial,
    TrialLog,
)
from results_db.part import StorePart
from results_db.records import ENDED_TRIAL_STATES, OutcomeReceipt, TrialState
from results_db.retry import retried
from results_db.rows import (
    WITH_MEASUREMENT,
    environment_columns,
    measurement_columns,
    stage_rows,
)
from results_db.standing_upkeep import keep_standings
from results_db.worker_tables import Worker
from search_spaces.outcome import Measurement, Outcome

_STATES: Final[dict[str, TrialState]] = {
    "completed": "COMPLETED",
    "infeasible": "INFEASIBLE",
    "failed": "FAILED",
}

_TEACHES_NOTHING: Final = ("node_lost", "cancelled")
"""Reasons that say nothing about the layout."""

_RATE_TOLERANCE: Final = 1e-6
"""How far two figures that follow from each other may be apart: rounding, nothing more."""


class Outcomes(StorePart):
    """The outcomes' part of the store."""

    @retried
    def post_outcome(
        self,
        trial_id: int,
        attempt: int,
        outcome: Outcome,
        *,
        nodes_held: float | None = None,
        iterations_s: float | None = None,
    ) -> OutcomeReceipt:
        """Takes the outcome of one attempt. Posting it again changes nothing.

        One that arrives after its lease was lost is taken all the same while the trial has not ended: a
        measurement is a measurement. Two kinds teach nothing about the layout and return the trial
        to PENDING instead of ending it: `node_lost` (a lost attempt), and `cancelled` where nobody
        asked for it (the worker gave up its lease).

        A measurement whose losses are off those of the campaign's other layouts is kept, and its trial
        is FAILED as diverged; if it shows that others were the odd ones, those are.

        Args:
            trial_id: whose attempt it is.
            attempt: which one.
            outcome: how it ended.
            nodes_held: nodes that it held, a part of one included; None: as its worker said in its
                heartbeats, or those of its layout.
            iterations_s: seconds of its iterations; None: those of its measurement.

        Raises:
            TrialNotFoundError: there is no such trial.
            AttemptNotFoundError: the trial never had this attempt.
            MeasurementInvalidError: its figures contradict each other, or the layout.
        """
        now = self._clock()
        with self._db.write() as session:
            campaign = lock_campaign_of(session, trial_id)
            trial = lock_trial(session, trial_id, WITH_MEASUREMENT)
            if campaign is None or trial is None:
                raise TrialNotFoundError(f"there is no trial {trial_id}")
            row = session.get(Attempt, (trial_id, attempt))
            if row is None:
                raise AttemptNotFoundError(
                    f"trial {trial_id} has no attempt {attempt}; its latest is {trial.attempt}"
                )
            if row.ending == "reported":
                return OutcomeReceipt(
                    accepted=_is_kept(trial, row, outcome), state=cast("TrialState", trial.state)
                )
            if outcome.measurement is not None:
                _check(outcome.measurement, trial)
            row.nodes_held = row.nodes_held if nodes_held is None else nodes_held
            row.iterations_s = iterations_s
            accepted = _take(session, campaign, trial, row, outcome, now)
            return OutcomeReceipt(accepted=accepted, state=cast("TrialState", trial.state))


def _is_kept(trial: Trial, attempt: Attempt, outcome: Outcome) -> bool:
    """Whether an attempt that has reported says the same again; anything else is dropped."""
    if outcome.reason in _TEACHES_NOTHING:
        return True
    if trial.ended_at != attempt.ended_at:
        return False
    if outcome.measurement is not None or trial.measurement is not None:
        # Kept whatever the trial's state became when its losses were compared.
        return outcome.measurement is not None and trial.measurement is not None
    return (trial.state, trial.reason) == (_STATES[outcome.state], outcome.reason)


def _take(
    session: Session,
    campaign: Campaign,
    trial: Trial,
    attempt: Attempt,
    outcome: Outcome,
    now: datetime,
) -> bool:
    # What it really held, in place of what was known before; paid for even when it came too late.
    charge(campaign, trial, attempt, _cost(session, trial, attempt, outcome))
    if trial.state in ENDED_TRIAL_STATES:
        return False
    current = trial.state == "RUNNING" and trial.attempt == attempt.attempt
    teaches_nothing = outcome.reason in _TEACHES_NOTHING
    if teaches_nothing and not current:
        return False
    was_lost = attempt.ending == "lost"
    attempt.ending = "reported"
    attempt.ended_at = attempt.seen_at = now
    if teaches_nothing:
        _give_back(campaign, trial, outcome, now)
        if trial.state in ENDED_TRIAL_STATES:
            _keep(session, trial, outcome)
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
    if outcome.measurement is not None:
        keep_standings(session, campaign, settle(session, campaign, trial))
    return True


def _cost(session: Session, trial: Trial, attempt: Attempt, outcome: Outcome) -> Cost:
    held_s, nodes = outcome.duration_s, nodes_of(trial, attempt)
    if trial.state in ENDED_TRIAL_STATES or outcome.reason in _TEACHES_NOTHING:
        return Cost.of_loss(held_s=held_s, nodes=nodes)
    iterations_s = attempt.iterations_s
    if iterations_s is None:
        iterations = () if outcome.measurement is None else outcome.measurement.iterations
        iterations_s = sum(iteration.step_time_s for iteration in iterations)
    worker = session.get_one(Worker, attempt.worker_id)
    return Cost.of_probe(
        held_s=held_s,
        nodes=nodes,
        used_nodes=trial.num_devices / worker.devices_per_node,
        iterations_s=iterations_s,
    )


def _give_back(campaign: Campaign, trial: Trial, outcome: Outcome, now: datetime) -> None:
    if outcome.reason == "node_lost":
        why = outcome.message or "a node was lost"
        count_lost_attempt(campaign, trial, now, why, node=outcome.node)
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
    if measurement.breakdown is not None:
        session.add(BreakdownRow(trial_id=trial.id, **asdict(measurement.breakdown)))
    session.add_all(stage_rows(trial.id, measurement))
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


def _check(measurement: Measurement, trial: Trial) -> None:
    """Refuses what each figure alone, which `Measurement` has looked at, does not tell."""
    for position, iteration in enumerate(measurement.iterations):
        if iteration.index != position:
            raise MeasurementInvalidError(
                f"iteration {iteration.index} stands at place {position} of the measurement"
            )
    if len(measurement.peak_memory_bytes_by_stage) != trial.pp:
        raise MeasurementInvalidError(
            "the measurement has the peak memory of "
            f"{len(measurement.peak_memory_bytes_by_stage)} stages; the layout has pp={trial.pp}"
        )
    tokens = measurement.tokens_per_s * measurement.step_time_s
    if not math.isclose(tokens, measurement.tokens_per_step, rel_tol=_RATE_TOLERANCE):
        raise MeasurementInvalidError(
            f"the measurement has tokens_per_s={measurement.tokens_per_s}, which is not "
            f"tokens_per_step={measurement.tokens_per_step} over "
            f"step_time_s={measurement.step_time_s}"
        )
    rate = measurement.tokens_per_s_per_device * trial.num_devices
    if not math.isclose(rate, measurement.tokens_per_s, rel_tol=_RATE_TOLERANCE):
        raise MeasurementInvalidError(
            f"the measurement has tokens_per_s_per_device={measurement.tokens_per_s_per_device}, "
            f"which is not tokens_per_s={measurement.tokens_per_s} over the {trial.num_devices} "
            "devices of the layout"
        )
