"""Which layouts are measured again before the winner is named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from results_db.leaderboard.leaderboard_records import RankedLayout

NUM_ROUNDS: Final = 2
"""How often each layout is measured again, at most: after each round, layouts that differ
significantly from the best one are left out."""

ASSUMED_DISTANCE: Final = 0.03
"""How far below the best a layout may be and still be measured again, while no layout was run
twice. Runs differ more than the iterations of one run. Where the standard deviation of runs is 1 %,
as on a quiet machine, two runs of one layout differ by up to 2.8 % in 95 % of all cases."""


def round_of_repeats(
    best: Sequence[RankedLayout], repeats: Mapping[str, int], *, left: int | None
) -> list[RankedLayout]:
    """The layouts of the next round, in the order in which they were first measured.

    The order is the same in every round: the layouts alternate, so that a machine that becomes
    slower affects all of them alike. The list is empty where no other layout may be the best,
    unless the best one was stopped early.

    Args:
        best: the best layouts, as many as may be measured again, the best first.
        repeats: how often each layout was measured again, by its key.
        left: trials that the budget has left; None: the budget does not count trials.
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


def _may_be_best(standing: RankedLayout, first: RankedLayout) -> bool:
    if standing.is_tied or standing.value >= first.value:
        return True
    return first.num_runs == 1 and standing.value >= first.value * (1.0 - ASSUMED_DISTANCE)
