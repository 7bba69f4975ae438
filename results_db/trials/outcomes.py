"""Outcomes: workers report the end of probes; each ends its trial once, however often it is posted.

Outcomes that arrive at the same time are taken in one transaction (decision 34): loaded together,
taken one by one, written together.
"""

from __future__ import annotations

import hashlib
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, cast

from sqlalchemy import select
from sqlalchemy.orm import Session

from layout_tuner.protocol.measurement import Measurement
from layout_tuner.protocol.outcome import Outcome
from layout_tuner.protocol.states import TrialState
from layout_tuner.protocol.worker_messages import OutcomeReply, OutcomeReport
from layout_tuner.results_db.database.database import Database
from layout_tuner.results_db.database.locks import lock_rows
from layout_tuner.results_db.database.retry import one_by_one_if_refused, retried
from layout_tuner.results_db.database.store_base import Clock, StoreSection
from layout_tuner.results_db.errors import (
    AttemptNotFoundError,
    DatabaseUnavailableError,
    ResultsDbError,
    TrialNotFoundError,
)
from layout_tuner.results_db.models.service_tables import WorkerRow
from layout_tuner.results_db.models.table_base import Base, insert_many
from layout_tuner.results_db.models.tables import (
    Attempt,
    BreakdownRow,
    Campaign,
    EnvironmentRow,
    IterationRow,
    MeasurementRow,
    StageMemoryRow,
    Trial,
    TrialLog,
)
from layout_tuner.results_db.records import ENDED_TRIAL_STATES, Cost
from layout_tuner.results_db.rows import PLAIN_MEASUREMENT_FIELDS, columns_of
from layout_tuner.results_db.trials.lifecycle import (
    charge,
    close_attempt,
    count_host_failure,
    count_lost_attempt,
    end_trial,
    nodes_of,
    put_back_or_cancel,
)
from layout_tuner.results_db.trials.loss_check import compare_losses
from layout_tuner.results_db.trials.outcome_checks import (
    longest_s,
    refuse_other_lease,
    refuse_other_probe,
)
from layout_tuner.results_db.trials.to_beat import may_change_to_beat
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec
from layout_tuner.trainers.simulator import is_simulator

_ORDER: Final[tuple[type[Base], ...]] = (
    TrialLog,
    EnvironmentRow,
    MeasurementRow,
    BreakdownRow,
    StageMemoryRow,
    IterationRow,
)
"""In the order of foreign keys."""


_STATES: Final[dict[str, TrialState]] = {
    "completed": "COMPLETED",
    "infeasible": "INFEASIBLE",
    "failed": "FAILED",
}

_log: Final = logging.getLogger(__name__)

_ANOTHER: Final = "the attempt has reported another outcome, which stays"
_TEACHES_NOTHING: Final = ("node_lost", "cancelled")
"""Reasons of outcomes without a result for the layout."""


