"""Compares the losses of a campaign's trials, and rejects those that computed something else.

The runs of one campaign, batch, precision and number of layers train the same model on the same
tokens. Runs whose losses agree are kin. Each layout has one vote, however often it was measured,
since a layout that computes something wrong mostly does so every time.

Nearly always all runs of a batch size and precision are one kin, and comparing a new run with the
first one is enough, however many trials the campaign has (`Kinship`). Otherwise all of them are
judged (`settle`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from threading import Lock
from typing import Any, Final, Literal, cast

from sqlalchemy import bindparam, exists, func, literal_column, select, update
from sqlalchemy.orm import Session, aliased

from results_db.database.events import tell
from results_db.models.tables import Campaign, IterationRow, MeasurementRow, Trial
from results_db.rows import record_of
from results_db.trials.loss_comparison import LossDifference, first_difference
from search_spaces.protocol.outcome import Iteration, IterationKind, Measurement
from search_spaces.spec.layout import Precision

FaultKind = Literal["off", "unsteady"]
"""off: more layouts, or earlier ones, have other losses. unsteady: a repeat of the same layout
has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VotedRun:
    """A measurement, as the vote needs it."""

    trial_id: int
    layout_key: str
    kin: int
    """The earliest trial with the same losses, possibly itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossFault:
    """Why a run does not count."""

    kind: FaultKind
    against: int
    """A trial with other losses."""
    is_settled: bool
    """Whether several layouts agree on the other losses; if not, a third one may change the
    vote."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The result of the vote for every run."""

    faults: Mapping[int, LossFault]
    """By trial; runs without a fault count."""
    again: tuple[int, ...]
    """Trials to measure again, because each layout has losses of its own and it is undecided which
    are right."""


def judge(runs: Sequence[VotedRun]) -> Verdict:
    """Judges the runs of one group, in the order in which they were measured.

    The losses of most layouts are right; among equal numbers, the earliest. A layout that was
    measured twice with different losses has no vote, and none of its runs counts.
    """
    kins: dict[str, set[int]] = {}
    for run in runs:
        kins.setdefault(run.layout_key, set()).add(run.kin)
    steady = {key: next(iter(found)) for key, found in kins.items() if len(found) == 1}
    votes = Counter(steady.values())
    first_run: dict[int, int] = {}
    for run in runs:
        if run.layout_key in steady:
            first_run.setdefault(run.kin, run.trial_id)
    # In order of time: `max` takes the first of equal ones.
    leader = max(first_run, key=lambda kin: votes[kin], default=None)
    faults = {}
    for run in runs:
        if run.layout_key not in steady:
            other = next(r for r in runs if r.layout_key == run.layout_key and r.kin != run.kin)
            faults[run.trial_id] = LossFault(
                kind="unsteady", against=other.trial_id, is_settled=True
            )
        elif leader is not None and run.kin != leader:
            faults[run.trial_id] = LossFault(
                kind="off", against=first_run[leader], is_settled=votes[leader] > 1
            )
    return Verdict(faults=faults, again=_again(runs, steady, votes))


def _again(
    runs: Sequence[VotedRun], steady: Mapping[str, int], votes: Counter[int]
) -> tuple[int, ...]:
    if len(votes) < 2 or max(votes.values()) > 1:
        return ()
    times = Counter(run.layout_key for run in runs)
    return tuple(
        run.trial_id for run in runs if run.layout_key in steady and times[run.layout_key] == 1
    )


Group = tuple[int, str, int, int | None]
"""Campaign, precision, global batch size, and layers of a cheap probe: runs that must have the same
losses."""

MAX_KNOWN: Final = 50_000
"""Iterations that a process caches: of a few thousand groups, or fewer with very long probes."""


class KnownLosses:
    """A cache of the losses of trials with which others are compared; measurements never change.

    After a database is restored under a running process (by its server, or by a failover), an id
    may be used again: the service must be restarted then. Safe for threads.
    """

    def __init__(self) -> None:
        self._known: dict[int, Sequence[Iteration]] = {}
        self._lock = Lock()

    def of(self, session: Session, trial_ids: Collection[int]) -> dict[int, Sequence[Iteration]]:
        """The iterations of trials, in order; trials without any are left out."""
        with self._lock:
            found = {id_: self._known[id_] for id_ in trial_ids if id_ in self._known}
        missing = [id_ for id_ in trial_ids if id_ not in found]
        if missing:
            read = _losses(session, missing)
            found |= read
            self._remember(read)
        return found

    def _remember(self, read: Mapping[int, Sequence[Iteration]]) -> None:
        num_read = sum(map(len, read.values()))
        if num_read > MAX_KNOWN:
            return
        with self._lock:
            if num_read + sum(map(len, self._known.values())) > MAX_KNOWN:
                self._known.clear()
            self._known |= read

    @property
    def num_known(self) -> int:
        """Number of cached iterations."""
        with self._lock:
            return sum(map(len, self._known.values()))


