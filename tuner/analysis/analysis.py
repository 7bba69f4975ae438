"""The analysis of a campaign: importance of its knobs, and steps of each knob around the winner."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from layout_tuner.documents.reading import word_of
from layout_tuner.predictions.belief.corrected_step_time import TimeCalibration
from layout_tuner.predictions.belief.job_knobs.knob_step_time import KnownKnobs
from layout_tuner.predictions.belief.known_measurements import Sample
from layout_tuner.predictions.estimates.peak_memory import peak_memory_bytes
from layout_tuner.protocol.outcome import NOT_OF_THE_LAYOUT
from layout_tuner.results_db.leaderboard.leaderboard_records import RankedLayout
from layout_tuner.results_db.records import (
    Analysis,
    CampaignRecord,
    KnobStepRead,
    StepDirection,
    StepState,
    TrialRecord,
)
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec
from layout_tuner.search_spaces.layouts.job_settings import JobValue
from layout_tuner.search_spaces.layouts.layout import LAYOUT_FIELDS, Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.objectives import objective_factors
from layout_tuner.search_spaces.spaces.job_set import JobSet
from layout_tuner.tuner.analysis.importance import (
    FOLLOWERS,
    METHOD,
    importances,
    job_values,
    knobs_of,
)
from layout_tuner.tuner.strategies.ask_and_tell import LayoutSet

ANALYSIS_INTERVAL_S: Final = 60.0
"""Pause between two analyses of a running campaign; one more is made at its end."""
ENDINGS_AN_ANALYSIS: Final = 5
"""Trials that must have ended since the last analysis."""

_DIRECTIONS: Final[tuple[tuple[StepDirection, int], ...]] = (("down", -1), ("up", 1))

StepTime = Callable[[Layout], float]
"""Predicts the step time of a layout, in seconds."""

_STATES: Final[dict[str, StepState]] = {
    "COMPLETED": "completed",
    "INFEASIBLE": "out_of_memory",
    "FAILED": "failed",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """The outcome of a layout that the campaign tried."""

    trial_id: int
    state: StepState
    value: float | None
    """The objective, over all of its runs; None unless completed."""
    is_apart: bool | None
    """Whether it differs significantly from the winner; None where it is not ranked."""


def analyse(
    campaign: CampaignRecord,
    standings: Sequence[RankedLayout],
    trials: Sequence[TrialRecord],
    layouts: LayoutSet,
) -> Analysis | None:
    """The analysis of a campaign by its ranked layouts, the winner first, and all of its trials.

    `layouts` is its legal set. None while the winner was not measured in full.
    """
    if not standings or standings[0].shortened:
        return None
    winner = standings[0]
    spec = campaign.stored.spec
    if layouts.index_of(winner.trial.layout) is None:
        return None  # An imported trial outside the campaign's legal set has no neighbours in it.
    measured = {standing.trial.layout: standing.value for standing in standings}
    knobs = knobs_of(layouts)
    found = importances(layouts, knobs, measured, seed=spec.seed)
    return Analysis(
        winner_id=winner.trial.id,
        objective=campaign.objective,
        num_trials=len(standings),
        last_ended_seq=max(trial.ended_seq or 0 for trial in trials),
        method=METHOD if found else "",
        importances=found,
        steps=knob_steps(
            spec,
            layouts,
            knobs,
            winner.trial.layout,
            winner.value,
            _tried(campaign, standings, trials),
            calibrated_step_time(spec, standings),
        ),
    )


def calibrated_step_time(spec: CampaignSpec, standings: Sequence[RankedLayout]) -> StepTime:
    """The closed form, calibrated on the campaign's own measurements."""
    samples = [
        Sample(
            model=spec.model,
            cluster=spec.cluster,
            layout=standing.trial.layout,
            state="completed",
            step_time_s=standing.step_time_s,
        )
        for standing in standings
    ]
    known = KnownKnobs(knobs=spec.space.job.knobs)
    calibration = TimeCalibration.fit(known=known).updated(samples, campaign=spec.name)

    def step_time_s(layout: Layout) -> float:
        (log_s,), _ = calibration.predict(layout, spec.model, spec.cluster, campaign=spec.name)
        return math.exp(log_s)

    return step_time_s


def _tried(
    campaign: CampaignRecord, standings: Sequence[RankedLayout], trials: Sequence[TrialRecord]
) -> dict[str, Tried]:
    found = {}
    # A cheap probe's figure compares with none, but a layout of which a part fails has failed.
    ran = {trial.stands_for for trial in trials if trial.is_cheap and trial.state == "COMPLETED"}
    for trial in trials:
        # A node's fault says nothing about the layout. Ranked layouts follow below, repeats
        # included.
        if trial.state not in _STATES or trial.reason in NOT_OF_THE_LAYOUT:
            continue
        if not (trial.is_cheap and trial.stands_for in ran):
            found[trial.stands_for.key] = Tried(
                trial_id=trial.id,
                state=_STATES[trial.state],
                value=trial.objective(campaign.objective) if trial.state == "COMPLETED" else None,
                is_apart=None,
            )
    for standing in standings:
        found[standing.trial.layout_key] = Tried(
            trial_id=standing.trial.id,
            state="completed",
            value=standing.value,
            is_apart=not standing.tied_with_first,
        )
    return found


