"""Which layouts are measured again before the winner is named, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final

from layout_tuner.results_db.leaderboard.leaderboard_records import RankedLayout
from layout_tuner.results_db.trials.trials import RepeatsOfLayout
from layout_tuner.search_spaces.campaigns.campaign_settings import Budget
from layout_tuner.tuner.driver.campaign_end import LARGEST_RESERVE

NUM_ROUNDS: Final = 2
"""How often each layout is measured again, at most: after each round, layouts that differ
significantly from the best one are left out."""
NUM_QUIET_TRIES: Final = 3
"""How often a layout is measured again, at most, because each of its runs was disturbed."""
LEAST_WAIT: Final = timedelta(seconds=20)
"""Before the first such try; the wait doubles with each, since other load often lasts a while."""

NO_REPEATS: Final = RepeatsOfLayout()


def most_doubted(budget: Budget, num_layouts: int) -> int:
    """How many repeats a campaign may spend on measurements that its strategy doubts.

    That is half of what the best layouts get, a third of all repeats.
    """
    for_the_best = NUM_ROUNDS * num_layouts
    if budget.trials is not None:
        for_the_best = min(for_the_best, int(budget.trials * LARGEST_RESERVE))
    return for_the_best // 2


def disturbed_layouts(
    tied: Sequence[RankedLayout], repeats: Mapping[str, RepeatsOfLayout]
) -> list[RankedLayout]:
    """The tied layouts of which every run so far was disturbed.

    The one that may be the best is first: by the upper end of its interval, since the value says
    how busy the machine was. Those that were tried often enough are left out.
    """
    lacking = [
        each
        for each in tied
        if each.disturbed
        and repeats.get(each.trial.layout_key, NO_REPEATS).disturbed < NUM_QUIET_TRIES
    ]
    return sorted(lacking, key=lambda each: -each.value_high)


def wait_until_quieter(
    layout: RankedLayout, repeats: Mapping[str, RepeatsOfLayout]
) -> datetime | None:
    """When to measure a disturbed layout again; None: at once, as nothing of it has ended."""
    so_far = repeats.get(layout.trial.layout_key, NO_REPEATS)
    last_ended_at = so_far.last_ended_at or layout.trial.ended_at
    return None if last_ended_at is None else last_ended_at + LEAST_WAIT * 2**so_far.disturbed


def round_of_repeats(
    best: Sequence[RankedLayout], repeats: Mapping[str, RepeatsOfLayout], *, left: int | None
) -> list[RankedLayout]:
    """The next round's layouts among the best, in the order in which they were first measured.

    The order is the same in every round: the layouts alternate, so that a machine that becomes
    slower affects all of them alike. The list is empty where no other layout may be the best,
    unless the best one was stopped early.
    """
    tied = [each for each in best if each.tied_with_first or each.value >= best[0].value][:left]
    if not tied or (len(tied) == 1 and not tied[0].shortened):
        return []
    done = {each.trial.id: _num_rounds(each, repeats) for each in tied}
    least = min(done.values())
    if least >= NUM_ROUNDS:
        return []
    lacking = [each for each in tied if done[each.trial.id] == least]
    return sorted(lacking, key=lambda standing: standing.trial.id)


def _num_rounds(layout: RankedLayout, repeats: Mapping[str, RepeatsOfLayout]) -> int:
    so_far = repeats.get(layout.trial.layout_key, NO_REPEATS)
    return so_far.total - so_far.disturbed - so_far.doubted
