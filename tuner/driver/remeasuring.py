"""Which layouts are measured again before the winner is named. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from results_db.standing import Standing

NUM_ROUNDS: Final = 2
"""How often each is measured again; those that are told apart after a round are not in the next."""

ASSUMED_DISTANCE: Final = 0.03
"""How far from the first a layout may be and still be measured again, while no layout was run twice.
Iterations of one run agree better than runs do; where runs have a standard deviation of 1 %, as on a
quiet machine, two of one layout are up to 2.8 % apart in 19 cases of 20."""


def most_repeats(num_layouts: int) -> int:
    """How many repeats measuring that many layouts again takes at most."""
    return NUM_ROUNDS * num_layouts


def round_of_repeats(
    best: Sequence[Standing], repeats: Mapping[str, int], *, left: int | None
) -> list[Standing]:
    """The next round: layouts to measure once more, in the order in which they were first measured.

    That order is the same in every round, so that the layouts alternate and a machine that becomes
    slower does so for all of them. Nothing is measured again where the first stands alone, unless it was
    stopped early.

    Args:
        best: the best layouts, as many as may be measured again, the first one first.
        repeats: by layout key, how often it was measured again.
        left: trials that the budget has left; None: it does not count them.
    """
    tied = [standing for standing in best if _may_be_best(standing, best[0])]
    if left is not None:
        tied = tied[:left]
    if not tied or (len(tied) == 1 and not tied[0].shortened):
        return []
    done = min(repeats.get(standing.trial.layout_key, 0) for standing in tied)
    if done >= NUM_ROUNDS:
        return []
    lacking = [each for each in tied if repeats.get(each.trial.layout_key, 0) == done]
    return sorted(lacking, key=lambda standing: standing.trial.id)


def _may_be_best(standing: Standing, first: Standing) -> bool:
    if standing.is_tied or standing.value >= first.value:
        return True
    return first.num_runs == 1 and standing.value >= first.value * (1.0 - ASSUMED_DISTANCE)
