"""Compares the losses of a campaign's trials, and fails those that computed something else.

The runs of one campaign, batch, precision and number of layers train the same model on the same
tokens: they are a group, and their losses must agree, whatever the settings of their jobs: a knob
that should not change losses may do so all the same. Jobs that differ in a knob which is declared
to change losses (`JobKnob.losses`) are groups of their own. Each layout has one vote on which
losses are right, however often it was measured, since a layout that computes something wrong mostly
does so every time.

The seed determines weights and tokens. Layouts add numbers in different orders, and such rounding
differences grow from step to step. A larger difference means that one of two layouts computes
wrongly.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, cast

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from layout_tuner.protocol.measurement import Iteration
from layout_tuner.results_db.database.events import tell
from layout_tuner.results_db.models.tables import Campaign, IterationRow, MeasurementRow, Trial
from layout_tuner.results_db.rows import record_of
from layout_tuner.search_spaces.layouts.layout import Precision

LOSS_TOLERANCE: Final[Mapping[Precision, float]] = {
    "fp32": 1e-4,
    "fp16": 5e-3,
    "bf16": 1e-2,
    **dict.fromkeys(("fp8", "fp8_block", "mxfp8"), 5e-2),
    "nvfp4": 1e-1,
}
"""Largest relative difference of two losses in the first iterations. Measured over every axis on
the presets for CPUs (docs/explanation/measurement.md): at most 3e-7 in fp32 and 5e-4 in bf16; fp16
has three bits more, and fp8 (other trainers) four bits fewer than bf16, in its products alone;
nvfp4 has two fewer than that, and scales of its own for 16 numbers."""

STEADY_ITERATIONS: Final = 4
"""Number of first iterations in which the tolerance does not grow."""

GROWTH: Final = 2.0
"""Growth of the tolerance with each later iteration: with a high learning rate, training is chaotic
and a rounding difference doubles about as fast."""

MAX_TOLERANCE: Final = 0.25
"""Largest tolerance: two runs of one model on the same tokens learn about equally well, even when
their weights differ much."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossDifference:
    """A difference between the losses of two probes."""

    index: int
    """The iteration."""
    loss: float
    other_loss: float
    tolerance: float
    """The largest allowed relative difference."""


def loss_tolerance(precision: Precision, index: int) -> float:
    """The largest allowed difference of two losses of an iteration, relative to the larger one."""
    # Limited before the power: probes may have thousands of iterations.
    steps = min(max(index - STEADY_ITERATIONS + 1, 0), 64)
    return min(LOSS_TOLERANCE[precision] * GROWTH**steps, MAX_TOLERANCE)


def first_difference(
    iterations: Sequence[Iteration], others: Sequence[Iteration], precision: Precision
) -> LossDifference | None:
    """The first iteration whose losses differ by more than the precision allows, or None.

    The iterations whose loss both probes have are compared, timed or not, up to the first one that
    only one of the two skipped: afterwards their weights differ.
    """
    for own, other in zip(iterations, others, strict=False):
        if own.loss is None or other.loss is None:
            continue
        tolerance = loss_tolerance(precision, own.index)
        # Relative to one nat at least: losses near 0 are noise.
        if abs(own.loss - other.loss) > tolerance * max(own.loss, other.loss, 1.0):
            return LossDifference(
                index=own.index, loss=own.loss, other_loss=other.loss, tolerance=tolerance
            )
        if (own.grad_norm is None) != (other.grad_norm is None):
            return None
    return None


DIVERGED: Final = "diverged"

FaultKind = Literal["off", "unsteady"]
"""off: more layouts, or earlier ones, have other losses. unsteady: a repeat of the same layout
has."""

Group = tuple[int, str, int, int | None]
"""Campaign, precision, global batch size, and layers of a cheap probe."""

_OF_GROUP: Final = (Trial.campaign_id, Trial.precision, Trial.global_batch_size, Trial.num_layers)


@dataclass(kw_only=True, slots=True)
class MeasuredRun:
    """A measured trial of a group."""

    trial_id: int
    number: int
    layout_key: str
    state: str
    same_losses_as: int | None
    """The earliest trial with the same losses, possibly itself; None: not compared yet."""


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
class Vote:
    """The result of the vote for every run."""

    faults: Mapping[int, LossFault]
    """By trial; runs without a fault count."""
    again: tuple[int, ...]
    """Trials to measure again, because each layout has losses of its own and it is undecided which
    are right."""


