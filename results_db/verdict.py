"""Which of a campaign's trials computed something else: a vote of layouts, as a pure function.

The runs of one campaign, batch and precision train the same model on the same tokens. Those whose
losses agree are kin; each layout has one vote, however often it was measured, since a layout that
computes something wrong mostly does so every time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

FaultKind = Literal["off", "unsteady"]
"""off: more layouts, or earlier ones, have other losses. unsteady: the same layout has, in a repeat."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A measurement as far as the vote looks at it."""

    trial_id: int
    layout_key: str
    kin: int
    """The earliest trial with the same losses: itself where it is the first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """Why a run does not count."""

    kind: FaultKind
    against: int
    """The trial whose losses it has not."""
    is_settled: bool
    """Whether several layouts agree on the other losses; if not, a third one may turn the vote."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What the vote says of every run."""

    faults: Mapping[int, Fault]
    """By trial; runs without one count."""
    again: tuple[int, ...]
    """Trials to measure again: of two layouts, each alone with its losses, nobody knows which is
    right."""


def judge(runs: Sequence[Run]) -> Verdict:
    """Judges the runs of one batch and precision, in the order in which they were measured.

    The losses that most layouts have are right; among equals, those that were there first. A layout
    that was measured twice, with different losses, has no vote and no run that counts.
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
    # In the order in which they came: `max` takes the first of equals.
    leader = max(first_run, key=lambda kin: votes[kin], default=None)
    faults = {}
    for run in runs:
        if run.layout_key not in steady:
            other = next(r for r in runs if r.layout_key == run.layout_key and r.kin != run.kin)
            faults[run.trial_id] = Fault(kind="unsteady", against=other.trial_id, is_settled=True)
        elif leader is not None and run.kin != leader:
            faults[run.trial_id] = Fault(
                kind="off", against=first_run[leader], is_settled=votes[leader] > 1
            )
    return Verdict(faults=faults, again=_again(runs, steady, votes))


def _again(runs: Sequence[Run], steady: Mapping[str, int], votes: Counter[int]) -> tuple[int, ...]:
    if len(votes) < 2 or max(votes.values()) > 1:
        return ()
    times = Counter(run.layout_key for run in runs)
    return tuple(
        run.trial_id for run in runs if run.layout_key in steady and times[run.layout_key] == 1
    )