@dataclass(slots=True)
class Kinship:
    """The kin of the groups in a batch of outcomes."""

    _first: dict[Group, int] = field(default_factory=dict)
    """By group with a single kin, its first trial."""
    _losses: dict[int, Sequence[Iteration]] = field(default_factory=dict)
    _doubtful: set[Group] = field(default_factory=set)
    """Groups with more than one kin."""
    _uncompared: set[int] = field(default_factory=set)
    """Campaigns with measurements that were not compared yet."""

    @classmethod
    def of(cls, session: Session, campaign_ids: Collection[int], known: KnownLosses) -> Kinship:
        """Reads the kin of campaigns, which are locked."""
        found = cls()
        rows = session.execute(_kins(), {_CAMPAIGN_IDS: list(campaign_ids)})
        for kin, *of_group, is_uncompared in rows:
            group = cast("Group", tuple(of_group))
            if is_uncompared:
                found._uncompared.add(group[0])
            if kin is not None and found._first.setdefault(group, kin) != kin:
                found._doubtful.add(group)
        found._losses = known.of(session, found._first.values())
        return found

    def kin_of(self, trial: Trial, measurement: Measurement) -> int | None:
        """The kin of a new measurement; None: `settle` must judge its whole group."""
        group = _group_of(trial)
        if group in self._doubtful or trial.campaign_id in self._uncompared:
            return None
        own = measurement.iterations if measurement.losses_comparable else ()
        first = self._first.setdefault(group, trial.id)
        others = self._losses.setdefault(first, own)
        precision = cast("Precision", trial.precision)
        if first_difference(own, others, precision) is None:
            return first
        self._doubtful.add(group)
        return None


def _group_of(trial: Trial) -> Group:
    return trial.campaign_id, trial.precision, trial.global_batch_size, trial.num_layers


_CAMPAIGN_IDS: Final = "campaign_ids"


_OF_GROUP: Final = (Trial.precision, Trial.global_batch_size, Trial.num_layers)
"""The columns of a trial that name its group within its campaign."""


@cache
def _kins() -> Any:
    """Selects the kins of campaigns; each is found after the one before, by an index."""
    own = aliased(MeasurementRow)
    smallest = select(func.min(own.kin)).where(own.campaign_id == Campaign.id)
    kins = (
        select(Campaign.id.label("campaign_id"), smallest.scalar_subquery().label("kin"))
        .where(Campaign.id.in_(bindparam(_CAMPAIGN_IDS, expanding=True)))
        .cte("kins", recursive=True)
    )
    later = aliased(MeasurementRow)
    following = select(func.min(later.kin)).where(
        later.campaign_id == kins.c.campaign_id, later.kin > kins.c.kin
    )
    kins = kins.union_all(
        select(kins.c.campaign_id, following.scalar_subquery()).where(kins.c.kin.is_not(None))
    )
    untold = exists(literal_column("1")).where(
        MeasurementRow.campaign_id == kins.c.campaign_id, MeasurementRow.kin.is_(None)
    )
    group = (kins.c.campaign_id, *_OF_GROUP)
    return (
        select(kins.c.kin, *group, untold)
        .outerjoin_from(kins, Trial, Trial.id == kins.c.kin)
        .order_by(kins.c.kin)
    )


def _losses(session: Session, trial_ids: Collection[int]) -> Mapping[int, Sequence[Iteration]]:
    found: defaultdict[int, list[Iteration]] = defaultdict(list)
    columns = (
        IterationRow.trial_id,
        IterationRow.index,
        IterationRow.kind,
        IterationRow.step_time_s,
        IterationRow.loss,
        IterationRow.grad_norm,
    )
    query = (
        select(*columns)
        .join(MeasurementRow, MeasurementRow.trial_id == IterationRow.trial_id)
        .where(IterationRow.trial_id.in_(trial_ids), MeasurementRow.losses_comparable)
        .order_by(IterationRow.trial_id, IterationRow.index)
    )
    for trial_id, index, kind, step_time_s, loss, grad_norm in session.execute(query):
        found[trial_id].append(
            Iteration(
                index=index,
                kind=cast("IterationKind", kind),
                step_time_s=step_time_s,
                loss=loss,
                grad_norm=grad_norm,
            )
        )
    return found


DIVERGED = "diverged"


def settle(session: Session, campaign: Campaign, trial: Trial) -> None:
    """Compares a new measurement with those of its group, and judges all of them.

    Called in the transaction that stores the measurement, with the campaign locked. A trial whose
    verdict changes moves to the end of the order of ends, so that the driver reads it again.
    """
    group = _Group(session, cast("Precision", trial.precision))
    rows = _measured(session, _group_of(trial))
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
            if not stands and judged is not trial:
                campaign.last_ended_seq += 1
                judged.ended_seq = campaign.last_ended_seq


