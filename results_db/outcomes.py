"""Outcomes: how a probe's end becomes a trial's, once, however often and late it is posted."""

from __future__ import annotations

from collections.abc import Sequence

from results_db.actor import SYSTEM, Actor
from results_db.apart import apart_if_refused
from results_db.errors import ResultsDbError
from results_db.kinship import KnownLosses
from results_db.outcome_batch import OutcomeBatch, OutcomeReport
from results_db.part import Clock, StorePart
from results_db.records import OutcomeReceipt
from results_db.retry import retried
from results_db.session import Database
from search_spaces.outcome import Outcome


class Outcomes(StorePart):
    """The outcomes' part of the store."""

    def __init__(self, database: Database, clock: Clock, actor: Actor = SYSTEM) -> None:
        super().__init__(database, clock, actor)
        self._known_losses = KnownLosses()

    def post_outcome(
        self,
        trial_id: int,
        attempt: int,
        outcome: Outcome,
        *,
        nodes_held: float | None = None,
        iterations_s: float | None = None,
    ) -> OutcomeReceipt:
        """Takes the outcome of one attempt; as `post_outcomes`, with the fields of `OutcomeReport`.

        Raises:
            TrialNotFoundError: there is no such trial.
            AttemptNotFoundError: the trial never had this attempt.
            MeasurementInvalidError: its figures contradict each other, or the layout.
        """
        report = OutcomeReport(
            trial_id=trial_id,
            attempt=attempt,
            outcome=outcome,
            nodes_held=nodes_held,
            iterations_s=iterations_s,
        )
        (answer,) = self.post_outcomes([report])
        if isinstance(answer, ResultsDbError):
            raise answer
        return answer

    def post_outcomes(
        self, reports: Sequence[OutcomeReport]
    ) -> list[OutcomeReceipt | ResultsDbError]:
        """Takes outcomes of attempts, all in one transaction. Posting one again changes nothing.

        One that arrives after its lease was lost is taken all the same while the trial has not ended: a
        measurement is a measurement. Two kinds teach nothing about the layout and return the trial
        to PENDING instead of ending it: `node_lost` (a lost attempt), and `cancelled` where nobody
        asked for it (the worker gave up its lease).

        A measurement whose losses are off those of the campaign's other layouts is kept, and its trial
        is FAILED as diverged; if it shows that others were the odd ones, those are.

        Returns:
            The receipt of each, or why it is refused: `TrialNotFoundError`, `AttemptNotFoundError`,
            `MeasurementInvalidError`. Those that are refused change nothing.
        """
        answers: list[OutcomeReceipt | ResultsDbError | None] = [None] * len(reports)
        waiting = list(range(len(reports)))
        while waiting:
            # Two of one trial go one after the other: the second answers to what the first did.
            turn = list({reports[place].trial_id: place for place in reversed(waiting)}.values())
            for place, answer in zip(
                turn, apart_if_refused(self._post, [reports[i] for i in turn]), strict=True
            ):
                answers[place] = answer
            waiting = [place for place in waiting if answers[place] is None]
        return [answer for answer in answers if answer is not None]

    @retried
    def _post(self, reports: Sequence[OutcomeReport]) -> list[OutcomeReceipt | ResultsDbError]:
        now = self._clock()
        with self._db.write() as session:
            trial_ids = [report.trial_id for report in reports]
            return OutcomeBatch(session, trial_ids, now, self._known_losses).take(reports)
