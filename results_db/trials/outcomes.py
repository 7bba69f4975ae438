"""A batch of outcomes in one transaction: loaded together, taken one by one, written together.

Workers post when their probes end, and each would pay for a transaction of two dozen statements. What waits
at the same time goes together (decision 34); what becomes of a trial is the same.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, cast

from sqlalchemy import select
from sqlalchemy.orm import Session

from results_db.cost import Cost
from results_db.divergence import settle
from results_db.errors import (
    AttemptNotFoundError,
    MeasurementInvalidError,
    ResultsDbError,
    TrialNotFoundError,
)
from results_db.kinship import Kinship, KnownLosses
from results_db.lifecycle import (
    charge,
    close_attempt,
    count_lost_attempt,
    end_trial,
    nodes_of,
    put_back_or_cancel,
)
from results_db.locks import lock_campaigns, lock_trials
from results_db.models import Attempt, Campaign, MeasurementRow, Trial
from results_db.outcome_rows import OutcomeRows
from results_db.records import ENDED_TRIAL_STATES, OutcomeReceipt, TrialState
from results_db.standing_first_runs import FirstRuns
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


@dataclass(frozen=True, kw_only=True, slots=True)
class OutcomeReport:
    """What a worker says of one attempt."""

    trial_id: int
    """Whose attempt it is."""
    attempt: int
    """Which one."""
    outcome: Outcome
    """How it ended."""
    nodes_held: float | None = None
    """Nodes that it held, a part of one included; None: as its worker said in its heartbeats, or those of
    its layout."""
    iterations_s: float | None = None
    """Seconds of its iterations; None: those of its measurement."""


class OutcomeBatch:
    """Trials that outcomes have come for, locked, in a transaction that somebody else holds."""

    def __init__(
        self, session: Session, trial_ids: Sequence[int], now: datetime, known: KnownLosses
    ) -> None:
        """Locks the trials and their campaigns, and loads what the outcomes need."""
        of_trials = select(Trial.campaign_id).where(Trial.id.in_(trial_ids))
        self._session = session
        self._now = now
        self._campaigns = {
            campaign.id: campaign
            for campaign in lock_campaigns(session, Campaign.id.in_(of_trials))
        }
        self._trials = {trial.id: trial for trial in lock_trials(session, Trial.id.in_(trial_ids))}
        self._attempts: dict[tuple[int, int], Attempt] = {}
        self._devices_per_node: dict[str, int] = {}
        for attempt, devices in session.execute(
            select(Attempt, Worker.devices_per_node)
            .join(Worker, Worker.id == Attempt.worker_id)
            .where(Attempt.trial_id.in_(trial_ids))
        ):
            self._attempts[attempt.trial_id, attempt.attempt] = attempt
            self._devices_per_node[attempt.worker_id] = devices
        self._known_losses = known
        self._kinship: Kinship | None = None
        self._rows = OutcomeRows()
        self._first_runs = FirstRuns()
        self._to_judge: list[Trial] = []
        self._changed: defaultdict[int, set[str]] = defaultdict(set)
        """By campaign, the layouts of which other runs may count than before."""

    def take(self, reports: Sequence[OutcomeReport]) -> list[OutcomeReceipt | ResultsDbError]:
        """Takes the outcomes, no two of one trial, and writes what follows from them."""
        accepted: list[bool | ResultsDbError] = []
        with self._session.no_autoflush:
            for report in reports:
                try:
                    accepted.append(self._take(report))
                except ResultsDbError as refusal:
                    accepted.append(refusal)
        self._rows.write(self._session)
        self._first_runs.write(self._session)
        for trial in self._to_judge:
            campaign = self._campaigns[trial.campaign_id]
            self._changed[campaign.id] |= settle(self._session, campaign, trial)
        for campaign_id, layout_keys in self._changed.items():
            keep_standings(self._session, self._campaigns[campaign_id], layout_keys)
        return [
            answer if isinstance(answer, ResultsDbError) else self._receipt(report, answer)
            for report, answer in zip(reports, accepted, strict=True)
        ]

    def _receipt(self, report: OutcomeReport, accepted: bool) -> OutcomeReceipt:
        state = self._trials[report.trial_id].state
        return OutcomeReceipt(accepted=accepted, state=cast("TrialState", state))

    def _take(self, report: OutcomeReport) -> bool:
        """Takes one outcome; whether it counts, or did when it was posted before."""
        trial = self._trials.get(report.trial_id)
        if trial is None:
            raise TrialNotFoundError(f"there is no trial {report.trial_id}")
        attempt = self._attempts.get((trial.id, report.attempt))
        if attempt is None:
            raise AttemptNotFoundError(
                f"trial {trial.id} has no attempt {report.attempt}; its latest is {trial.attempt}"
            )
        if attempt.ending == "reported":
            return self._is_kept(trial, attempt, report.outcome)
        if report.outcome.measurement is not None:
            _check(report.outcome.measurement, trial)
        if report.nodes_held is not None:
            attempt.nodes_held = report.nodes_held
        attempt.iterations_s = report.iterations_s
        campaign = self._campaigns[trial.campaign_id]
        # What it really held, in place of what was known before; paid for even when it came too late.
        charge(campaign, trial, attempt, self._cost(trial, attempt, report.outcome))
        if trial.state in ENDED_TRIAL_STATES:
            return False
        return self._end_attempt(campaign, trial, attempt, report.outcome)

    def _is_kept(self, trial: Trial, attempt: Attempt, outcome: Outcome) -> bool:
        """Whether an attempt that has reported says the same again; anything else is dropped."""
        if outcome.reason in _TEACHES_NOTHING:
            return True
        if trial.ended_at != attempt.ended_at:
            return False
        was_measured = self._session.get(MeasurementRow, trial.id) is not None
        if outcome.measurement is not None or was_measured:
            # Kept whatever the trial's state became when its losses were compared.
            return outcome.measurement is not None and was_measured
        return (trial.state, trial.reason) == (_STATES[outcome.state], outcome.reason)

    def _cost(self, trial: Trial, attempt: Attempt, outcome: Outcome) -> Cost:
        held_s, nodes = outcome.duration_s, nodes_of(trial, attempt)
        if trial.state in ENDED_TRIAL_STATES or outcome.reason in _TEACHES_NOTHING:
            return Cost.of_loss(held_s=held_s, nodes=nodes)
        iterations_s = attempt.iterations_s
        if iterations_s is None:
            iterations = () if outcome.measurement is None else outcome.measurement.iterations
            iterations_s = sum(iteration.step_time_s for iteration in iterations)
        return Cost.of_probe(
            held_s=held_s,
            nodes=nodes,
            used_nodes=trial.num_devices / self._devices_per_node[attempt.worker_id],
            iterations_s=iterations_s,
        )

    def _end_attempt(
        self, campaign: Campaign, trial: Trial, attempt: Attempt, outcome: Outcome
    ) -> bool:
        current = trial.state == "RUNNING" and trial.attempt == attempt.attempt
        teaches_nothing = outcome.reason in _TEACHES_NOTHING
        if teaches_nothing and not current:
            return False
        was_lost = attempt.ending == "lost"
        attempt.ending = "reported"
        attempt.ended_at = attempt.seen_at = self._now
        if teaches_nothing:
            _give_back(campaign, trial, outcome, self._now)
            if trial.state in ENDED_TRIAL_STATES:
                self._rows.keep(trial, outcome, kin=None)
            return True
        if trial.state == "RUNNING" and not current:
            # A late outcome of an earlier attempt; the worker of this one hears it with its next beat.
            running = self._attempts[trial.id, trial.attempt]
            close_attempt(campaign, trial, running, "superseded", self._now)
        if was_lost:
            # It was not lost after all.
            trial.lost_attempts -= 1
        self._end_trial(campaign, trial, outcome)
        return True

    def _end_trial(self, campaign: Campaign, trial: Trial, outcome: Outcome) -> None:
        end_trial(
            campaign,
            trial,
            _STATES[outcome.state],
            self._now,
            reason=outcome.reason,
            message=outcome.message,
            node=outcome.node,
        )
        kin = None
        if outcome.measurement is not None:
            kin = self._known_kin(trial, outcome.measurement)
            if kin is None:
                self._to_judge.append(trial)
            elif trial.repeat_index == 0:
                # It has not ended before, and what has not ended is not repeated.
                self._first_runs.add(campaign, trial, outcome.measurement)
            else:
                self._changed[campaign.id].add(trial.layout_key)
        self._rows.keep(trial, outcome, kin=kin)

    def _known_kin(self, trial: Trial, measurement: Measurement) -> int | None:
        if self._kinship is None:
            self._kinship = Kinship.of(self._session, self._campaigns, self._known_losses)
        return self._kinship.kin_of(trial, measurement)


def _give_back(campaign: Campaign, trial: Trial, outcome: Outcome, now: datetime) -> None:
    if outcome.reason == "node_lost":
        why = outcome.message or "a node was lost"
        count_lost_attempt(campaign, trial, now, why, node=outcome.node)
    else:
        put_back_or_cancel(campaign, trial, now, outcome.message or "stopped by its worker")


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