class OutcomeBatch:
    """Outcomes of trials, which are locked, within one transaction of the caller."""

    def __init__(self, session: Session, trial_ids: Sequence[int], now: datetime) -> None:
        """Locks the trials and their campaigns, and loads the rows that the outcomes need."""
        of_trials = select(Trial.campaign_id).where(Trial.id.in_(trial_ids))
        self._session = session
        self._now = now
        self._campaigns = {
            campaign.id: campaign
            for campaign in lock_rows(session, Campaign, Campaign.id.in_(of_trials))
        }
        self._trials = {
            trial.id: trial for trial in lock_rows(session, Trial, Trial.id.in_(trial_ids))
        }
        self._attempts: dict[tuple[int, int], Attempt] = {}
        self._devices_per_node: dict[str, int] = {}
        for attempt, devices in session.execute(
            select(Attempt, WorkerRow.devices_per_node)
            .join(WorkerRow, WorkerRow.id == Attempt.worker_id)
            .where(Attempt.trial_id.in_(trial_ids))
        ):
            self._attempts[attempt.trial_id, attempt.attempt] = attempt
            self._devices_per_node[attempt.worker_id] = devices
        self._specs = {id_: row.stored.read for id_, row in self._campaigns.items()}
        self._rows: defaultdict[type[Base], list[dict[str, Any]]] = defaultdict(list)
        """Rows of the outcomes besides the trials' own, to be written together."""
        self._measured: defaultdict[int, dict[Trial, Measurement]] = defaultdict(dict)
        self.to_beat_changed: set[int] = set()
        """Campaigns of which `Campaign.to_beat` must be computed once this is committed."""

    def take(self, reports: Sequence[OutcomeReport]) -> list[OutcomeReply | ResultsDbError]:
        """Processes the outcomes, at most one for each trial, and writes all changes."""
        dropped: list[str | ResultsDbError] = []
        with self._session.no_autoflush:
            for report in reports:
                try:
                    dropped.append(self._take(report))
                except ResultsDbError as refusal:
                    dropped.append(refusal)
        # The trials' own rows first, to which the others refer.
        self._session.flush()
        for kind in _ORDER:
            insert_many(self._session, kind, self._rows[kind])
        for campaign_id, runs in self._measured.items():
            self._compare(self._campaigns[campaign_id], runs)
        return [
            answer if isinstance(answer, ResultsDbError) else self._receipt(report, answer)
            for report, answer in zip(reports, dropped, strict=True)
        ]

    def _compare(self, campaign: Campaign, runs: Mapping[Trial, Measurement]) -> None:
        """Compares the losses of a campaign's new runs, and what its probes must beat."""
        others_changed = compare_losses(self._session, campaign, list(runs))
        spec = self._specs[campaign.id]
        if isinstance(spec, CampaignSpec) and may_change_to_beat(
            self._session, campaign, spec, runs, others_changed=others_changed
        ):
            self.to_beat_changed.add(campaign.id)

    def _receipt(self, report: OutcomeReport, dropped: str) -> OutcomeReply:
        state = cast("TrialState", self._trials[report.trial_id].state)
        return OutcomeReply(accepted=not dropped, state=state, reason=dropped)

    def _take(self, report: OutcomeReport) -> str:
        """Processes one outcome; returns why it is dropped, empty where it counts."""
        trial = self._trials.get(report.trial_id)
        if trial is None:
            raise TrialNotFoundError(f"there is no trial {report.trial_id}")
        attempt = self._attempts.get((trial.id, report.attempt))
        if attempt is None:
            raise AttemptNotFoundError(
                f"trial {trial.id} has no attempt {report.attempt}; its latest is {trial.attempt}"
            )
        if not self._may_report(report.worker_id, attempt):
            raise AttemptNotFoundError(
                f"worker session {report.worker_id!r} has not leased attempt {report.attempt} of "
                f"trial {trial.id}; report the outcome for the session that has"
            )
        reported = repr((report.outcome, report.nodes_held, report.iterations_s))
        digest = hashlib.sha256(reported.encode()).hexdigest()
        if attempt.ending == "reported":
            return "" if digest == attempt.outcome_digest else _ANOTHER
        campaign = self._campaigns[trial.campaign_id]
        refuse_other_lease(report, campaign, trial, attempt, self._now)
        if report.outcome.measurement is not None:
            spec = self._specs[campaign.id]
            refuse_other_probe(report.outcome.measurement, campaign, trial, spec)
        if report.nodes_held is not None:
            attempt.nodes_held = report.nodes_held
        attempt.iterations_s = report.iterations_s
        if is_simulator(campaign.trainer):
            attempt.held_s = report.outcome.duration_s  # readers take the real time otherwise
        # The final cost replaces the one known so far, even if the outcome is too late.
        cost = self._cost(campaign, trial, attempt, report.outcome)
        charge(campaign, trial, attempt, cost, self._now)
        if trial.state in ENDED_TRIAL_STATES:
            return f"the trial had ended before: it is {trial.state}"
        if not self._end_attempt(campaign, trial, attempt, report.outcome):
            return "the attempt had ended before, and the outcome is no result of the layout"
        attempt.outcome_digest = digest
        return ""

    def _may_report(self, sender: str, attempt: Attempt) -> bool:
        """Whether a session leased the attempt, or is of the same token as the one that did."""
        if sender == attempt.worker_id:
            return True
        ids = (sender, attempt.worker_id)
        query = select(WorkerRow.registered_by).where(WorkerRow.id.in_(ids))
        owners = self._session.scalars(query).all()
        return len(owners) == len(ids) and len(set(owners)) == 1

    def _cost(self, campaign: Campaign, trial: Trial, attempt: Attempt, outcome: Outcome) -> Cost:
        most_s = longest_s(attempt, self._now, is_simulated=is_simulator(campaign.trainer))
        held_s = min(outcome.duration_s, most_s)
        nodes = nodes_of(trial, attempt)
        if trial.state in ENDED_TRIAL_STATES or outcome.reason in _TEACHES_NOTHING:
            return Cost(lost=held_s * nodes)
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
            said = outcome.message
            if outcome.reason == "node_lost":
                why = said or "a node was lost"
                count_lost_attempt(campaign, trial, self._now, why, node=outcome.node)
            else:
                put_back_or_cancel(campaign, trial, self._now, said or "stopped by its worker")
            if trial.state in ENDED_TRIAL_STATES:
                self._keep(trial, outcome)
            return True
        if trial.state == "RUNNING" and not current:
            # A late outcome of an earlier attempt; the next heartbeat stops the current worker.
            running = self._attempts[trial.id, trial.attempt]
            close_attempt(campaign, trial, running, "superseded", self._now)
        if was_lost:
            # The attempt was not lost after all.
            trial.lost_attempts -= 1
        end_trial(
            campaign,
            trial,
            _STATES[outcome.state],
            self._now,
            reason=outcome.reason,
            message=outcome.message,
            node=outcome.node,
        )
        if outcome.reason == "host_resource":
            count_host_failure(self._session, campaign, trial, self._now)
        if outcome.measurement is not None:
            self._measured[campaign.id][trial] = outcome.measurement
        self._keep(trial, outcome)
        return True

    def _keep(self, trial: Trial, outcome: Outcome) -> None:
        """Adds the rows of an outcome besides the trial's own row."""
        of_trial = {"trial_id": trial.id}
        if outcome.log_tail:
            self._rows[TrialLog].append(of_trial | {"tail": outcome.log_tail})
        if outcome.environment is not None:
            self._rows[EnvironmentRow].append(of_trial | columns_of(outcome.environment))
        measured = outcome.measurement
        if measured is None:
            return
        trial.iterations_done = len(measured.iterations)
        self._rows[MeasurementRow].append(
            {**of_trial, "campaign_id": trial.campaign_id}
            | {name: getattr(measured, name) for name in PLAIN_MEASUREMENT_FIELDS}
        )
        if measured.breakdown is not None:
            self._rows[BreakdownRow].append(of_trial | columns_of(measured.breakdown))
        peaks = measured.peak_memory_bytes_by_stage
        reserved = measured.peak_reserved_bytes_by_stage or (None,) * len(peaks)
        self._rows[StageMemoryRow] += [
            {**of_trial, "stage": stage, "peak_memory_bytes": peak, "peak_reserved_bytes": held}
            for stage, (peak, held) in enumerate(zip(peaks, reserved, strict=True))
        ]
        self._rows[IterationRow] += [
            of_trial | columns_of(iteration) for iteration in measured.iterations
        ]


