"""Losses that are off: measurements are compared as they come in, and the odd ones do not count.

All of it happens in the transaction that keeps the measurement, under the campaign's lock: whoever
reads the campaign before or after sees one verdict on all of its trials, and a service that is
killed in between has taken no outcome.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from results_db.events import tell
from results_db.models import Campaign, IterationRow, MeasurementRow, Trial
from results_db.rows import iteration_value
from results_db.verdict import Fault, Run, judge
from search_spaces.layout import Precision
from search_spaces.losses import LossDifference, first_difference
from search_spaces.outcome import Iteration

DIVERGED = "diverged"


def settle(session: Session, campaign: Campaign, trial: Trial) -> set[str]:
    """Compares a trial's new measurement with those of its batch and precision, and judges them all.

    A trial whose verdict changes gets another place in the order of endings, so that the driver hears
    of it again.

    Returns:
        Keys of the layouts of which other runs may count than before, the trial's own among them.
    """
    changed = {trial.layout_key}
    group = _Group(session, cast("Precision", trial.precision))
    rows = _measured(session, campaign.id, trial.precision, trial.global_batch_size)
    before = judge(_runs([row for row in rows if row.kin is not None]))
    group.compare(rows)
    after = judge(_runs(rows))
    for row in rows:
        fault = after.faults.get(row.trial_id)
        stands = (row.state == "COMPLETED") == (fault is None)
        if not stands or fault != before.faults.get(row.trial_id):
            judged = session.get_one(Trial, row.trial_id)
            _set_state(judged, fault, "" if fault is None else group.words(row, fault, rows))
            assert trial.ended_at is not None  # it has just been measured
            tell(judged, "trial.judged", trial.ended_at)
            changed.add(judged.layout_key)
            if not stands and judged is not trial:
                campaign.last_ended_seq += 1
                judged.ended_seq = campaign.last_ended_seq
    return changed


def trials_in_doubt(session: Session, campaign_id: int) -> list[int]:
    """Trials that are to be measured again and have not been, since no layout agrees with theirs."""
    groups = session.execute(
        select(Trial.precision, Trial.global_batch_size)
        .join(MeasurementRow, MeasurementRow.trial_id == Trial.id)
        .where(Trial.campaign_id == campaign_id, Trial.state == "FAILED")
        .where(Trial.reason == DIVERGED)
        .distinct()
    ).all()
    again = [
        trial_id
        for precision, batch in groups
        for trial_id in judge(_runs(_measured(session, campaign_id, precision, batch))).again
    ]
    if not again:
        return []
    repeated = select(Trial.repeat_of).where(
        Trial.campaign_id == campaign_id, Trial.repeat_of.in_(again)
    )
    return sorted(set(again) - set(session.scalars(repeated)))


@dataclass(kw_only=True, slots=True)
class _Measured:
    """One measured trial of a group."""

    trial_id: int
    number: int
    layout_key: str
    state: str
    kin: int | None


@dataclass(slots=True)
class _Group:
    """Losses of the trials of one batch and precision, read as they are needed."""

    session: Session
    precision: Precision
    iterations: dict[int, list[Iteration]] = field(default_factory=dict)

    def compare(self, rows: Sequence[_Measured]) -> None:
        """Finds the kin of the measurements that have none yet, in the order they were made."""
        kins = [row.trial_id for row in rows if row.kin == row.trial_id]
        for row in rows:
            if row.kin is not None:
                continue
            row.kin = self._kin_of(row, kins, rows)
            if row.kin == row.trial_id:
                kins.append(row.kin)
            self.session.execute(
                update(MeasurementRow)
                .where(MeasurementRow.trial_id == row.trial_id)
                .values(kin=row.kin)
            )

    def _kin_of(self, row: _Measured, kins: Sequence[int], rows: Sequence[_Measured]) -> int:
        """The first with the same losses, or the trial itself.

        A repeat that agrees with an earlier run of its layout goes where that went: at the edge of
        what is allowed the two might else part, and the layout look as if it were unsteady.
        """
        for other in rows:
            is_told = other.kin is not None and other.layout_key == row.layout_key
            if is_told and self.difference(row.trial_id, other.trial_id) is None:
                return cast("int", other.kin)
        agreeing = (kin for kin in kins if self.difference(row.trial_id, kin) is None)
        return next(agreeing, row.trial_id)

    def difference(self, trial_id: int, other_id: int) -> LossDifference | None:
        """Where the losses of two trials part."""
        return first_difference(self._losses(trial_id), self._losses(other_id), self.precision)

    def words(self, row: _Measured, fault: Fault, rows: Sequence[_Measured]) -> str:
        """Why a trial does not count, in a sentence that names both trials and both losses."""
        by_id = {other.trial_id: other for other in rows}
        own, other = row, by_id[fault.against]
        difference = self.difference(own.trial_id, other.trial_id)
        if difference is None:
            # Both are at the edge of what is allowed; the first of their kin are not.
            own, other = by_id[cast("int", own.kin)], by_id[cast("int", other.kin)]
            difference = self.difference(own.trial_id, other.trial_id)
        assert difference is not None, "the first of two kin differ"
        whose = "" if own is row else f"it trains as trial {own.number} does: "
        apart = (
            f"{whose}loss {difference.loss:.6g} of trial {own.number} at iteration "
            f"{difference.index} is off the {difference.other_loss:.6g} of trial {other.number} by "
            f"more than {difference.tolerance:.2g} of it, which is what {self.precision} allows there"
        )
        return f"{apart}; {_consequence(fault, other)}"

    def _losses(self, trial_id: int) -> list[Iteration]:
        if trial_id not in self.iterations:
            query = (
                select(IterationRow)
                .where(IterationRow.trial_id == trial_id)
                .order_by(IterationRow.index)
            )
            self.iterations[trial_id] = [
                iteration_value(row) for row in self.session.scalars(query)
            ]
        return self.iterations[trial_id]


def _consequence(fault: Fault, other: _Measured) -> str:
    if fault.kind == "unsteady":
        return f"both ran {other.layout_key}, which does not reproduce itself"
    if fault.is_settled:
        return f"several layouts agree with trial {other.number}"
    return (
        f"no other layout agrees with either yet: trial {other.number} was first and stands, and both "
        "are to be measured again"
    )


def _measured(session: Session, campaign_id: int, precision: str, batch: int) -> list[_Measured]:
    """The measured trials of one batch and precision, in the order they were made."""
    query = (
        select(Trial.id, Trial.number, Trial.layout_key, Trial.state, MeasurementRow.kin)
        .join(MeasurementRow, MeasurementRow.trial_id == Trial.id)
        .where(MeasurementRow.campaign_id == campaign_id)
        .where(Trial.precision == precision, Trial.global_batch_size == batch)
        .order_by(Trial.ended_at, Trial.number)
    )
    return [
        _Measured(trial_id=trial_id, number=number, layout_key=key, state=state, kin=kin)
        for trial_id, number, key, state, kin in session.execute(query)
    ]


def _runs(rows: Sequence[_Measured]) -> list[Run]:
    return [
        Run(trial_id=row.trial_id, layout_key=row.layout_key, kin=row.kin)
        for row in rows
        if row.kin is not None
    ]


def _set_state(trial: Trial, fault: Fault | None, message: str) -> None:
    trial.state = "COMPLETED" if fault is None else "FAILED"
    trial.reason = None if fault is None else DIVERGED
    trial.message = message