def knob_steps(
    spec: CampaignSpec,
    layouts: LayoutSet,
    knobs: Mapping[str, NDArray[np.int32]],
    winner: Layout,
    value: float,
    tried: Mapping[str, Tried],
    step_time_s: StepTime,
) -> tuple[KnobStepRead, ...]:
    """One step down and one step up in each independent knob, sorted by knob.

    A step leads to the legal layout with the knob's next value that differs from the winner in the
    fewest other knobs; knobs that follow from others (replicas, micro-batches a step) do not count.
    Of several such layouts, one that was tried is preferred. Its job has settings as near to the
    winner's as the layout may have; a step in a job knob stays with the winner's layout. The effect
    of a layout that was not tried is predicted, relative to the prediction of the winner.

    `knobs` are those of the legal set. The winner is in it, and `value` is its objective; `tried`
    has outcomes by the keys of layouts; `step_time_s` predicts a layout's step time, in seconds.
    """
    jobs = layouts if isinstance(layouts, JobSet) else None
    legal = layouts if jobs is None else jobs.legal
    place = legal.index_of(winner if jobs is None else winner.without_job)
    assert place is not None, f"the winner {winner.key} is not legal"
    differs = {name: ranks != ranks[place] for name, ranks in knobs.items()}
    steps = []
    for knob in sorted(knobs):
        others = [mask for name, mask in differs.items() if name not in (knob, *FOLLOWERS)]
        num_others = np.sum(others, axis=0) if others else np.zeros(len(legal), dtype=np.int64)
        for direction, by in _DIRECTIONS:
            there = np.flatnonzero(knobs[knob] == knobs[knob][place] + by)
            if len(there):
                near = there[num_others[there] == num_others[there].min()]
                chosen = _nearest(layouts, near, winner, tried)
                steps.append(
                    _step(spec, knob, direction, winner, value, chosen, tried, step_time_s)
                )
    if jobs is not None:
        for knob, values in job_values(jobs).items():
            for direction, chosen in _job_steps(jobs, place, knob, values, winner):
                steps.append(
                    _step(spec, knob, direction, winner, value, chosen, tried, step_time_s)
                )
    return tuple(sorted(steps, key=lambda each: each.knob))


def _job_steps(
    jobs: JobSet, row: int, knob: str, values: Sequence[JobValue], winner: Layout
) -> Iterator[tuple[StepDirection, Layout]]:
    """The jobs of the winner's layout with the next values of a job knob, as far as it has them."""
    alike = list(jobs.jobs_like(row, winner.job))
    value_of = jobs.choices.knobs[knob].value_of
    here = value_of(winner.job)
    for direction, by in _DIRECTIONS:
        at = values.index(here) + by if here in values else -1
        there = [
            each for each in alike if 0 <= at < len(values) and value_of(each.job) == values[at]
        ]
        if there:
            yield direction, there[0]


def _nearest(
    layouts: LayoutSet, near: NDArray[np.int64], winner: Layout, tried: Mapping[str, Tried]
) -> Layout:
    if isinstance(layouts, JobSet):
        candidates = [next(layouts.jobs_like(int(row), winner.job)) for row in near[:256]]
    else:
        candidates = [layouts.layout(int(index)) for index in near[:256]]
    return min(candidates, key=lambda each: (each.key not in tried, len(_differing(each, winner))))


def _differing(layout: Layout, winner: Layout) -> list[str]:
    of_layout = [name for name in LAYOUT_FIELDS if getattr(layout, name) != getattr(winner, name)]
    return of_layout + sorted(
        {name for name, _ in dict(layout.job).items() ^ dict(winner.job).items()}
    )


def _step(
    spec: CampaignSpec,
    knob: str,
    direction: StepDirection,
    winner: Layout,
    value: float,
    layout: Layout,
    tried: Mapping[str, Tried],
    step_time_s: StepTime,
) -> KnobStepRead:
    known = tried.get(layout.key)
    if known is None:
        state, effect = _predicted(spec, winner, layout, step_time_s)
    else:
        state, effect = known.state, None if known.value is None else known.value / value - 1.0
    return KnobStepRead(
        knob=knob,
        direction=direction,
        value=_value(spec, winner, knob),
        stepped_value=_value(spec, layout, knob),
        also=tuple(name for name in _differing(layout, winner) if name != knob),
        layout_key=layout.key,
        source="predicted" if known is None else "measured",
        state=state,
        effect=effect,
        is_apart=None if known is None else known.is_apart,
        trial_id=None if known is None else known.trial_id,
    )


def _value(spec: CampaignSpec, layout: Layout, knob: str) -> str:
    declared = spec.space.job.knobs.get(knob)
    if declared is None:
        return word_of(getattr(layout, knob))
    return word_of(declared.value_of(layout.job))


def _predicted(
    spec: CampaignSpec, winner: Layout, layout: Layout, step_time_s: StepTime
) -> tuple[StepState, float | None]:
    columns = LayoutColumns.of(layout)
    allowed = spec.constraints.allowed_memory_bytes(spec.cluster.device_memory_bytes)
    if float(peak_memory_bytes(columns, spec.model)) > allowed:
        return "out_of_memory", None
    there, here = (
        float(objective_factors(spec.objective, LayoutColumns.of(of), spec.model)) / step_time_s(of)
        for of in (layout, winner)
    )
    return "completed", there / here - 1.0