def vote(runs: Sequence[MeasuredRun]) -> Vote:
    """Votes on the runs of one group, which were all compared, in the order of their measurement.

    The losses of most layouts are right; among equal numbers, the earliest. A layout that was
    measured twice with different losses has no vote, and none of its runs counts.
    """
    losses_of: defaultdict[str, set[int | None]] = defaultdict(set)
    for run in runs:
        losses_of[run.layout_key].add(run.same_losses_as)
    steady = {key: next(iter(found)) for key, found in losses_of.items() if len(found) == 1}
    votes = Counter(steady.values())
    first_run: dict[int | None, int] = {}
    for run in runs:
        if run.layout_key in steady:
            first_run.setdefault(run.same_losses_as, run.trial_id)
    # In order of time: `max` takes the first of equal ones.
    leader = max(first_run, key=lambda losses: votes[losses], default=None)
    faults = {}
    for run in runs:
        if run.layout_key not in steady:
            other = next(
                each
                for each in runs
                if each.layout_key == run.layout_key and each.same_losses_as != run.same_losses_as
            )
            faults[run.trial_id] = LossFault(
                kind="unsteady", against=other.trial_id, is_settled=True
            )
        elif run.same_losses_as != leader:
            faults[run.trial_id] = LossFault(
                kind="off", against=first_run[leader], is_settled=votes[leader] > 1
            )
    is_undecided = len(votes) > 1 and max(votes.values()) == 1
    times = Counter(run.layout_key for run in runs)
    again = [
        run.trial_id for run in runs if run.layout_key in steady and times[run.layout_key] == 1
    ]
    return Vote(faults=faults, again=tuple(again) if is_undecided else ())


def compare_losses(session: Session, campaign: Campaign, trials: Sequence[Trial]) -> bool:
    """Compares new measurements with those of their groups, and votes on the groups again.

    Called in the transaction that stores the measurements, with the campaign locked. An earlier
    trial that fails or completes by the vote moves to the end of the order of ends, so that the
    driver reads it again.

    Returns:
        Whether there is such a trial.
    """
    last_ended_seq = campaign.last_ended_seq
    groups = ((t.campaign_id, t.precision, t.global_batch_size, t.num_layers) for t in trials)
    same = [(group, runs) for group in dict.fromkeys(groups) for runs in _measured(session, group)]
    for group, runs in same:
        losses = _Losses(session, cast("Precision", group[1]))
        before = vote([run for run in runs if run.same_losses_as is not None])
        losses.compare(runs)
        after = vote(runs)
        for run in runs:
            fault = after.faults.get(run.trial_id)
            keeps_state = (run.state == "COMPLETED") == (fault is None)
            if keeps_state and fault == before.faults.get(run.trial_id):
                continue
            trial = session.get_one(Trial, run.trial_id)
            trial.state = "COMPLETED" if fault is None else "FAILED"
            trial.reason = None if fault is None else DIVERGED
            trial.message = "" if fault is None else losses.words(run, fault, runs)
            assert trial.ended_at is not None  # it has been measured
            tell(trial, "trial.judged", trial.ended_at)
            if not keeps_state and trial not in trials:
                campaign.last_ended_seq += 1
                trial.ended_seq = campaign.last_ended_seq
    return campaign.last_ended_seq > last_ended_seq


def trials_in_doubt(session: Session, campaign_id: int) -> list[int]:
    """Trials that must be measured again, because no other layout agrees with their losses."""
    groups = session.execute(
        select(*_OF_GROUP)
        .join(MeasurementRow, MeasurementRow.trial_id == Trial.id)
        .where(Trial.campaign_id == campaign_id, Trial.state == "FAILED")
        .where(Trial.reason == DIVERGED)
        .distinct()
    ).all()
    again: set[int] = set()
    for group in groups:
        for runs in _measured(session, cast("Group", tuple(group))):
            again.update(vote(runs).again)
    repeated = select(Trial.repeat_of).where(
        Trial.campaign_id == campaign_id, Trial.repeat_of.in_(again)
    )
    return sorted(again - set(session.scalars(repeated))) if again else []


def _measured(session: Session, group: Group) -> list[list[MeasuredRun]]:
    """The measured trials of one group, in the order they were made.

    They are listed apart where a knob of their jobs makes other losses.
    """
    campaign_id, *values = group
    knobs = session.get_one(Campaign, campaign_id).stored.job_knobs
    others = [name for name, knob in knobs.items() if knob.losses == "other"]
    in_group = (
        each.is_not_distinct_from(own) for each, own in zip(_OF_GROUP[1:], values, strict=True)
    )
    query = (
        select(
            Trial.id.label("trial_id"),
            Trial.number,
            Trial.layout_key,
            Trial.state,
            Trial.job,
            MeasurementRow.same_losses_as,
        )
        .join(MeasurementRow, MeasurementRow.trial_id == Trial.id)
        .where(Trial.campaign_id == campaign_id, *in_group)
        .order_by(Trial.ended_at, Trial.number)
    )
    found: defaultdict[tuple[object, ...], list[MeasuredRun]] = defaultdict(list)
    for row in session.execute(query).mappings():
        columns = dict(row)
        job = columns.pop("job")
        # With the type, since 1 is not true.
        apart = tuple((type(job.get(name)), job.get(name)) for name in others)
        found[apart].append(MeasuredRun(**columns))
    return list(found.values())