def trials_in_doubt(session: Session, campaign_id: int) -> list[int]:
    """Trials that must be measured again, because no other layout agrees with their losses."""
    groups = session.execute(
        select(Trial.campaign_id, *_OF_GROUP)
        .join(MeasurementRow, MeasurementRow.trial_id == Trial.id)
        .where(Trial.campaign_id == campaign_id, Trial.state == "FAILED")
        .where(Trial.reason == DIVERGED)
        .distinct()
    ).all()
    again = [
        trial_id
        for group in groups
        for trial_id in judge(_runs(_measured(session, cast("Group", tuple(group))))).again
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
    """Losses of the trials of one group, read when needed."""

    session: Session
    precision: Precision
    iterations: dict[int, list[Iteration]] = field(default_factory=dict)

    def compare(self, rows: Sequence[_Measured]) -> None:
        """Sets the kin of the measurements that have none yet, in order of time."""
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
        """The first trial with the same losses, or the trial itself.

        A repeat that agrees with an earlier run of its layout gets the kin of that run. Otherwise,
        near the limit of the tolerance, the two could get different kin, and the layout seem
        unsteady.
        """
        for other in rows:
            is_told = other.kin is not None and other.layout_key == row.layout_key
            if is_told and self.difference(row.trial_id, other.trial_id) is None:
                return cast("int", other.kin)
        agreeing = (kin for kin in kins if self.difference(row.trial_id, kin) is None)
        return next(agreeing, row.trial_id)

    def difference(self, trial_id: int, other_id: int) -> LossDifference | None:
        """The first iteration at which the losses of two trials differ."""
        return first_difference(self._losses(trial_id), self._losses(other_id), self.precision)

    def words(self, row: _Measured, fault: LossFault, rows: Sequence[_Measured]) -> str:
        """Why a trial does not count: a sentence with both trials and both losses."""
        by_id = {other.trial_id: other for other in rows}
        own, other = row, by_id[fault.against]
        difference = self.difference(own.trial_id, other.trial_id)
        if difference is None:
            # Both are within the tolerance of each other; the first trials of their kin are not.
            own, other = by_id[cast("int", own.kin)], by_id[cast("int", other.kin)]
            difference = self.difference(own.trial_id, other.trial_id)
        assert difference is not None, "the first of two kin differ"
        whose = "" if own is row else f"it trains as trial {own.number} does: "
        difference_text = (
            f"{whose}loss {difference.loss:.6g} of trial {own.number} at iteration "
            f"{difference.index} is off the {difference.other_loss:.6g} of trial {other.number} by "
            f"more than {difference.tolerance:.2g} of it, which is what {self.precision} allows there"
        )
        return f"{difference_text}; {_consequence(fault, other)}"

    def _losses(self, trial_id: int) -> list[Iteration]:
        if trial_id not in self.iterations:
            query = (
                select(IterationRow)
                .join(MeasurementRow, MeasurementRow.trial_id == IterationRow.trial_id)
                .where(IterationRow.trial_id == trial_id, MeasurementRow.losses_comparable)
                .order_by(IterationRow.index)
            )
            self.iterations[trial_id] = [
                record_of(Iteration, row) for row in self.session.scalars(query)
            ]
        return self.iterations[trial_id]


def _consequence(fault: LossFault, other: _Measured) -> str:
    if fault.kind == "unsteady":
        return f"both ran {other.layout_key}, which does not reproduce itself"
    if fault.is_settled:
        return f"several layouts agree with trial {other.number}"
    return (
        f"no other layout agrees with either yet: trial {other.number} was first and stands, and both "
        "are to be measured again"
    )


def _measured(session: Session, group: Group) -> list[_Measured]:
    """The measured trials of one group, in the order they were made."""
    campaign_id, *values = group
    in_group = (each.is_not_distinct_from(own) for each, own in zip(_OF_GROUP, values, strict=True))
    query = (
        select(Trial.id, Trial.number, Trial.layout_key, Trial.state, MeasurementRow.kin)
        .join(MeasurementRow, MeasurementRow.trial_id == Trial.id)
        .where(MeasurementRow.campaign_id == campaign_id, *in_group)
        .order_by(Trial.ended_at, Trial.number)
    )
    return [
        _Measured(trial_id=trial_id, number=number, layout_key=key, state=state, kin=kin)
        for trial_id, number, key, state, kin in session.execute(query)
    ]


def _runs(rows: Sequence[_Measured]) -> list[VotedRun]:
    return [
        VotedRun(trial_id=row.trial_id, layout_key=row.layout_key, kin=row.kin)
        for row in rows
        if row.kin is not None
    ]


def _set_state(trial: Trial, fault: LossFault | None, message: str) -> None:
    trial.state = "COMPLETED" if fault is None else "FAILED"
    trial.reason = None if fault is None else DIVERGED
    trial.message = message