class Outcomes(StoreSection):
    """The store's methods for outcomes."""

    def __init__(
        self, database: Database, clock: Clock, write_to_beat: Callable[[Collection[int]], None]
    ) -> None:
        """`write_to_beat` computes `Campaign.to_beat` of campaigns."""
        super().__init__(database, clock)
        self._write_to_beat = write_to_beat

    def post_all(self, reports: Sequence[OutcomeReport]) -> list[OutcomeReply | ResultsDbError]:
        """Processes outcomes of attempts in one transaction. Posting one again changes nothing.

        An outcome that arrives after its lease expired still counts if the trial has not ended. Two
        reasons give no result for the layout, and return the trial to PENDING: `node_lost` (a lost
        attempt), and `cancelled` without a request to cancel (the worker returned its lease).

        If the losses of a measurement differ from those of the campaign's other layouts, the
        measurement is stored and its trial is FAILED as diverged; if it shows that others are
        wrong, those are.

        After some trials that ended as `host_resource` their campaign is paused.

        Returns:
            For each, the reply or the refusal: `TrialNotFoundError`, `AttemptNotFoundError`,
            `MeasurementInvalidError`. A refused outcome changes nothing.
        """
        answers: list[OutcomeReply | ResultsDbError | None] = [None] * len(reports)
        waiting = list(range(len(reports)))
        while waiting:
            # Outcomes of one trial are processed one after the other.
            turn = list({reports[place].trial_id: place for place in reversed(waiting)}.values())
            for place, answer in zip(
                turn, one_by_one_if_refused(self._post, [reports[i] for i in turn]), strict=True
            ):
                answers[place] = answer
            waiting = [place for place in waiting if answers[place] is None]
        return [answer for answer in answers if answer is not None]

    def _post(self, reports: Sequence[OutcomeReport]) -> list[OutcomeReply | ResultsDbError]:
        answers, to_beat_changed = self._store(reports)
        try:
            self._write_to_beat(to_beat_changed)
        except DatabaseUnavailableError as error:
            # The outcomes are stored; a later run has it computed.
            _log.warning("what probes must beat is not computed: %s", error)
        return answers

    @retried
    def _store(
        self, reports: Sequence[OutcomeReport]
    ) -> tuple[list[OutcomeReply | ResultsDbError], Collection[int]]:
        now = self._clock()
        with self._db.write() as session:
            trial_ids = [report.trial_id for report in reports]
            batch = OutcomeBatch(session, trial_ids, now)
            return batch.take(reports), batch.to_beat_changed