@dataclass(slots=True)
class _Losses:
    """Losses of the trials of one group, read when needed."""

    session: Session
    precision: Precision
    iterations: dict[int, list[Iteration]] = field(default_factory=dict)

    def compare(self, runs: Sequence[MeasuredRun]) -> None:
        """Finds the earliest run with the same losses, in order of time, for those without."""
        firsts = [run.trial_id for run in runs if run.same_losses_as == run.trial_id]
        new = [run for run in runs if run.same_losses_as is None]
        self._read([*(run.trial_id for run in new), *firsts])
        for run in new:
            run.same_losses_as = self._same_as(run, firsts, runs)
            if run.same_losses_as == run.trial_id:
                firsts.append(run.trial_id)
            self.session.execute(
                update(MeasurementRow)
                .where(MeasurementRow.trial_id == run.trial_id)
                .values(same_losses_as=run.same_losses_as)
            )

    def _same_as(self, run: MeasuredRun, firsts: Sequence[int], runs: Sequence[MeasuredRun]) -> int:
        """The earliest trial with the same losses, or the trial itself.

        A repeat that agrees with an earlier run of its layout gets what that run has. Otherwise,
        near the limit of the tolerance, the two could get different ones, and the layout seem
        unsteady.
        """
        for other in runs:
            is_compared = other.same_losses_as is not None and other.layout_key == run.layout_key
            if is_compared and self.difference(run.trial_id, other.trial_id) is None:
                return cast("int", other.same_losses_as)
        agreeing = (first for first in firsts if self.difference(run.trial_id, first) is None)
        return next(agreeing, run.trial_id)

    def difference(self, trial_id: int, other_id: int) -> LossDifference | None:
        """The first iteration at which the losses of two trials differ."""
        self._read((trial_id, other_id))
        own, others = self.iterations[trial_id], self.iterations[other_id]
        return first_difference(own, others, self.precision)

    def words(self, run: MeasuredRun, fault: LossFault, runs: Sequence[MeasuredRun]) -> str:
        """Why a trial does not count: a sentence with both trials and both losses."""
        by_id = {other.trial_id: other for other in runs}
        own, other = run, by_id[fault.against]
        difference = self.difference(own.trial_id, other.trial_id)
        if difference is None:
            # The two are within the tolerance, the trials whose losses they have are not.
            own, other = by_id[own.same_losses_as or 0], by_id[other.same_losses_as or 0]
            difference = self.difference(own.trial_id, other.trial_id)
        assert difference is not None
        whose = "" if own is run else f"it trains as trial {own.number} does: "
        difference_text = (
            f"{whose}loss {difference.loss:.6g} of trial {own.number} at iteration "
            f"{difference.index} is off the {difference.other_loss:.6g} of trial {other.number} by "
            f"more than {difference.tolerance:.2g} of it, which is what {self.precision} allows there"
        )
        return f"{difference_text}; {_consequence(fault, other)}"

    def _read(self, trial_ids: Collection[int]) -> None:
        """Reads the losses of trials that were not read before."""
        missing = [each for each in trial_ids if each not in self.iterations]
        if not missing:
            return
        self.iterations |= {each: [] for each in missing}
        query = (
            select(IterationRow)
            .join(MeasurementRow, MeasurementRow.trial_id == IterationRow.trial_id)
            .where(IterationRow.trial_id.in_(missing), MeasurementRow.losses_comparable)
            .order_by(IterationRow.trial_id, IterationRow.index)
        )
        for row in self.session.scalars(query):
            self.iterations[row.trial_id].append(record_of(Iteration, row))


def _consequence(fault: LossFault, other: MeasuredRun) -> str:
    if fault.kind == "unsteady":
        return f"both ran {other.layout_key}, which does not reproduce itself"
    if fault.is_settled:
        return f"several layouts agree with trial {other.number}"
    return (
        f"no other layout agrees with either yet: trial {other.number} was first and stands, and both "
        "are measured twice"
    )
